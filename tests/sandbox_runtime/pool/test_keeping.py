"""What is kept ready stays good, heals after failures, and ends in order."""

import asyncio
from dataclasses import replace

import anyio
import pytest

from policies.pool import PoolSettings
from sandbox_runtime.backends.base import SWEEP_S, sweep_forever
from sandbox_runtime.errors import SandboxUnavailableError
from sandbox_runtime.pool.lifecycle import BEAT_S
from tests.fakes.hand_clock import HandClock
from tests.fakes.puppet_backend import PuppetBackend
from tests.fakes.waiting import until
from tests.sandbox_runtime.pool.stage import SMALL, puppets

WARM = PoolSettings(idle=2)
STRICT = replace(SMALL, level="strict")


async def test_every_living_sandbox_lent_or_not_is_pinged_at_every_beat() -> None:
    async with puppets(WARM) as stage, stage.pool.lease(SMALL) as lease:
        await lease.sandbox()
        await stage.until(idle=2, lent=1)
        before = [guest.pings for guest in stage.backend.guests]
        await stage.beat(3)
        await until(
            lambda: [guest.pings for guest in stage.backend.guests] == [n + 3 for n in before]
        )


async def test_one_that_does_not_answer_holds_up_nobodys_ping() -> None:
    async with puppets(WARM) as stage, stage.pool.lease(SMALL) as lease:
        await lease.sandbox()
        await stage.until(idle=2, lent=1)
        stuck, *others = stage.backend.guests
        stuck.answers = False
        before = [guest.pings for guest in others]
        await stage.beat(3)
        await until(lambda: [guest.pings for guest in others] == [n + 3 for n in before])
        assert stage.stats.lent == 1


@pytest.mark.parametrize("end", ["it died", "it hangs"])
async def test_a_warm_sandbox_found_dead_is_replaced(end: str) -> None:
    async with puppets(WARM, idle_patience_s=0.01) as stage:
        await stage.until(idle=2)
        bad = stage.backend.guests[0]
        if end == "it died":
            bad.die()
        bad.answers = False
        await stage.beat()
        await stage.until(idle=2, replaced=1, started=3)
        assert bad not in stage.backend.alive


async def test_one_at_work_may_be_slower_to_answer_than_an_idle_one() -> None:
    async with puppets(WARM, idle_patience_s=0.05) as stage, stage.pool.lease(SMALL) as lease:
        sandbox = await lease.sandbox()
        await stage.until(idle=2, lent=1)
        at_work, idle, _ = stage.backend.guests
        at_work.answers = idle.answers = False
        await stage.beat()
        await stage.until(idle=2, replaced=1)
        assert sandbox.lost is None


async def test_a_sandbox_that_dies_while_lent_is_its_users_affair() -> None:
    async with puppets(WARM) as stage, stage.pool.lease(SMALL) as lease:
        await lease.sandbox()
        await stage.until(idle=2, lent=1)
        stage.backend.guests[0].die()
        await stage.beat()
        assert (stage.stats.lent, stage.stats.replaced) == (1, 0)


async def test_warm_sandboxes_that_are_too_old_are_replaced_one_after_the_other() -> None:
    async with puppets(PoolSettings(idle=2, ttl_s=30)) as stage:
        await stage.until(idle=2)
        first = list(stage.backend.guests)
        await stage.beat(3)
        assert stage.stats.replaced == 0
        stage.backend.may_start.clear()
        await stage.beat()
        await stage.until(idle=1, starting=1, ending=0, replaced=1)
        stage.backend.may_start.set()
        await stage.until(idle=2)
        await stage.beat()
        await stage.until(idle=2, ending=0, replaced=2)
        assert not stage.backend.alive.intersection(first)


async def test_a_new_image_drops_the_warm_sandboxes_of_the_old_one() -> None:
    async with puppets(WARM) as stage:
        await stage.until(idle=2)
        old = list(stage.backend.guests)
        stage.backend.image = "image-2"
        await stage.beat()
        await stage.until(idle=2, ending=0, replaced=2)
        assert not stage.backend.alive.intersection(old)


async def test_a_sandbox_of_the_old_image_that_starts_while_a_new_one_comes_is_not_kept() -> None:
    async with puppets(PoolSettings(idle=1)) as stage:
        stage.backend.may_start.clear()
        await stage.until(starting=1)
        await until(lambda: stage.backend.asked == 1)
        stage.backend.image = "image-2"
        await stage.beat()
        stage.backend.may_start.set()
        await stage.until(idle=1, ending=0, started=2)


