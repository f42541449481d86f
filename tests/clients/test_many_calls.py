"""Turns with more tool calls than MAX_CALLS: the first ones run, and one note reports the limit."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from policies.prompts import CALLS_LEFT_OUT
from proxy.agent.model import MAX_CALLS
from proxy.models.scripted import call, text_reply, tool_reply
from tests.clients.responses_sdk import create_response, responses_client
from tests.fakes.backend import Frames, Item, Raw, by_history, chunk, frames, scripted_backend
from tests.fakes.server import running_proxy

BASH = "execute_bash"
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
MANY = 100_000
ARGUMENT_BYTES = 4 << 10
"""Size of a long argument: the kernel's buffers of one connection hold far fewer than MANY."""
BODY = {"model": "m", "messages": [{"role": "user", "content": "Look."}], "stream": True}


def call_entry(index: int, name: str = BASH, command: str = "true") -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps({"command": command})}
    return {"index": index, "id": f"c{index}", "type": "function", "function": function}


def call_event(index: int, name: str = BASH, command: str = "true") -> bytes:
    return frames(chunk({"tool_calls": [call_entry(index, name, command)]}))[0]


def streamed_reply(count: int, name: str = BASH) -> Frames:
    """Return a reply with one event for each of `count` calls."""
    return Frames([*(call_event(index, name) for index in range(count)), *frames("[DONE]")])


def json_reply(count: int, name: str = BASH) -> Raw:
    """Return a reply with `count` calls in one piece, although a stream was requested."""
    calls = [call_entry(index, name) for index in range(count)]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    body = json.dumps({"choices": [choice]}).encode()
    return Raw(200, body, {"content-type": "application/json"})


MakeReply = Callable[..., Item]
in_each_form = pytest.mark.parametrize("make_reply", [streamed_reply, json_reply])


class LongCalls(Sequence[bytes]):
    """The events of `MANY` calls with long arguments, generated while they are sent."""

    def __init__(self) -> None:
        self.sent = 0

    def __len__(self) -> int:
        return MANY

    def __getitem__(self, number: Any) -> Any:
        return call_event(number, command=f": {'x' * ARGUMENT_BYTES}")

    def __iter__(self) -> Iterator[bytes]:
        for number in range(MANY):
            self.sent += 1
            yield self[number]


@in_each_form
async def test_calls_over_the_limit_are_dropped_with_one_note(
    make_reply: MakeReply, tmp_path: Path
) -> None:
    script = by_history([make_reply(MANY), text_reply("Done.")])
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


@in_each_form
async def test_client_tool_calls_over_the_limit_are_missing_from_the_stored_response(
    make_reply: MakeReply, tmp_path: Path
) -> None:
    reply = make_reply(MAX_CALLS + 9, "weather")
    async with (
        scripted_backend([reply]) as backend,
        responses_client(backend, tmp_path) as client,
    ):
        made = await create_response(client, "Look.", tools=[WEATHER])
        stored = await client.responses.retrieve(made.id)
    calls = [item for item in stored.output if item.type == "function_call"]
    assert (len(calls), {each.name for each in calls}) == (MAX_CALLS, {"weather"})
    assert stored == made


async def test_stream_is_cancelled_at_the_first_call_over_the_limit(tmp_path: Path) -> None:
    events = LongCalls()
    script = by_history([Frames(events), text_reply("Done.")])
    with anyio.fail_after(60):
        async with (
            scripted_backend(script) as backend,
            running_proxy(backend, "memory", tmp_path) as url,
            httpx.AsyncClient(base_url=url, timeout=60) as client,
        ):
            text = (await client.post("/v1/chat/completions", json=BODY)).text
            await backend.requests[0].gone.wait()
    assert "Done." in text
    assert MAX_CALLS < events.sent < MANY // 10
    prompt: list[dict[str, Any]] = backend.requests[1].body["messages"]
    assert sum(len(message.get("tool_calls") or ()) for message in prompt) == MAX_CALLS


async def test_calls_up_to_the_limit_add_no_note_on_omitted_calls_to_the_prompt(
    tmp_path: Path,
) -> None:
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
