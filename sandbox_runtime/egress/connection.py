"""A program's connection as the host sees it, and reading from it piece by piece."""

from typing import Protocol

from sandbox_runtime.egress.errors import DeniedError


class Connection(Protocol):
    """A byte stream that a program inside has opened."""

    async def receive(self) -> bytes:
        """The next bytes; b"" when the program has finished writing. Raises ConnectionError."""
        ...

    async def send(self, data: bytes) -> None:
        """Send, as fast as the program reads. Raises ConnectionError."""
        ...

    async def finish(self, last: bytes = b"") -> None:
        """Send `last` and nothing more; the other direction stays open. Raises ConnectionError."""
        ...

    def abort(self) -> None:
        """Close both directions at once. Safe to call twice."""
        ...


class Inbox:
    """What a program sends, kept until it is taken."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._kept = bytearray()
        self._ended = False

    async def peek(self) -> int | None:
        """The first byte, which stays; None when nothing more comes."""
        if not self._kept:
            await self._more()
        return self._kept[0] if self._kept else None

    async def some(self, max_bytes: int) -> bytes:
        """At least one byte; b"" when nothing more comes."""
        if not self._kept:
            await self._more()
        return self._take(max_bytes)

    async def exactly(self, count: int) -> bytes:
        """So many bytes. Raises DeniedError where the program stops before."""
        while len(self._kept) < count:
            await self._more_or_fail()
        return self._take(count)

    async def line(self, max_bytes: int) -> bytes:
        """Up to the next LF, with it. Raises DeniedError for a longer one."""
        return self._take(await self._end_of((b"\n",), max_bytes))

    async def head(self, max_bytes: int) -> bytes:
        """Up to the next empty line, with it. Raises DeniedError for a longer one."""
        return self._take(await self._end_of((b"\n\r\n", b"\n\n"), max_bytes))

    async def _end_of(self, marks: tuple[bytes, ...], max_bytes: int) -> int:
        start = 0
        while True:
            found = ((self._kept.find(mark, start, max_bytes), len(mark)) for mark in marks)
            if ends := [at + length for at, length in found if at >= 0]:
                return min(ends)
            if len(self._kept) >= max_bytes:
                raise DeniedError(f"more than {max_bytes} bytes where a request was expected", 400)
            start = max(0, len(self._kept) - 2)  # what was searched is not searched again
            await self._more_or_fail()

    async def _more_or_fail(self) -> None:
        await self._more()
        if self._ended:
            raise DeniedError("the request ends in its middle", 400)

    async def _more(self) -> None:
        if not self._ended:
            data = await self._connection.receive()
            self._ended = not data
            self._kept += data

    def _take(self, count: int) -> bytes:
        taken = bytes(self._kept[:count])
        del self._kept[:count]
        return taken
