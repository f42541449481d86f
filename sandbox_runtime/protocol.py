"""The protocol between the host and the guest agent: frames, flow control and their limits.

A frame is `u32 stream, u8 type, u32 length`, big-endian, followed by `length` bytes. Stream 0 is
the link itself. The host opens odd streams, one for each operation. The agent opens even streams,
one for each connection that a program in the sandbox makes to the egress port.

Flow control: on each stream the host may send WINDOW_BYTES of data and the agent FIRST_WINDOW_BYTES
before the receiver gives credit for more, so one stream never blocks another. The credit of a
sender is never more than WINDOW_BYTES.

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

A command has an id and runs at most once. A reading is the part of its output that one exec or
attach operation returns. A reading ends when the command ends or waits for input, or after the time
that the host has set. The agent keeps the output of a reading until the next reading begins or the
command is acknowledged: a host that lost the stream can request the reading again.
"""

import struct
from collections.abc import Generator

from policies.json_bounds import decode_json, encode_json

VERSION = 4
HEADER = struct.Struct(">IBI")
CREDIT = struct.Struct(">I")

HELLO, OPEN, DATA, STDERR, TAIL, STDERR_TAIL, EOF, WINDOW, END, RESET, PING, PONG, ACK = range(
    1, 14
)

WINDOW_BYTES = 256 * 1024
FIRST_WINDOW_BYTES = 16 * 1024
"""The first window of data from the agent to the host. The host may widen the window of a
stream."""
MAX_DATA_BYTES = 64 * 1024
MAX_OPEN_BYTES = 16 * 1024 * 1024
"""Maximum payload of an OPEN frame from the host, which contains the text of a command."""
MAX_REPORT_BYTES = 64 * 1024
"""The largest payload of a frame that the host accepts from the agent."""
MAX_CONNECTIONS = 256
"""Maximum number of concurrent connections of the programs of one sandbox; the agent opens no
more."""
FRAMES_PER_S = 50_000
BURST_FRAMES = 8192
"""One guest may send BURST_FRAMES frames at once, and FRAMES_PER_S over time. Above this rate the
guest is read more slowly. Even a small frame costs the host about 1.5 µs (measured in 2024)."""
FREE_BYTES = 1024
"""For each FREE_BYTES bytes of received data, one frame does not count towards the rate."""


class ProtocolError(Exception):
    """The other side broke the protocol."""


def frame(stream: int, kind: int, payload: bytes = b"") -> bytes:
    """Return the bytes of one frame."""
    return HEADER.pack(stream, kind, len(payload)) + payload


def json_frame(stream: int, kind: int, value: object) -> bytes:
    """Return the bytes of one frame whose payload is JSON."""
    return frame(stream, kind, encode_json(value))


def parse_object(payload: bytes) -> dict[str, object]:
    """Parse a payload as a JSON object. Raises ProtocolError."""
    try:
        value = decode_json(payload)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"payload is not JSON: {payload[:80]!r}") from error
    if not isinstance(value, dict):
        raise ProtocolError(f"payload is not a JSON object: {payload[:80]!r}")
    return value


class Decoder:
    """Splits a byte stream into frames, whose payloads have at most `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> Generator[tuple[int, int, bytes], None, None]:
        """Yield each frame that `data` completes as (stream, type, payload). If the caller stops
        early, the next call yields the remaining frames first. Raises ProtocolError if a payload is
        longer than `max_bytes`."""
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
    """Limits the rate of small frames from one guest by pauses between the reads."""

    def __init__(self) -> None:
        self._frames_left = float(BURST_FRAMES)
        self._counted_at_s = 0.0

    def count_and_get_pause_s(self, frames: int, size: int, now_s: float) -> float:
        """Count frames with `size` bytes in total; return the seconds for which the guest should
        not be read."""
        frames -= size // FREE_BYTES
        if frames <= 0:
            return 0.0
        earned = (now_s - self._counted_at_s) * FRAMES_PER_S
        self._frames_left = min(BURST_FRAMES, self._frames_left + earned) - frames
        self._counted_at_s = now_s
        return max(0.0, -self._frames_left / FRAMES_PER_S)
