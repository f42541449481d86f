"""The protocol between the host and the agent inside: frames, flow control and their limits.

A frame is `u32 stream, u8 type, u32 length`, big-endian, and `length` bytes. Stream 0 is the link
itself. The host opens odd streams, one for each operation; the agent opens even ones, one for each
connection that a program inside makes to the way out. On each stream the host may send WINDOW_BYTES
of data and the agent FIRST_WINDOW_BYTES before the receiver has given credit for more, so one noisy
stream never blocks another; and no more than WINDOW_BYTES may wait for the receiver, whatever the
credit. After END or RESET the agent sends nothing more on that stream. On one that the host has
RESET it may send what was in flight: no more than the stream had credit for, until it has answered
a PING that was sent later. No frame is empty that need not be, and no credit is for nothing.

    host → agent   OPEN(json)  DATA*  EOF           an operation and its input
                   RESET                            give it up
                   WINDOW(u32)                      credit for so many more bytes
                   PING                             answered by PONG
                   ACK(id)                          that command's outcome has arrived: forget it
    agent → host   HELLO(json)                      once, on stream 0: ready
                   DATA* STDERR*                    output as it comes
                   TAIL* STDERR_TAIL*               the end of output too long to send whole
                   END(json)                        the outcome
                   WINDOW(u32), PONG
    even streams   OPEN  DATA*  EOF  RESET  WINDOW  a byte stream, alike in both directions

A command has an id, runs at most once, and is heard in readings. A reading ends with the command,
or while it still runs when its host asked for that; what it delivered is kept until the next one
begins or the command is acknowledged, so a host that lost its stream can ask for it again.
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
"""Agent to host: it is the host that decides which streams of a sandbox may have more unread."""
MAX_DATA_BYTES = 64 * 1024
MAX_OPEN_BYTES = 16 * 1024 * 1024
"""Host to agent: a command's text travels here."""
MAX_REPORT_BYTES = 64 * 1024
"""Agent to host: the largest frame the host accepts."""
MAX_CONNECTIONS = 256
"""Connections of programs inside, at one time: the agent opens no more."""
FRAMES_PER_S = 50_000
BURST_FRAMES = 8192
"""Small frames cost their number of times a constant: about 1.5 µs each on a machine of 2024. A
guest that sends more of them is read more slowly, which is all that happens to it."""
FREE_BYTES = 1024
"""The bytes of data that pay for one frame."""


class ProtocolError(Exception):
    """The other side sent something that is not this protocol."""


def frame(stream: int, kind: int, payload: bytes = b"") -> bytes:
    """Return one frame as bytes."""
    return HEADER.pack(stream, kind, len(payload)) + payload


def json_frame(stream: int, kind: int, value: object) -> bytes:
    """Return one frame whose payload is JSON."""
    return frame(stream, kind, json.dumps(value).encode())


def parse_object(payload: bytes) -> dict[str, object]:
    """Return a frame's payload as a JSON object. Raises ProtocolError for anything else."""
    try:
        value = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"payload is not JSON: {payload[:80]!r}") from error
    if not isinstance(value, dict):
        raise ProtocolError(f"payload is not a JSON object: {payload[:80]!r}")
    return value


class Decoder:
    """Cuts a byte stream into frames, none longer than `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> Generator[tuple[int, int, bytes], None, None]:
        """Yield each frame that `data` completes: (stream, type, payload); those that are not asked
        for come first the next time. Raises ProtocolError."""
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
    """The rate of small frames from one guest, beyond which the host reads it more slowly."""

    def __init__(self) -> None:
        self._frames = float(BURST_FRAMES)
        self._at_s = 0.0

    def pause_s(self, frames: int, size: int, now_s: float) -> float:
        """Return for how many seconds the guest should not be read after `frames` frames, which
        have `size` bytes together."""
        frames -= size // FREE_BYTES
        if frames <= 0:
            return 0.0
        earned = (now_s - self._at_s) * FRAMES_PER_S
        self._frames = min(BURST_FRAMES, self._frames + earned) - frames
        self._at_s = now_s
        return max(0.0, -self._frames / FRAMES_PER_S)
