"""A terminal in memory, which shows whether a program waits for input."""

import asyncio
from collections import deque


class Terminal:
    """A line-buffered standard input without echo and without signals."""

    def __init__(self) -> None:
        self._line = b""
        """The incomplete last line of the input."""
        self._typed: deque[bytes] = deque()
        """The data of each read by a program; b"" is the end of input, for one read."""
        self._change = asyncio.Event()
        self._readers = 0

    @property
    def is_awaited(self) -> bool:
        """True if a program waits for input."""
        return self._readers > 0 and not self._typed

    def type(self, data: bytes) -> None:
        *lines, self._line = (self._line + data).split(b"\n")
        self._typed += [line + b"\n" for line in lines]
        self._change.set()

    def type_end(self) -> None:
        """End the input, or submit an incomplete line."""
        self._typed.append(self._line)
        self._line = b""
        self._change.set()

    async def read(self, size: int) -> bytes:
        self._readers += 1
        try:
            while not self._typed:
                self._change.clear()
                await self._change.wait()
        finally:
            self._readers -= 1
        line = self._typed.popleft()
        if len(line) > size:
            self._typed.appendleft(line[size:])
        return line[:size]

    def close(self) -> None:
        pass