async def test_an_engine_that_cannot_say_what_it_has_costs_no_warm_sandbox() -> None:
    async with puppets(WARM) as stage:
        await stage.until(idle=2)
        stage.backend.refusal = "the engine is down"
        await stage.beat(2)
        assert (stage.stats.idle, stage.stats.replaced) == (2, 0)


async def test_after_failed_starts_filling_rests_longer_each_time_and_then_heals() -> None:
    backend = PuppetBackend()
    backend.refusal = "the engine is down"
    async with puppets(WARM, backend) as stage:
        await stage.until(failed=1)

        def rests() -> list[float]:
            return [seconds for seconds in stage.clock.asked if seconds != BEAT_S]

        for rest_s in (1, 2, 4, 8, 16, 30, 30):
            await until(lambda: len(rests()) == stage.stats.failed)
            assert rests()[-1] == rest_s
            stage.clock.advance(rest_s)
            await stage.until(failed=len(rests()) + 1)
        backend.refusal = None
        await until(lambda: len(rests()) == stage.stats.failed)
        stage.clock.advance(rests()[-1])
        await stage.until(idle=2)


async def test_a_start_that_succeeds_ends_the_rest() -> None:
    backend = PuppetBackend()
    backend.refusal = "the engine is down"
    async with puppets(WARM, backend) as stage:
        await stage.until(failed=1)
        backend.refusal = None
        async with stage.pool.lease(STRICT) as lease:
            await lease.sandbox()
            await stage.until(idle=2)
        assert stage.stats.failed == 1


async def test_making_them_ready_leaves_half_the_time_to_commands() -> None:
    async with puppets(WARM) as stage:
        await stage.until(idle=2)
        stage.backend.may_start.clear()
        async with stage.pool.lease(SMALL) as lease, stage.pool.lease(SMALL) as other:
            await lease.sandbox()
            await other.sandbox()
            await stage.until(starting=1)
            stage.clock.advance(0.25)
            stage.backend.may_start.set()
            await stage.until(idle=1)
            await until(lambda: 0.25 in stage.clock.alarms)
            assert stage.stats.starting == 0
            stage.clock.advance(0.25)
            await stage.until(idle=2)


async def test_closing_ends_what_nobody_has_and_waits_for_the_rest() -> None:
    async with puppets(WARM) as stage:
        async with stage.pool.lease(SMALL) as lease:
            sandbox = await lease.sandbox()
            await stage.until(idle=2)
            closing = asyncio.create_task(stage.pool.aclose())
            await stage.until(idle=0, starting=0, ending=0)
            assert not closing.done()
            before = stage.backend.guests[0].pings
            await stage.beat()
            await until(lambda: stage.backend.guests[0].pings == before + 1)
            assert (await sandbox.exec("true", timeout_s=5)).exit_code == 0
        await closing
        assert not stage.backend.alive


async def test_a_closed_pool_lends_nothing_and_says_so() -> None:
    async with puppets(WARM) as stage:
        await stage.pool.aclose()
        with pytest.raises(SandboxUnavailableError, match="the pool is closed"):
            async with stage.pool.lease(SMALL):
                pass
        assert not stage.backend.alive


async def test_who_waits_when_the_pool_closes_is_told() -> None:
    async with puppets(PoolSettings(idle=0)) as stage:
        stage.backend.may_start.clear()
        async with stage.pool.lease(SMALL) as lease:
            await stage.until(starting=1)
            closing = asyncio.create_task(stage.pool.aclose())
            with pytest.raises(SandboxUnavailableError, match="the pool is closed"):
                await lease.sandbox()
        await closing


class Littered(PuppetBackend):
    """Finds leftovers, or the way blocked."""

    def __init__(self) -> None:
        super().__init__()
        self.sweeps = 0

    async def sweep(self) -> int:
        self.sweeps += 1
        if self.sweeps == 2:
            raise FileNotFoundError("somebody removed it first")
        return 1


async def test_leftovers_are_swept_at_start_and_every_minute_whatever_happens() -> None:
    backend, clock = Littered(), HandClock()
    sweeping = asyncio.create_task(sweep_forever(backend, clock))
    with anyio.fail_after(10):
        for _ in range(3):
            await until(lambda: clock.alarms == [SWEEP_S])
            clock.advance(SWEEP_S)
        await until(lambda: backend.sweeps == 4)
    assert clock.asked[:3] == [SWEEP_S] * 3
    sweeping.cancel()
    await asyncio.wait([sweeping])
