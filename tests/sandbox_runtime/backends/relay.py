"""The local Docker engine on a TCP port, through a relay that can cut the connections."""

import contextlib
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
from anyio.abc import ByteStream, SocketAttribute
from anyio.streams.tls import TLSListener

SOCKET = "/var/run/docker.sock"


class EngineSocketRelay:
    """A relay to the engine."""

    def __init__(self, change: Callable[[bytes], bytes]) -> None:
        self.port = 0
        self._change = change
        self._calls: set[anyio.CancelScope] = set()
        self._is_cut = False
        self._flows = anyio.Event()
        self._flows.set()

    def pause(self) -> None:
        """Pass on nothing, and keep all connections open."""
        self._flows = anyio.Event()

    def resume(self) -> None:
        """Pass on what has arrived, and all that follows."""
        self._flows.set()

    def cut(self) -> None:
        """Close all connections and refuse new ones."""
        self._is_cut = True
        for call in self._calls:
            call.cancel()

    def restore(self) -> None:
        """Accept connections again."""
        self._is_cut = False

    async def serve(self, caller: ByteStream) -> None:
        async with caller:
            if self._is_cut:
                return
            with anyio.CancelScope() as call:
                self._calls.add(call)
                async with await anyio.connect_unix(SOCKET) as engine:
                    await self._join(caller, engine)
            self._calls.discard(call)

    async def _join(self, caller: ByteStream, engine: ByteStream) -> None:
        async with anyio.create_task_group() as both:
            both.start_soon(self._pump, caller, engine, bytes)
            await self._pump(engine, caller, self._change)
            both.cancel_scope.cancel()

    async def _pump(
        self, source: ByteStream, target: ByteStream, change: Callable[[bytes], bytes]
    ) -> None:
        with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            async for data in source:
                await self._flows.wait()
                await target.send(change(data))


@asynccontextmanager
async def relay(
    tls: ssl.SSLContext | None = None, change: Callable[[bytes], bytes] = bytes
) -> AsyncIterator[EngineSocketRelay]:
    """Yield a relay that changes the responses of the engine."""
    plain = await anyio.create_tcp_listener(local_host="127.0.0.1")
    line = EngineSocketRelay(change)
    line.port = plain.extra(SocketAttribute.local_port)
    async with plain, anyio.create_task_group() as serving:
        listener = TLSListener(plain, tls, standard_compatible=False) if tls else plain
        serving.start_soon(listener.serve, line.serve)
        yield line
        serving.cancel_scope.cancel()
