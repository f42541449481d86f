"""Idle sandboxes are monitored, refilled after failures, and closed in order."""

import asyncio
from dataclasses import replace

import anyio
import pytest

from policies.pool import PoolSettings
from sandbox_runtime.backends.base import SWEEP_S, sweep_forever
from sandbox_runtime.errors import NoFreeSandboxError
from sandbox_runtime.guest_sandbox import PING_INTERVAL_S
from tests.fakes.manual_clock import ManualClock
from tests.fakes.sandbox_backend import FakeSandboxBackend
from tests.fakes.waiting import until
from tests.sandbox_runtime.pool.pool_fixture import SMALL, fake_pool

WARM = PoolSettings(min_ready=2)
STRICT = replace(SMALL, level="strict")


async def test_idle_and_leased_sandboxes_are_pinged_every_interval() -> None:
    async with fake_pool(WARM) as fixture, fixture.pool.lease(SMALL) as lease:
        await lease.sandbox()
        await fixture.until(idle=2, leased=1)
        before = [guest.pings for guest in fixture.backend.guests]
        await fixture.run_monitor(3)
        await until(
            lambda: [guest.pings for guest in fixture.backend.guests] == [n + 3 for n in before]
        )


async def test_unresponsive_sandbox_does_not_delay_other_pings() -> None:
    async with fake_pool(WARM) as fixture, fixture.pool.lease(SMALL) as lease:
        await lease.sandbox()
        await fixture.until(idle=2, leased=1)
        stuck, *others = fixture.backend.guests
        stuck.answers = False
        before = [guest.pings for guest in others]
        await fixture.run_monitor(3)
        await until(lambda: [guest.pings for guest in others] == [n + 3 for n in before])
        assert fixture.stats.leased == 1


@pytest.mark.parametrize("end", ["it died", "it hangs"])
async def test_dead_idle_sandbox_is_replaced(end: str) -> None:
    async with fake_pool(WARM, idle_ping_timeout_s=0.01) as fixture:
        await fixture.until(idle=2)
        bad = fixture.backend.guests[0]
        if end == "it died":
            bad.die()
        bad.answers = False
        await fixture.run_monitor()
        await fixture.until(idle=2, replaced=1, started=3)
        assert bad not in fixture.backend.alive


async def test_leased_sandbox_has_more_time_to_answer_a_ping_than_an_idle_one() -> None:
    async with (
        fake_pool(WARM, idle_ping_timeout_s=0.05) as fixture,
        fixture.pool.lease(SMALL) as lease,
    ):
        sandbox = await lease.sandbox()
        await fixture.until(idle=2, leased=1)
        at_work, idle, _ = fixture.backend.guests
        at_work.answers = idle.answers = False
        await fixture.run_monitor()
        await fixture.until(idle=2, replaced=1)
        assert sandbox.lost is None


async def test_dead_leased_sandbox_is_not_replaced_by_the_monitor() -> None:
    async with fake_pool(WARM) as fixture, fixture.pool.lease(SMALL) as lease:
        await lease.sandbox()
        await fixture.until(idle=2, leased=1)
        fixture.backend.guests[0].die()
        await fixture.run_monitor()
        assert (fixture.stats.leased, fixture.stats.replaced) == (1, 0)


async def test_too_old_idle_sandboxes_are_replaced_one_at_a_time() -> None:
    async with fake_pool(PoolSettings(min_ready=2, ttl_s=30)) as fixture:
        await fixture.until(idle=2)
        first = list(fixture.backend.guests)
        await fixture.run_monitor(3)
        assert fixture.stats.replaced == 0
        fixture.backend.may_start.clear()
        await fixture.run_monitor()
        await fixture.until(idle=1, starting=1, ending=0, replaced=1)
        fixture.backend.may_start.set()
        await fixture.until(idle=2)
        await fixture.run_monitor()
        await fixture.until(idle=2, ending=0, replaced=2)
        assert not fixture.backend.alive.intersection(first)


async def test_most_of_the_idle_sandboxes_stay_ready_while_old_ones_are_replaced() -> None:
    backend = FakeSandboxBackend()
    backend.parallel_starts = 64
    async with fake_pool(PoolSettings(min_ready=10, ttl_s=5), backend) as fixture:
        await fixture.until(idle=10)
        backend.may_start.clear()
        await fixture.run_monitor()
        await fixture.until(idle=8, starting=2, replaced=2)
        backend.may_start.set()
        await fixture.until(idle=10)


async def test_idle_sandboxes_of_an_old_image_are_replaced() -> None:
    async with fake_pool(WARM) as fixture:
        await fixture.until(idle=2)
        old = list(fixture.backend.guests)
        fixture.backend.image = "image-2"
        await fixture.run_monitor()
        await fixture.until(idle=2, ending=0, replaced=2)
        assert not fixture.backend.alive.intersection(old)


