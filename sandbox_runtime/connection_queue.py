"""The connections that programs of one sandbox open: those that are served, and those that wait for
their turn because more are opened in a second than `ConnectionRate` allows."""

import asyncio
import logging
import math
from collections.abc import Callable

from sandbox_runtime.clock import Clock
from sandbox_runtime.protocol import MAX_CONNECTIONS
from sandbox_runtime.streams import Connection, OnConnection

logger = logging.getLogger(__name__)

MAX_HANDLERS = 2 * MAX_CONNECTIONS
"""Handlers of closed connections end a little later, hence the factor 2."""
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


class ConnectionQueue:
    """Serves connections in their order, as fast as their rate allows.

    A connection that waits has no task. It keeps what its program sends, up to a stream's window,
    and the agent counts it among those that may be open at one time.
    """

    def __init__(self, clock: Clock, on_served: Callable[[int], None]) -> None:
        """`on_served` is called with the number of each connection whose handler has ended."""
        self._clock = clock
        self._on_served = on_served
        self._on_connection: OnConnection | None = None
        self._rate = ConnectionRate()
        self._waiting: dict[int, Connection] = {}
        """By number, in the order in which they were opened."""
        self._handlers: dict[asyncio.Task[None], Connection] = {}
        self._turns: asyncio.Task[None] | None = None
        """Serves those that wait; it ends when none is left."""

    def set_handler(self, on_connection: OnConnection | None) -> None:
        """Serve connections with `on_connection` from now on, at a new rate; None closes each.
        Those that wait are closed."""
        self.close_waiting()
        self._on_connection = on_connection
        self._rate = ConnectionRate()

    def add(self, connection: Connection) -> None:
        """Serve a connection now, or as soon as the rate allows."""
        if not self._waiting and not self._rate.wait_s(self._clock.time()):
            self._serve(connection)
            return
        self._waiting[connection.number] = connection
        if self._turns is None:
            self._turns = asyncio.create_task(self._take_turns(), name="turns of connections")

    def discard(self, number: int) -> None:
        """Forget a connection that is over, if it waits."""
        self._waiting.pop(number, None)

    def close_waiting(self) -> None:
        """Close all connections that wait."""
        for connection in list(self._waiting.values()):
            connection.abort()

    def tasks(self) -> set[asyncio.Task[None]]:
        """Return all tasks, to be cancelled with the sandbox."""
        return {*self._handlers, self._turns} if self._turns else {*self._handlers}

    async def _take_turns(self) -> None:
        try:
            while self._waiting:
                if wait_s := self._rate.wait_s(self._clock.time()):
                    await self._clock.sleep(wait_s)
                else:
                    self._serve(self._waiting.pop(next(iter(self._waiting))))
        finally:
            self._turns = None

    def _serve(self, connection: Connection) -> None:
        self._rate.take(self._clock.time())
        if self._on_connection is None or len(self._handlers) >= MAX_HANDLERS:
            connection.abort()
            return
        task = asyncio.ensure_future(self._on_connection(connection))
        self._handlers[task] = connection
        task.add_done_callback(self._served)

    def _served(self, task: asyncio.Task[None]) -> None:
        connection = self._handlers.pop(task)
        connection.abort()
        self._on_served(connection.number)
        error = None if task.cancelled() else task.exception()
        if error and not isinstance(error, ConnectionError):  # that the guest is gone is known
            logger.error("a connection from inside failed", exc_info=error)
