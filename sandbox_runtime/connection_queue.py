"""Serves the connections that programs of one sandbox open, at a limited rate: a connection beyond
the rate of `ConnectionRate` waits in a queue."""

import asyncio
import logging
import math
from collections.abc import Callable

from sandbox_runtime.clock import Clock
from sandbox_runtime.protocol import MAX_CONNECTIONS
from sandbox_runtime.streams import OnConnection, ProgramConnection

logger = logging.getLogger(__name__)

MAX_HANDLERS = 2 * MAX_CONNECTIONS
"""Maximum number of running handlers. The handler of a closed connection ends a little later, hence
the factor 2."""
CONNECTIONS_PER_S = 64
BURST_CONNECTIONS = MAX_CONNECTIONS
"""One sandbox gets BURST_CONNECTIONS connections at once, and CONNECTIONS_PER_S over time. Further
connections wait for up to 4 s. A refused connection costs the host about 0.2 ms, one that reaches a
server about 1 ms."""


class ConnectionRate:
    """Limits the rate at which the connections of one sandbox are served."""

    def __init__(self) -> None:
        self._next_s = -math.inf
        """The time by which the connections so far would have been served at the steady rate."""

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until another connection may be served; 0 if one may be now."""
        return max(0.0, self._next_s - now_s)

    def take(self, now_s: float) -> None:
        """Count a connection that is served now."""
        earliest_s = now_s - (BURST_CONNECTIONS - 1) / CONNECTIONS_PER_S
        self._next_s = max(self._next_s, earliest_s) + 1 / CONNECTIONS_PER_S


class ConnectionQueue:
    """Serves connections in order, as fast as the rate allows.

    A waiting connection has no task. It buffers what its program sends, up to a stream's window,
    and counts towards MAX_CONNECTIONS.
    """

    def __init__(self, clock: Clock, on_served: Callable[[int], None]) -> None:
        """`on_served` is called with the number of each connection whose handler has ended."""
        self._clock = clock
        self._on_served = on_served
        self._on_connection: OnConnection | None = None
        self._rate = ConnectionRate()
        self._waiting: dict[int, ProgramConnection] = {}
        """Waiting connections by stream number, in the order in which they were opened."""
        self._handlers: dict[asyncio.Task[None], ProgramConnection] = {}
        self._serve_task: asyncio.Task[None] | None = None
        """Serves the waiting connections; ends when none is left."""

    def set_handler(self, on_connection: OnConnection | None) -> None:
        """Call `on_connection` for each new connection, or close new connections if it is None.
        Close the waiting connections and reset the rate."""
        self.close_waiting()
        self._on_connection = on_connection
        self._rate = ConnectionRate()

    def add(self, connection: ProgramConnection) -> None:
        """Serve a connection now, or as soon as the rate allows."""
        if not self._waiting and not self._rate.wait_s(self._clock.time()):
            self._serve(connection)
            return
        self._waiting[connection.number] = connection
        if self._serve_task is None:
            self._serve_task = asyncio.create_task(self._serve_waiting(), name="connection queue")

    def discard(self, number: int) -> None:
        """Remove a connection that is over from the queue."""
        self._waiting.pop(number, None)

    def close_waiting(self) -> None:
        """Close all waiting connections."""
        for connection in list(self._waiting.values()):
            connection.abort()

    def tasks(self) -> set[asyncio.Task[None]]:
        """Return all tasks, for cancellation when the sandbox ends."""
        return {*self._handlers, self._serve_task} if self._serve_task else {*self._handlers}

    async def _serve_waiting(self) -> None:
        try:
            while self._waiting:
                if wait_s := self._rate.wait_s(self._clock.time()):
                    await self._clock.sleep(wait_s)
                else:
                    self._serve(self._waiting.pop(next(iter(self._waiting))))
        finally:
            self._serve_task = None

    def _serve(self, connection: ProgramConnection) -> None:
        self._rate.take(self._clock.time())
        if self._on_connection is None or len(self._handlers) >= MAX_HANDLERS:
            connection.abort()
            return
        task = asyncio.ensure_future(self._on_connection(connection))
        self._handlers[task] = connection
        task.add_done_callback(self._on_handler_done)

    def _on_handler_done(self, task: asyncio.Task[None]) -> None:
        connection = self._handlers.pop(task)
        connection.abort()
        self._on_served(connection.number)
        error = None if task.cancelled() else task.exception()
        # The program or the end of the guest causes a ConnectionError.
        if error and not isinstance(error, ConnectionError):
            logger.error("a connection from inside failed", exc_info=error)
