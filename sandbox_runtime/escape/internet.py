"""A stand-in for the internet: names and addresses of our own making, whose every connection ends
at a server on the host's loopback. What was asked, dialed and sent is kept."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from sandbox_runtime.egress.dialer import Server

PUBLIC = "93.184.215.14"
ALLOWED, OTHER = "allowed.example", "other.example"
Answers = Sequence[Sequence[str]]
"""A name's addresses, each time that it is asked for; the last ones stay."""
_BOTH: Mapping[str, Answers] = {ALLOWED: [[PUBLIC]], OTHER: [[PUBLIC]]}
_RESPONSE = b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\nConnection: close\r\n\r\nreached\n"
_PATIENCE_S = 0.3


class Internet:
    """Resolves and connects for a way out; nothing leaves the host."""

    def __init__(self, names: Mapping[str, Answers] | None = None) -> None:
        self.lookups: list[str] = []
        self.dialed: list[tuple[str, int]] = []
        self.received = bytearray()
        self._names = {**_BOTH, **(names or {})}
        self._port = 0

    async def resolve(self, host: str) -> Sequence[str]:
        """Raises OSError for a name that there is not."""
        asked_before = self.lookups.count(host)
        self.lookups.append(host)
        if host not in self._names:
            raise OSError(-2, "Name or service not known")
        answers = self._names[host]
        return answers[min(asked_before, len(answers) - 1)]

    async def connect(self, ip: str, port: int) -> Server:
        """Whatever the address, it is our server that answers."""
        self.dialed.append((ip, port))
        return await asyncio.open_connection("127.0.0.1", self._port)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """While its server is there."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._port = server.sockets[0].getsockname()[1]
        async with server:
            try:
                yield
            finally:
                await self._all_let_in()

    async def _all_let_in(self) -> None:
        """Return when whoever has called is let in: asyncio loses those whom it accepts while a
        server closes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write_eof()
        await reader.read()  # nothing, but not before its turn has come
        writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await asyncio.wait_for(reader.read(1 << 16), _PATIENCE_S):
                self.received += data
                if b"\r\n\r\n" in data:
                    writer.write(_RESPONSE)
        except (TimeoutError, ConnectionError):
            pass  # whoever came has said all that he had to say
        finally:
            writer.close()
