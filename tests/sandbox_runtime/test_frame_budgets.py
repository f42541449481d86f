"""Frames without requested data are counted, and queued data is bounded."""

import asyncio
import sys
import tracemalloc
from collections.abc import Callable

import anyio
import pytest

from sandbox_runtime.channel import MAX_REQUEST_BYTES, Channel
from sandbox_runtime.command_output import CommandOutput
from sandbox_runtime.connection_queue import BURST_CONNECTIONS, CONNECTIONS_PER_S, ConnectionRate
from sandbox_runtime.errors import SandboxLostError
from sandbox_runtime.guest_sandbox import GuestSandbox
from sandbox_runtime.protocol import (
    BURST_FRAMES,
    CREDIT,
    DATA,
    END,
    EOF,
    FRAMES_PER_S,
    FREE_BYTES,
    MAX_CONNECTIONS,
    MAX_DATA_BYTES,
    OPEN,
    PING,
    PONG,
    RESET,
    STDERR,
    STDERR_TAIL,
    TAIL,
    WINDOW,
    WINDOW_BYTES,
    FrameRate,
    frame,
    json_frame,
)
from sandbox_runtime.sandbox import OutputCap
from sandbox_runtime.streams import MAX_PIECES, MAX_RESET_STREAMS, ProgramConnection, Stream
from tests.fakes.manual_clock import ManualClock
from tests.fakes.waiting import until
from tests.sandbox_runtime.scripted_guest import (
    ScriptedGuest,
    connected,
    deliver,
    reporting,
    scripted_sandbox,
)

CHUNK = b"x" * MAX_DATA_BYTES
FULL_WINDOW = WINDOW_BYTES // MAX_DATA_BYTES


# Connections


async def accept(connection: ProgramConnection) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("on_connection", [None, accept], ids=["refused", "accepted"])
async def test_flood_of_connections_marks_the_sandbox_as_lost(
    on_connection: Callable[[ProgramConnection], asyncio.Future[None]] | None,
) -> None:
    channel, guest = await connected()
    channel.set_connection_handler(on_connection)
    lost = await deliver(channel, guest, b"".join(frame(n, OPEN) for n in range(2, 200_002, 2)))
    assert lost
    assert "broke the protocol: more than" in lost
    assert len(guest.kinds) <= MAX_RESET_STREAMS + 2  # what was queued for it
    await channel.close()


async def test_maximum_number_of_connections_may_be_open() -> None:
    channel, guest = await connected()
    channel.set_connection_handler(accept)
    numbers = range(2, 2 * MAX_CONNECTIONS + 2, 2)
    assert not await deliver(channel, guest, b"".join(frame(n, OPEN) for n in numbers))
    assert await deliver(channel, guest, frame(2 * MAX_CONNECTIONS + 2, OPEN))
    await channel.close()


async def test_connections_finished_by_both_ends_make_room_for_new_connections() -> None:
    clock = ManualClock()
    channel, guest = await connected(clock)

    async def answer(connection: ProgramConnection) -> None:
        await connection.finish()
        await asyncio.Event().wait()

    channel.set_connection_handler(answer)
    for number in range(2, 4 * MAX_CONNECTIONS, 2):
        clock.advance(1.0)
        assert not await deliver(channel, guest, frame(number, OPEN))
        assert not await deliver(channel, guest, frame(number, EOF))
    assert guest.kinds.count(EOF) == 2 * MAX_CONNECTIONS - 1
    await channel.close()


async def test_refused_connections_keep_the_channel_open_while_pings_are_answered() -> None:
    clock = ManualClock()
    channel, guest = await connected(clock)
    for number in range(2, 8 * MAX_RESET_STREAMS, 2):
        clock.advance(1.0)
        assert not await deliver(channel, guest, frame(number, OPEN))
        if guest.kinds.count(PING) > guest.pongs:
            guest.pongs += 1
            assert not await deliver(channel, guest, frame(0, PONG))
    assert guest.kinds.count(RESET) == 4 * MAX_RESET_STREAMS - 1
    assert guest.pongs > 1
    await channel.close()


# Streams that are over


async def cancelled_operation(channel: Channel) -> Stream:
    stream = await channel.open({"op": "exec"})
    channel.reset(stream.number)
    return stream


TOLERATED = {
    "all that its credit was for": frame(1, DATA, CHUNK) * FULL_WINDOW,
    "its end": json_frame(1, END, {}),
    "data and its end": frame(1, STDERR, b"x") + json_frame(1, END, {}),
}
NOT_TOLERATED = {
    "more than its credit": frame(1, DATA, CHUNK) * FULL_WINDOW + frame(1, DATA, b"x"),
    "data without end": frame(1, DATA, b"x") * (WINDOW_BYTES + 1),
    "empty data": frame(1, DATA),
    "credit for what was never sent": frame(1, WINDOW, CREDIT.pack(1)),
    "two ends": json_frame(1, END, {}) * 2,
    "data after its end": json_frame(1, END, {}) + frame(1, DATA, b"x"),
    "a frame of another's": frame(1, EOF),
}


