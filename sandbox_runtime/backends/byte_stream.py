"""The byte streams between the host and an agent: `ByteStreamProtocol` for the agent's input and
output, and `StderrTail` for its standard error.

Received bytes go to a callback: asyncio's own streams would wake a task for every piece.
"""

import asyncio

from sandbox_runtime.backends.base import DataCallback
from sandbox_runtime.protocol import ProtocolError

_MAX_EARLY_BYTES = 1 << 20
"""Maximum number of bytes that are buffered until `receive` is called."""
_MAX_CALLBACK_BYTES = 32 << 10
"""Maximum number of bytes in one call of the callback, which may request a pause in each call."""
MAX_UNREAD_BYTES = 256 << 10
"""Maximum number of bytes that `write_control` queues while the peer does not read."""
TAIL_BYTES = 4096
"""Number of bytes at the end of an agent's standard error that are kept for error messages."""
MAX_STDERR_BYTES = 1 << 20
"""Maximum number of bytes that an agent may write to standard error, which it uses only for
errors."""


class StderrTail:
    """Keeps the end of an agent's standard error, for error messages."""

    def __init__(self) -> None:
        self._tail = b""
        self._bytes_left = MAX_STDERR_BYTES

    def add(self, data: bytes | bytearray) -> None:
        """Append `data` and keep the end. Raises ProtocolError after MAX_STDERR_BYTES in total."""
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        self._bytes_left -= len(data)
        if self._bytes_left < 0:
            raise ProtocolError(f"more than {MAX_STDERR_BYTES} bytes of diagnostics")

    def text(self) -> str:
        """Return the tail as stripped text."""
        return self._tail.decode(errors="replace").strip()


class ByteStreamProtocol(asyncio.Protocol):
    """The host's end of a bidirectional byte stream: the protocol of an asyncio transport."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._early_bytes = bytearray()
        self._changed = asyncio.Event()
        """Set when bytes arrive before `receive` is called, and at the end of the stream."""
        self._on_data: DataCallback | None = None
        self._failure: ProtocolError | None = None
        self._undelivered_bytes: bytes | memoryview = b""
        """Received bytes that the callback gets only after the pause that it has requested."""
        self._pause_timer: asyncio.TimerHandle | None = None
        self._unread_bytes = 0
        """Bytes that `write_control` has queued since the transport last had room."""
        self._ended = asyncio.Event()
        self._is_lost = False
        self._writable = asyncio.Event()
        self._writable.set()

    async def receive(self, on_data: DataCallback) -> None:
        """Call `on_data` with all bytes that arrive, until the stream ends. Pause when `on_data`
        requests it. Raises ProtocolError."""
        self._on_data = on_data
        try:
            self._undelivered_bytes = self._take_early_bytes(len(self._early_bytes))
            self._deliver()
            await self._ended.wait()
            # No more bytes arrive, so the rest is delivered without pauses.
            while self._pause_timer:
                self._pause_timer.cancel()
                self._resume()
                await asyncio.sleep(0)
        finally:
            self._on_data = None
        if self._failure:
            raise self._failure

    async def read_until(self, mark: bytes) -> bytes:
        """Return the received bytes up to and including `mark`; call it before `receive`. Raises
        ConnectionError if the stream ends before the mark, and ValueError if the first MiB has
        none."""
        while (at := self._early_bytes.find(mark)) < 0:
            if self._ended.is_set():
                raise ConnectionResetError("the stream ended too early")
            if len(self._early_bytes) >= _MAX_EARLY_BYTES:
                raise ValueError(f"no {mark!r} in its first {len(self._early_bytes)} bytes")
            self._changed.clear()
            await self._changed.wait()
        return self._take_early_bytes(at + len(mark))

    async def drain(self) -> None:
        """Wait until the write buffer has room. Raises BrokenPipeError if the stream is closed."""
        while not self._writable.is_set():
            await self._writable.wait()
        if self._is_lost or self._transport.is_closing():
            raise BrokenPipeError("the other end is closed")

    def write(self, data: bytes) -> None:
        """Queue data without waiting. Callers await `drain` first, which bounds the queue; a caller
        that is cancelled in `drain` has queued nothing."""
        if not self._transport.is_closing():
            self._transport.write(data)

    def write_control(self, data: bytes) -> None:
        """Queue data even if the buffer has no room. If more than MAX_UNREAD_BYTES wait for the
        peer, `receive` raises ProtocolError."""
        self._unread_bytes = 0 if self._writable.is_set() else self._unread_bytes + len(data)
        if self._unread_bytes > MAX_UNREAD_BYTES:
            self.fail(ProtocolError("the agent does not read its input"))
        else:
            self.write(data)

    def fail(self, error: ProtocolError) -> None:
        """Stop reading and make `receive` raise the error; only the first error counts."""
        self._failure = self._failure or error
        self._on_data = None
        self._end()

    def abort(self) -> None:
        """Close the stream at once and discard unsent data."""
        self._transport.abort()

    # Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._on_data is None:
            self._early_bytes += data
            self._changed.set()
            if len(self._early_bytes) >= _MAX_EARLY_BYTES:
                self._transport.pause_reading()
            return
        self._undelivered_bytes = memoryview(data)
        self._deliver()

    def eof_received(self) -> bool:
        self._end()
        return True  # keep the write direction open

    def connection_lost(self, error: Exception | None) -> None:
        self._is_lost = True
        self._writable.set()
        if self._pause_timer:
            self._pause_timer.cancel()
        self._end()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def _deliver(self) -> None:
        """Call the callback with the received bytes, up to the next pause."""
        # A reference that stays would keep the transport from reusing the buffer's memory.
        rest, self._undelivered_bytes = self._undelivered_bytes, b""
        for start in range(0, len(rest), _MAX_CALLBACK_BYTES):
            if self._deliver_piece(rest[start : start + _MAX_CALLBACK_BYTES]):
                self._undelivered_bytes = rest[start + _MAX_CALLBACK_BYTES :]
                return
        self._transport.resume_reading()

    def _deliver_piece(self, turn: bytes | memoryview) -> bool:
        """Call the callback with a part of the received bytes. If it requests a pause, pause
        reading and return True."""
        try:
            pause_s = self._on_data(turn) if self._on_data else None
        except ProtocolError as error:
            self.fail(error)
            return False
        if pause_s is None:
            return False
        self._transport.pause_reading()
        self._pause_timer = asyncio.get_running_loop().call_later(pause_s, self._resume)
        return True

    def _resume(self) -> None:
        """Continue after a pause: call the callback with b"", then with the remaining bytes."""
        self._pause_timer = None
        if not self._deliver_piece(b""):
            self._deliver()

    def _end(self) -> None:
        self._changed.set()
        self._ended.set()

    def _take_early_bytes(self, count: int) -> bytes:
        taken = bytes(self._early_bytes[:count])
        del self._early_bytes[:count]
        return taken
