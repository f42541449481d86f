"""A model that calls without end: 256 calls of a turn are taken, and one note says so."""

from pathlib import Path
from typing import Any

import httpx

from policies.prompts import CALLS_LEFT_OUT
from proxy.agent.model import MAX_CALLS
from proxy.models.scripted import call, text_reply, tool_reply
from tests.fakes.backend import Frames, by_history, chunk, frames, scripted_backend
from tests.fakes.server import running_proxy

MANY = 100_000
ASKED = {"model": "m", "messages": [{"role": "user", "content": "Look."}], "stream": True}


def streamed(count: int) -> Frames:
    """Each call in an event of its own."""
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


async def test_the_first_calls_of_a_turn_are_taken_and_one_note_tells_of_the_rest(
    tmp_path: Path,
) -> None:
    script = by_history([streamed(MANY), text_reply("Done.")])
    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        httpx.AsyncClient(base_url=url, timeout=120) as client,
    ):
        text = (await client.post("/v1/chat/completions", json=ASKED)).text
    assert "Done." in text
    assert "error" not in text
    told: list[dict[str, Any]] = backend.requests[1].body["messages"]
    results = [message for message in told if message["role"] in ("tool", "user")][1:]
    calls = [made for message in told for made in message.get("tool_calls") or ()]
    assert len(calls) == len(results) == MAX_CALLS
    assert str(results).count(CALLS_LEFT_OUT.format(count=MAX_CALLS)) == 1


async def test_as_many_calls_as_there_may_be_bring_no_note(tmp_path: Path) -> None:
    calls = [call("execute_bash", command=f"echo {number}") for number in range(MAX_CALLS)]
    script = by_history([tool_reply(*calls), text_reply("Done.")])
    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        httpx.AsyncClient(base_url=url, timeout=120) as client,
    ):
        await client.post("/v1/chat/completions", json=ASKED)
    told = str(backend.requests[1].body["messages"])
    assert CALLS_LEFT_OUT.format(count=MAX_CALLS) not in told
    assert "echo 255" in told