@pytest.mark.parametrize("frames", TOLERATED.values(), ids=TOLERATED.keys())
async def test_frames_in_flight_for_a_cancelled_stream_are_ignored(frames: bytes) -> None:
    channel, guest = await connected()
    await cancelled_operation(channel)
    assert not await deliver(channel, guest, frames)
    await channel.close()


@pytest.mark.parametrize("frames", NOT_TOLERATED.values(), ids=NOT_TOLERATED.keys())
async def test_excess_data_on_a_cancelled_stream_loses_the_sandbox(
    frames: bytes,
) -> None:
    channel, guest = await connected()
    await cancelled_operation(channel)
    lost = await deliver(channel, guest, frames)
    assert lost
    assert "broke the protocol" in lost
    await channel.close()


async def test_late_frame_of_a_stream_cancelled_before_an_answered_ping_loses_the_sandbox() -> None:
    channel, guest = await connected()
    await cancelled_operation(channel)
    pinging = asyncio.create_task(channel.ping(timeout_s=20))
    await asyncio.sleep(0)
    later = await cancelled_operation(channel)
    assert not await deliver(channel, guest, frame(0, PONG))
    await pinging
    assert not await deliver(channel, guest, frame(later.number, DATA, b"x"))
    assert await deliver(channel, guest, frame(1, DATA, b"x"))
    await channel.close()


async def test_frames_after_the_end_of_a_command_mark_the_sandbox_as_lost() -> None:
    sandbox, guest = await scripted_sandbox(
        lambda n: reporting()(n) + (frame(n, DATA, b"x") if n == 1 else b"")
    )
    assert (await sandbox.exec("true", timeout_s=5)).exit_code == 0
    with pytest.raises(SandboxLostError):
        await sandbox.exec("true", timeout_s=5)
    assert guest.killed
    await sandbox.close()


async def test_agent_that_answers_no_pings_cannot_accumulate_reset_streams() -> None:
    channel, _ = await connected()

    async def give_up_without_end() -> None:
        while True:
            await cancelled_operation(channel)

    with anyio.fail_after(20), pytest.raises(SandboxLostError, match="has not answered"):
        await give_up_without_end()
    await channel.close()


async def test_idle_sandbox_is_lost_if_its_agent_does_not_answer_the_ping_for_a_reset_stream() -> (
    None
):
    guest = ScriptedGuest(lambda n: b"")
    channel = Channel(guest, silence_timeout_s=0.01)
    await channel.connect(timeout_s=5)
    await cancelled_operation(channel)
    with anyio.fail_after(20):
        await until(lambda: bool(guest.killed))
    assert "no answer" in (channel.lost or "")
    await channel.close()


# Frames that carry nothing

EMPTY = {
    "credit for nothing": frame(1, WINDOW, CREDIT.pack(0)),
    "a pong with a payload": frame(0, PONG, b"x"),
    "a connection with a payload": frame(2, OPEN, b"x" * (MAX_REQUEST_BYTES + 1)),
    "an end of writing with a payload": frame(2, OPEN) + frame(2, EOF, b"x"),
    "a reset with a payload": frame(2, OPEN) + frame(2, RESET, b"x"),
    "two ends of writing": frame(2, OPEN) + frame(2, EOF) * 2,
    "credit twice for the same bytes": frame(2, OPEN) + frame(2, WINDOW, CREDIT.pack(1)),
}


@pytest.mark.parametrize("frames", EMPTY.values(), ids=EMPTY.keys())
async def test_frames_that_the_protocol_does_not_allow_lose_the_sandbox(frames: bytes) -> None:
    channel, guest = await connected()
    channel.set_connection_handler(accept)
    stream = await channel.open({"op": "exec"})
    pinging = asyncio.create_task(channel.ping(timeout_s=20))
    lost = await deliver(channel, guest, frames)
    assert lost
    assert "broke the protocol" in lost
    with pytest.raises(SandboxLostError):
        await pinging
    with pytest.raises(SandboxLostError):
        await stream.receive()
    await channel.close()


# What waits to be received


