"""The protocol between the host and the guest agent: frames, flow control and their limits.

A frame is `u32 stream, u8 type, u32 length`, big-endian, followed by `length` bytes. Stream 0 is
the link itself. The host opens odd streams, one for each operation. The agent opens even streams,
one for each connection that a program inside makes to the egress port.

Flow control: on each stream the host may send WINDOW_BYTES of data and the agent FIRST_WINDOW_BYTES
before the receiver gives credit for more, so one stream never blocks another. At most WINDOW_BYTES
may wait for the receiver, whatever its credit.

After END or RESET the agent sends nothing more on that stream. After a RESET by the host, data in
flight may still arrive: at most what the stream had credit for, until the agent has answered a PING
that was sent after the RESET. DATA frames are never empty, and WINDOW frames never give 0 bytes.

    host → agent   OPEN(json)  DATA*  EOF           an operation and its input
                   RESET                            cancels the operation
                   WINDOW(u32)                      credit for more bytes
                   PING                             answered by PONG
                   ACK(id)                          the command's result has arrived: forget it
    agent → host   HELLO(json)                      once, on stream 0: the agent is ready
                   DATA* STDERR*                    output as it is written
                   TAIL* STDERR_TAIL*               the tail of truncated output
                   END(json)                        the report of the operation
                   WINDOW(u32), PONG
    even streams   OPEN  DATA*  EOF  RESET  WINDOW  a byte stream, the same in both directions

A command has an id, runs at most once, and is read in readings. A reading ends when the command
ends, or earlier if the host requested that. The agent keeps the output of a reading until the next
one begins or the command is acknowledged, so that a host that lost its stream can request it again.
"""

import json
import struct
from collections.abc import Generator

VERSION = 3
HEADER = struct.Struct(">IBI")
CREDIT = struct.Struct(">I")

HELLO, OPEN, DATA, STDERR, TAIL, STDERR_TAIL, EOF, WINDOW, END, RESET, PING, PONG, ACK = range(
    1, 14
)

WINDOW_BYTES = 256 * 1024
FIRST_WINDOW_BYTES = 16 * 1024
"""Agent to host. The host decides which streams of a sandbox may have more unread data."""
MAX_DATA_BYTES = 64 * 1024
MAX_OPEN_BYTES = 16 * 1024 * 1024
"""Host to agent. The text of a command is in its OPEN frame."""
MAX_REPORT_BYTES = 64 * 1024
"""Agent to host: the largest frame that the host accepts."""
MAX_CONNECTIONS = 256
"""Concurrent connections of the programs of one sandbox; the agent opens no more."""
FRAMES_PER_S = 50_000
BURST_FRAMES = 8192
"""A small frame costs the host about 1.5 µs (measured in 2024), whatever its size. A guest that
sends more of them is read more slowly."""
FREE_BYTES = 1024
"""Each FREE_BYTES of data allow one more frame, which does not count towards the rate."""


class ProtocolError(Exception):
    """The other side broke the protocol."""


def frame(stream: int, kind: int, payload: bytes = b"") -> bytes:
    """Return the bytes of one frame."""
    return HEADER.pack(stream, kind, len(payload)) + payload


def json_frame(stream: int, kind: int, value: object) -> bytes:
    """Return the bytes of one frame whose payload is JSON."""
    return frame(stream, kind, json.dumps(value).encode())


def parse_object(payload: bytes) -> dict[str, object]:
    """Parse a payload as a JSON object. Raises ProtocolError."""
    try:
        value = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"payload is not JSON: {payload[:80]!r}") from error
    if not isinstance(value, dict):
        raise ProtocolError(f"payload is not a JSON object: {payload[:80]!r}")
    return value


class Decoder:
    """Splits a byte stream into frames of at most `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> Generator[tuple[int, int, bytes], None, None]:
        """Yield each frame that `data` completes as (stream, type, payload). Frames that the caller
        does not take are the first of the next call. Raises ProtocolError."""
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= HEADER.size:
                stream, kind, length = HEADER.unpack_from(self._buffer, start)
                if length > self._max_bytes:
                    raise ProtocolError(f"frame of {length} bytes, {self._max_bytes} allowed")
                end = start + HEADER.size + length
                if len(self._buffer) < end:
                    break
                payload = bytes(self._buffer[start + HEADER.size : end])
                start = end
                yield stream, kind, payload
        finally:
            del self._buffer[:start]


class FrameRate:
    """Limits the rate of small frames from one guest, which is read more slowly beyond it."""

    def __init__(self) -> None:
        self._frames = float(BURST_FRAMES)
        self._at_s = 0.0

    def pause_s(self, frames: int, size: int, now_s: float) -> float:
        """Return the seconds for which the guest should not be read after `frames` frames with
        `size` bytes in total."""
        frames -= size // FREE_BYTES
        if frames <= 0:
            return 0.0
        earned = (now_s - self._at_s) * FRAMES_PER_S
        self._frames = min(BURST_FRAMES, self._frames + earned) - frames
        self._at_s = now_s
        return max(0.0, -self._frames / FRAMES_PER_S)
