"""What travels on one stream of a channel: an operation of ours, or a connection of a program's."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from sandbox_runtime.errors import SandboxLostError
from sandbox_runtime.protocol import (
    CREDIT,
    DATA,
    END,
    EOF,
    FIRST_WINDOW_BYTES,
    MAX_DATA_BYTES,
    OPEN,
    RESET,
    STDERR,
    STDERR_TAIL,
    TAIL,
    WINDOW,
    WINDOW_BYTES,
    ProtocolError,
    frame,
    json_frame,
    parse_object,
)

OUTPUT_KINDS = (DATA, STDERR, TAIL, STDERR_TAIL)
NO_CREDIT = CREDIT.pack(0)
MAX_PIECES = 1024
"""Of data that waits to be received, each of one kind: so many keep their order. What else arrives
is added to the last of its kind, so that 256 KiB in frames of a byte take 200 KiB more at most."""


class Link(Protocol):
    """What a stream needs of its channel."""

    @property
    def lost(self) -> str | None: ...

    def lost_error(self) -> SandboxLostError: ...

    async def send(self, data: bytes, *, more: bool = False) -> None: ...

    def write(self, data: bytes) -> None: ...

    def widen(self, number: int) -> bool: ...

    def reset(self, number: int) -> None: ...

    def connection_ended(self, number: int) -> None: ...


class _Flow:
    """Bytes in both directions, each only as fast as the other side gives credit."""

    def __init__(self, link: Link, number: int) -> None:
        self.number = number
        self._link = link
        self._pieces: deque[tuple[int, bytes | bytearray]] = deque()
        self._arrived = asyncio.Event()
        self._credit = WINDOW_BYTES
        self._window = self._credit_given = FIRST_WINDOW_BYTES
        """How much may wait to be received, or be on its way here."""
        self._credit_due = 0
        self._over = False
        """Closed by either side."""
        self._is_reset = False

    def mark_reset(self) -> None:
        """The host has reset it: what still arrives is checked, but not kept."""
        self._is_reset = True
        self._pieces.clear()

    def wake(self) -> None:
        """Something has changed."""
        self._arrived.set()

    async def _wait(self) -> None:
        if self._link.lost:
            raise self._link.lost_error()
        self._arrived.clear()
        await self._arrived.wait()

    async def _send(self, data: bytes, *, more: bool = False) -> None:
        for start in range(0, len(data), MAX_DATA_BYTES):
            piece = data[start : start + MAX_DATA_BYTES]
            while self._credit < len(piece) and not self._over:
                await self._wait()
            if self._over:
                return
            self._credit -= len(piece)
            await self._link.send(frame(self.number, DATA, piece), more=more)

    async def _next(self) -> tuple[int, bytes]:
        kind, data = self._pieces.popleft()
        self._credit_due += len(data)
        # Half a window at a time: most operations are over before any is due.
        if self._credit_due >= self._window // 2 and not self._over:
            credit, self._credit_due = self._credit_due, 0
            await self._link.send(self._give(credit + self._widen()))
        return kind, bytes(data)

    def _widen(self) -> int:
        """Make the window a whole one if the sandbox may have another; returns by how much."""
        if self._window == WINDOW_BYTES or not self._link.widen(self.number):
            return 0
        self._window = WINDOW_BYTES
        return WINDOW_BYTES - FIRST_WINDOW_BYTES

    def _give(self, credit: int) -> bytes:
        """The frame that gives credit."""
        self._credit_given += credit
        return frame(self.number, WINDOW, CREDIT.pack(credit))

    def _take(self, kind: int, payload: bytes) -> None:
        if not payload or len(payload) > self._credit_given:
            raise ProtocolError(f"{len(payload)} bytes where {self._credit_given} were allowed")
        self._credit_given -= len(payload)
        if self._is_reset:
            return
        if self._pieces:
            self._add(kind, payload)
        else:  # the reader keeps up
            self._pieces.append((kind, payload))

    def _add(self, kind: int, payload: bytes) -> None:
        """Queue data behind what waits already, as part of the last piece where that is small."""
        place = len(self._pieces) - 1
        last_kind, last = self._pieces[place]
        if last_kind != kind or len(last) + len(payload) > MAX_DATA_BYTES:
            if len(self._pieces) < MAX_PIECES:
                self._pieces.append((kind, payload))
                return
            # In such a queue the order of different kinds is lost. The last
            # pieces are of different kinds, as one is only added of a kind that is not among them.
            oldest = place - len(OUTPUT_KINDS)
            while place > oldest and self._pieces[place][0] != kind:
                place -= 1
            if place == oldest:
                self._pieces.append((kind, payload))
                return
            last = self._pieces[place][1]
        if isinstance(last, bytes):
            last = bytearray(last)
            self._pieces[place] = kind, last
        last += payload

    def _take_credit(self, payload: bytes) -> None:
        if len(payload) != CREDIT.size or payload == NO_CREDIT:
            raise ProtocolError("malformed credit")
        self._credit += CREDIT.unpack(payload)[0]
        if self._credit > WINDOW_BYTES:
            raise ProtocolError("credit for more than was sent")


class Stream(_Flow):
    """One operation: what is sent to it, what came from it."""

    def __init__(self, link: Link, number: int) -> None:
        super().__init__(link, number)
        self._report: dict[str, object] | None = None

    def opening(self, request: Mapping[str, object]) -> bytes:
        """The frames that open it: the request, and credit for a whole window if it has one."""
        credit = self._widen()
        return json_frame(self.number, OPEN, request) + (self._give(credit) if credit else b"")

    async def send(self, data: bytes, *, more: bool = False) -> None:
        """Send input, as fast as the guest takes it; nothing once the operation is over. Where
        `more` is about to follow, or the end, it may go out with that."""
        await self._send(data, more=more)

    async def finish_input(self) -> None:
        """Say that the input is complete."""
        await self._link.send(frame(self.number, EOF))

    async def receive(self) -> tuple[int, bytes] | None:
        """The next piece of output as (type, bytes); None when the operation is over."""
        while not self._pieces:
            if self._over:
                return None
            await self._wait()
        return await self._next()

    @property
    def report(self) -> Mapping[str, object]:
        """The outcome; there once `receive` has returned None."""
        assert self._report is not None
        return self._report

    def accept(self, kind: int, payload: bytes) -> bool:
        """Take a frame from inside; returns whether it was the last. Raises ProtocolError."""
        if kind in OUTPUT_KINDS:
            self._take(kind, payload)
        elif kind == WINDOW:
            self._take_credit(payload)
        elif kind == END:
            self._report = {} if self._is_reset else parse_object(payload)
            self._over = True
        else:
            raise ProtocolError(f"frame type {kind} on stream {self.number}")
        self.wake()
        return kind == END


class Connection(_Flow):
    """A byte stream that a program inside has opened through the agent."""

    def __init__(self, link: Link, number: int) -> None:
        super().__init__(link, number)
        self._ended = self._finished = False

    async def receive(self) -> bytes:
        """The next bytes; b"" when the program has finished writing. Raises ConnectionError."""
        with _lost_with_its_sandbox():
            while not self._pieces:
                if self._over:
                    raise ConnectionResetError("the program has closed its connection")
                if self._ended:
                    return b""
                await self._wait()
            return (await self._next())[1]

    async def send(self, data: bytes) -> None:
        """Send, as fast as the program reads. Raises ConnectionError."""
        with _lost_with_its_sandbox():
            await self._send(data)
        if self._over:
            raise ConnectionResetError("the program has closed its connection")

    async def finish(self, last: bytes = b"") -> None:
        """Send `last` and nothing more; the other direction stays open. Raises ConnectionError."""
        with _lost_with_its_sandbox():
            await self._send(last, more=True)
            if not self._finished and not self._over:
                self._finished = True
                try:
                    await self._link.send(frame(self.number, EOF))
                except BaseException:  # it did not go out
                    self._finished = False
                    raise
                self._close_if_over()

    def abort(self) -> None:
        """Close both directions at once. Safe to call twice."""
        if not self._over:
            self._over = True
            self._link.reset(self.number)
            self.wake()

    def accept(self, kind: int, payload: bytes) -> bool:
        """Take a frame from inside; returns whether it was the last. Raises ProtocolError."""
        if kind == DATA and not self._ended:
            self._take(kind, payload)
        elif kind == WINDOW:
            self._take_credit(payload)
        elif kind == EOF and not self._ended and not payload:
            self._ended = True
            self._close_if_over()
        elif kind == RESET and not payload:
            self._over = True
        else:
            raise ProtocolError(f"frame type {kind} on stream {self.number}")
        self.wake()
        return kind == RESET

    def _close_if_over(self) -> None:
        if self._ended and self._finished:
            self._link.connection_ended(self.number)


@contextmanager
def _lost_with_its_sandbox() -> Iterator[None]:
    try:
        yield
    except SandboxLostError as error:
        raise ConnectionResetError(str(error)) from error


OnConnection = Callable[[Connection], Awaitable[None]]
"""What is done with a connection; runs in a task of its own."""
