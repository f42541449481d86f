"""Agents that read late or send much at once do not block other work and leave nothing behind."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from sandbox_runtime.channel import FRAMES_PER_BATCH, OPEN_FRAMES
from sandbox_runtime.errors import FileTimeoutError
from sandbox_runtime.guest_sandbox import GuestSandbox
from sandbox_runtime.protocol import (
    BURST_FRAMES,
    DATA,
    END,
    MAX_DATA_BYTES,
    MAX_OPEN_BYTES,
    OPEN,
    RESET,
    STDERR,
    Decoder,
    frame,
    json_frame,
)
from sandbox_runtime.sandbox import ExecResult, OutputCap
from sandbox_runtime.streams import ProgramConnection
from tests.fakes.waiting import until
from tests.sandbox_runtime.scripted_guest import REPORT
from tests.sandbox_runtime.socket_guest import SocketGuest, socket_sandbox
from tests.sandbox_runtime.transfer import drop

CAP = OutputCap(max_bytes=20_000)
LONG_PATH = "/" + "p" * 4000


async def turns(count: int) -> None:
    """Let other tasks run for `count` turns of the event loop."""
    for _ in range(count):
        await asyncio.sleep(0)


async def hold(connection: ProgramConnection) -> None:
    """Keep a connection open without reading it."""
    await asyncio.Event().wait()


async def endless() -> AsyncIterator[bytes]:
    while True:
        yield bytes(MAX_DATA_BYTES)


async def fill(sandbox: GuestSandbox, guest: SocketGuest) -> "list[asyncio.Task[int]]":
    """Start uploads until the buffer is full; return the uploads, which wait."""
    uploads = []
    while guest.has_room:
        uploads.append(asyncio.create_task(sandbox.put("/file", endless())))
        await turns(20)
    return uploads


async def end(*operations: "asyncio.Task[int] | asyncio.Task[ExecResult]") -> None:
    for operation in operations:
        operation.cancel()
    await asyncio.wait(operations)


async def kinds_by_stream(peer: socket.socket, guest: SocketGuest) -> dict[int, list[int]]:
    """Read all that was sent to the agent."""
    decoder, read, idle_turns = Decoder(MAX_OPEN_BYTES), dict[int, list[int]](), 0
    while idle_turns < 20:
        await asyncio.sleep(0)
        idle_turns += not guest.queued_bytes
        with suppress(BlockingIOError):
            for number, kind, _ in decoder.feed(peer.recv(1 << 20)):
                read.setdefault(number, []).append(kind)
                idle_turns = 0
    return read


async def test_unread_requests_of_ended_operations_are_removed_from_the_send_queue() -> None:
    async with socket_sandbox() as (sandbox, guest, _):
        uploads = await fill(sandbox, guest)
        before = guest.queued_bytes
        for _ in range(500):
            with pytest.raises(FileTimeoutError):
                await sandbox.get(LONG_PATH, drop, max_bytes=1, timeout_s=0)
            reading = asyncio.create_task(sandbox.get(LONG_PATH, drop, max_bytes=1))
            await turns(2)
            await end(reading)
        assert guest.queued_bytes - before < len(LONG_PATH)
        await end(*uploads)
        assert not sandbox._channel._streams
        assert not sandbox.lost


async def test_command_cancelled_before_the_agent_reads_does_not_run() -> None:
    async with socket_sandbox() as (sandbox, guest, peer):
        uploads = await fill(sandbox, guest)
        command = asyncio.create_task(sandbox.exec("sleep 1000", timeout_s=60))
        await turns(5)
        assert not command.done()
        await end(command)
        await end(*uploads)
        for number, kinds in (await kinds_by_stream(peer, guest)).items():
            assert RESET in kinds or OPEN not in kinds, number


async def test_operation_that_waits_because_the_channel_is_full_begins_once_the_agent_reads() -> (
    None
):
    async with socket_sandbox() as (sandbox, guest, peer):
        uploads = await fill(sandbox, guest)
        reading = asyncio.create_task(sandbox.get(LONG_PATH, drop, max_bytes=1))
        await turns(5)
        last = max(await kinds_by_stream(peer, guest))
        assert last == 2 * len(uploads) + 1
        await end(reading, *uploads)


async def test_uploads_cancelled_while_the_agent_is_busy_do_not_lose_the_sandbox() -> None:
    async with socket_sandbox() as (sandbox, guest, _):
        uploads = await fill(sandbox, guest)
        for _ in range(100):
            upload = asyncio.create_task(sandbox.put("/other", endless()))
            await turns(5)
            await end(upload)
        assert not sandbox.lost
        await end(*uploads)


async def test_flood_of_small_frames_does_not_block_other_tasks() -> None:
    """Other tasks wait while a turn handles frames: the test counts the connections of a turn."""
    pairs = 20_000
    async with socket_sandbox() as (sandbox, _, peer):
        sandbox.set_connection_handler(hold)
        flood = b"".join(frame(n, OPEN) + frame(n, RESET) for n in range(2, 2 * pairs + 2, 2))
        flooding = asyncio.create_task(asyncio.get_running_loop().sock_sendall(peer, flood))
        opened, most = 0, 0
        while opened < BURST_FRAMES // OPEN_FRAMES:
            await asyncio.sleep(0)
            before, opened = opened, sandbox._channel._last_connection // 2
            most = max(most, opened - before)
        assert most <= 2 * FRAMES_PER_BATCH // OPEN_FRAMES
        assert not sandbox.lost
        flooding.cancel()


@pytest.mark.parametrize("kind", [DATA, STDERR])
async def test_last_frame_of_a_flood_is_processed(kind: int) -> None:
    async with socket_sandbox() as (sandbox, _, peer):
        command = asyncio.create_task(sandbox.exec("true", timeout_s=60, cap=CAP))
        await until(lambda: 1 in sandbox._channel._streams)
        await turns(3)
        said = frame(1, kind, b"x") * 10_000 + json_frame(1, END, REPORT)
        await asyncio.get_running_loop().sock_sendall(peer, said)
        peer.shutdown(socket.SHUT_WR)
        result = await command
        assert len(result.stdout + result.stderr) == 10_000
