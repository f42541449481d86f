"""Turns with more tool calls than MAX_CALLS: the first ones run, and one note reports the limit."""

from pathlib import Path
from typing import Any

import httpx

from policies.prompts import CALLS_LEFT_OUT
from proxy.agent.model import MAX_CALLS
from proxy.models.scripted import call, text_reply, tool_reply
from tests.fakes.backend import Frames, by_history, chunk, frames, scripted_backend
from tests.fakes.server import running_proxy

MANY = 100_000
BODY = {"model": "m", "messages": [{"role": "user", "content": "Look."}], "stream": True}


def reply_with_calls(count: int) -> Frames:
    """Return a reply with one event for each of `count` calls."""
    made = (
        {
            "index": index,
            "id": f"c{index}",
            "type": "function",
            "function": {"name": "execute_bash", "arguments": '{"command": "true"}'},
        }
        for index in range(count)
    )
    return Frames([*frames(*(chunk({"tool_calls": [each]}) for each in made)), *frames("[DONE]")])


async def test_calls_over_the_limit_are_dropped_with_one_note(
    tmp_path: Path,
) -> None:
    script = by_history([reply_with_calls(MANY), text_reply("Done.")])
    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        httpx.AsyncClient(base_url=url, timeout=120) as client,
    ):
        text = (await client.post("/v1/chat/completions", json=BODY)).text
    assert "Done." in text
    assert "error" not in text
    prompt: list[dict[str, Any]] = backend.requests[1].body["messages"]
    results = [message for message in prompt if message["role"] in ("tool", "user")][1:]
    calls = [made for message in prompt for made in message.get("tool_calls") or ()]
    assert len(calls) == len(results) == MAX_CALLS
    assert str(results).count(CALLS_LEFT_OUT.format(count=MAX_CALLS)) == 1


async def test_calls_up_to_the_limit_add_no_note(tmp_path: Path) -> None:
    calls = [call("execute_bash", command=f"echo {number}") for number in range(MAX_CALLS)]
    script = by_history([tool_reply(*calls), text_reply("Done.")])
    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        httpx.AsyncClient(base_url=url, timeout=120) as client,
    ):
        await client.post("/v1/chat/completions", json=BODY)
    prompt = str(backend.requests[1].body["messages"])
    assert CALLS_LEFT_OUT.format(count=MAX_CALLS) not in prompt
    assert "echo 255" in prompt
