"""Cancellations and faults at every moment leave no sandbox behind."""

import asyncio
import random
from dataclasses import replace

import anyio
import pytest

from policies.pool import PoolSettings
from sandbox_runtime.errors import SandboxError
from sandbox_runtime.pool.pool import Pool
from tests.fakes.manual_clock import ManualClock
from tests.fakes.sandbox_backend import FakeSandboxBackend
from tests.sandbox_runtime.pool.pool_fixture import SMALL, RecordingGateways, fake_pool

KINDS = (SMALL, SMALL, replace(SMALL, memory_mib=200), replace(SMALL, level="strict"))
BUDGET_MIB = 500


async def turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


@pytest.mark.parametrize("idle", [0, 1])
async def test_lease_can_be_cancelled_at_every_moment(idle: int) -> None:
    for moment in range(60):
        backend = FakeSandboxBackend(turns=lambda: 2)
        async with fake_pool(PoolSettings(min_ready=idle, max_sandboxes=2), backend) as fixture:
            await fixture.until(idle=idle)

            async def run(pool: Pool = fixture.pool) -> None:
                async with pool.lease(replace(SMALL, memory_mib=200)) as lease:
                    sandbox = await lease.sandbox()
                    await sandbox.exec("true", timeout_s=5)

            running = asyncio.create_task(run())
            await turns(moment)
            running.cancel()
            await asyncio.wait([running])
            await fixture.until(leased=0, ending=0, waiting=0, starting=0, idle=idle)
            assert len(backend.alive) == idle


@pytest.mark.parametrize("moment", range(0, 60, 3))
async def test_a_pool_can_be_closed_at_every_moment_of_a_start(moment: int) -> None:
    async with fake_pool(PoolSettings(min_ready=2), FakeSandboxBackend(turns=lambda: 3)) as fixture:
        await turns(moment)
        await fixture.pool.aclose()
        assert not fixture.backend.alive
        assert fixture.stats.starting == fixture.stats.idle == fixture.stats.ending == 0


class Storm:
    """Random leases and faults, which a seed determines."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.backend = FakeSandboxBackend(turns=lambda: self.random.randrange(4))
        self.clock = ManualClock()
        self.settings = PoolSettings(
            min_ready=self.random.randrange(3),
            max_sandboxes=self.random.randrange(2, 6),
            memory_budget_mib=self.random.choice([None, BUDGET_MIB]),
            on_miss=self.random.choice(["create", "wait"]),
            max_parallel_starts=2 * self.random.randrange(1, 5),
            queue_size=self.random.choice([3, 100]),
            ttl_s=self.random.choice([15, 3600]),
        )
        self.gateways = RecordingGateways()
        self.gateways.on_create = self._note_memory
        self.pool = Pool(
            self.backend,
            self.settings,
            [SMALL],
            gateways=self.gateways,
            clock=self.clock,
            idle_ping_timeout_s=0.01,
        )
        self.leased: list[str] = []
        self.most_memory_mib = 0

    def _note_memory(self) -> None:
        self.most_memory_mib = max(self.most_memory_mib, self._memory_mib())

    def _memory_mib(self) -> int:
        return sum((guest.limited or [guest.made])[-1].memory_mib for guest in self.backend.alive)

    async def lease(self) -> None:
        try:
            isolation, owner = self.random.choice(KINDS), self.random.choice("abc")
            async with self.pool.lease(isolation, owner=owner) as lease:
                if self.random.random() < 0.2:
                    return
                sandbox = await lease.sandbox()
                self.leased.append(sandbox.id)
                await turns(self.random.randrange(20))
                await sandbox.exec("true", timeout_s=5)
        except SandboxError:
            return

    def disturb(self) -> None:
        """Cause a random fault, or advance the clock."""
        backend = self.backend
        what = self.random.randrange(8)
        if what == 0 and backend.alive:
            self.random.choice(sorted(backend.alive, key=lambda guest: guest.id)).die()
        elif what == 1:
            backend.refusal = None if backend.refusal else "the engine is down"
        elif what == 2:
            backend.image = self.random.choice(["image-1", "image-2"])
        elif what == 3:
            backend.limits_are_fixed = not backend.limits_are_fixed
        elif what == 4:
            self.clock.advance(10)
        elif what == 5 and backend.guests:
            backend.guests[-1].answers = False

    async def blow(self) -> None:
        running = []
        for _ in range(40):
            running.append(asyncio.create_task(self.lease()))
            await turns(self.random.randrange(6))
            self.disturb()
            if self.random.random() < 0.5:
                self.random.choice(running).cancel()
        self.backend.refusal = None
        await turns(self.random.randrange(30))
        for task in self.random.sample(running, self.random.randrange(len(running))):
            task.cancel()
        await asyncio.wait(running)


@pytest.mark.parametrize("seed", range(200))
async def test_random_leases_failures_and_cancellations_leave_no_sandbox(seed: int) -> None:
    before = asyncio.all_tasks()
    storm = Storm(seed)
    with anyio.fail_after(20):
        storm.pool.start()
        await storm.blow()
        await storm.pool.aclose()
    assert not storm.backend.alive
    assert storm.gateways.open == 0
    assert len(set(storm.leased)) == len(storm.leased)
    assert storm.backend.most_alive <= storm.settings.max_sandboxes
    assert storm.most_memory_mib <= (storm.settings.memory_budget_mib or storm.most_memory_mib)
    stats = storm.pool.stats()
    assert (stats.starting, stats.idle, stats.leased, stats.ending, stats.waiting) == (
        0,
        0,
        0,
        0,
        0,
    )
    await turns(3)
    assert asyncio.all_tasks() == before
