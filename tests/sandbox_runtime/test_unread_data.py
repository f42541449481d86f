"""Bounds on the unreceived data of all streams of one sandbox."""

import asyncio
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

from sandbox_runtime.channel import MAX_WIDE_STREAMS
from sandbox_runtime.connection_queue import MAX_HANDLERS
from sandbox_runtime.protocol import (
    DATA,
    END,
    EOF,
    FIRST_WINDOW_BYTES,
    MAX_CONNECTIONS,
    MAX_DATA_BYTES,
    OPEN,
    WINDOW_BYTES,
    frame,
    json_frame,
)
from sandbox_runtime.streams import ProgramConnection
from tests.sandbox_runtime.scripted_guest import connected, deliver

CHUNK = bytes(MAX_DATA_BYTES)
FULL_WINDOW = WINDOW_BYTES // MAX_DATA_BYTES
WIDER = WINDOW_BYTES - FIRST_WINDOW_BYTES
MAX_UNREAD_BYTES = 16 << 20
"""Maximum of all connections of one sandbox together."""


def test_windows_of_all_connections_together_stay_within_the_bound_of_unread_data() -> None:
    assert MAX_HANDLERS * FIRST_WINDOW_BYTES + MAX_WIDE_STREAMS * WIDER <= MAX_UNREAD_BYTES


@contextmanager
def memory_held_below(most: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < most


async def test_connections_that_exceed_their_first_window_lose_the_sandbox() -> None:
    channel, guest = await connected()

    async def finish(connection: ProgramConnection) -> None:
        await connection.finish()
        await asyncio.Event().wait()

    channel.set_connection_handler(finish)
    with memory_held_below(MAX_UNREAD_BYTES):
        for number in range(2, 2 * MAX_HANDLERS + 2, 2):
            data = frame(number, DATA, CHUNK) * FULL_WINDOW
            if await deliver(channel, guest, frame(number, OPEN) + data + frame(number, EOF)):
                break
    assert channel.lost
    assert "bytes where 16384 were allowed" in channel.lost
    await channel.close()


async def test_guest_that_uses_all_its_credit_takes_bounded_memory_and_is_not_lost() -> None:
    channel, guest = await connected()
    connections: list[ProgramConnection] = []

    async def receive_once(connection: ProgramConnection) -> None:
        await connection.receive()
        connections.append(connection)
        await asyncio.Event().wait()

    channel.set_connection_handler(receive_once)
    first = bytes(FIRST_WINDOW_BYTES)
    with memory_held_below(MAX_UNREAD_BYTES):
        for number in range(2, 2 * MAX_CONNECTIONS + 2, 2):
            guest.credit[number] = 0
            assert not await deliver(
                channel, guest, frame(number, OPEN) + frame(number, DATA, first)
            )
        assert sum(guest.credit.values()) == (
            MAX_CONNECTIONS * FIRST_WINDOW_BYTES + MAX_WIDE_STREAMS * WIDER
        )
        for number, credit in guest.credit.items():
            sent = [CHUNK] * (credit // len(CHUNK)) + [bytes(credit % len(CHUNK))]
            data = b"".join(frame(number, DATA, piece) for piece in sent if piece)
            assert not await deliver(channel, guest, data)
    assert await deliver(channel, guest, frame(2, DATA, b"x"))
    await channel.close()


async def test_resetting_a_stream_gives_its_enlarged_window_to_another_stream() -> None:
    channel, guest = await connected()
    streams = [await channel.open({"op": "get"}) for _ in range(MAX_WIDE_STREAMS + 1)]
    last = streams.pop()
    assert [guest.credit[stream.number] for stream in streams] == [WIDER] * MAX_WIDE_STREAMS
    assert guest.credit[last.number] == 0
    guest.send_frames(json_frame(streams[0].number, END, {}))
    assert not await deliver(channel, guest, frame(last.number, DATA, bytes(FIRST_WINDOW_BYTES)))
    await last.receive()
    assert guest.credit[last.number] == FIRST_WINDOW_BYTES
    channel.reset(streams[0].number)
    assert not await deliver(channel, guest, frame(last.number, DATA, bytes(FIRST_WINDOW_BYTES)))
    await last.receive()
    assert guest.credit[last.number] == 2 * FIRST_WINDOW_BYTES + WIDER
    await channel.close()


async def test_connection_whose_handler_has_ended_frees_its_enlarged_window() -> None:
    channel, guest = await connected()

    async def receive_all(connection: ProgramConnection) -> None:
        while await connection.receive():
            pass
        await connection.finish()

    channel.set_connection_handler(receive_all)
    data = bytes(FIRST_WINDOW_BYTES)
    for number in range(2, 4 * MAX_WIDE_STREAMS, 2):
        frames = frame(number, OPEN) + frame(number, DATA, data)
        assert not await deliver(channel, guest, frames)
        assert not await deliver(channel, guest, frame(number, EOF))
        assert guest.credit[number] == FIRST_WINDOW_BYTES + WIDER
    await channel.close()
