"""Host end of the protocol: many operations over one byte stream, every byte of it distrusted.

Whatever a frame from inside says is checked before it is used. A guest that breaks the protocol is
killed, and only that guest: its sandbox's callers get SandboxLostError.
"""

import asyncio
from collections import deque
from collections.abc import Mapping

import anyio

from sandbox_runtime.backends.base import Guest
from sandbox_runtime.errors import SandboxLostError, SandboxStartError
from sandbox_runtime.protocol import (
    CREDIT,
    DATA,
    END,
    EOF,
    HELLO,
    MAX_DATA_BYTES,
    MAX_REPORT_BYTES,
    OPEN,
    PING,
    PONG,
    RESET,
    STDERR,
    STDERR_TAIL,
    TAIL,
    VERSION,
    WINDOW,
    WINDOW_BYTES,
    Decoder,
    ProtocolError,
    frame,
    json_frame,
    parse_object,
)

OUTPUT_KINDS = (DATA, STDERR, TAIL, STDERR_TAIL)


PATIENCE_S = 10.0
"""How long the agent may be silent, or not read, before it must show that it is alive."""


class Stream:
    """One operation: what is sent to it, what came from it."""

    def __init__(self, channel: "Channel", number: int) -> None:
        self._channel = channel
        self._number = number
        self._frames: deque[tuple[int, bytes]] = deque()
        self._arrived = asyncio.Event()
        self._credit = WINDOW_BYTES
        self._credit_given = WINDOW_BYTES
        self._report: dict[str, object] | None = None

    async def send(self, data: bytes) -> None:
        """Send input, as fast as the guest takes it; nothing once the operation is over."""
        for start in range(0, len(data), MAX_DATA_BYTES):
            piece = data[start : start + MAX_DATA_BYTES]
            while self._credit < len(piece) and self._report is None:
                await self._wait()
            if self._report is not None:
                return
            self._credit -= len(piece)
            await self._channel.send(frame(self._number, DATA, piece))

    async def finish_input(self) -> None:
        """Say that the input is complete."""
        await self._channel.send(frame(self._number, EOF))

    async def receive(self) -> tuple[int, bytes] | None:
        """The next piece of output as (type, bytes); None when the operation is over."""
        while not self._frames:
            if self._report is not None:
                return None
            await self._wait()
        kind, data = self._frames.popleft()
        if self._report is None:
            self._credit_given += len(data)
            await self._channel.send(frame(self._number, WINDOW, CREDIT.pack(len(data))))
        return kind, data

    @property
    def report(self) -> Mapping[str, object]:
        """The outcome; there once `receive` has returned None."""
        assert self._report is not None
        return self._report

    async def _wait(self) -> None:
        if self._channel.lost:
            raise self._channel.lost_error()
        self._arrived.clear()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._arrived.wait()
        except TimeoutError:
            await self._channel.ping(PATIENCE_S)

    def wake(self) -> None:
        """Something has changed."""
        self._arrived.set()

    def accept(self, kind: int, payload: bytes) -> bool:
        """Take a frame from inside; returns whether it was the last. Raises ProtocolError."""
        if kind in OUTPUT_KINDS:
            if not payload or len(payload) > self._credit_given:
                raise ProtocolError(f"{len(payload)} bytes where {self._credit_given} were allowed")
            self._credit_given -= len(payload)
            self._frames.append((kind, payload))
        elif kind == WINDOW and len(payload) == CREDIT.size:
            self._credit += CREDIT.unpack(payload)[0]
            if self._credit > WINDOW_BYTES:
                raise ProtocolError("credit for more than was sent")
        elif kind == END:
            self._report = parse_object(payload)
        else:
            raise ProtocolError(f"frame type {kind} on stream {self._number}")
        self.wake()
        return kind == END


