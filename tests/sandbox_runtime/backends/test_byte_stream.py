"""The byte stream to a guest, with a socket as its peer."""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from sandbox_runtime.backends.byte_stream import (
    _MAX_CALLBACK_BYTES,
    MAX_STDERR_BYTES,
    MAX_UNREAD_BYTES,
    TAIL_BYTES,
    ByteStreamProtocol,
)
from sandbox_runtime.backends.docker_engine import FRAME_HEADER, AttachStream
from sandbox_runtime.backends.process_guest import spawn
from sandbox_runtime.protocol import BURST_FRAMES, ProtocolError
from tests.fakes.waiting import until

MEGABYTE = 1 << 20


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[ByteStreamProtocol, socket.socket]]:
    ours, peer = socket.socketpair()
    peer.setblocking(False)
    connect = asyncio.get_running_loop().create_unix_connection
    transport, byte_stream = await connect(ByteStreamProtocol, sock=ours)
    with peer, anyio.fail_after(20):
        yield byte_stream, peer
    transport.abort()


@asynccontextmanager
async def attached() -> AsyncIterator[tuple[AttachStream, socket.socket]]:
    ours, peer = socket.socketpair()
    peer.setblocking(False)
    connect = asyncio.get_running_loop().create_unix_connection
    transport, stream = await connect(AttachStream, sock=ours)
    with peer, anyio.fail_after(20):
        yield stream, peer
    transport.abort()


async def read_all(byte_stream: ByteStreamProtocol) -> bytes:
    """Return all received bytes."""
    said = bytearray()
    await byte_stream.receive(said.extend)
    return bytes(said)


async def test_bytes_that_arrive_before_receive_are_delivered_first() -> None:
    async with connected() as (byte_stream, peer):
        peer.send(b"head\r\n\r\nearly ")
        assert await byte_stream.read_until(b"\r\n\r\n") == b"head\r\n\r\n"
        receiving = asyncio.create_task(read_all(byte_stream))
        peer.send(b"late")
        peer.close()
        assert await receiving == b"early late"


async def test_flood_that_arrives_before_receive_is_delivered_in_full() -> None:
    async with connected() as (byte_stream, peer):
        flood = asyncio.create_task(
            asyncio.get_running_loop().sock_sendall(peer, bytes(8 * MEGABYTE))
        )
        with pytest.raises(ValueError, match="first"):
            await byte_stream.read_until(b"mark")
        receiving = asyncio.create_task(read_all(byte_stream))
        await flood
        peer.close()
        assert len(await receiving) == 8 * MEGABYTE


async def test_protocol_error_ends_receive() -> None:
    def refuse(data: bytes) -> None:
        raise ProtocolError("no frame")

    async with connected() as (byte_stream, peer):
        peer.send(b"garbage")
        with pytest.raises(ProtocolError, match="no frame"):
            await byte_stream.receive(refuse)


async def test_drain_waits_while_the_peer_does_not_read() -> None:
    async with connected() as (byte_stream, peer):
        byte_stream.write(bytes(8 * MEGABYTE))
        waiting = asyncio.create_task(byte_stream.drain())
        receive = asyncio.get_running_loop().sock_recv
        received = len(await receive(peer, MEGABYTE))
        assert not waiting.done()
        while received < 8 * MEGABYTE:
            received += len(await receive(peer, MEGABYTE))
        await waiting


async def test_drain_raises_an_error_once_the_peer_has_closed() -> None:
    async with connected() as (byte_stream, peer):
        byte_stream.write(bytes(8 * MEGABYTE))
        await asyncio.get_running_loop().sock_recv(peer, 1)
        peer.close()
        for _ in range(2):
            with pytest.raises(BrokenPipeError):
                await byte_stream.drain()
        byte_stream.write(b"more")  # is lost
        assert await read_all(byte_stream) == b""


async def test_stream_that_ends_before_the_awaited_mark_raises_an_error() -> None:
    async with connected() as (byte_stream, peer):
        peer.send(b"HTTP/1.1")
        peer.close()
        with pytest.raises(ConnectionResetError):
            await byte_stream.read_until(b"\r\n\r\n")


async def test_control_data_for_a_peer_that_does_not_read_is_bounded() -> None:
    async with connected() as (byte_stream, _theirs):
        receiving = asyncio.create_task(read_all(byte_stream))
        await asyncio.sleep(0)
        sent = 0
        while not receiving.done():
            for _ in range(1000):
                byte_stream.write_control(bytes(9))
                sent += 9
            await asyncio.sleep(0)
        with pytest.raises(ProtocolError, match="does not read"):
            await receiving
        assert sent < MEGABYTE
        waiting = byte_stream._transport.get_write_buffer_size()
        assert waiting <= MAX_UNREAD_BYTES + (128 << 10)  # asyncio's own high-water mark
        byte_stream.write_control(bytes(9))
        assert byte_stream._transport.get_write_buffer_size() == waiting


