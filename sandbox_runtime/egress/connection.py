"""The interface of a program's connection, and a buffered reader for it."""

from typing import Protocol

from sandbox_runtime.egress.decision import DeniedError


class Connection(Protocol):
    """A byte stream that a program inside the sandbox has opened."""

    async def receive(self) -> bytes:
        """Return the next bytes, or b"" once the program has finished writing. Raises
        ConnectionError."""
        ...

    async def send(self, data: bytes) -> None:
        """Send data as fast as the program reads it. Raises ConnectionError."""
        ...

    async def finish(self, last: bytes = b"") -> None:
        """Send `last` and nothing more; the other direction stays open. Raises ConnectionError."""
        ...

    def abort(self) -> None:
        """Close both directions at once. Safe to call twice."""
        ...


class BufferedReader:
    """Reads from a program's connection by length, line or HTTP head, each within a maximum
    size."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._buffer = bytearray()
        self._is_ended = False

    async def peek(self) -> int | None:
        """Return the first byte without consuming it, or None at the end."""
        if not self._buffer:
            await self._receive_more()
        return self._buffer[0] if self._buffer else None

    async def read(self, max_bytes: int) -> bytes:
        """Return 1 to `max_bytes` bytes, or b"" at the end."""
        if not self._buffer:
            await self._receive_more()
        return self._take(max_bytes)

    async def read_exactly(self, count: int) -> bytes:
        """Return exactly `count` bytes. Raises DeniedError if the stream ends first."""
        while len(self._buffer) < count:
            await self._receive_more_or_fail()
        return self._take(count)

    async def read_line(self, max_bytes: int) -> bytes:
        """Return the bytes up to and including the next LF. Raises DeniedError if the next
        `max_bytes` bytes contain none, or if the stream ends first."""
        return self._take(await self._find_end((b"\n",), max_bytes))

    async def read_head(self, max_bytes: int) -> bytes:
        """Return the bytes up to and including the next empty line. Raises DeniedError if the next
        `max_bytes` bytes contain none, or if the stream ends first."""
        return self._take(await self._find_end((b"\n\r\n", b"\n\n"), max_bytes))

    async def _find_end(self, marks: tuple[bytes, ...], max_bytes: int) -> int:
        start = 0
        while True:
            found = ((self._buffer.find(mark, start, max_bytes), len(mark)) for mark in marks)
            if ends := [at + length for at, length in found if at >= 0]:
                return min(ends)
            if len(self._buffer) >= max_bytes:
                raise DeniedError(f"more than {max_bytes} bytes where a request was expected", 400)
            start = max(0, len(self._buffer) - 2)  # do not search the same bytes again
            await self._receive_more_or_fail()

    async def _receive_more_or_fail(self) -> None:
        await self._receive_more()
        if self._is_ended:
            raise DeniedError("the request ends in its middle", 400)

    async def _receive_more(self) -> None:
        if not self._is_ended:
            data = await self._connection.receive()
            self._is_ended = not data
            self._buffer += data

    def _take(self, count: int) -> bytes:
        taken = bytes(self._buffer[:count])
        del self._buffer[:count]
        return taken
