"""A server with a manual clock, and clients that send raw bytes."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Self

import anyio
import httpx
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from proxy.http_server import MIN_BYTES_PER_S, ConnectionRegistry, is_loopback
from tests.fakes.manual_clock import ManualClock
from tests.fakes.server import serve_app
from tests.fakes.waiting import until

PIECE = b"x" * MIN_BYTES_PER_S
LARGE_BYTES = 64 << 20


def http_request(path: str, *headers: str, method: str = "GET") -> bytes:
    return "\r\n".join((f"{method} {path} HTTP/1.1", "Host: h", *headers, "", "")).encode()


UPLOAD = http_request("/upload", f"Content-Length: {4 * MIN_BYTES_PER_S}", method="POST")


class App:
    """An application whose paths respond at once, slowly, endlessly, or after `released` is set."""

    def __init__(self) -> None:
        self.released = asyncio.Event()
        self.client_left = asyncio.Event()
        """Set when the client of an endless response has disconnected."""
        self.held = 0
        """Number of read requests that wait for `released`, including those of disconnected
        clients."""
        self.uploads: list[int] = []
        """Number of bytes received of each upload that has ended."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        response: Response = PlainTextResponse("ok")
        match request.url.path:
            case "/stream" | "/metrics":
                response = StreamingResponse(self._stream())
            case "/late":
                await self.released.wait()
                response = await self._upload(request)
            case "/upload":
                response = await self._upload(request)
            case "/held":
                await request.body()
                with self._holding():
                    watching = asyncio.ensure_future(request.receive())
                    await self.released.wait()
                    watching.cancel()
                    await response(scope, receive, send)
                return
            case "/endless":
                response = StreamingResponse(self._endless())
            case "/large":
                response = Response(bytes(LARGE_BYTES))
        await response(scope, receive, send)

    async def _stream(self) -> AsyncIterator[bytes]:
        yield b"begun"
        await self.released.wait()
        yield b"ended"

    @contextlib.contextmanager
    def _holding(self) -> Iterator[None]:
        self.held += 1
        try:
            yield
        finally:
            self.held -= 1

    async def _endless(self) -> AsyncIterator[bytes]:
        try:
            while True:
                yield bytes(1 << 20)
                await asyncio.sleep(0)  # so that a disconnect cancels this task
        finally:
            self.client_left.set()

    async def _upload(self, request: Request) -> Response:
        size = 0
        try:
            async for piece in request.stream():
                size += len(piece)
        finally:
            self.uploads.append(size)
        return PlainTextResponse(str(size))


class Client:
    """A client's connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def response(self) -> tuple[int, dict[str, str], bytes]:
        """Return the next response: status, headers and body."""
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        body = await self._reader.readexactly(int(headers.get("content-length", 0)))
        return int(head[0].split()[1]), headers, body

    async def until(self, end: bytes) -> bytes:
        return await self._reader.readuntil(end)

    async def read(self, size: int) -> bytes:
        return await self._reader.readexactly(size)

    async def read_to_end(self) -> bytes:
        """Return the bytes that arrive before the server closes the connection."""
        data = bytearray()
        try:
            while piece := await self._reader.read(1 << 16):
                data += piece
        except ConnectionError:
            pass  # the server closed with unread bytes of the client
        return bytes(data)

    def shrink_buffer(self, size: int) -> None:
        received = self._writer.get_extra_info("socket")
        received.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)

    async def aclose(self) -> None:
        self._writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


class RunningServer:
    """A server, its clock and its clients."""

    def __init__(self, url: str, connections: ConnectionRegistry, clock: ManualClock) -> None:
        self._url = httpx.URL(url)
        self._connections = connections
        self._clock = clock
        self._clients: list[Client] = []

    @property
    def open(self) -> int:
        return len(self._connections.connections)

    @property
    def unsent(self) -> int:
        """Number of response bytes that the clients have not read."""
        return sum(each.transport.get_write_buffer_size() for each in self._connections.connections)

    def shrink_buffers(self, size: int) -> None:
        """Limit the kernel's socket buffers to `size` bytes."""
        for each in self._connections.connections:
            sent = each.transport.get_extra_info("socket")
            sent.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
        for client in self._clients:
            client.shrink_buffer(size)

    async def connect(self, data: bytes = b"", address: str = "127.0.0.1") -> Client:
        opened = await asyncio.open_connection(
            self._url.host, self._url.port, local_addr=(address, 0)
        )
        client = Client(*opened)
        self._clients.append(client)
        await client.send(data)
        return client

    async def connect_in_order(self, count: int) -> list[Client]:
        """Open `count` connections that send nothing. The server accepts them in order."""
        clients = []
        for _ in range(count):
            grown = self.open + 1
            clients.append(await self.connect())
            await until(lambda grown=grown: self.open == grown)
        return clients

    async def advance(self, seconds: float) -> None:
        """Wait until the server has read all sent bytes, then advance its clock."""
        barrier = await self.connect(http_request("/", "Connection: close"))
        await barrier.read_to_end()
        self._clock.advance(seconds)
        self._connections.close_expired()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *failure: object) -> None:
        for client in self._clients:
            await client.aclose()


@asynccontextmanager
async def running_server(
    app: App, most: int = 100, is_shared: Callable[[str], bool] = is_loopback
) -> AsyncIterator[RunningServer]:
    clock = ManualClock()
    connections = ConnectionRegistry(most, clock, is_shared)
    with anyio.fail_after(20):
        async with (
            serve_app(app, connections) as url,
            RunningServer(url, connections, clock) as opened,
        ):
            try:
                yield opened
            finally:
                app.released.set()
