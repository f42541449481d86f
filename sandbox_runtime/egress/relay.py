"""A program and the server it has reached, and what passes between them."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import anyio

from sandbox_runtime.egress.connection import Connection, Inbox
from sandbox_runtime.egress.dialer import Server
from sandbox_runtime.egress.errors import EgressError, UnreachableError
from sandbox_runtime.egress.meter import Meter
from sandbox_runtime.egress.patience import Patience

PIECE_BYTES = 64 << 10
Side = Callable[[], Awaitable[None]]


class Relay:
    """Two directions under one meter and one clock; at most a piece of each is held."""

    def __init__(
        self,
        connection: Connection,
        inbox: Inbox,
        server: Server,
        meter: Meter,
        patience: Patience,
    ) -> None:
        self.inbox = inbox
        self._reader, self._writer = server
        self.bytes_up = self.bytes_down = 0
        self._connection = connection
        self._meter = meter
        self._patience = patience
        self._scope = anyio.CancelScope()
        self._answered = False

    async def run(self, *sides: Side) -> None:
        """Run each side to its end; the first that fails ends all.

        Raises ConnectionError where the program is gone, EgressError for all other reasons.
        """
        failures: list[Exception] = []

        async def to_its_end(side: Side) -> None:
            try:
                await side()
            except (ConnectionError, EgressError) as error:
                failures.append(error)
                self._scope.cancel()

        async with anyio.create_task_group() as group:
            self._scope = group.cancel_scope
            self._stir()
            for side in sides:
                group.start_soon(to_its_end, side)
        if failures:
            raise failures[0]
        if self._scope.cancel_called and not self._answered:
            raise UnreachableError(f"nothing passed for {self._patience.idle_s:g} s", 504)

    async def up(self, data: bytes) -> None:
        """From the program to the server. Raises DeniedError where the meter does."""
        await self._meter.take(len(data))
        # What it no longer reads is dropped: it may have answered already, and if it is gone
        # the other direction says so.
        if not self._writer.is_closing():
            with suppress(OSError):
                self._writer.write(data)
                await self._writer.drain()
        self.bytes_up += len(data)
        self._stir()

    def finish_up(self) -> None:
        """The program has no more."""
        with suppress(OSError):
            self._writer.write_eof()

    async def down(self, data: bytes) -> None:
        """From the server to the program. Raises ConnectionError, DeniedError."""
        await self._meter.take(len(data))
        self.bytes_down += len(data)
        await self._connection.send(data)
        self._stir()

    async def head_from_server(self) -> bytes:
        """Up to the next empty line, with it. Raises UnreachableError."""
        try:
            return await self._reader.readuntil(b"\r\n\r\n")
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            raise UnreachableError("the host did not answer in HTTP/1") from error

    async def rest_down(self) -> None:
        """All that the server still has, and its end. Raises ConnectionError, EgressError."""
        while data := await self._from_server():
            await self.down(data)
        await self._connection.finish()

    async def _from_server(self) -> bytes:
        try:
            return await self._reader.read(PIECE_BYTES)
        except OSError as error:
            why = f"the host broke the connection: {error.strerror or error}"
            raise UnreachableError(why) from error

    async def until_closed(self) -> None:
        """Drop what a program sends after its request, until it leaves. Raises ConnectionError."""
        while data := await self.inbox.some(PIECE_BYTES):
            await self._meter.take(len(data))

    def answered(self) -> None:
        """The one request has its answer: soon all is over, whoever still sends."""
        self._answered = True
        self._scope.deadline = anyio.current_time() + self._patience.linger_s

    async def close(self) -> None:
        """Let the server have what is on its way to it, for a while."""
        self._writer.close()
        with suppress(OSError):
            with anyio.move_on_after(self._patience.linger_s):
                await self._writer.wait_closed()

    def abort(self) -> None:
        """Leave the server at once. Safe to call twice."""
        transport = self._writer.transport
        # A transport that has been closed and has sent all does not bear abort() (CPython 3.11).
        if not transport.is_closing() or transport.get_write_buffer_size():
            transport.abort()

    def _stir(self) -> None:
        if not self._answered:
            self._scope.deadline = anyio.current_time() + self._patience.idle_s
