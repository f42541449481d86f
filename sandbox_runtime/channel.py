"""The host's end of the protocol: a Channel multiplexes operations and connections over one guest's
byte stream.

Every frame from the guest agent is checked before it is used. A guest that breaks the protocol is
killed and the callers of its sandbox get SandboxLostError; other sandboxes are not affected.
"""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress

import anyio

from sandbox_runtime.backends.base import Guest
from sandbox_runtime.clock import Clock, SystemClock
from sandbox_runtime.connection_queue import ConnectionQueue
from sandbox_runtime.errors import SandboxLostError, SandboxStartError
from sandbox_runtime.protocol import (
    ACK,
    HELLO,
    MAX_CONNECTIONS,
    MAX_REPORT_BYTES,
    OPEN,
    PING,
    PONG,
    RESET,
    VERSION,
    Decoder,
    FrameRate,
    ProtocolError,
    frame,
    parse_object,
)
from sandbox_runtime.streams import (
    MAX_RESET_STREAMS,
    OnConnection,
    ProgramConnection,
    ResetStreams,
    Stream,
)

logger = logging.getLogger(__name__)

_TOO_MANY_RESETS = (
    f"more than {MAX_RESET_STREAMS} streams were reset, and the agent has not answered since"
)
MAX_REQUEST_BYTES = 64
"""The largest payload of an OPEN frame from the agent, which sends `{}`."""
SILENCE_TIMEOUT_S = 10.0
"""If the agent sends no frame for this time during an operation, the host sends a PING. The agent
must answer the PING within the same time."""
HOLD_BYTES = 1 << 16
"""Maximum number of bytes that are held back to be written together with the next data."""
MAX_WIDE_STREAMS = 32
"""Maximum number of streams of one sandbox that may have WINDOW_BYTES unread. All others may have
FIRST_WINDOW_BYTES. The unread data of all connections and wide streams is thus at most 16 MiB; each
further operation of the host adds up to 16 KiB."""
READ_FRAMES = 4
"""Number of frames that one read from the byte stream counts as in FrameRate."""
FRAMES_PER_BATCH = 1024
"""Number of frames that are processed before other tasks run: about 1.5 ms."""
OPEN_FRAMES = 32
"""Number of frames that a new connection counts as in FrameRate: serving it starts a task."""
KILL_TIMEOUT_S = 5.0
"""Maximum time that the operations of a lost guest wait for its end before they raise
SandboxLostError."""


