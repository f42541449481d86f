"""A fake internet: names and public addresses that lead to local servers."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from sandbox_runtime.egress.dialer import Server, open_connection

CERTIFICATE = Path(__file__).parent / "origin.pem"
"""A self-signed certificate for allowed.example and its subdomains, other.example and
198.51.100.7."""
Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter
Behaviour = Callable[[Reader, Writer], Awaitable[None]]
PUBLIC = "93.184.215.14"


def client_tls_context() -> ssl.SSLContext:
    """Return a TLS context that trusts the fake servers."""
    return ssl.create_default_context(cafile=str(CERTIFICATE))


class Internet:
    """A fake internet: `resolve` and `connect` for a Gateway, which record their calls."""

    def __init__(self, names: Mapping[str, Sequence[str]] | None = None) -> None:
        self.names = dict(names or {"allowed.example": [PUBLIC], "other.example": [PUBLIC]})
        self.lookups: list[str] = []
        self.dialed: list[tuple[str, int]] = []
        self._ports: dict[tuple[str, int], int] = {}

    async def resolve(self, host: str) -> Sequence[str]:
        self.lookups.append(host)
        if host not in self.names:
            raise OSError(-2, "Name or service not known")
        return self.names[host]

    async def connect(self, ip: str, port: int) -> Server:
        self.dialed.append((ip, port))
        if (ip, port) not in self._ports:
            raise ConnectionRefusedError(111, "Connection refused")
        return await open_connection("127.0.0.1", self._ports[ip, port])

    @asynccontextmanager
    async def server(
        self, behaviour: Behaviour, *, ip: str = PUBLIC, port: int = 80, tls: bool = False
    ) -> AsyncIterator[int]:
        """Run a server at a public address for the length of the block; yield its loopback port."""
        writers: list[Writer] = []

        async def served(reader: Reader, writer: Writer) -> None:
            writers.append(writer)
            try:
                await behaviour(reader, writer)
            except (OSError, asyncio.IncompleteReadError):
                pass
            finally:
                writer.close()

        context = None
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(CERTIFICATE)
        server = await asyncio.start_server(served, "127.0.0.1", 0, ssl=context)
        self._ports[ip, port] = server.sockets[0].getsockname()[1]
        try:
            yield self._ports[ip, port]
        finally:
            del self._ports[ip, port]
            server.close()
            await end(writers)


async def end(writers: Iterable[Writer]) -> None:
    """Abort connections and wait until they are closed."""
    for writer in writers:
        if not writer.is_closing():
            writer.transport.abort()
        with suppress(OSError):
            await writer.wait_closed()


class Origin:
    """Answers every HTTP request with the head of the request."""

    def __init__(self) -> None:
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []
        self.cut: int = 0
        """Number of incomplete requests."""

    async def __call__(self, reader: Reader, writer: Writer) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.heads.append(head)
        try:
            self.bodies.append(await self._body(head, reader))
        except asyncio.IncompleteReadError:
            self.cut += 1
            return
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(head) + head)
        await writer.drain()

    @staticmethod
    async def _body(head: bytes, reader: Reader) -> bytes:
        headers = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if line)
        if headers.get(b"transfer-encoding") == b"chunked":
            body = b""
            while size := int(await reader.readuntil(b"\r\n"), 16):
                body += (await reader.readexactly(size + 2))[:-2]
            assert await reader.readexactly(2) == b"\r\n"
            return body
        return await reader.readexactly(int(headers.get(b"content-length", b"0")))


async def echo(reader: Reader, writer: Writer) -> None:
    """Sends everything back."""
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
