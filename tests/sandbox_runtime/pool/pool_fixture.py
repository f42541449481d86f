"""A pool of fake sandboxes for tests."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio

from policies.egress import Egress
from policies.isolation import Isolation
from policies.pool import PoolSettings
from sandbox_runtime.egress.decision import CheckTarget, OnDecision
from sandbox_runtime.egress.gateway import EgressGateways, Gateway
from sandbox_runtime.guest_sandbox import PING_INTERVAL_S
from sandbox_runtime.pool.pool import Pool, PoolStats
from tests.fakes.manual_clock import ManualClock
from tests.fakes.sandbox_backend import FakeSandboxBackend
from tests.fakes.waiting import until

SMALL = Isolation(memory_mib=100)


class RecordingGateways(EgressGateways):
    """Makes gateways, and records their arguments and the number of open gateways."""

    def __init__(self, *, error: Exception | None = None) -> None:
        super().__init__()
        self.created: list[tuple[Egress, OnDecision | None]] = []
        self.open = 0
        self.on_create: Callable[[], None] = lambda: None
        self.on_close: Callable[[], None] = lambda: None
        self._error = error

    def create(
        self,
        egress: Egress,
        on_decision: OnDecision | None = None,
        check_target: CheckTarget | None = None,
    ) -> Gateway:
        if self._error:
            raise self._error
        self.created.append((egress, on_decision))
        self.open += 1
        self.on_create()
        return _RecordedGateway(self, egress)


class _RecordedGateway(Gateway):
    def __init__(self, made_by: RecordingGateways, egress: Egress) -> None:
        super().__init__(egress, resolve=_no_names)
        self._made_by = made_by

    async def aclose(self) -> None:
        self._made_by.open -= 1
        self._made_by.on_close()
        await super().aclose()


async def _no_names(name: str) -> Sequence[str]:
    raise OSError(f"nothing resolves {name}")


@dataclass
class PoolFixture:
    """A pool that keeps small fake sandboxes idle and starts one at a time in advance."""

    backend: FakeSandboxBackend
    clock: ManualClock
    pool: Pool

    @property
    def stats(self) -> PoolStats:
        return self.pool.stats()

    async def until(self, **expected: int) -> None:
        """Return once the pool's stats are as expected."""

        def stands() -> bool:
            stats = self.stats
            return all(getattr(stats, name) == value for name, value in expected.items())

        await until(stands)

    async def run_monitor(self, times: int = 1) -> None:
        """Let the monitor ping the sandboxes `times` times."""
        for _ in range(times):
            await until(lambda: PING_INTERVAL_S in self.clock.alarms)
            self.clock.advance(PING_INTERVAL_S)
            await until(lambda: PING_INTERVAL_S in self.clock.alarms)


@asynccontextmanager
async def fake_pool(
    settings: PoolSettings, backend: FakeSandboxBackend | None = None, **parts: Any
) -> AsyncIterator[PoolFixture]:
    """Yield a started pool. Fails if a guest still runs after the end of the pool, or after 20
    s."""
    backend, clock = backend or FakeSandboxBackend(), ManualClock()
    pool = Pool(backend, settings, [SMALL], clock=clock, **parts)
    with anyio.fail_after(20):
        pool.start()
        try:
            yield PoolFixture(backend, clock, pool)
        finally:
            backend.may_start.set()
            backend.may_end.set()
            await pool.aclose()
        assert not backend.alive
