"""A TCP load balancer that takes its servers in turn and knows nothing of HTTP.

A server that refuses the connection is passed over, as a load balancer does after a failed health
check. A connection stays with its server until one of the two ends.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

READ_BYTES = 64 << 10


class Balancer:
    """A running balancer."""

    def __init__(self, ports: Sequence[int]) -> None:
        self.port = 0
        """Its own port on 127.0.0.1."""
        self._ports = itertools.cycle(ports)
        self._attempts = len(ports)
        self._connections = set[asyncio.Task[None]]()

    async def close(self) -> None:
        """Drop all connections."""
        for connection in self._connections:
            connection.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one client's connection in a task."""
        task = asyncio.create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward a connection, or close it if no server accepts it."""
        try:
            server = await self._connect()
            if server is not None:
                await _forward((reader, writer), server)
        finally:
            writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        for _ in range(self._attempts):
            with suppress(OSError):
                return await asyncio.open_connection("127.0.0.1", next(self._ports))
        return None


async def _forward(
    client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    server: tuple[asyncio.StreamReader, asyncio.StreamWriter],
) -> None:
    """Forward in both directions until one side has ended, then end the other side."""
    copies = [
        asyncio.create_task(_copy(source, target))
        for source, target in ((client[0], server[1]), (server[0], client[1]))
    ]
    try:
        await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for copy in copies:
            copy.cancel()
        server[1].close()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await source.read(READ_BYTES):
            target.write(data)
            await target.drain()


@asynccontextmanager
async def running_balancer(ports: Sequence[int]) -> AsyncIterator[Balancer]:
    """Run a balancer for servers on these ports of 127.0.0.1."""
    balancer = Balancer(ports)
    server = await asyncio.start_server(balancer.accept, "127.0.0.1", 0, backlog=1024)
    balancer.port = server.sockets[0].getsockname()[1]
    try:
        yield balancer
    finally:
        server.close()
        await balancer.close()
