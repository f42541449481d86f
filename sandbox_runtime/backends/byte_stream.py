"""The byte streams between the host and an agent: `Duplex` for its input and output, which calls a
callback as bytes arrive (asyncio's own streams wake a task for every piece), and `StderrTail` for
its standard error."""

import asyncio

from sandbox_runtime.backends.base import Take
from sandbox_runtime.protocol import ProtocolError

_EARLY_BYTES = 1 << 20
"""How much is read before `listen` is called."""
_TURN_BYTES = 32 << 10
"""How much the callback gets at a time; after each it may ask for a pause."""
_MAX_UNREAD_BYTES = 256 << 10
"""What `write_control` may queue behind bytes that the other side does not read."""
TAIL_BYTES = 4096
"""The end of an agent's standard error that is kept for error messages."""
MAX_STDERR_BYTES = 1 << 20
"""What an agent may write to its standard error in all its life: it writes there before it dies."""


class StderrTail:
    """The end of an agent's standard error, for error messages."""

    def __init__(self) -> None:
        self._tail = b""
        self._left = MAX_STDERR_BYTES

    def add(self, data: bytes | bytearray) -> None:
        """Keep the end. Raises ProtocolError beyond MAX_STDERR_BYTES."""
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        self._left -= len(data)
        if self._left < 0:
            raise ProtocolError(f"more than {MAX_STDERR_BYTES} bytes of diagnostics")

    def text(self) -> str:
        """Return it, without space at its ends."""
        return self._tail.decode(errors="replace").strip()


class Duplex(asyncio.Protocol):
    """The host's end of a stream in both directions, as the protocol of an asyncio transport."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._early = bytearray()
        self._came = asyncio.Event()
        """Set by bytes that arrive before `listen`, and at the end."""
        self._take: Take | None = None
        self._refused: ProtocolError | None = None
        self._rest: bytes | memoryview = b""
        """What the callback gets after the pause."""
        self._pause: asyncio.TimerHandle | None = None
        self._unread = 0
        """What `write_control` has queued since the transport last had room."""
        self._ended = asyncio.Event()
        self._is_lost = False
        self._writable = asyncio.Event()
        self._writable.set()

    async def listen(self, take: Take) -> None:
        """Call `take` with all bytes that arrive, at the pace that it asks for, until the stream
        ends. Raises ProtocolError."""
        self._take = take
        try:
            self._rest = self._drawn(len(self._early))
            self._hand_over()
            await self._ended.wait()
            while self._pause:  # nothing more will arrive: the rest is taken turn by turn, at once
                self._pause.cancel()
                self._go_on()
                await asyncio.sleep(0)
        finally:
            self._take = None
        if self._refused:
            raise self._refused

    async def until(self, mark: bytes) -> bytes:
        """Return what arrives before `listen`, up to `mark` and with it. Raises ConnectionError if
        the stream ends, and ValueError if the first MiB has no such mark."""
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
        """Queue without waiting. Callers await `drain` first, which keeps the queue short; a caller
        that is cancelled there has queued nothing."""
        if not self._transport.is_closing():
            self._transport.write(data)

    def write_control(self, data: bytes) -> None:
        """Queue, with or without room. If the peer leaves too much of it unread, `listen` raises
        ProtocolError."""
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

    # Called by the transport

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
        """Call the callback with what has arrived, up to the next pause."""
        rest, self._rest = self._rest, b""  # else the buffer's memory could not be used again
        for start in range(0, len(rest), _TURN_BYTES):
            if self._pauses_after(rest[start : start + _TURN_BYTES]):
                self._rest = rest[start + _TURN_BYTES :]
                return
        self._transport.resume_reading()

    def _pauses_after(self, turn: bytes | memoryview) -> bool:
        """Call the callback with the bytes of one turn; return whether the rest must wait."""
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
        """Call the callback with the rest after a pause."""
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