async def test_large_request_does_not_count_towards_the_limit_of_unread_control_data() -> None:
    async with connected() as (byte_stream, peer):
        receiving = asyncio.create_task(read_all(byte_stream))
        byte_stream.write(bytes(8 * MEGABYTE))
        for _ in range(1000):
            byte_stream.write_control(bytes(9))
        receive, received = asyncio.get_running_loop().sock_recv, 0
        while received < 8 * MEGABYTE + 9000:
            received += len(await receive(peer, MEGABYTE))
        await byte_stream.drain()
        peer.close()
        assert await receiving == b""


async def test_pause_returned_by_the_callback_stops_delivery_until_it_ends() -> None:
    taken: list[bytes] = []

    def take(data: bytes | memoryview) -> float | None:
        taken.append(bytes(data))
        return 3600 if len(taken) == 1 else None

    async with connected() as (byte_stream, peer):
        receiving = asyncio.create_task(byte_stream.receive(take))
        await asyncio.sleep(0)
        flood = asyncio.create_task(
            asyncio.get_running_loop().sock_sendall(peer, bytes(8 * MEGABYTE))
        )
        await until(lambda: bool(taken) and not byte_stream._transport.is_reading())
        assert sum(map(len, taken)) <= _MAX_CALLBACK_BYTES
        assert not flood.done()
        assert byte_stream._pause_timer
        byte_stream._pause_timer.cancel()
        byte_stream._resume()
        await flood
        peer.close()
        await receiving
        assert sum(map(len, taken)) == 8 * MEGABYTE


async def test_pauses_keep_all_bytes_in_order() -> None:
    said = bytes(range(256)) * 4096
    taken = bytearray()

    def take(data: bytes | memoryview) -> float | None:
        taken.extend(data)
        return 1e-6 if data else None

    async with connected() as (byte_stream, peer):
        flood = asyncio.create_task(asyncio.get_running_loop().sock_sendall(peer, said))
        receiving = asyncio.create_task(byte_stream.receive(take))
        await flood
        peer.close()
        await receiving
        assert taken == said


async def test_bytes_of_an_ended_stream_are_delivered_when_receive_begins_later() -> None:
    taken = bytearray()

    def take(data: bytes | memoryview) -> float | None:
        taken.extend(data)
        return 3600 if data else None

    async with connected() as (byte_stream, peer):
        said = bytes(2 * _MAX_CALLBACK_BYTES)
        await asyncio.get_running_loop().sock_sendall(peer, said)
        peer.close()
        await byte_stream._ended.wait()
        await byte_stream.receive(take)
        assert taken == said


async def test_container_that_floods_stderr_raises_protocol_error() -> None:
    piece = FRAME_HEADER.pack(2, 1 << 16) + bytes(1 << 16)
    async with attached() as (stream, peer):
        flood = asyncio.create_task(
            asyncio.get_running_loop().sock_sendall(peer, piece * (MAX_STDERR_BYTES // (1 << 15)))
        )
        with pytest.raises(ProtocolError, match="diagnostics"):
            await stream.receive(lambda data: None)
        assert len(stream.stderr_tail()) <= TAIL_BYTES
        flood.cancel()


async def test_process_that_floods_stderr_raises_protocol_error() -> None:
    endless = "print('ready', flush=True); import os\nwhile True: os.write(2, bytes(1 << 16))"
    command = (sys.executable, "-c", endless)
    spawning = {"cwd": Path("/"), "env": {}, "pass_fds": (), "cgroup": None}
    with anyio.fail_after(20):
        guest = await spawn("endless", command, **spawning)
        with pytest.raises(ProtocolError, match="diagnostics"):
            await guest.receive(lambda data: None)
        await guest.kill()
    assert not Path(f"/proc/{guest.pid}").exists()
    assert len(guest.diagnostics()) <= TAIL_BYTES


@pytest.mark.parametrize("number", [1, 2], ids=["output", "diagnostics"])
async def test_flood_of_small_engine_frames_pauses_reading_from_the_container(number: int) -> None:
    """Each write of the agent may become an engine frame, which costs time whatever its size."""
    taken = bytearray()

    def take(data: bytes | memoryview) -> None:
        taken.extend(data)

    flood = (FRAME_HEADER.pack(number, 1) + b"x") * (4 * BURST_FRAMES)
    async with attached() as (stream, peer):
        receiving = asyncio.create_task(stream.receive(take))
        flooding = asyncio.create_task(asyncio.get_running_loop().sock_sendall(peer, flood))
        await until(lambda: bool(stream._pause_timer))
        await flooding
        peer.close()
        await receiving
    assert len(taken) == (4 * BURST_FRAMES if number == 1 else 0)


async def test_large_engine_frames_never_pause_reading_from_the_container() -> None:
    frames = (FRAME_HEADER.pack(1, 1 << 15) + bytes(1 << 15)) * 1024
    pauses = []
    async with attached() as (stream, peer):
        receiving = asyncio.create_task(
            stream.receive(lambda data: pauses.append(stream._pause_timer))
        )
        await asyncio.get_running_loop().sock_sendall(peer, frames)
        peer.close()
        await receiving
    assert set(pauses) == {None}
