"""A byte stream in both directions, whose bytes are handed over as they arrive.

asyncio's own streams have a task wait for them, and wake it for every piece.
"""

import asyncio

from sandbox_runtime.backends.base import Take
from sandbox_runtime.protocol import ProtocolError

_EARLY_BYTES = 1 << 20
"""How much is read before anybody listens."""
_TURN_BYTES = 32 << 10
"""How much is handed over at a time, to learn whether there should be a pause."""
_MAX_UNREAD_BYTES = 256 << 10
"""What may be queued by `write_control` behind bytes that the other side does not read."""


class Duplex(asyncio.Protocol):
    """Our end of one, as the protocol of a transport."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._early = bytearray()
        self._came = asyncio.Event()
        """Set by bytes that nobody listened to, and at the end."""
        self._take: Take | None = None
        self._refused: ProtocolError | None = None
        self._rest: bytes | memoryview = b""
        """What is handed over after the pause."""
        self._pause: asyncio.TimerHandle | None = None
        self._unread = 0
        """What was queued by `write_control` since the transport had room."""
        self._ended = asyncio.Event()
        self._is_lost = False
        self._writable = asyncio.Event()
        self._writable.set()

    async def listen(self, take: Take) -> None:
        """Hand over all that comes, at the pace that `take` asks for, until its end. Raises
        ProtocolError."""
        self._take = take
        try:
            self._rest = self._drawn(len(self._early))
            self._hand_over()
            await self._ended.wait()
            while self._pause:  # nothing more will come: the rest is taken at once, turn by turn
                self._pause.cancel()
                self._go_on()
                await asyncio.sleep(0)
        finally:
            self._take = None
        if self._refused:
            raise self._refused

    async def until(self, mark: bytes) -> bytes:
        """What comes before anybody listens, to this mark. Raises ConnectionError, and ValueError
        where there is no mark in a megabyte."""
        while (at := self._early.find(mark)) < 0:
            if self._ended.is_set():
                raise ConnectionResetError("it ended before it had said all")
            if len(self._early) >= _EARLY_BYTES:
                raise ValueError(f"no {mark!r} in its first {len(self._early)} bytes")
            self._came.clear()
            await self._came.wait()
        return self._drawn(at + len(mark))

    async def drain(self) -> None:
        """Wait until there is room to write. Raises BrokenPipeError."""
        while not self._writable.is_set():
            await self._writable.wait()
        if self._is_lost or self._transport.is_closing():
            raise BrokenPipeError("nobody is at the other end any more")

    def write(self, data: bytes) -> None:
        """Queue without waiting. Who calls `drain` first keeps the queue short: what is cancelled
        while it waits has queued nothing."""
        if not self._transport.is_closing():
            self._transport.write(data)

    def write_control(self, data: bytes) -> None:
        """Queue, with or without room. A peer that lets too much of it wait is refused: `listen`
        raises ProtocolError."""
        self._unread = 0 if self._writable.is_set() else self._unread + len(data)
        if self._unread > _MAX_UNREAD_BYTES:
            self.refuse(ProtocolError("it does not read what it is sent"))
        else:
            self.write(data)

    def refuse(self, error: ProtocolError) -> None:
        """Take nothing more: `listen` raises the first error."""
        self._refused = self._refused or error
        self._take = None
        self._end()

    def abort(self) -> None:
        """Close it without waiting for anything."""
        self._transport.abort()

    # As a transport calls it

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._take is None:
            self._early += data
            self._came.set()
            if len(self._early) >= _EARLY_BYTES:
                self._transport.pause_reading()
            return
        self._rest = memoryview(data)
        self._hand_over()

    def eof_received(self) -> bool:
        self._end()
        return True  # it may still be written to

    def connection_lost(self, error: Exception | None) -> None:
        self._is_lost = True
        self._writable.set()
        if self._pause:
            self._pause.cancel()
        self._end()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def _hand_over(self) -> None:
        """Hand over what has come, up to the next pause."""
        rest, self._rest = self._rest, b""  # kept any longer, its memory could not be used again
        for start in range(0, len(rest), _TURN_BYTES):
            if self._pauses_after(rest[start : start + _TURN_BYTES]):
                self._rest = rest[start + _TURN_BYTES :]
                return
        self._transport.resume_reading()

    def _pauses_after(self, turn: bytes | memoryview) -> bool:
        """Hand over the bytes of one turn; returns whether the rest must wait."""
        try:
            pause_s = self._take(turn) if self._take else None
        except ProtocolError as error:
            self.refuse(error)
            return False
        if pause_s is None:
            return False
        self._transport.pause_reading()
        self._pause = asyncio.get_running_loop().call_later(pause_s, self._go_on)
        return True

    def _go_on(self) -> None:
        """Hand over the rest after a pause."""
        self._pause = None
        if not self._pauses_after(b""):
            self._hand_over()

    def _end(self) -> None:
        self._came.set()
        self._ended.set()

    def _drawn(self, count: int) -> bytes:
        drawn = bytes(self._early[:count])
        del self._early[:count]
        return drawn
