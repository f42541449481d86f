"""Where a run's sandbox comes from and where it goes: started side by side with the first model
call, used once, ended off the request's path."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from policies.isolation import Isolation
from sandbox_runtime.backends.base import Backend
from sandbox_runtime.channel import Channel
from sandbox_runtime.errors import SandboxError
from sandbox_runtime.guest_sandbox import GuestSandbox
from sandbox_runtime.sandbox import Sandbox

START_TIMEOUT_S = 60.0


async def start_sandbox(backend: Backend, isolation: Isolation) -> GuestSandbox:
    """A new sandbox, ready for its first command. Raises SandboxStartError."""
    channel = Channel(await backend.start(isolation))
    await channel.connect(START_TIMEOUT_S)
    return GuestSandbox(channel)


class FreshLease:
    """A claim to one sandbox that is being started."""

    def __init__(self, starting: "asyncio.Task[GuestSandbox]") -> None:
        self._starting = starting

    async def sandbox(self) -> Sandbox:
        return await asyncio.shield(self._starting)


class FreshSandboxes:
    """Starts a sandbox for every lease and ends it with the lease."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._ending: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def lease(self, isolation: Isolation) -> AsyncIterator[FreshLease]:
        starting = asyncio.create_task(start_sandbox(self._backend, isolation))
        try:
            yield FreshLease(starting)
        finally:
            # The request does not wait, and its cancellation cannot reach this task.
            ending = asyncio.create_task(_end(starting))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    async def aclose(self) -> None:
        """Wait until every sandbox has ended."""
        while self._ending:
            await asyncio.wait(self._ending)


async def _end(starting: "asyncio.Task[GuestSandbox]") -> None:
    try:
        sandbox = await starting
    except SandboxError:
        return  # it never was; whoever asked for it has been told
    await sandbox.close()
