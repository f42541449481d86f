"""Who gets a sandbox first, who waits, and who is told to come again."""

from dataclasses import replace

import pytest

from policies.pool import PoolSettings
from sandbox_runtime.errors import SandboxStartError, SandboxUnavailableError
from tests.fakes.puppet_backend import PuppetBackend
from tests.fakes.waiting import until
from tests.sandbox_runtime.pool.lender import Lender
from tests.sandbox_runtime.pool.stage import SMALL, puppets


async def test_who_asked_first_is_served_first() -> None:
    async with puppets(PoolSettings(idle=0, max_total=1)) as stage:
        lender = Lender(stage)
        for name in "abcd":
            lender.ask(name)
        for number in range(1, 5):
            await lender.until_served(*"abcd"[:number])
            lender.end("abcd"[number - 1])
        await lender.end_all()


async def test_who_leaves_the_queue_makes_room_in_it() -> None:
    async with puppets(PoolSettings(idle=0, max_total=1)) as stage:
        lender = Lender(stage)
        for name in "abcd":
            lender.ask(name)
        await stage.until(lent=1, waiting=3)
        lender.cancel("b")
        await stage.until(waiting=2)
        lender.end("a")
        await lender.until_served("a", "c")
        await lender.end_all()


async def test_who_needed_too_much_and_leaves_lets_those_behind_go_on() -> None:
    async with puppets(PoolSettings(idle=0, memory_budget_mib=500)) as stage:
        lender = Lender(stage)
        lender.ask("a", replace(SMALL, memory_mib=400))
        await lender.until_served("a")
        lender.ask("b", replace(SMALL, memory_mib=200))
        lender.ask("c", SMALL)
        await stage.until(waiting=2)
        lender.cancel("b")
        await lender.until_served("a", "c")
        await lender.end_all()


async def test_who_was_given_a_dead_one_is_served_before_those_who_came_later() -> None:
    settings = PoolSettings(idle=1, max_total=1)
    async with puppets(settings, idle_patience_s=0.05) as stage:
        await stage.until(idle=1)
        stage.backend.guests[0].answers = False
        lender = Lender(stage)
        lender.ask("a")
        lender.ask("b")
        await lender.until_served("a")
        await lender.end_all()


async def test_what_was_started_for_one_who_left_goes_to_the_next() -> None:
    async with puppets(PoolSettings(idle=0, max_total=1)) as stage:
        stage.backend.may_start.clear()
        lender = Lender(stage)
        lender.ask("a")
        lender.ask("b")
        await stage.until(starting=1, waiting=2)
        lender.cancel("a")
        await stage.until(waiting=1)
        stage.backend.may_start.set()
        await lender.until_served("b")
        assert stage.backend.asked == 1
        await lender.end_all()


async def test_what_was_started_for_one_who_left_is_kept_where_one_is_missing() -> None:
    async with puppets(PoolSettings(idle=1, on_miss="wait")) as stage:
        stage.backend.may_start.clear()
        lender = Lender(stage)
        lender.ask("a")
        await stage.until(starting=1, waiting=1)
        lender.cancel("a")
        await stage.until(waiting=0)
        stage.backend.may_start.set()
        await stage.until(idle=1)
        assert stage.backend.asked == 1


async def test_a_miss_starts_one_at_once_beside_those_that_start_already() -> None:
    async with puppets(PoolSettings(idle=1)) as stage:
        stage.backend.may_start.clear()
        lender = Lender(stage)
        for name in "abc":
            lender.ask(name)
        await stage.until(starting=3)
        stage.backend.may_start.set()
        await until(lambda: len(lender.served) == 3)
        await lender.end_all()


