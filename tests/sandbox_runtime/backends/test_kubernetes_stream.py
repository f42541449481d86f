"""The attached websocket, with a server that the test plays at its other end."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import anyio
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from sandbox_runtime.backends.byte_stream import MAX_STDERR_BYTES
from sandbox_runtime.backends.kubernetes_stream import (
    HIGH_WATER_BYTES,
    MAX_MESSAGE_BYTES,
    SUBPROTOCOLS,
    AttachedStream,
    WebSocketTransport,
)
from sandbox_runtime.protocol import ProtocolError
from tests.fakes.waiting import until

MEGABYTE = 1 << 20


@asynccontextmanager
async def attached(
    subprotocol: str = "v4.channel.k8s.io",
) -> AsyncIterator[tuple[AttachedStream, web.WebSocketResponse]]:
    """Yield a stream and the server's end of its websocket."""
    opened: asyncio.Future[web.WebSocketResponse] = asyncio.get_running_loop().create_future()
    is_over = asyncio.Event()

    async def attach(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(protocols=[subprotocol], max_msg_size=4 * MEGABYTE)
        await socket.prepare(request)
        opened.set_result(socket)
        await is_over.wait()
        return socket

    app = web.Application()
    app.router.add_get("/attach", attach)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        with anyio.fail_after(30):
            socket = await session.ws_connect(
                server.make_url("/attach"), headers={"sec-websocket-protocol": SUBPROTOCOLS}
            )
            stream = AttachedStream()
            WebSocketTransport(socket, stream)
            peer = await opened
            assert peer.ws_protocol == subprotocol
            try:
                yield stream, peer
            finally:
                stream.abort()
                is_over.set()
                await stream.wait_closed()


async def read_all(stream: AttachedStream) -> bytes:
    received = bytearray()
    await stream.receive(received.extend)
    return bytes(received)


@pytest.mark.parametrize("subprotocol", ["v4.channel.k8s.io", "v5.channel.k8s.io"])
async def test_standard_output_is_delivered_and_the_other_channels_are_kept_apart(
    subprotocol: str,
) -> None:
    async with attached(subprotocol) as (stream, peer):
        for message in (b"\x01", b"\x02", b"\x03"):  # what the API server begins with
            await peer.send_bytes(message)
        await peer.send_bytes(b"\x01out")
        await peer.send_bytes(b"\x02an error\n")
        await peer.send_bytes(b"\x04unknown")
        await peer.send_bytes(b"\x01put")
        await peer.send_bytes(b'\x03{"status":"Success"}')
        await peer.close()
        assert await read_all(stream) == b"output"
        assert stream.stderr_tail() == "an error"
        assert stream.status() == '{"status":"Success"}'


async def test_written_bytes_arrive_in_order_as_standard_input() -> None:
    async with attached() as (stream, peer):
        data = bytes(range(256)) * 1024
        for start in range(0, len(data), 1000):
            await stream.drain()
            stream.write(data[start : start + 1000])
        received = b""
        while len(received) < len(data):
            message = await peer.receive_bytes()
            assert message[:1] == b"\x00"
            assert len(message) <= 1 + MAX_MESSAGE_BYTES
            received += message[1:]
        assert received == data


async def test_large_write_is_split_into_messages() -> None:
    async with attached() as (stream, peer):
        stream.write(b"x" * (3 * MAX_MESSAGE_BYTES))
        assert [len(await peer.receive_bytes()) for _ in range(3)] == [1 + MAX_MESSAGE_BYTES] * 3


async def test_writer_waits_for_a_server_that_does_not_read() -> None:
    async with attached() as (stream, peer):
        written = 0

        async def write_forever() -> None:
            nonlocal written
            while True:
                await stream.drain()
                stream.write(bytes(MAX_MESSAGE_BYTES))
                written += MAX_MESSAGE_BYTES

        writing = asyncio.create_task(write_forever())
        await until(lambda: not stream._writable.is_set())
        assert stream._transport._queued_bytes <= HIGH_WATER_BYTES + MAX_MESSAGE_BYTES
        before, received = written, 0
        while written == before:
            received += len(await peer.receive_bytes()) - 1
        writing.cancel()
        await asyncio.wait([writing])
        assert received <= written


async def test_paused_stream_stops_reading_the_websocket() -> None:
    async with attached() as (stream, peer):
        calls: list[int] = []
        may_go_on = False

        def on_data(data: bytes | memoryview) -> float | None:
            calls.append(len(data))
            return None if may_go_on else 0.01

        receiving = asyncio.create_task(stream.receive(on_data))
        total, sent = 64 * MEGABYTE, 0

        async def flood() -> None:
            nonlocal sent
            while sent < total:
                await peer.send_bytes(b"\x01" + bytes(MEGABYTE))
                sent += MEGABYTE
            await peer.close()

        flooding = asyncio.create_task(flood())
        await until(lambda: len(calls) > 20)  # each call but the first is after a pause
        assert sent < total / 2
        may_go_on = True
        await flooding
        await receiving
        assert sum(calls) == total


async def test_too_much_standard_error_raises_protocol_error() -> None:
    async with attached() as (stream, peer):
        receiving = asyncio.create_task(read_all(stream))
        await peer.send_bytes(b"\x02" + b"x" * (MAX_STDERR_BYTES + 1))
        with pytest.raises(ProtocolError, match="diagnostics"):
            await receiving


async def test_lost_connection_ends_receive_and_fails_drain() -> None:
    async with attached() as (stream, peer):
        assert peer._req is not None
        assert peer._req.transport is not None
        peer._req.transport.abort()
        assert await read_all(stream) == b""
        with pytest.raises(BrokenPipeError):
            await stream.drain()
        stream.write(b"too late")  # is ignored


async def test_aborted_stream_closes_the_connection() -> None:
    async with attached() as (stream, peer):
        stream.abort()
        assert (await peer.receive()).type is aiohttp.WSMsgType.CLOSE
        await stream.wait_closed()
        assert await read_all(stream) == b""
