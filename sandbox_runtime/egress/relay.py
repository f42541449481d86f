"""The byte streams between a program and the server that it is connected to."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import anyio

from sandbox_runtime.egress.connection import BufferedReader, Connection
from sandbox_runtime.egress.decision import EgressError, UnreachableError
from sandbox_runtime.egress.dialer import Server
from sandbox_runtime.egress.limits import Timeouts, TrafficQuota

PIECE_BYTES = 64 << 10
RelayDirection = Callable[[], Awaitable[None]]
"""A coroutine function that relays one direction of a connection."""


class Relay:
    """Both directions of a connection, with one traffic quota and one idle timeout. Each direction
    reads at most PIECE_BYTES at a time, and goes on once the receiver accepts more."""

    def __init__(
        self,
        connection: Connection,
        program_reader: BufferedReader,
        server: Server,
        traffic: TrafficQuota,
        timeouts: Timeouts,
    ) -> None:
        self.program_reader = program_reader
        self._reader, self._writer = server
        self.bytes_up = self.bytes_down = 0
        self._connection = connection
        self._traffic = traffic
        self._timeouts = timeouts
        self._scope = anyio.CancelScope()
        self._is_answered = False

    async def run(self, *directions: RelayDirection) -> None:
        """Run all `directions` concurrently to their end; the first failure cancels the others.

        Raises ConnectionError if the program is gone, and EgressError for any other failure.
        """
        failures: list[Exception] = []

        async def run_direction(direction: RelayDirection) -> None:
            try:
                await direction()
            except (ConnectionError, EgressError) as error:
                failures.append(error)
                self._scope.cancel()

        async with anyio.create_task_group() as group:
            self._scope = group.cancel_scope
            self._restart_idle_timer()
            for direction in directions:
                group.start_soon(run_direction, direction)
        if failures:
            raise failures[0]
        if self._scope.cancel_called and not self._is_answered:
            raise UnreachableError(f"nothing passed for {self._timeouts.idle_s:g} s", 504)

    async def send_to_server(self, data: bytes) -> None:
        """Send to the server. Raises DeniedError if the traffic quota is used up."""
        await self._traffic.consume(len(data))
        # Bytes for a server that no longer reads are dropped: it may have answered already, and
        # if it is gone, the other direction raises.
        if not self._writer.is_closing():
            with suppress(OSError):
                self._writer.write(data)
                await self._writer.drain()
        self.bytes_up += len(data)
        self._restart_idle_timer()

    def send_end_to_server(self) -> None:
        """Pass the end of the program's data on to the server."""
        with suppress(OSError):
            self._writer.write_eof()

    async def send_to_program(self, data: bytes) -> None:
        """Send to the program. Raises ConnectionError if the program is gone, and DeniedError if
        the traffic quota is used up."""
        await self._traffic.consume(len(data))
        self.bytes_down += len(data)
        await self._connection.send(data)
        self._restart_idle_timer()

    async def read_response_head(self) -> bytes:
        """Return a response head with the empty line at its end. Raises UnreachableError."""
        try:
            return await self._reader.readuntil(b"\r\n\r\n")
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            raise UnreachableError("the host did not answer in HTTP/1") from error

    async def relay_rest_to_program(self) -> None:
        """Relay everything that the server sends until it closes. Raises ConnectionError,
        EgressError."""
        while data := await self._read_from_server():
            await self.send_to_program(data)
        await self._connection.finish()

    async def _read_from_server(self) -> bytes:
        try:
            return await self._reader.read(PIECE_BYTES)
        except OSError as error:
            why = f"the host broke the connection: {error.strerror or error}"
            raise UnreachableError(why) from error

    async def discard_rest_of_request(self) -> None:
        """Read and discard what the program sends after its request, until the program has
        finished. Raises ConnectionError, DeniedError."""
        while data := await self.program_reader.read(PIECE_BYTES):
            await self._traffic.consume(len(data))

    def mark_answered(self) -> None:
        """Record that the response is complete: the relay ends after `linger_s`."""
        self._is_answered = True
        self._scope.deadline = anyio.current_time() + self._timeouts.linger_s

    async def close(self) -> None:
        """Close the connection to the server; wait up to `linger_s` for unsent data."""
        self._writer.close()
        with suppress(OSError):
            with anyio.move_on_after(self._timeouts.linger_s):
                await self._writer.wait_closed()

    def abort(self) -> None:
        """Abort the connection to the server. Safe to call twice."""
        transport = self._writer.transport
        # abort() fails on a transport that is closed and has sent everything (CPython 3.11).
        if not transport.is_closing() or transport.get_write_buffer_size():
            transport.abort()

    def _restart_idle_timer(self) -> None:
        if not self._is_answered:
            self._scope.deadline = anyio.current_time() + self._timeouts.idle_s