class Channel:
    """The link to one guest, which multiplexes operations and connections."""

    def __init__(
        self,
        guest: Guest,
        silence_timeout_s: float = SILENCE_TIMEOUT_S,
        clock: Clock | None = None,
        *,
        max_outage_s: float = 0.0,
    ) -> None:
        self.lost: str | None = None
        """The reason why the guest cannot be used any more; None while it can be used."""
        self.guest = guest
        self.max_outage_s = max_outage_s
        """See `Backend.max_outage_s`. The agent's answers may be late by this time."""
        self._silence_timeout_s = silence_timeout_s
        self._received_at = 0.0
        self._silence_timer: asyncio.TimerHandle | None = None
        self._ping_task: asyncio.Task[None] | None = None
        self._decoder = Decoder(MAX_REPORT_BYTES)
        self._held_bytes = b""
        """Bytes that are written together with the next data, because each write is expensive."""
        self._streams: dict[int, Stream | ProgramConnection] = {}
        self._reset_streams = ResetStreams()
        self._frame_rate = FrameRate()
        self._frame_cost = 0
        """Number of frames that the last call of `_on_data` counts as in FrameRate."""
        self._next_number = 1
        self._last_connection = 0
        self._wide_streams: set[int] = set()
        """The numbers of the streams that may have WINDOW_BYTES unread."""
        self._connection_queue = ConnectionQueue(clock or SystemClock(), self._wide_streams.discard)
        self._open_connections: set[int] = set()
        """The numbers of the connections that are still open in the agent. They count towards
        MAX_CONNECTIONS."""
        self._hello = asyncio.Event()
        self._pong = asyncio.Event()
        self._read_task: asyncio.Task[None] | None = None
        self._kill_task: asyncio.Task[None] | None = None

    async def connect(self, timeout_s: float) -> None:
        """Wait until the agent is ready. If the agent is not ready in time, ends or breaks the
        protocol, kill the guest and raise SandboxStartError."""
        self._read_task = asyncio.create_task(self._read(), name=f"channel {self.guest.id}")
        try:
            async with asyncio.timeout(timeout_s):
                await self._hello.wait()
        except TimeoutError as error:
            await self.close()
            reason = self.guest.diagnostics() or "the agent sent nothing"
            raise SandboxStartError(
                f"sandbox {self.guest.id} was not ready after {timeout_s:g} s: {reason}"
            ) from error
        except asyncio.CancelledError:
            await self.close()
            raise
        if self.lost:
            await self.close()
            raise SandboxStartError(self.lost)

    def set_connection_handler(self, on_connection: OnConnection | None) -> None:
        """Call `on_connection` for each connection that a program in the sandbox opens. If it is
        None, close all such connections."""
        self._connection_queue.set_handler(on_connection)

    async def open(self, request: Mapping[str, object], *, more: bool = False) -> Stream:
        """Send the request of a new operation and return its stream. `more` has the same meaning as
        in `send`. Raises SandboxLostError."""
        if self.lost:
            raise self.lost_error()
        if len(self._reset_streams) > MAX_RESET_STREAMS:
            await self.fail(_TOO_MANY_RESETS)
            raise self.lost_error()
        self._watch_silence()
        number = self._next_number
        self._next_number += 2
        stream = self._streams[number] = Stream(self, number)
        try:
            await self._drain()
        except BaseException:  # the request was not sent
            self._streams.pop(number, None)
            raise
        self._write(stream.opening_frames(request), more=more)
        return stream  # no await since the request was sent: a cancelled caller leaves no stream

    def widen_window(self, number: int) -> bool:
        """Allow a stream WINDOW_BYTES of unread data and return True; return False if
        MAX_WIDE_STREAMS other streams have as much."""
        if len(self._wide_streams) >= MAX_WIDE_STREAMS:
            return False
        self._wide_streams.add(number)
        return True

    def reset(self, number: int) -> None:
        """Cancel a stream from the host's end; do nothing if it is over."""
        stream = self._streams.pop(number, None)
        self._open_connections.discard(number)
        self._connection_queue.discard(number)
        self._wide_streams.discard(number)
        if stream is not None and not self.lost:
            self._reset_stream(number, stream)

    def connection_ended(self, number: int) -> None:
        """Stop counting a connection towards MAX_CONNECTIONS, because both sides have sent EOF."""
        self._open_connections.discard(number)

    def _reset_stream(self, number: int, stream: Stream | ProgramConnection) -> None:
        if self._held_bytes:  # drop what the stream still has to send
            held = Decoder(HOLD_BYTES).feed(self._held_bytes)
            self._held_bytes = b"".join(
                frame(stream_number, kind, payload)
                for stream_number, kind, payload in held
                if stream_number != number
            )
        # Without awaiting: an agent that does not read must not block the caller.
        self.write_control(frame(number, RESET))
        if self._reset_streams.add(number, stream):
            self._reset_streams.ping_sent()
            self.write_control(frame(0, PING))

    async def ping(self, timeout_s: float) -> None:
        """Send a PING and wait for the answer. If no answer comes within `timeout_s` plus
        `max_outage_s`, kill the guest and raise SandboxLostError."""
        self._pong.clear()
        self._reset_streams.ping_sent()
        self.write_control(frame(0, PING))
        timeout_s += self.max_outage_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._pong.wait()
        except TimeoutError:
            await self.fail(f"no answer in {timeout_s:g} s")
        if self.lost:
            raise self.lost_error()

    def acknowledge(self, command_id: str) -> None:
        """Let the agent forget a command whose report has arrived. The ACK frame is sent with the
        next data."""
        self._held_bytes += frame(0, ACK, command_id.encode())

    def lost_error(self) -> SandboxLostError:
        """Return the error for operations of a lost guest."""
        return SandboxLostError(self.lost)

    def write_control(self, data: bytes) -> None:
        """Queue control frames for the guest without waiting; do nothing if it is lost."""
        if not self.lost:
            self.guest.write_control(data)

    async def send(self, data: bytes, *, more: bool = False) -> None:
        """Write to the guest once its buffer has room. With `more`, like MSG_MORE of send(2), the
        data may be held back until the next call. Raises SandboxLostError."""
        await self._drain()
        self._write(data, more=more)

    async def _drain(self) -> None:
        """Wait until the guest's buffer has room. Raises SandboxLostError."""
        if self.lost:
            raise self.lost_error()
        try:
            await self.guest.drain()
        except OSError as error:
            self._mark_lost(f"the agent's input is closed: {error}")
            raise self.lost_error() from error

    def _write(self, data: bytes, *, more: bool) -> None:
        if self._held_bytes:
            data, self._held_bytes = self._held_bytes + data, b""
        if more and len(data) < HOLD_BYTES:
            self._held_bytes = data
        else:
            self.guest.write(data)

    async def fail(self, why: str) -> None:
        """Kill the guest for a violation of the protocol, or because it does not answer."""
        self._mark_lost(why)
        await self.close()

    async def close(self) -> None:
        """Kill the guest, even if the caller is cancelled. Safe to call twice."""
        self._mark_lost("the sandbox was closed")
        if self._kill_task is None or self._kill_task.done():
            end = self._end(caller=asyncio.current_task())
            self._kill_task = asyncio.create_task(end, name=f"kill of {self.guest.id}")
        with anyio.CancelScope(shield=True):
            await asyncio.shield(self._kill_task)  # also against cancellation by asyncio

    async def _end(self, *, caller: asyncio.Task[object] | None) -> None:
        """Kill the guest and cancel all tasks except `caller`, which may be one of them."""
        if self._silence_timer:
            self._silence_timer.cancel()
        others = {task for task in (self._read_task, self._ping_task) if task}
        others |= self._connection_queue.tasks()
        others -= {caller}
        for task in others:
            task.cancel()
        await self.guest.kill()
        if others:
            await asyncio.wait(others)
        self._reset_streams.clear()
        self._wake_all()

    async def _read(self) -> None:
        why = ""
        try:
            await self.guest.receive(self._on_data)
        except ProtocolError as error:
            why = f"the agent broke the protocol: {error}"
        self._mark_lost(why or self.guest.diagnostics() or "the agent ended")
        with suppress(TimeoutError):
            async with asyncio.timeout(KILL_TIMEOUT_S):
                await self.guest.kill()
        self._wake_all()

    def _on_data(self, data: bytes | memoryview) -> float | None:
        """Process received frames; see `DataCallback`. Return the pause that the frame rate
        requires, 0 if frames may be left in the decoder for the next call, or else None."""
        now_s = self._received_at = asyncio.get_running_loop().time()
        self._frame_cost = READ_FRAMES if data else 0
        frames = self._decoder.feed(data)
        for number, kind, payload in frames:
            self._frame_cost += 1
            self._dispatch(number, kind, payload)
            if self._frame_cost >= FRAMES_PER_BATCH:
                frames.close()  # the remaining frames stay in the decoder
        pause_s = self._frame_rate.count_and_get_pause_s(self._frame_cost, len(data), now_s)
        return pause_s if pause_s or self._frame_cost >= FRAMES_PER_BATCH else None

    def _watch_silence(self) -> None:
        if self._silence_timer is None and not self._ping_task:
            self._received_at = asyncio.get_running_loop().time()
            self._check_silence_in(self._silence_timeout_s)

    def _check_silence_in(self, seconds: float) -> None:
        self._silence_timer = asyncio.get_running_loop().call_later(seconds, self._check_silence)

    def _check_silence(self) -> None:
        """Ping an agent that has sent nothing for too long during an operation. One timer serves
        all operations, because most end long before it fires."""
        self._silence_timer = None
        if self.lost or not (self._streams or self._reset_streams):
            return
        silent_s = asyncio.get_running_loop().time() - self._received_at
        if silent_s < self._silence_timeout_s:
            self._check_silence_in(self._silence_timeout_s - silent_s)
        else:
            self._ping_task = asyncio.create_task(
                self._ping_after_silence(), name=f"ping of {self.guest.id}"
            )

    async def _ping_after_silence(self) -> None:
        with suppress(SandboxLostError):  # the operations raise it
            await self.ping(self._silence_timeout_s)
        self._ping_task = None
        if not self.lost:
            self._check_silence_in(self._silence_timeout_s)

    def _dispatch(self, number: int, kind: int, payload: bytes) -> None:
        if number == 0:
            self._on_link_frame(kind, payload)
        elif stream := self._streams.get(number):
            if stream.accept(kind, payload):
                del self._streams[number]
                self._open_connections.discard(number)
                self._connection_queue.discard(number)
        elif number in self._reset_streams:
            self._reset_streams.accept(number, kind, payload)
        elif number % 2 == 0 and kind == OPEN:
            self._open_connection(number, payload)
        else:
            raise ProtocolError(f"frame type {kind} on stream {number}, which is not open")

    def _open_connection(self, number: int, request: bytes) -> None:
        """Open the connection that a program in the sandbox requests."""
        if number != self._last_connection + 2:
            raise ProtocolError(f"stream {number} opened after {self._last_connection}")
        if len(self._reset_streams) > MAX_RESET_STREAMS:
            raise ProtocolError(_TOO_MANY_RESETS)
        if len(request) > MAX_REQUEST_BYTES:
            raise ProtocolError(f"a connection request of {len(request)} bytes is too long")
        if len(self._open_connections) >= MAX_CONNECTIONS:
            raise ProtocolError(f"more than {MAX_CONNECTIONS} connections at one time")
        self._last_connection = number
        self._frame_cost += OPEN_FRAMES
        self._watch_silence()
        connection = self._streams[number] = ProgramConnection(self, number)
        self._open_connections.add(number)
        self._connection_queue.add(connection)

    def _on_link_frame(self, kind: int, payload: bytes) -> None:
        if kind == HELLO and not self._hello.is_set():
            version = parse_object(payload).get("version")
            if version != VERSION:
                shown = version if isinstance(version, int | str) else type(version)
                raise ProtocolError(f"protocol version {shown!s:.80}, {VERSION} expected")
            self._hello.set()
        elif kind == PONG and not payload:
            self._reset_streams.pong_received()
            self._pong.set()
        else:
            raise ProtocolError(f"frame type {kind} on stream 0")

    def _mark_lost(self, why: str) -> None:
        if not self.lost:
            self.lost = f"sandbox {self.guest.id} is gone: {why}"
        self._hello.set()
        self._pong.set()

    def _wake_all(self) -> None:
        self._connection_queue.close_waiting()
        for stream in list(self._streams.values()):
            stream.wake()
