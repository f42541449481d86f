"""Budgets of what a guest may send: of the frames that no stream's credit pays for, and of the data
of all its streams that nobody has received yet."""

import itertools
import math
from collections import deque

from sandbox_runtime.protocol import ProtocolError
from sandbox_runtime.streams import Connection, Stream

MAX_CONNECTIONS = 256
"""Of programs inside, at one time: the agent opens no more."""
RESETS_BEFORE_PING = MAX_CONNECTIONS
MAX_RESET_STREAMS = 8 * MAX_CONNECTIONS
"""Two round trips of an agent that opens and closes at full speed leave at most 1,280 reset
streams; beyond 2,048 the agent ignores PING."""
MAX_WIDE_STREAMS = 32
"""Streams of one sandbox that may have WINDOW_BYTES unread at one time; all others may have
FIRST_WINDOW_BYTES. With as many connections as there may be that is 16 MiB, and 16 KiB for each
operation that the host began."""
READ_FRAMES = 4
"""What each piece of the byte stream costs, however small it is."""
TURN_FRAMES = 1024
"""How many are taken before other tasks have their turn: about 1.5 ms."""
OPEN_FRAMES = 32
"""A connection costs as much as so many frames: each has a task."""
CONNECTIONS_PER_S = 64
BURST_CONNECTIONS = MAX_CONNECTIONS
"""The connections of one sandbox's programs. A refused one costs the host about 0.2 ms, one that
reaches a server about 1 ms. Connections beyond this rate wait, for 4 s at most."""


class ConnectionRate:
    """How soon the next connection of one sandbox's programs may be served."""

    def __init__(self) -> None:
        self._next_s = -math.inf
        """When the connections served so far would all have been served at the steady rate."""

    def wait_s(self, now_s: float) -> float:
        """Return in how many seconds another connection may be served; 0 if one may be now."""
        return max(0.0, self._next_s - now_s)

    def take(self, now_s: float) -> None:
        """Count a connection that is served now."""
        earliest_s = now_s - (BURST_CONNECTIONS - 1) / CONNECTIONS_PER_S
        self._next_s = max(self._next_s, earliest_s) + 1 / CONNECTIONS_PER_S


class ResetStreams:
    """The streams that the host has reset, of which the agent may not know yet.

    What was in flight is tolerated: as much as a stream still had credit for, and its end. A stream
    is forgotten once the agent has closed it, or has answered a PING that was sent after its RESET.
    """

    def __init__(self) -> None:
        self._streams: dict[int, tuple[int, Stream | Connection]] = {}
        """By number, in the order of their RESETs: which RESET it was, and the stream."""
        self._resets = 0
        self._pings: deque[int] = deque()
        """Of each PING that is not answered yet: how many RESETs were sent before it."""

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, number: int) -> bool:
        return number in self._streams

    def add(self, number: int, stream: Stream | Connection) -> bool:
        """Take a stream of which RESET has been sent; returns whether a PING is due."""
        stream.mark_reset()
        self._resets += 1
        self._streams[number] = self._resets, stream
        return len(self._streams) >= RESETS_BEFORE_PING and not self._pings

    def accept(self, number: int, kind: int, payload: bytes) -> None:
        """Check a frame that was in flight. Raises ProtocolError."""
        if self._streams[number][1].accept(kind, payload):
            del self._streams[number]

    def ping_sent(self) -> None:
        """A PING follows the RESETs sent so far."""
        self._pings.append(self._resets)

    def pong_received(self) -> None:
        """Forget the streams whose RESET the agent has read. Raises ProtocolError."""
        if not self._pings:
            raise ProtocolError("a PONG without a PING")
        known = self._pings.popleft()
        read = itertools.takewhile(lambda item: item[1][0] <= known, self._streams.items())
        for number in [number for number, _ in read]:
            del self._streams[number]

    def clear(self) -> None:
        """Forget all of them."""
        self._streams.clear()
        self._pings.clear()
