"""Large bodies that arrive at the same time: the event loop runs between their decodings."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.types import Scope

from policies.json_bounds import encode_json
from policies.large_json import PIECE_SIZE
from proxy import stepwise
from proxy.api.dependencies import SLOW_BYTES, decode_body, set_client_credentials, set_services
from proxy.body_memory import BodyMemory
from proxy.errors import BadRequestError
from proxy.keys import Key
from proxy.models.scripted import ScriptedModel
from proxy.stepwise import LARGE_CHARS
from tests.fakes.memory_sandbox import MemorySandboxes
from tests.fakes.server import make_services

BODIES = 5


class Journal(BodyMemory):
    """Records each reservation, which `decode_body` makes directly after a body is decoded."""

    def __init__(self, entries: list[str]) -> None:
        super().__init__()
        self._entries = entries

    def take(self, owner: str, count: int) -> None:
        self._entries.append("decoded")
        super().take(owner, count)


@asynccontextmanager
async def recorded_turns(entries: list[str]) -> AsyncIterator[None]:
    """Record each pass of the event loop during the block."""

    async def record() -> None:
        while True:
            entries.append("turn")
            await asyncio.sleep(0)

    task = asyncio.create_task(record())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_event_loop_runs_between_the_decodings_of_large_bodies(tmp_path: Path) -> None:
    """Ten bodies of 8 MiB that were decoded in one pass of the loop stalled /health for 0.4 s."""
    entries: list[str] = []
    services = make_services(
        ScriptedModel([]), MemorySandboxes(), tmp_path, body_memory=Journal(entries)
    )
    body = b'{"messages": "' + b"x" * SLOW_BYTES + b'"}'

    def request() -> Request:
        scope: Scope = {"type": "http", "headers": []}
        set_services(scope, services)
        made = Request(scope)
        set_client_credentials(made, Key("k"), {})
        return made

    async with recorded_turns(entries):
        await asyncio.gather(*(decode_body(request(), body) for _ in range(BODIES)))
    decodings = [number for number, entry in enumerate(entries) if entry == "decoded"]
    assert len(decodings) == BODIES
    for before, after in pairwise(decodings):
        assert "turn" in entries[before:after]


async def test_event_loop_runs_while_a_large_body_is_decoded(tmp_path: Path) -> None:
    """One body of 100 MB stalled /health for 0.4 s."""
    entries: list[str] = []
    services = make_services(ScriptedModel([]), MemorySandboxes(), tmp_path)
    body = b'{"messages": "' + b"x" * (4 * SLOW_BYTES) + b'"}'
    scope: Scope = {"type": "http", "headers": []}
    set_services(scope, services)
    set_client_credentials(made := Request(scope), Key("k"), {})
    async with recorded_turns(entries):
        assert await decode_body(made, body) == {"messages": "x" * (4 * SLOW_BYTES)}
    assert len(entries) > len(body) // PIECE_SIZE


async def test_large_body_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    services = make_services(ScriptedModel([]), MemorySandboxes(), tmp_path)
    scope: Scope = {"type": "http", "headers": []}
    set_services(scope, services)
    body = f'"{"x" * SLOW_BYTES}"'
    for encoding in ("utf-16", "utf-16-le", "utf-32"):
        with pytest.raises(BadRequestError, match="must be in UTF-8"):
            await decode_body(Request(scope), body.encode(encoding))


async def test_large_values_that_are_encoded_at_the_same_time_take_turns() -> None:
    """One iteration of the event loop never encodes parts of two values."""
    encoded_in: dict[int, set[int]] = {}
    current = 0

    async def count_passes() -> None:
        nonlocal current
        while True:
            current += 1
            await asyncio.sleep(0)

    def encoder(number: int) -> Callable[[Any], bytes]:
        def encode_and_note(value: Any) -> bytes:
            encoded_in.setdefault(current, set()).add(number)
            return encode_json(value)

        return encode_and_note

    counting = asyncio.create_task(count_passes())
    value = {"text": "x" * (LARGE_CHARS + 1)}
    encoded = await asyncio.gather(*(stepwise.encode(value, encoder(n)) for n in range(3)))
    counting.cancel()
    assert [bytes(each) for each in encoded] == [encode_json(value)] * 3
    assert all(len(numbers) == 1 for numbers in encoded_in.values())