@pytest.mark.parametrize("kinds", [(DATA,), (DATA, STDERR)], ids=["one kind", "two kinds"])
async def test_frames_of_one_byte_take_less_memory_than_twice_the_window(
    kinds: tuple[int, ...],
) -> None:
    channel, guest = await connected()
    stream = await channel.open({"op": "exec"})
    sent = bytes(n % 251 for n in range(WINDOW_BYTES))
    frames = (frame(1, kinds[n % len(kinds)], sent[n : n + 1]) for n in range(WINDOW_BYTES))
    assert not await deliver(channel, guest, b"".join(frames))
    pieces = list(stream._pieces)
    assert len(pieces) <= MAX_PIECES + len(kinds)
    assert sum(map(sys.getsizeof, pieces)) + sum(map(sys.getsizeof, (d for _, d in pieces))) < (
        2 * WINDOW_BYTES
    )
    guest.send_frames(json_frame(1, END, {}))
    received: dict[int, bytes] = {}
    while piece := await stream.receive():
        received[piece[0]] = received.get(piece[0], b"") + piece[1]
    assert received == {kind: sent[n :: len(kinds)] for n, kind in enumerate(kinds)}
    await channel.close()


async def test_merging_of_queued_frames_keeps_the_order_of_stdout_and_stderr() -> None:
    channel, guest = await connected()
    stream = await channel.open({"op": "exec"})
    said = [(DATA, b"a"), (DATA, b"b"), (STDERR, b"c"), (DATA, b"d"), (DATA, CHUNK)]
    await deliver(channel, guest, b"".join(frame(1, *piece) for piece in said))
    assert [await stream.receive() for _ in range(4)] == [
        (DATA, b"ab"),
        (STDERR, b"c"),
        (DATA, b"d"),
        (DATA, CHUNK),
    ]
    await channel.close()


async def test_slow_reader_gets_stdout_and_stderr_in_order() -> None:
    channel, guest = await connected()
    stream = await channel.open({"op": "exec"})
    said = [((DATA, STDERR)[n % 2], b"line %d\n" % n) for n in range(1000)]
    assert not await deliver(channel, guest, b"".join(frame(1, *piece) for piece in said))
    assert [await stream.receive() for _ in said] == said
    await channel.close()


async def test_alternating_kinds_of_output_are_kept_in_few_pieces() -> None:
    channel, guest = await connected()
    stream = await channel.open({"op": "exec"})
    kinds = (DATA, STDERR, TAIL, STDERR_TAIL)
    said = [frame(1, DATA, b"x")] * 3 + [frame(1, kinds[n % 4], b"x") for n in range(20_000)]
    assert not await deliver(channel, guest, b"".join(said))
    assert len(stream._pieces) <= MAX_PIECES + len(kinds)
    await channel.close()


async def test_command_output_in_tiny_pieces_uses_bounded_memory() -> None:
    output = CommandOutput(OutputCap(max_bytes=200_000), None)
    tracemalloc.start()
    try:
        for _ in range(100_000):
            assert await output.add(DATA, b"ab")
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 2 * 200_000


# The rate


def test_small_frames_beyond_their_rate_pause_the_guest() -> None:
    rate = FrameRate()
    assert rate.count_and_get_pause_s(BURST_FRAMES, 0, now_s=100.0) == 0
    assert rate.count_and_get_pause_s(FRAMES_PER_S, 0, now_s=100.0) == pytest.approx(1.0)
    assert rate.count_and_get_pause_s(1, 0, now_s=101.0) == pytest.approx(1 / FRAMES_PER_S)
    assert rate.count_and_get_pause_s(1, 0, now_s=102.0) == 0


def test_frames_full_of_data_do_not_count_towards_the_rate() -> None:
    rate = FrameRate()
    for _ in range(100):
        assert rate.count_and_get_pause_s(BURST_FRAMES, BURST_FRAMES * FREE_BYTES, now_s=100.0) == 0


def test_connections_beyond_a_burst_are_delayed_to_the_allowed_rate() -> None:
    rate = ConnectionRate()
    for _ in range(BURST_CONNECTIONS):
        assert rate.wait_s(now_s=100.0) == 0
        rate.take(now_s=100.0)
    assert rate.wait_s(now_s=100.0) == 1 / CONNECTIONS_PER_S
    rate.take(now_s=100.0)
    assert rate.wait_s(now_s=100.0) == 2 / CONNECTIONS_PER_S
    assert rate.wait_s(now_s=101.0) == 0


async def test_flood_from_one_sandbox_does_not_disturb_another() -> None:
    hostile, guest = await scripted_sandbox(lambda n: frame(n, DATA, b"x") * (WINDOW_BYTES + 1))
    sound, _ = await scripted_sandbox(reporting(exit_code=7))

    async def lose(sandbox: GuestSandbox) -> None:
        with pytest.raises(SandboxLostError):
            await sandbox.exec("true", timeout_s=20)

    with anyio.fail_after(20):
        async with anyio.create_task_group() as group:
            group.start_soon(lose, hostile)
            assert (await sound.exec("true", timeout_s=5)).exit_code == 7
    assert guest.killed
    await hostile.close()
    await sound.close()
