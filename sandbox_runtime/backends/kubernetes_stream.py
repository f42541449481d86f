"""The standard streams of a Pod's main process, over the websocket of an attach call.

Each binary message begins with a byte that names its channel: 0 standard input, 1 standard output,
2 standard error, 3 the end of the call as a JSON Status. The subprotocols v4.channel.k8s.io and
v5.channel.k8s.io differ only in a message that closes one channel, which is not needed here: the
agent's input ends with the connection.
"""

import asyncio
import contextlib
import logging
import socket
from collections import deque

import aiohttp

from sandbox_runtime.backends.base import DataCallback
from sandbox_runtime.backends.byte_stream import TAIL_BYTES, ByteStreamProtocol, StderrTail
from sandbox_runtime.packets import MAX_PACKET_BYTES
from sandbox_runtime.protocol import FrameRate, ProtocolError

logger = logging.getLogger(__name__)

SUBPROTOCOLS = "v5.channel.k8s.io, v4.channel.k8s.io"
STDIN, STDOUT, STDERR, STATUS = range(4)
"""The channels."""
MAX_MESSAGE_BYTES = MAX_PACKET_BYTES
"""Maximum number of bytes of standard input in one message. A message has whole packets, so that a
container runtime writes each packet to the standard input in one piece."""
HIGH_WATER_BYTES, LOW_WATER_BYTES = 64 << 10, 16 << 10
"""Writers wait once more than HIGH_WATER_BYTES are unsent, until at most LOW_WATER_BYTES are."""
CLOSE_TIMEOUT_S = 0.5
"""Maximum time for the closing handshake; then the connection is dropped."""
MESSAGE_FRAMES = 16
"""Number of frames that one message counts as in FrameRate. Each write of the agent may become a
message."""


class AttachedStream(ByteStreamProtocol):
    """The standard streams of a Pod's main process, from the attach call until `abort`."""

    def __init__(self) -> None:
        super().__init__()
        self._stderr = StderrTail()
        self._status = bytearray()
        self._frame_rate = FrameRate()

    async def receive(self, on_data: DataCallback) -> None:
        """Pass standard output to `on_data` until its end. Raises ProtocolError."""

        def count_messages(data: bytes | memoryview) -> float | None:
            pause_s = on_data(data)
            now_s = asyncio.get_running_loop().time()
            cost = MESSAGE_FRAMES if data else 0
            own_pause_s = self._frame_rate.count_and_get_pause_s(cost, len(data), now_s)
            return max(pause_s or 0.0, own_pause_s) if own_pause_s else pause_s

        await super().receive(count_messages)

    def message_received(self, message: bytes) -> None:
        """Process one message of the API server; those of unknown channels are ignored."""
        channel, payload = message[:1], message[1:]
        if not payload:  # the API server begins with an empty message for each channel
            return
        if channel[0] == STDOUT:
            self.data_received(payload)
        elif channel[0] == STDERR:
            try:
                self._stderr.add(payload)
            except ProtocolError as error:
                self.fail(error)
        elif channel[0] == STATUS and len(self._status) < TAIL_BYTES:
            self._status += payload[:TAIL_BYTES]

    def stderr_tail(self) -> str:
        """Return the tail of standard error."""
        return self._stderr.text()

    def status(self) -> str:
        """Return the Status with which the API server ended the call, as JSON; or an empty
        string."""
        return self._status.decode(errors="replace")

    async def wait_closed(self) -> None:
        """Wait until the connection is closed; call `abort` first."""
        if isinstance(self._transport, WebSocketTransport):
            await self._transport.wait_closed()


class WebSocketTransport(asyncio.Transport):
    """An asyncio transport that sends and receives the messages of a websocket for one
    AttachedStream. While reading is paused, the transport takes no message. Then the websocket's
    own bounded queue fills, and TCP slows down the sender."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, stream: AttachedStream) -> None:
        super().__init__()
        self._socket = socket
        self._stream = stream
        self._queue = deque[bytes]()
        self._queued_bytes = 0
        self._is_full = False
        self._has_data = asyncio.Event()
        self._may_read = asyncio.Event()
        self._may_read.set()
        self._is_closing = False
        stream.connection_made(self)
        self._receiving = asyncio.create_task(self._receive(), name="websocket: receiving")
        self._sending = asyncio.create_task(self._send(), name="websocket: sending")
        self._closing = asyncio.create_task(self._close_at_end(), name="websocket: closing")

    # Called by the protocol

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._is_closing:
            return
        self._queue.append(bytes(data))
        self._queued_bytes += len(data)
        self._has_data.set()
        if self._queued_bytes > HIGH_WATER_BYTES and not self._is_full:
            self._is_full = True
            self._stream.pause_writing()

    def pause_reading(self) -> None:
        self._may_read.clear()

    def resume_reading(self) -> None:
        self._may_read.set()

    def is_closing(self) -> bool:
        return self._is_closing

    def abort(self) -> None:
        self._is_closing = True
        self._receiving.cancel()

    def close(self) -> None:
        self.abort()

    async def wait_closed(self) -> None:
        """Wait until the connection is closed."""
        await asyncio.wait([self._closing])

    # The connection

    async def _close_at_end(self) -> None:
        """Wait until the connection has ended or `abort` was called, and close it."""
        await asyncio.wait([self._receiving])
        self._is_closing = True
        self._sending.cancel()
        await asyncio.wait([self._sending])
        error = None if self._receiving.cancelled() else self._receiving.exception()
        if error and not isinstance(error, aiohttp.ClientError | OSError):
            logger.error("an attached websocket failed", exc_info=error)
        self._stream.connection_lost(None)
        connection = self._socket.get_extra_info("socket")
        # A `close` that is cancelled drops the connection.
        with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._socket.close()
        if connection is not None:
            # Otherwise TLS would wait for the server's end of the connection.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    async def _receive(self) -> None:
        while True:
            message = await self._socket.receive()
            if message.type is not aiohttp.WSMsgType.BINARY:
                return  # the connection is closed or broken; text is never sent
            self._stream.message_received(message.data)
            await self._may_read.wait()

    async def _send(self) -> None:
        prefix = bytes([STDIN])
        while True:
            await self._has_data.wait()
            self._has_data.clear()
            while self._queue:
                piece = self._take()
                try:
                    await self._socket.send_bytes(prefix + piece)
                except (aiohttp.ClientError, OSError):
                    self.abort()
                    return
                self._queued_bytes -= len(piece)
                if self._is_full and self._queued_bytes <= LOW_WATER_BYTES:
                    self._is_full = False
                    self._stream.resume_writing()

    def _take(self) -> bytes:
        """Remove up to MAX_MESSAGE_BYTES from the queue."""
        piece = self._queue.popleft()
        if len(piece) > MAX_MESSAGE_BYTES:
            self._queue.appendleft(piece[MAX_MESSAGE_BYTES:])
            return piece[:MAX_MESSAGE_BYTES]
        if not self._queue or len(piece) + len(self._queue[0]) > MAX_MESSAGE_BYTES:
            return piece
        pieces, size = [piece], len(piece)
        while self._queue and size + len(self._queue[0]) <= MAX_MESSAGE_BYTES:
            size += len(self._queue[0])
            pieces.append(self._queue.popleft())
        return b"".join(pieces)
