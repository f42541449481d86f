"""A fake internet for the egress attacks, and the requests that a program sends to a proxy.

The names and addresses are made up, and every connection ends at a server on the host's loopback.
Lookups, dialed addresses and received bytes are recorded.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

from sandbox_runtime.egress.dialer import Server

PUBLIC = "93.184.215.14"
ALLOWED, OTHER = "allowed.example", "other.example"
Answers = Sequence[Sequence[str]]
"""The addresses of a name at its first lookup, its second lookup and so on. The last entry also
answers all further lookups."""
_BOTH: Mapping[str, Answers] = {ALLOWED: [[PUBLIC]], OTHER: [[PUBLIC]]}
_RESPONSE = b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\nConnection: close\r\n\r\nreached\n"
_IDLE_S = 0.3


class FakeInternet:
    """Resolves names and opens connections for a gateway; nothing leaves the host."""

    def __init__(self, names: Mapping[str, Answers] | None = None) -> None:
        self.lookups: list[str] = []
        self.dialed: list[tuple[str, int]] = []
        self.received = bytearray()
        self._names = {**_BOTH, **(names or {})}
        self._port = 0

    async def resolve(self, host: str) -> Sequence[str]:
        """Return the addresses of a name. Raises OSError for an unknown name."""
        earlier = self.lookups.count(host)
        self.lookups.append(host)
        if host not in self._names:
            raise OSError(-2, "Name or service not known")
        answers = self._names[host]
        return answers[min(earlier, len(answers) - 1)]

    async def connect(self, ip: str, port: int) -> Server:
        """Record the address and connect to the fake server."""
        self.dialed.append((ip, port))
        return await asyncio.open_connection("127.0.0.1", self._port)

    @asynccontextmanager
    async def running_server(self) -> AsyncIterator[None]:
        """Run the fake server during the block."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._port = server.sockets[0].getsockname()[1]
        async with server:
            try:
                yield
            finally:
                await self._accept_pending()

    async def _accept_pending(self) -> None:
        """Wait until the server has accepted pending connections, because asyncio loses connections
        that it accepts while a server closes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write_eof()
        await reader.read()  # returns b"" once the server has accepted this connection
        writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await asyncio.wait_for(reader.read(1 << 16), _IDLE_S):
                self.received += data
                if b"\r\n\r\n" in data:
                    writer.write(_RESPONSE)
        except (TimeoutError, ConnectionError):
            pass  # the client sends nothing more, or has closed the connection
        finally:
            writer.close()


def connect_request(authority: str) -> bytes:
    """Return a CONNECT request."""
    return f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n".encode("latin-1")


def get_request(url: str, host: str, *lines: str, body: bytes = b"") -> bytes:
    """Return a plain GET request with these additional header lines."""
    head = "\r\n".join((f"GET {url} HTTP/1.1", f"Host: {host}", *lines))
    return f"{head}\r\n\r\n".encode("latin-1") + body


def socks_request(host: str, port: int, *, command: int = 1) -> bytes:
    """Return a SOCKS 5 greeting and request; command 1 is CONNECT. The host is sent as a name."""
    name = host.encode()
    request = bytes([5, command, 0, 3, len(name)]) + name + port.to_bytes(2, "big")
    return b"\x05\x01\x00" + request


def client_hello(server_name: str | None) -> bytes:
    """Return a TLS ClientHello that names `server_name`, or no server if that is None."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    outgoing = ssl.MemoryBIO()
    connection = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=server_name)
    with suppress(ssl.SSLWantReadError):
        connection.do_handshake()
    return outgoing.read()