async def test_where_a_miss_fails_the_client_is_told_when_to_come_again() -> None:
    async with puppets(PoolSettings(idle=1, on_miss="fail")) as stage:
        await stage.until(idle=1)
        stage.backend.may_start.clear()
        async with stage.pool.lease(SMALL) as lease:
            await lease.sandbox()
            with pytest.raises(SandboxUnavailableError, match="no sandbox is ready") as refusal:
                async with stage.pool.lease(SMALL):
                    pass
        assert refusal.value.retry_after_s >= 1
        assert (stage.stats.hits, stage.stats.misses, stage.stats.refused) == (1, 1, 1)


async def test_where_a_miss_fails_a_dead_warm_sandbox_is_a_miss() -> None:
    async with puppets(PoolSettings(idle=1, on_miss="fail")) as stage:
        await stage.until(idle=1)
        stage.backend.may_start.clear()
        stage.backend.guests[0].die()
        async with stage.pool.lease(SMALL) as lease:
            with pytest.raises(SandboxUnavailableError):
                await lease.sandbox()


async def test_a_full_queue_refuses_the_next_one() -> None:
    async with puppets(PoolSettings(idle=0, max_total=1, max_waiting=1)) as stage:
        lender = Lender(stage)
        for name in "abc":
            lender.ask(name)
        await lender.until_served("a")
        assert lender.refused == {"c": "1 requests wait for a sandbox already"}
        lender.end("a")
        await lender.until_served("a", "b")
        await lender.end_all()


async def test_who_has_one_coming_takes_no_place_in_the_queue() -> None:
    async with puppets(PoolSettings(idle=0, max_waiting=0)) as stage:
        stage.backend.may_start.clear()
        lender = Lender(stage)
        for name in "abc":
            lender.ask(name)
        await stage.until(starting=3, refused=0)
        stage.backend.may_start.set()
        await until(lambda: len(lender.served) == 3)
        await lender.end_all()


async def test_who_has_waited_too_long_is_told_to_come_again_and_takes_nobodys_turn() -> None:
    async with puppets(PoolSettings(idle=0, max_total=1, wait_s=0.05)) as stage:
        lender = Lender(stage)
        lender.ask("a")
        await lender.until_served("a")
        async with stage.pool.lease(SMALL) as lease:
            with pytest.raises(SandboxUnavailableError, match=r"no sandbox came free in 0\.05 s"):
                await lease.sandbox()
            assert (stage.stats.refused, stage.stats.waiting) == (1, 0)
            lender.ask("b")
            lender.end("a")
            await lender.until_served("a", "b")
        await lender.end_all()


async def test_a_start_that_fails_is_told_to_who_waits_for_it() -> None:
    async with puppets(PoolSettings(idle=0)) as stage:
        stage.backend.refusal = "the engine is down"
        async with stage.pool.lease(SMALL) as lease:
            with pytest.raises(SandboxStartError, match="the engine is down"):
                await lease.sandbox()
        stage.backend.refusal = None
        async with stage.pool.lease(SMALL) as lease:
            await lease.sandbox()
        assert (stage.stats.failed, stage.stats.started) == (1, 1)


async def test_everybody_in_the_queue_of_a_backend_that_is_down_hears_of_it() -> None:
    async with puppets(PoolSettings(idle=0, max_total=1)) as stage:
        stage.backend.may_start.clear()
        lender = Lender(stage)
        for name in "abc":
            lender.ask(name)
        await stage.until(starting=1, waiting=3)
        stage.backend.refusal = "the engine is down"
        stage.backend.may_start.set()
        await until(lambda: len(lender.refused) == 3)
        assert set(lender.refused.values()) == {"the engine is down"}


async def test_a_fault_of_the_backend_reaches_the_lease_and_not_the_pool() -> None:
    backend = PuppetBackend()
    async with puppets(PoolSettings(idle=0), backend) as stage:

        def stumble() -> None:
            raise ZeroDivisionError

        backend.on_start = stumble
        async with stage.pool.lease(SMALL) as lease:
            with pytest.raises(ZeroDivisionError):
                await lease.sandbox()
        backend.on_start = lambda: None
        async with stage.pool.lease(SMALL) as lease:
            await lease.sandbox()
