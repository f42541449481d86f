"""A pool of puppets for a test."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio

from policies.isolation import Isolation
from policies.pool import PoolSettings
from sandbox_runtime.pool.lifecycle import BEAT_S
from sandbox_runtime.pool.pool import Pool, PoolStats
from tests.fakes.hand_clock import HandClock
from tests.fakes.puppet_backend import PuppetBackend
from tests.fakes.waiting import until

SMALL = Isolation(memory_mib=100)


@dataclass
class Stage:
    """A pool that keeps small puppets ready and starts one ahead at a time."""

    backend: PuppetBackend
    clock: HandClock
    pool: Pool

    @property
    def stats(self) -> PoolStats:
        return self.pool.stats()

    async def until(self, **expected: int) -> None:
        """Return once the pool stands as expected."""

        def stands() -> bool:
            stats = self.stats
            return all(getattr(stats, name) == value for name, value in expected.items())

        await until(stands)

    async def beat(self, times: int = 1) -> None:
        """Let the keeper look so often at what lives."""
        for _ in range(times):
            await until(lambda: BEAT_S in self.clock.alarms)
            self.clock.advance(BEAT_S)
            await until(lambda: BEAT_S in self.clock.alarms)


@asynccontextmanager
async def puppets(
    settings: PoolSettings, backend: PuppetBackend | None = None, **parts: Any
) -> AsyncIterator[Stage]:
    """A pool that has begun; when it has ended, in 20 s at most, so has every puppet."""
    backend, clock = backend or PuppetBackend(), HandClock()
    pool = Pool(backend, settings, [SMALL], clock=clock, cores=2, **parts)
    with anyio.fail_after(20):
        pool.start()
        try:
            yield Stage(backend, clock, pool)
        finally:
            backend.may_start.set()
            backend.may_end.set()
            await pool.aclose()
        assert not backend.alive
