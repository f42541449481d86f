"""The llama.cpp server."""

import json
from collections.abc import Sequence

import httpx

from tests.engines.engine import MODEL, WITH_TOOLS, Body, Engine, Gauges, Launch, Tools, words
from tests.engines.install_llama_cpp import find_installation


def command(launch: Launch) -> list[str]:
    installation = find_installation()
    options: dict[str, object] = {
        "-m": installation.model,
        "--host": "127.0.0.1",
        "--port": launch.port,
        "-c": launch.window * launch.slots,
        "-np": launch.slots,
        "-a": MODEL,
        # Spinning worker threads stall when the cores are busy, so use one thread.
        "-t": 1,
        **({"--chat-template-file": launch.tools.template} if launch.tools.template else {}),
    }
    return [str(installation.server), *words(options), *launch.tools.flags]


async def count_prompt(client: httpx.AsyncClient, body: Body) -> int:
    made = (await client.post("/apply-template", json=body)).raise_for_status().json()
    pieces = {"content": made["prompt"]}
    return len((await client.post("/tokenize", json=pieces)).raise_for_status().json()["tokens"])


def one_of(allowed: Sequence[str]) -> Body:
    return {"grammar": f"root ::= {' | '.join(json.dumps(word) for word in allowed)}"}


def window_in(error: Body) -> int:
    return int(error["n_ctx"])


FLAGS = ("--jinja", "--metrics")
LLAMA_CPP = Engine(
    name="llama.cpp",
    find=find_installation,
    command=command,
    gauges=Gauges(
        prefix="llamacpp",
        running="requests_processing",
        waiting="requests_deferred",
        prompt_tokens="prompt_tokens_total",
        completion_tokens="tokens_predicted_total",
    ),
    without_tools=Tools("own-template", flags=FLAGS, reason="tools_ignored"),
    with_tools=Tools("tools-template", WITH_TOOLS, FLAGS),
    count_prompt=count_prompt,
    one_of=one_of,
    window_in=window_in,
)
