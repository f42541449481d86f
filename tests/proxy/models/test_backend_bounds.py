"""A response that exceeds a limit is rejected, and uses a limited amount of memory."""

import gc
import json
import tracemalloc
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import anyio
import pytest

from proxy.agent.model import MAX_CALLS
from proxy.errors import AnswerTooLargeError, BackendError
from proxy.models.completion_builder import MAX_ARGUMENTS_CHARS, MAX_FIELD_CHARS, CompletionBuilder
from proxy.models.openai_http import OpenAIHTTPModel
from proxy.models.retry import RetryingModel
from proxy.models.streaming import (
    MAX_COMPLETION_BYTES,
    MAX_EVENT_BYTES,
    EventTooLongError,
    SSEDecoder,
)
from tests.fakes.backend import Frames, Item, Raw, chunk, frames, scripted_backend
from tests.proxy.agent.runs import USER
from tests.proxy.models.delta_recorder import DeltaRecorder

BODY = {"model": "m", "messages": [USER]}
MIB = 1 << 20


class Endless(Sequence[bytes]):
    """Pieces that are generated while they are sent."""

    def __init__(self, first: bytes, piece: bytes, count: int) -> None:
        self._first, self._piece, self._count = first, piece, count
        self.sent = 0

    def __len__(self) -> int:
        return 1 + self._count

    def __getitem__(self, number: Any) -> Any:
        return self._piece if number else self._first

    def __iter__(self) -> Iterator[bytes]:
        yield self._first
        for _ in range(self._count):
            self.sent += len(self._piece)
            yield self._piece


def called(index: int, arguments: str = "{}") -> dict[str, Any]:
    function = {"name": "look", "arguments": arguments}
    return {"index": index, "id": f"c{index}", "type": "function", "function": function}


async def rejection(item: Item, *, is_streamed: bool = True) -> str:
    """Return the message of the error that rejects a response."""
    async with scripted_backend([item]) as backend:
        model = OpenAIHTTPModel(backend.base_url, api_key=None, timeout_s=30)
        with anyio.fail_after(60), pytest.raises(BackendError) as raised:
            await model.complete(BODY, DeltaRecorder() if is_streamed else None)
        await model.aclose()
    assert (raised.value.status, raised.value.code) == (502, "backend_bad_response")
    return raised.value.message


async def test_endless_line_of_a_backend_stream_is_rejected() -> None:
    """Without the limit, such a line made the proxy use 18.9 GB."""
    endless = Endless(b"data: ", b"x" * MIB, 1 << 10)
    message = await rejection(Frames(endless))
    assert "32 MiB" in message
    assert endless.sent < 2 * MAX_EVENT_BYTES


async def test_size_of_a_whole_backend_stream_is_limited() -> None:
    comment = b": " + b"x" * (MIB - 4) + b"\n\n"
    endless = Endless(b"", comment, 2 * MAX_COMPLETION_BYTES // MIB)
    message = await rejection(Frames(endless))
    assert "512 MiB" in message
    assert endless.sent < 1.2 * MAX_COMPLETION_BYTES


async def test_response_that_exceeds_a_limit_is_not_requested_again() -> None:
    endless = [Frames(Endless(b"data: ", b"x" * MIB, 1 << 10)) for _ in range(2)]
    async with scripted_backend(endless) as backend:
        model = RetryingModel(OpenAIHTTPModel(backend.base_url, api_key=None, timeout_s=30))
        with anyio.fail_after(60), pytest.raises(AnswerTooLargeError) as raised:
            await model.complete(BODY, DeltaRecorder())
        await model.aclose()
    assert len(backend.requests) == 1
    assert raised.value.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    "body", [b"[" + b"{}," * (8 * MIB) + b"{}]", b"[" * 1000 + b"]" * 1000, b"9" * (257 * MIB)]
)
async def test_json_response_that_is_too_long_too_deep_or_has_too_many_values_is_rejected(
    body: bytes,
) -> None:
    message = await rejection(
        Raw(200, body, {"content-type": "application/json"}), is_streamed=False
    )
    assert "more than" in message or "longer than" in message


async def test_event_with_too_many_values_is_rejected() -> None:
    event = b'data: {"choices": [' + b"{}," * MIB + b"{}]}\n\n"
    assert "200,000 values" in await rejection(Frames([event]))


async def test_size_of_tool_call_arguments_is_limited() -> None:
    piece = frames(chunk({"tool_calls": [called(0, "x" * MIB)]}))[0]
    endless = Endless(b"", piece, 1 << 10)
    assert str(MAX_ARGUMENTS_CHARS) in await rejection(Frames(endless))


def test_total_size_of_an_unknown_field_is_limited() -> None:
    builder = CompletionBuilder()
    builder.add(chunk({}, unknown="x" * MAX_FIELD_CHARS))
    with pytest.raises(BackendError):
        builder.add(chunk({}, unknown="x"))


def test_completion_builder_stores_at_most_one_tool_call_beyond_the_limit() -> None:
    builder = CompletionBuilder()
    for index in range(1000):
        builder.add(chunk({"tool_calls": [called(index)]}))
    assert len(builder.build().message["tool_calls"]) == MAX_CALLS + 1


def test_total_size_of_an_event_of_many_lines_is_limited() -> None:
    decoder, line = SSEDecoder(), b"data: " + b"x" * MIB + b"\n"
    for _ in range(MAX_EVENT_BYTES // MIB - 1):
        decoder.feed(line)
    with pytest.raises(EventTooLongError):
        decoder.feed(line)


def test_size_limit_of_an_event_does_not_limit_the_whole_stream() -> None:
    decoder, event = SSEDecoder(), b"data: " + b"x" * MIB + b"\n\n"
    tracemalloc.start()
    try:
        for _ in range(2 * MAX_EVENT_BYTES // MIB):
            assert len(decoder.feed(event)) == 1
        assert tracemalloc.get_traced_memory()[0] < 4 * MIB
    finally:
        tracemalloc.stop()


LONG = "x" * MIB


@pytest.mark.parametrize(
    "delta",
    [
        {"content": LONG},
        {"reasoning_content": LONG},
        {"thinking_blocks": [{"type": "thinking", "thinking": LONG}]},
        {"tool_calls": [{"index": 0, "function": {"name": LONG}}]},
        {"content": [{"type": "text", "text": ""}] * 1000},
        {"thinking_blocks": [{"type": "redacted_thinking"}] * 1000},
    ],
)
def test_size_of_each_part_of_a_completion_is_limited(delta: dict[str, Any]) -> None:
    builder = CompletionBuilder()
    with pytest.raises(BackendError):
        deque((builder.add(chunk(delta)) for _ in range(100)), maxlen=0)


async def test_garbage_collection_pauses_while_large_json_is_decoded() -> None:
    """With garbage collection, decoding took five times as long."""
    choice = {"index": 0, "message": {"role": "assistant", "content": "Long."}}
    completion = {"choices": [choice], "prompt_logprobs": 300_000 * [[]]}
    body = json.dumps(completion).encode()
    async with scripted_backend([Raw(200, body, {"content-type": "application/json"})]) as backend:
        model = OpenAIHTTPModel(backend.base_url, api_key=None, timeout_s=30)
        before = gc.get_stats()[0]["collections"]
        with anyio.fail_after(60):
            completion = await model.complete(BODY, None)
        collections = gc.get_stats()[0]["collections"] - before
        await model.aclose()
    assert completion.message["content"] == "Long."
    assert collections < 300_000 // gc.get_threshold()[0] // 4
    assert gc.isenabled()
