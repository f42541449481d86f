"""Frames and flow control between the host and the agent inside; both sides speak exactly this.

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


class ProtocolError(Exception):
    """The other side sent something that is not this protocol."""


def frame(stream: int, kind: int, payload: bytes = b"") -> bytes:
    """One frame as bytes."""
    return HEADER.pack(stream, kind, len(payload)) + payload


def json_frame(stream: int, kind: int, value: object) -> bytes:
    """One frame whose payload is JSON."""
    return frame(stream, kind, json.dumps(value).encode())


def parse_object(payload: bytes) -> dict[str, object]:
    """A frame's payload as a JSON object. Raises ProtocolError for anything else."""
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
