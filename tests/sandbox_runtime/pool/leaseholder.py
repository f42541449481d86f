"""Concurrent leases, each in its own task."""

import asyncio

from policies.isolation import Isolation
from sandbox_runtime.errors import NoFreeSandboxError, SandboxStartError
from tests.fakes.waiting import until
from tests.sandbox_runtime.pool.pool_fixture import SMALL, PoolFixture


class Leaseholder:
    """Takes leases and records the order in which they get a sandbox."""

    def __init__(self, fixture: PoolFixture) -> None:
        self.served: list[str] = []
        self.refused: dict[str, str] = {}
        self._stage = fixture
        self._ends: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def request(self, name: str, isolation: Isolation = SMALL, owner: str = "") -> None:
        self._ends[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(self._hold(name, isolation, owner))

    async def _hold(self, name: str, isolation: Isolation, owner: str) -> None:
        try:
            async with self._stage.pool.lease(isolation, owner=owner) as lease:
                await lease.sandbox()
                self.served.append(name)
                await self._ends[name].wait()
        except (SandboxStartError, NoFreeSandboxError) as error:
            self.refused[name] = str(error)

    def end(self, name: str) -> None:
        self._ends[name].set()

    def cancel(self, name: str) -> None:
        self._tasks[name].cancel()

    async def until_served(self, *names: str) -> None:
        """Wait until exactly these leases have a sandbox, in this order."""
        await until(lambda: len(self.served) >= len(names))
        assert self.served == list(names)

    async def end_all(self) -> None:
        for name, task in self._tasks.items():
            self.end(name)
            await asyncio.wait([task])
