"""The streams of a channel, flow-controlled in both directions.

A `Stream` carries one operation that the host has started. A `ProgramConnection` carries a
connection that a program in the sandbox has opened.
`ResetStreams` holds the streams that the host has reset.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sandbox_runtime.errors import SandboxLostError
from sandbox_runtime.protocol import (
    CREDIT,
    DATA,
    END,
    EOF,
    FIRST_WINDOW_BYTES,
    MAX_CONNECTIONS,
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

if TYPE_CHECKING:
    from sandbox_runtime.channel import Channel

OUTPUT_KINDS = (DATA, STDERR, TAIL, STDERR_TAIL)
NO_CREDIT = CREDIT.pack(0)
MAX_PIECES = 1024
"""Maximum number of received pieces that wait for `receive`; each piece has data of one kind.
Beyond it, data is appended to the last piece of its kind. So 256 KiB that arrive in frames of one
byte take at most 200 KiB of additional memory."""
RESETS_BEFORE_PING = MAX_CONNECTIONS
MAX_RESET_STREAMS = 8 * MAX_CONNECTIONS
"""Maximum number of reset streams whose RESET the agent has not confirmed. An agent that opens and
closes connections at full speed leaves at most 1,280 in two round trips, so an agent that leaves
more than the maximum does not answer PING."""


class _FlowControl:
    """The flow control of a stream: each side sends bytes only as fast as the receiver gives
    credit."""

    def __init__(self, channel: "Channel", number: int) -> None:
        self.number = number
        self._channel = channel
        self._pieces: deque[tuple[int, bytes | bytearray]] = deque()
        self._changed = asyncio.Event()
        self._credit = WINDOW_BYTES
        self._window = FIRST_WINDOW_BYTES
        """Maximum number of bytes that wait for `receive` or are in flight."""
        self._agent_credit = self._window
        """Number of bytes that the agent may still send."""
        self._credit_due = 0
        self._is_over = False
        """True if either side has closed the stream."""
        self._is_reset = False

    def mark_reset(self) -> None:
        """Discard the waiting data. Data that still arrives is checked and discarded too, because
        the host has reset the stream."""
        self._is_reset = True
        self._pieces.clear()

    def wake(self) -> None:
        """Wake the coroutines that wait for a change."""
        self._changed.set()

    async def _wait(self) -> None:
        if self._channel.lost:
            raise self._channel.lost_error()
        self._changed.clear()
        await self._changed.wait()

    async def _send(self, data: bytes, *, more: bool = False) -> None:
        for start in range(0, len(data), MAX_DATA_BYTES):
            piece = data[start : start + MAX_DATA_BYTES]
            while self._credit < len(piece) and not self._is_over:
                await self._wait()
            if self._is_over:
                return
            self._credit -= len(piece)
            await self._channel.send(frame(self.number, DATA, piece), more=more)

    async def _next_piece(self) -> tuple[int, bytes]:
        kind, data = self._pieces.popleft()
        self._credit_due += len(data)
        # Credit is given half a window at a time: most operations end before any is due.
        if self._credit_due >= self._window // 2 and not self._is_over:
            credit, self._credit_due = self._credit_due, 0
            await self._channel.send(self._credit_frame(credit + self._widen_window()))
        return kind, bytes(data)

    def _widen_window(self) -> int:
        """Widen the window to WINDOW_BYTES if the channel allows it. Return the number of bytes by
        which the window has grown."""
        if self._window == WINDOW_BYTES or not self._channel.widen_window(self.number):
            return 0
        self._window = WINDOW_BYTES
        return WINDOW_BYTES - FIRST_WINDOW_BYTES

    def _credit_frame(self, credit: int) -> bytes:
        """Return the frame that gives credit."""
        self._agent_credit += credit
        return frame(self.number, WINDOW, CREDIT.pack(credit))

    def _accept_data(self, kind: int, payload: bytes) -> None:
        if not payload or len(payload) > self._agent_credit:
            raise ProtocolError(f"{len(payload)} bytes where {self._agent_credit} were allowed")
        self._agent_credit -= len(payload)
        if self._is_reset:
            return
        if self._pieces:
            self._append_data(kind, payload)
        else:  # nothing waits, so there is no piece to append to
            self._pieces.append((kind, payload))

    def _append_data(self, kind: int, payload: bytes) -> None:
        """Queue data behind the waiting pieces. If the last piece has the same kind and room,
        append the data to it; if the queue is full, append the data to the last piece of the same
        kind."""
        place = len(self._pieces) - 1
        last_kind, last = self._pieces[place]
        if last_kind != kind or len(last) + len(payload) > MAX_DATA_BYTES:
            if len(self._pieces) < MAX_PIECES:
                self._pieces.append((kind, payload))
                return
            # A full queue keeps the order within each kind only. Its last pieces are of different
            # kinds, because a piece is added only if its kind is not among them.
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

    def _add_credit(self, payload: bytes) -> None:
        if len(payload) != CREDIT.size or payload == NO_CREDIT:
            raise ProtocolError("malformed credit")
        self._credit += CREDIT.unpack(payload)[0]
        if self._credit > WINDOW_BYTES:
            raise ProtocolError("credit for more than was sent")


class Stream(_FlowControl):
    """One operation of the host: its input, its output and its report. Its coroutines raise
    SandboxLostError if the guest is lost."""

    def __init__(self, channel: "Channel", number: int) -> None:
        super().__init__(channel, number)
        self._report: dict[str, object] | None = None

    def opening_frames(self, request: Mapping[str, object]) -> bytes:
        """Return the frames that open the stream: the request, and credit for a full window if the
        channel allows it."""
        credit = self._widen_window()
        return json_frame(self.number, OPEN, request) + (
            self._credit_frame(credit) if credit else b""
        )

    async def send(self, data: bytes, *, more: bool = False) -> None:
        """Send input as fast as the guest accepts it; do nothing once the operation is over. With
        `more`, the data may be held back until the next data or the end of input."""
        await self._send(data, more=more)

    async def finish_input(self) -> None:
        """Tell the agent that the input is complete."""
        await self._channel.send(frame(self.number, EOF))

    async def receive(self) -> tuple[int, bytes] | None:
        """Return the next piece of output as (type, bytes); None when the operation is over."""
        while not self._pieces:
            if self._is_over:
                return None
            await self._wait()
        return await self._next_piece()

    @property
    def report(self) -> Mapping[str, object]:
        """The report of the operation, which is known once `receive` has returned None."""
        assert self._report is not None
        return self._report

    def accept(self, kind: int, payload: bytes) -> bool:
        """Process a frame from the agent; return True if it is the last. Raises ProtocolError."""
        if kind in OUTPUT_KINDS:
            self._accept_data(kind, payload)
        elif kind == WINDOW:
            self._add_credit(payload)
        elif kind == END:
            self._report = {} if self._is_reset else parse_object(payload)
            self._is_over = True
        else:
            raise ProtocolError(f"frame type {kind} on stream {self.number}")
        self.wake()
        return kind == END


class ProgramConnection(_FlowControl):
    """A byte stream that a program in the sandbox has opened."""

    def __init__(self, channel: "Channel", number: int) -> None:
        super().__init__(channel, number)
        self._program_finished = self._host_finished = False

    async def receive(self) -> bytes:
        """Return the next bytes, or b"" once the program has finished. Raises ConnectionError if
        the connection is closed or the sandbox is lost."""
        with _translate_loss():
            while not self._pieces:
                if self._is_over:
                    raise ConnectionResetError("the program has closed its connection")
                if self._program_finished:
                    return b""
                await self._wait()
            return (await self._next_piece())[1]

    async def send(self, data: bytes) -> None:
        """Send data as fast as the program reads it. Raises ConnectionError if the connection is
        closed or the sandbox is lost."""
        with _translate_loss():
            await self._send(data)
        if self._is_over:
            raise ConnectionResetError("the program has closed its connection")

    async def finish(self, last: bytes = b"") -> None:
        """Send `last` and nothing more; the other direction stays open. Raises ConnectionError if
        the sandbox is lost."""
        with _translate_loss():
            await self._send(last, more=True)
            if not self._host_finished and not self._is_over:
                self._host_finished = True
                try:
                    await self._channel.send(frame(self.number, EOF))
                except BaseException:  # EOF was not sent
                    self._host_finished = False
                    raise
                self._notify_channel_if_both_finished()

    def abort(self) -> None:
        """Close both directions at once. Safe to call twice."""
        if not self._is_over:
            self._is_over = True
            self._channel.reset(self.number)
            self.wake()

    def accept(self, kind: int, payload: bytes) -> bool:
        """Process a frame from the agent; return True if it is the last. Raises ProtocolError."""
        if kind == DATA and not self._program_finished:
            self._accept_data(kind, payload)
        elif kind == WINDOW:
            self._add_credit(payload)
        elif kind == EOF and not self._program_finished and not payload:
            self._program_finished = True
            self._notify_channel_if_both_finished()
        elif kind == RESET and not payload:
            self._is_over = True
        else:
            raise ProtocolError(f"frame type {kind} on stream {self.number}")
        self.wake()
        return kind == RESET

    def _notify_channel_if_both_finished(self) -> None:
        if self._program_finished and self._host_finished:
            self._channel.connection_ended(self.number)


@contextmanager
def _translate_loss() -> Iterator[None]:
    try:
        yield
    except SandboxLostError as error:
        raise ConnectionResetError(str(error)) from error


OnConnection = Callable[[ProgramConnection], Awaitable[None]]
"""A function that handles one connection, in a task of its own."""


class ResetStreams:
    """The streams that the host has reset and that the agent may still send on.

    Data in flight, up to the stream's credit, and the end of the stream are checked and discarded.
    A stream is forgotten once the agent has closed it or has answered a PING that was sent after
    its RESET.
    """

    def __init__(self) -> None:
        self._streams: dict[int, tuple[int, Stream | ProgramConnection]] = {}
        """Maps each stream number to the number of RESETs up to and including its own, and to the
        stream. The entries are in the order of the RESETs."""
        self._resets = 0
        self._pings: deque[int] = deque()
        """For each unanswered PING, the number of RESETs sent before it."""

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, number: int) -> bool:
        return number in self._streams

    def add(self, number: int, stream: Stream | ProgramConnection) -> bool:
        """Add a stream whose RESET has been sent; return True if a PING is due."""
        stream.mark_reset()
        self._resets += 1
        self._streams[number] = self._resets, stream
        return len(self._streams) >= RESETS_BEFORE_PING and not self._pings

    def accept(self, number: int, kind: int, payload: bytes) -> None:
        """Check and discard a frame that the agent sent on a reset stream. Forget the stream after
        its last frame. Raises ProtocolError for a frame that breaks the protocol."""
        if self._streams[number][1].accept(kind, payload):
            del self._streams[number]

    def ping_sent(self) -> None:
        """Record that a PING follows the RESETs sent so far."""
        self._pings.append(self._resets)

    def pong_received(self) -> None:
        """Forget the streams whose RESET the agent has read. Raises ProtocolError if no PING is
        unanswered."""
        if not self._pings:
            raise ProtocolError("a PONG without a PING")
        known = self._pings.popleft()
        read = itertools.takewhile(lambda item: item[1][0] <= known, self._streams.items())
        for number in [number for number, _ in read]:
            del self._streams[number]

    def clear(self) -> None:
        """Forget all streams."""
        self._streams.clear()
        self._pings.clear()
