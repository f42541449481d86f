"""Programs inside a sandbox, as a gateway sees them: each over a real TCP connection."""

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from typing import Any

from policies.egress import Egress
from sandbox_runtime.egress.decision import Decision
from sandbox_runtime.egress.dialer import Connect, Endpoint, Resolve
from sandbox_runtime.egress.gateway import Gateway
from sandbox_runtime.egress.limits import Timeouts
from tests.fakes.waiting import until
from tests.sandbox_runtime.egress.internet import Internet, Reader, Writer, client_tls_context, end

Streams = tuple[Reader, Writer]


class SocketConnection:
    """A Connection whose program is at the other end of a socket."""

    def __init__(self, reader: Reader, writer: Writer) -> None:
        self._reader = reader
        self._writer = writer

    async def receive(self) -> bytes:
        return await self._reader.read(16 << 10)

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def finish(self, last: bytes = b"") -> None:
        if self._writer.is_closing():
            raise ConnectionResetError("the program has closed its connection")
        try:
            self._writer.write(last)
            self._writer.write_eof()
        except OSError as error:
            raise ConnectionResetError(str(error)) from error

    def abort(self) -> None:
        self._writer.transport.abort()


class PieceConnection:
    """A Connection that receives these pieces."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    async def receive(self) -> bytes:
        return self._pieces.pop(0) if self._pieces else b""

    async def send(self, data: bytes) -> None:
        raise NotImplementedError

    async def finish(self, last: bytes = b"") -> None:
        raise NotImplementedError

    def abort(self) -> None:
        raise NotImplementedError


class GatewayClient:
    """The client side of a gateway: connects as programs do, and records the decisions."""

    def __init__(self, gateway: Gateway, port: int, decisions: list[Decision]) -> None:
        self.gateway = gateway
        self.port = port
        self.decisions = decisions
        self.writers: list[Writer] = []
        self.tasks: list[asyncio.Task[None]] = []
        """The tasks that serve the connections, in order."""

    async def open(self) -> Streams:
        """Open a connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(writer)
        return reader, writer

    async def exchange(self, *pieces: bytes) -> bytes:
        """Send data and return the complete response."""
        reader, writer = await self.open()
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        answer = await reader.read()
        writer.close()
        return answer

    async def connect(self, authority: str) -> Streams:
        """Open a tunnel by CONNECT."""
        reader, writer = await self.open()
        writer.write(f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n".encode())
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 200 Connection established\r\n\r\n"
        return reader, writer

    async def connect_tls(self, authority: str, server_name: str) -> Streams:
        """Open a tunnel and begin TLS in it. Raises ssl.SSLError."""
        reader, writer = await self.connect(authority)
        await writer.start_tls(client_tls_context(), server_hostname=server_name)
        return reader, writer

    async def socks(self, host: bytes, port: int) -> Streams:
        """Open a tunnel by SOCKS; `host` is the encoded address with its type."""
        reader, writer = await self.open()
        writer.write(b"\x05\x01\x00\x05\x01\x00" + host + port.to_bytes(2, "big"))
        assert await reader.readexactly(12) == b"\x05\x00\x05\x00\x00\x01" + bytes(6)
        return reader, writer

    async def only_decision(self) -> Decision:
        """Wait for the only decision and return it."""
        await until(lambda: bool(self.decisions))
        (decision,) = self.decisions
        return decision


@asynccontextmanager
async def gateway_client(
    egress: Egress,
    internet: Internet,
    *,
    resolve: Resolve | None = None,
    connect: Connect | None = None,
    forbidden: Collection[Endpoint] = (),
    secrets: Mapping[str, str] | None = None,
    timeouts: Timeouts | None = None,
) -> AsyncIterator[GatewayClient]:
    """Yield the client side of a gateway to a fake internet."""
    decisions: list[Decision] = []
    gateway = Gateway(
        egress,
        resolve=resolve or internet.resolve,
        connect=connect or internet.connect,
        forbidden=forbidden,
        secrets=secrets,
        on_decision=decisions.append,
        timeouts=timeouts,
    )
    async with serve_programs(gateway, decisions) as sandbox:
        yield sandbox


@asynccontextmanager
async def serve_programs(
    gateway: Gateway, decisions: list[Decision]
) -> AsyncIterator[GatewayClient]:
    """Serve a gateway on a port for programs."""

    async def serve(reader: Reader, writer: Writer) -> None:
        task = asyncio.current_task()
        assert task
        sandbox.tasks.append(task)
        await gateway.serve(SocketConnection(reader, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    sandbox = GatewayClient(gateway, server.sockets[0].getsockname()[1], decisions)
    try:
        yield sandbox
    finally:
        server.close()
        await gateway.aclose()
        await end(sandbox.writers)


def allowlist(*allow: str, **others: Any) -> Egress:
    """Return an allowlist policy."""
    return Egress(mode="allowlist", allowed_hosts=allow, **others)
