"""The byte stream to an agent over connections that may be lost: `ResumableStream`.

Its bytes travel in packets (see `sandbox_runtime.packets`). When a connection ends, the stream
opens another. On the new connection, each side tells the other how many bytes it has received, and
sends again what the other has not received. The users of the stream do not notice.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress

from sandbox_runtime.backends.base import DataCallback
from sandbox_runtime.backends.byte_stream import MAX_UNREAD_BYTES
from sandbox_runtime.backends.kubernetes_stream import AttachedStream
from sandbox_runtime.packets import (
    MAX_PAYLOAD_BYTES,
    PACKET_ADOPT,
    PACKET_DATA,
    PACKET_END,
    Packet,
    PacketDecoder,
    first_connection,
    generation_of,
    packet_bytes,
)
from sandbox_runtime.protocol import FrameRate, ProtocolError

MAX_UNACKNOWLEDGED_BYTES = 1 << 20
"""Unacknowledged bytes above which writers must wait."""
ACKNOWLEDGE_BYTES = 64 << 10
ACKNOWLEDGE_DELAY_S = 1.0
"""An acknowledgement is sent once ACKNOWLEDGE_BYTES were received, and at the latest after
ACKNOWLEDGE_DELAY_S."""
STALL_TIMEOUT_S, MAX_STALL_TIMEOUT_S = 5.0, 20.0
"""Time without an acknowledgement of sent bytes after which the connection is replaced. It doubles
with each replacement, up to the maximum, because the agent may just be slow."""
PACKET_FRAMES = 4
"""Number of frames that one packet counts as in FrameRate."""

Reconnect = Callable[[int], Awaitable[AttachedStream | None]]
"""Opens another connection and returns it, or None if the agent has ended or cannot be reached any
more. The argument is the number of connections in succession on which the agent did not answer."""


class ResumableStream:
    """The host's end of the byte stream, from the first connection until `abort`."""

    def __init__(
        self,
        token: bytes,
        connection: AttachedStream,
        reconnect: Reconnect,
        *,
        generation: int = 0,
    ) -> None:
        """If `generation` is not 0, adopt the agent's link from an earlier process; see
        `Packet.connection`."""
        self._token = token
        self._connection = connection
        self._reconnect = reconnect
        self._decoder = PacketDecoder(token, may_begin_inside=generation > 0)
        self._generation = generation
        self._connection_number = first_connection(generation)
        self._is_connected = True
        self._is_answered = generation == 0
        """True once the agent has answered on the current connection. The first connection of the
        host that started the agent needs no answer: nothing was sent before."""
        self._unanswered_count = 0
        self.last_packet_at_s = asyncio.get_running_loop().time()
        """The event loop's time at which the last packet arrived from the agent."""
        self._clock_ms = 0
        """The newest value of the agent's clock."""
        self._on_data: DataCallback | None = None
        self._frame_rate = FrameRate()
        self._received_bytes = 0
        self._acknowledged_bytes = 0
        """Number of received bytes that were acknowledged to the agent."""
        self._acknowledge_timer: asyncio.TimerHandle | None = None
        self._unacknowledged: deque[tuple[int, bytes]] = deque()
        """Payloads that the agent may not have received, each with its offset."""
        self._sent_bytes = 0
        self._unacknowledged_bytes = 0
        self._unread_bytes = 0
        """Bytes that `write_control` has queued since the stream last had room."""
        self._has_overflowed = False
        """True once `write_control` had to drop bytes."""
        self._progress_at_s = 0.0
        """The latest of three times of the event loop: the agent's last acknowledgement, the first
        write after everything was acknowledged, and the opening of the connection."""
        self._stall_timeout_s = STALL_TIMEOUT_S
        self._stall_timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()
        self._stderr = ""
        self._is_over = False
        if generation:
            self._ask_for_received_bytes()

    async def receive(self, on_data: DataCallback) -> None:
        """Call `on_data` with all bytes that arrive, until no connection can be opened any more or
        the stream is aborted. Raises ProtocolError."""
        self._on_data = on_data
        try:
            while not self._is_over:
                await self._connection.receive(self._process_packets)
                await self._disconnect()
                if self._is_over:
                    return
                connection = await self._reconnect(self._unanswered_count)
                if connection is None:
                    return
                self._resume(connection)
                if self._has_overflowed:
                    raise ProtocolError("the agent does not read its input")
        finally:
            self._end()

    async def drain(self) -> None:
        """Wait until the stream has a connection and room. Raises BrokenPipeError if it is over."""
        while not self._is_over:
            connection = self._connection
            if self._has_room():
                with suppress(BrokenPipeError):
                    await connection.drain()
                    return
            if connection is not self._connection:
                continue
            self._changed.clear()
            await self._changed.wait()
        raise BrokenPipeError("no connection to the agent")

    def write(self, data: bytes) -> None:
        """Queue data; await `drain` first. Does nothing if the stream is over."""
        if self._is_over:
            return
        if not self._unacknowledged:
            self._progress_at_s = asyncio.get_running_loop().time()
        for start in range(0, len(data), MAX_PAYLOAD_BYTES):
            payload = data[start : start + MAX_PAYLOAD_BYTES]
            self._unacknowledged.append((self._sent_bytes, payload))
            if self._is_answered:
                self._send(self._sent_bytes, payload)
            self._sent_bytes += len(payload)
            self._unacknowledged_bytes += len(payload)
        self._watch_stall()

    def write_control(self, data: bytes) -> None:
        """Queue data even without room. If more than MAX_UNREAD_BYTES wait for the agent, `receive`
        raises ProtocolError."""
        self._unread_bytes = 0 if self._has_room() else self._unread_bytes + len(data)
        if self._unread_bytes > MAX_UNREAD_BYTES:
            self._has_overflowed = True  # `fail` has no effect while there is no connection
            self._connection.fail(ProtocolError("the agent does not read its input"))
        else:
            self.write(data)

    def end(self) -> None:
        """Tell the agent to end, if it is connected. Data that the agent has not received yet may
        be lost."""
        self._send_packet(PACKET_END, self._sent_bytes, b"")

    def abort(self) -> None:
        """Close the connection at once and open no other."""
        self._end()
        self._connection.abort()

    async def wait_closed(self) -> None:
        """Wait until the connection is closed; call `abort` first."""
        await self._connection.wait_closed()

    def stderr_tail(self) -> str:
        """Return the tail of standard error, as far as it arrived."""
        return self._connection.stderr_tail() or self._stderr

    # Connections

    async def _disconnect(self) -> None:
        self._unanswered_count = 0 if self._is_answered else self._unanswered_count + 1
        self._is_connected = self._is_answered = False
        self._stderr = self.stderr_tail()
        self._connection.abort()
        await self._connection.wait_closed()

    def _resume(self, connection: AttachedStream) -> None:
        """Use another connection: ask the agent which bytes it has received."""
        self._connection = connection
        self._is_connected = True
        self._decoder = PacketDecoder(self._token, may_begin_inside=True)
        self._connection_number += 1
        self._ask_for_received_bytes()

    def _ask_for_received_bytes(self) -> None:
        """Ask the agent, on a new connection, which bytes it has received. If the link was adopted,
        the question is an ADOPT packet, which adopts nothing if an earlier one has arrived."""
        self._progress_at_s = asyncio.get_running_loop().time()
        kind = PACKET_ADOPT if self._generation else PACKET_DATA
        self._send_packet(kind, self._sent_bytes, b"")
        self._watch_stall()

    def _end(self) -> None:
        self._is_over = True
        self._changed.set()
        for timer in (self._acknowledge_timer, self._stall_timer):
            if timer:
                timer.cancel()

    # Receiving

    def _process_packets(self, data: bytes | memoryview) -> float | None:
        """Process the bytes of the current connection."""
        assert self._on_data
        if not data:  # after a pause
            return self._on_data(b"")
        payloads = [self._accept(packet) for packet in self._decoder.feed(data)]
        received = payloads[0] if len(payloads) == 1 else b"".join(payloads)
        pause_s = self._on_data(received) if received else None
        cost, now_s = PACKET_FRAMES * len(payloads), asyncio.get_running_loop().time()
        own_pause_s = self._frame_rate.count_and_get_pause_s(cost, len(data), now_s)
        return max(pause_s or 0.0, own_pause_s) if own_pause_s else pause_s

    def _accept(self, packet: Packet) -> bytes:
        """Process a packet and return its new bytes. Raises ProtocolError."""
        if generation_of(packet.connection) > self._generation:
            raise ProtocolError("another server has adopted the sandbox")
        if packet.connection != self._connection_number:
            return b""  # sent before the agent knew of this connection: it will be sent again
        if not self._is_answered and packet.offset > self._received_bytes:
            # The answer was missed, because the attached output begins after it: connect again.
            self._connection.abort()
            return b""
        self.last_packet_at_s = asyncio.get_running_loop().time()
        self._clock_ms = packet.clock_ms
        self._take_acknowledgement(packet.received)
        if not self._is_answered:
            self._is_answered = True
            self._send_again()
        if packet.offset > self._received_bytes:
            raise ProtocolError(f"bytes are missing before byte {packet.offset}")
        new_bytes = packet.payload[self._received_bytes - packet.offset :]
        self._received_bytes += len(new_bytes)
        if self._received_bytes - self._acknowledged_bytes >= ACKNOWLEDGE_BYTES:
            self._send(self._sent_bytes, b"")
        elif new_bytes and not self._acknowledge_timer:
            self._acknowledge_timer = asyncio.get_running_loop().call_later(
                ACKNOWLEDGE_DELAY_S, self._acknowledge
            )
        return new_bytes

    def _acknowledge(self) -> None:
        """Acknowledge received bytes, unless a packet did so meanwhile."""
        self._acknowledge_timer = None
        if self._is_answered and self._acknowledged_bytes < self._received_bytes:
            self._send(self._sent_bytes, b"")

    def _take_acknowledgement(self, received_bytes: int) -> None:
        if received_bytes > self._sent_bytes:
            raise ProtocolError(f"{received_bytes} bytes arrived, {self._sent_bytes} were sent")
        queue = self._unacknowledged
        if not queue or queue[0][0] + len(queue[0][1]) > received_bytes:
            return
        while queue and queue[0][0] + len(queue[0][1]) <= received_bytes:
            self._unacknowledged_bytes -= len(queue.popleft()[1])
        self._progress_at_s = self.last_packet_at_s
        self._stall_timeout_s = STALL_TIMEOUT_S
        self._changed.set()

    # Sending

    def _has_room(self) -> bool:
        return self._is_answered and self._unacknowledged_bytes < MAX_UNACKNOWLEDGED_BYTES

    def _send(self, offset: int, payload: bytes) -> None:
        self._send_packet(PACKET_DATA, offset, payload)
        self._acknowledged_bytes = self._received_bytes

    def _send_packet(self, kind: int, offset: int, payload: bytes) -> None:
        number, received = self._connection_number, self._received_bytes
        packet = Packet(kind, number, offset, received, self._clock_ms, payload)
        self._connection.write(packet_bytes(self._token, packet))

    def _send_again(self) -> None:
        """Send all unacknowledged payloads again, or if there are none, an empty packet that
        acknowledges the answer."""
        for offset, payload in self._unacknowledged or [(self._sent_bytes, b"")]:
            self._send(offset, payload)
        self._changed.set()

    def _watch_stall(self) -> None:
        if self._is_connected and self._stall_timer is None:
            self._check_stall_in(self._stall_timeout_s)

    def _check_stall_in(self, seconds: float) -> None:
        self._stall_timer = asyncio.get_running_loop().call_later(seconds, self._check_stall)

    def _check_stall(self) -> None:
        """Close a connection on which the agent acknowledges nothing, so that `receive` opens
        another. One timer serves all writes, because most are acknowledged before it fires."""
        self._stall_timer = None
        if not self._is_connected or (self._is_answered and not self._unacknowledged):
            return
        waited_s = asyncio.get_running_loop().time() - self._progress_at_s
        if waited_s < self._stall_timeout_s:
            self._check_stall_in(self._stall_timeout_s - waited_s)
        else:
            self._stall_timeout_s = min(2 * self._stall_timeout_s, MAX_STALL_TIMEOUT_S)
            self._connection.abort()
