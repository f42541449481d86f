"""Tokens sent to the model for a question about four documents with 100,000 tokens in total.

The question is sent once with all documents in the prompt (`:plain`), and once with the documents
in a sandbox, where the scripted model greps for the fact, reads the lines around it and submits it.
Counts all tokens of all backend requests, including their JSON and tools, with OpenAI's o200k
tokenizer.
"""

import asyncio
import json
import os
import random
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import httpx

from bench.backends import Kind, working_backends
from bench.instant_model import call_completion, completion, json_response, serve
from bench.plan import Plan
from bench.servers import BenchServer, free_port, run_proxy
from bench.table import Row, TablePart
from policies.workspace import INPUT_DIR
from proxy.models.litellm_model import LiteLLMModel

MODEL = "reader"
COUNTER_MODEL = "openai/gpt-4o"
"""The model whose tokenizer, o200k, counts the tokens. A dependency of this project contains the
tokenizer."""
MAX_SHARE_OF_PLAIN = 1 / 8
PLACES = ("north", "south", "east", "west")
SENTENCES_PER_DOCUMENT = 1100
FACT, ANSWER = "The mill at Orlu was sold to its workers for 4,731 crowns.", "4,731"
QUESTION = "For how much was the mill at Orlu sold?"
_SOLD_FOR = re.compile(r"Orlu was sold to its workers for ([\d,]+) crowns")
_GREP_MATCH = re.compile(rf"({INPUT_DIR}/[\w.-]+):(\d+):")


def survey_documents() -> dict[str, str]:
    """Return the same documents at each call. One of them contains the fact."""
    rng = random.Random(26)
    made: dict[str, str] = {}
    for place in PLACES:
        lines = [_sentence(rng) for _ in range(SENTENCES_PER_DOCUMENT)]
        if place == "east":
            lines[rng.randrange(SENTENCES_PER_DOCUMENT)] = FACT
        made[f"survey-{place}.txt"] = "\n".join(lines) + "\n"
    return made


def question_text() -> str:
    """Return the documents and the question as one message."""
    documents = (
        f'<document title="{name}">\n{text}</document>\n'
        for name, text in survey_documents().items()
    )
    return f"{''.join(documents)}\n{QUESTION}"


def _sentence(rng: random.Random) -> str:
    town = "".join(rng.choices("aeiou", k=1) + rng.choices("bdklmnrst", k=3)).title()
    trade, state = rng.choice(_TRADES), rng.choice(_STATES)
    year, count = rng.randrange(1850, 1950), rng.randrange(3, 900)
    return f"In {year} the {trade} of {town} had {count} hands, and its books were {state}."


_TRADES = ("mill", "foundry", "tannery", "brewery", "printing works", "glass house", "ropery")
_STATES = ("in good order", "kept by the owner's son", "lost in a fire", "open to its creditors")


async def measure(plan: Plan) -> list[TablePart]:
    """Measure every kind of sandbox, and the model without a sandbox."""
    async with AsyncExitStack() as opened:
        async with working_backends(plan.image) as found:
            pass
        reader = _GrepModel()
        model = await opened.enter_async_context(_serve_reader(reader))
        plain, rows = 0, list[Row]()
        for kind in found.kinds:
            ours = run_proxy(model, sandbox=kind, image=plan.image, idle=0)
            server = await opened.enter_async_context(ours)
            if not plain:
                plain = await _count_tokens(reader, server, f"{MODEL}:plain")
                rows.append(Row(":plain", [plain], "tokens"))
            rows += _rows(kind, await _count_tokens(reader, server, MODEL), plain)
    name = f"documents: tokens the backend gets for one question, by {COUNTER_MODEL}'s tokenizer"
    return [TablePart(name, [*rows, *found.missing_rows])]


def _rows(kind: Kind, tokens: int, plain: int) -> list[Row]:
    share = Row(f"{kind}: its share of :plain's", [tokens / plain], "", MAX_SHARE_OF_PLAIN)
    return [Row(f"{kind}: all calls of the run", [tokens], "tokens"), share]


async def _count_tokens(reader: "_GrepModel", server: BenchServer, model: str) -> int:
    """Return the number of tokens sent to the backend. Raises RuntimeError for a wrong answer."""
    reader.bodies.clear()
    asked = {"model": model, "messages": [{"role": "user", "content": question_text()}]}
    async with httpx.AsyncClient(base_url=server.base_url, timeout=60) as client:
        response = await client.post("/chat/completions", json=asked)
    if response.status_code != 200:
        raise RuntimeError(f"{model}: {response.status_code} {response.text[:500]}")
    answer = response.json()["choices"][0]["message"]["content"]
    if answer != ANSWER:
        raise RuntimeError(f"{model} answered {answer!r}")
    counter = LiteLLMModel([COUNTER_MODEL], timeout_s=60)
    written = (json.dumps(body, ensure_ascii=False) for body in reader.bodies)
    counts = [await counter.count_tokens(COUNTER_MODEL, body) for body in written]
    return sum(count or 0 for count in counts)


class _GrepModel:
    """A scripted model that reads the documents with grep."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        """The bodies of the received requests."""

    async def answer(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        """Write the next step of the script, or the answer if the request has no tools."""
        self.bodies.append(body)
        observations = [str(said["content"]) for said in body["messages"] if said["role"] == "tool"]
        if not body.get("tools"):
            sold = _SOLD_FOR.search(body["messages"][-1]["content"])
            said = {"role": "assistant", "content": sold[1] if sold else "I do not know."}
            writer.write(json_response(completion(said, "stop")))
            return
        writer.write(json_response(call_completion(*_next_call(observations))))


def _next_call(observations: list[str]) -> tuple[str, dict[str, Any]]:
    if not observations:
        return "execute_bash", {"command": f"grep -n Orlu {INPUT_DIR}/*"}
    found, sold = _GREP_MATCH.search(observations[0]), _SOLD_FOR.search(observations[-1])
    if len(observations) == 1 and found:
        line = int(found[2])
        return "execute_bash", {"command": f"sed -n {max(1, line - 3)},{line + 3}p {found[1]}"}
    return "submit", {"answer": sold[1] if sold else "I do not know."}


@asynccontextmanager
async def _serve_reader(reader: _GrepModel) -> AsyncIterator[BenchServer]:
    """Run the model as a server in this process."""
    port = free_port()
    serving = await asyncio.start_server(partial(serve, reader.answer), "127.0.0.1", port)
    async with serving:
        yield BenchServer(os.getpid(), port, 0)