async def test_sandbox_that_starts_from_an_outdated_image_is_not_kept() -> None:
    async with fake_pool(PoolSettings(min_ready=1)) as fixture:
        fixture.backend.may_start.clear()
        await fixture.until(starting=1)
        await until(lambda: fixture.backend.asked == 1)
        fixture.backend.image = "image-2"
        await fixture.run_monitor()
        fixture.backend.may_start.set()
        await fixture.until(idle=1, ending=0, started=2)


async def test_idle_sandboxes_are_kept_if_the_image_fingerprint_cannot_be_read() -> None:
    async with fake_pool(WARM) as fixture:
        await fixture.until(idle=2)
        fixture.backend.refusal = "the engine is down"
        await fixture.run_monitor(2)
        assert (fixture.stats.idle, fixture.stats.replaced) == (2, 0)


async def test_refilling_backs_off_after_failed_starts_and_recovers() -> None:
    backend = FakeSandboxBackend()
    backend.refusal = "the engine is down"
    async with fake_pool(WARM, backend) as fixture:
        await fixture.until(failed=1)

        def rests() -> list[float]:
            return [seconds for seconds in fixture.clock.asked if seconds != PING_INTERVAL_S]

        for start_backoff_s in (1, 2, 4, 8, 16, 30, 30):
            await until(lambda: len(rests()) == fixture.stats.failed)
            assert rests()[-1] == start_backoff_s
            fixture.clock.advance(start_backoff_s)
            await fixture.until(failed=len(rests()) + 1)
        backend.refusal = None
        await until(lambda: len(rests()) == fixture.stats.failed)
        fixture.clock.advance(rests()[-1])
        await fixture.until(idle=2)


async def test_successful_start_ends_the_backoff() -> None:
    backend = FakeSandboxBackend()
    backend.refusal = "the engine is down"
    async with fake_pool(WARM, backend) as fixture:
        await fixture.until(failed=1)
        backend.refusal = None
        async with fixture.pool.lease(STRICT) as lease:
            await lease.sandbox()
            await fixture.until(idle=2)
        assert fixture.stats.failed == 1


async def test_refilling_backs_off_for_as_long_as_a_start_takes() -> None:
    async with fake_pool(WARM) as fixture:
        await fixture.until(idle=2)
        fixture.backend.may_start.clear()
        async with fixture.pool.lease(SMALL) as lease, fixture.pool.lease(SMALL) as other:
            await lease.sandbox()
            await other.sandbox()
            await fixture.until(starting=1)
            fixture.clock.advance(0.25)
            fixture.backend.may_start.set()
            await fixture.until(idle=1)
            await until(lambda: 0.25 in fixture.clock.alarms)
            assert fixture.stats.starting == 0
            fixture.clock.advance(0.25)
            await fixture.until(idle=2)


async def test_closing_pool_ends_idle_sandboxes_and_waits_for_leased_ones() -> None:
    async with fake_pool(WARM) as fixture:
        async with fixture.pool.lease(SMALL) as lease:
            sandbox = await lease.sandbox()
            await fixture.until(idle=2)
            closing = asyncio.create_task(fixture.pool.aclose())
            await fixture.until(idle=0, starting=0, ending=0)
            assert not closing.done()
            before = fixture.backend.guests[0].pings
            await fixture.run_monitor()
            await until(lambda: fixture.backend.guests[0].pings == before + 1)
            assert (await sandbox.exec("true", timeout_s=5)).exit_code == 0
        await closing
        assert not fixture.backend.alive


async def test_closed_pool_refuses_leases() -> None:
    async with fake_pool(WARM) as fixture:
        await fixture.pool.aclose()
        with pytest.raises(NoFreeSandboxError, match="the pool is closed"):
            async with fixture.pool.lease(SMALL):
                pass
        assert not fixture.backend.alive


async def test_closing_pool_fails_its_waiters() -> None:
    async with fake_pool(PoolSettings(min_ready=0)) as fixture:
        fixture.backend.may_start.clear()
        async with fixture.pool.lease(SMALL) as lease:
            await fixture.until(starting=1)
            closing = asyncio.create_task(fixture.pool.aclose())
            with pytest.raises(NoFreeSandboxError, match="the pool is closed"):
                await lease.sandbox()
        await closing


class BackendWithLeftovers(FakeSandboxBackend):
    """A fake backend whose sweeps find leftovers or fail."""

    def __init__(self) -> None:
        super().__init__()
        self.sweeps = 0

    async def sweep(self) -> int:
        self.sweeps += 1
        if self.sweeps == 2:
            raise FileNotFoundError("somebody removed it first")
        return 1


async def test_leftover_sandboxes_are_swept_at_start_and_every_minute_despite_errors() -> None:
    backend, clock = BackendWithLeftovers(), ManualClock()
    sweeping = asyncio.create_task(sweep_forever(backend, clock))
    with anyio.fail_after(10):
        for _ in range(3):
            await until(lambda: clock.alarms == [SWEEP_S])
            clock.advance(SWEEP_S)
        await until(lambda: backend.sweeps == 4)
    assert clock.asked[:3] == [SWEEP_S] * 3
    sweeping.cancel()
    await asyncio.wait([sweeping])
