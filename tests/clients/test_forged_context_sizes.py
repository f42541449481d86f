"""Refusals that state a context window: what one client causes never shortens another's runs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from proxy.models.scripted import call, tool_reply
from tests.fakes.backend import Item, Refusal, scripted_backend
from tests.fakes.server import EachKey, running_proxy
from tests.fakes.small_window import tokens

FORGED = "maximum context length is 5000 tokens"
FORGED_TOKENS = 5000
ORDINARY = "Count."
TURNS = 6


def reply(body: Mapping[str, Any]) -> Item:
    """Refuse a request for a refusal; else print about 1,000 tokens in each of the first turns."""
    first = next(message for message in body["messages"] if message["role"] == "user")
    if ORDINARY not in first["content"]:
        quoted = f"{first['content']!r}" if FORGED in first["content"] else f"the {FORGED}"
        return Refusal(400, f"Invalid message: {quoted}")
    turn = sum(message["role"] == "assistant" for message in body["messages"])
    if turn == TURNS:
        return tool_reply(call("submit", answer="42"))
    return tool_reply(call("execute_bash", command=f": {turn}; seq 100001 100600"))


@pytest.mark.parametrize(
    ("prompt", "next_key"),
    [(f"The {FORGED}.", "sk-a"), (f"The {FORGED}.", "sk-b"), ("Refuse this.", "sk-b")],
    ids=["echoed, same key", "echoed, other key", "stated, other key"],
)
async def test_backend_error_caused_by_one_client_does_not_shrink_the_context_of_the_next_run(
    prompt: str, next_key: str, tmp_path: Path
) -> None:
    """Key A once shrank the context window of all keys by an error that quoted its message."""
    with anyio.fail_after(60):
        async with (
            scripted_backend(reply, window=None) as backend,
            running_proxy(backend, "memory", tmp_path, keyring=EachKey()) as url,
            httpx.AsyncClient(base_url=url, timeout=30) as client,
        ):
            answers = [
                await client.post(
                    "/v1/chat/completions",
                    headers={"authorization": f"Bearer {key}"},
                    json={"model": "m", "messages": [{"role": "user", "content": content}]},
                )
                for key, content in (("sk-a", prompt), (next_key, ORDINARY))
            ]
    refused, answered = answers
    assert refused.status_code == 400
    assert answered.json()["choices"][0]["message"]["content"] == "42"
    assert "compactions" not in answered.json()["sandbox"]
    assert tokens(backend.requests[-1].body["messages"]) > FORGED_TOKENS