class Channel:
    """The link to one guest."""

    def __init__(self, guest: Guest) -> None:
        self.lost: str | None = None
        """Why the guest is gone."""
        self.guest = guest
        self._decoder = Decoder(MAX_REPORT_BYTES)
        self._streams: dict[int, Stream] = {}
        self._next = 1
        self._hello = asyncio.Event()
        self._pong = asyncio.Event()
        self._pongs_due = 0
        self._reader: asyncio.Task[None] | None = None

    async def connect(self, timeout_s: float) -> None:
        """Wait until the agent is ready. Raises SandboxStartError; the guest is then dead."""
        self._reader = asyncio.create_task(self._read(), name=f"channel {self.guest.id}")
        try:
            async with asyncio.timeout(timeout_s):
                await self._hello.wait()
        except TimeoutError as error:
            await self.close()
            words = self.guest.last_words() or "it said nothing"
            raise SandboxStartError(
                f"sandbox {self.guest.id} was not ready after {timeout_s:g} s: {words}"
            ) from error
        except asyncio.CancelledError:
            await self.close()
            raise
        if self.lost:
            await self.close()
            raise SandboxStartError(self.lost)

    async def open(self, request: Mapping[str, object]) -> Stream:
        """Begin an operation."""
        if self.lost:
            raise self.lost_error()
        number = self._next
        self._next += 2
        stream = self._streams[number] = Stream(self, number)
        await self.send(json_frame(number, OPEN, request))
        return stream

    def reset(self, stream: Stream) -> None:
        """Give an operation up; nothing happens when it is over."""
        numbers = [number for number, open_one in self._streams.items() if open_one is stream]
        for number in numbers:
            del self._streams[number]
            if not self.lost:
                # Without waiting: an agent that does not read must not hold up who gave up on it.
                self.guest.write(frame(number, RESET))

    async def ping(self, timeout_s: float) -> None:
        """Return when the agent answers. Raises SandboxLostError when it does not."""
        self._pong.clear()
        self._pongs_due += 1
        try:
            async with asyncio.timeout(timeout_s):
                await self.send(frame(0, PING))
                await self._pong.wait()
        except TimeoutError:
            await self.fail(f"no answer in {timeout_s:g} s")
        if self.lost:
            raise self.lost_error()

    def lost_error(self) -> SandboxLostError:
        """What its users are told once it is lost."""
        return SandboxLostError(self.lost)

    async def send(self, data: bytes) -> None:
        """Write to the guest. Raises SandboxLostError."""
        if self.lost:
            raise self.lost_error()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self.guest.send(data)
        except TimeoutError:
            await self.fail("it does not read")
            raise self.lost_error() from None
        except OSError as error:
            self._lose(f"its input is closed: {error}")
            raise self.lost_error() from error

    async def fail(self, why: str) -> None:
        """Kill the guest because it cannot be trusted or reached any more."""
        self._lose(why)
        await self.close()

    async def close(self) -> None:
        """Kill the guest. Safe to call twice; finishes when cancelled."""
        with anyio.CancelScope(shield=True):
            self._lose("it was closed")
            await self.guest.kill()
            if self._reader and self._reader is not asyncio.current_task():
                self._reader.cancel()
                await asyncio.wait([self._reader])

    async def _read(self) -> None:
        try:
            while data := await self.guest.receive():
                for number, kind, payload in self._decoder.feed(data):
                    self._dispatch(number, kind, payload)
        except ProtocolError as error:
            self._lose(f"it broke the protocol: {error}")
        except OSError as error:
            self._lose(f"its output failed: {error}")
        self._lose(self.guest.last_words() or "it ended")
        await self.guest.kill()

    def _dispatch(self, number: int, kind: int, payload: bytes) -> None:
        if number == 0:
            self._greet(kind, payload)
        elif stream := self._streams.get(number):
            if stream.accept(kind, payload):
                del self._streams[number]
        elif number % 2 == 0 or number >= self._next:
            raise ProtocolError(f"stream {number} was never opened")

    def _greet(self, kind: int, payload: bytes) -> None:
        if kind == HELLO and not self._hello.is_set():
            version = parse_object(payload).get("version")
            if version != VERSION:
                raise ProtocolError(f"protocol version {version!r}, {VERSION} expected")
            self._hello.set()
        elif kind == PONG and self._pongs_due:
            self._pongs_due -= 1
            self._pong.set()
        else:
            raise ProtocolError(f"frame type {kind} on stream 0")

    def _lose(self, why: str) -> None:
        if not self.lost:
            self.lost = f"sandbox {self.guest.id} is gone: {why}"
        self._hello.set()
        self._pong.set()
        for stream in self._streams.values():
            stream.wake()
