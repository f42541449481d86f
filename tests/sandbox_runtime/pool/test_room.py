"""How many sandboxes there are at one time, with how much memory, and who goes for whom."""

from dataclasses import replace

import pytest

from policies.pool import PoolSettings
from sandbox_runtime.errors import SandboxStartError
from tests.fakes.waiting import until
from tests.sandbox_runtime.pool.lender import Lender
from tests.sandbox_runtime.pool.stage import SMALL, puppets

STRICT = replace(SMALL, level="strict")
TWO = PoolSettings(idle=0, max_total=2)


async def test_no_more_sandboxes_than_allowed_are_there_at_one_time() -> None:
    async with puppets(TWO) as stage:
        lender = Lender(stage)
        for name in "abcde":
            lender.ask(name)
        await stage.until(lent=2, waiting=3)
        for name in "abcde":
            lender.end(name)
        await until(lambda: len(lender.served) == 5)
        await lender.end_all()
        assert stage.backend.most_alive == 2


async def test_one_that_is_still_ending_counts() -> None:
    async with puppets(PoolSettings(idle=0, max_total=1)) as stage:
        lender = Lender(stage)
        lender.ask("a")
        await lender.until_served("a")
        stage.backend.may_end.clear()
        lender.end("a")
        lender.ask("b")
        await stage.until(ending=1, waiting=1, starting=0)
        stage.backend.may_end.set()
        await lender.until_served("a", "b")
        await lender.end_all()


async def test_no_more_start_at_a_time_than_helps() -> None:
    async with puppets(PoolSettings(idle=0)) as stage:
        stage.backend.may_start.clear()
        lender = Lender(stage)
        for name in "abcdefgh":
            lender.ask(name)
        await stage.until(starting=4, waiting=8)
        stage.backend.may_start.set()
        await until(lambda: len(lender.served) == 8)
        assert stage.backend.most_starting == 4
        await lender.end_all()


async def test_where_a_miss_waits_no_more_start_at_a_time_than_the_processor_bears() -> None:
    async with puppets(PoolSettings(idle=1, on_miss="wait")) as stage:
        stage.backend.may_start.clear()
        lender = Lender(stage)
        for name in "abcd":
            lender.ask(name)
        await stage.until(starting=1, waiting=4)
        stage.backend.may_start.set()
        await lender.until_served(*"abcd")
        assert stage.backend.most_starting == 1
        await lender.end_all()


async def test_the_memory_of_all_together_stays_within_its_budget() -> None:
    settings = PoolSettings(idle=0, memory_budget_mib=500)
    async with puppets(settings) as stage:
        lender = Lender(stage)
        lender.ask("a", replace(SMALL, memory_mib=400))
        lender.ask("b", replace(SMALL, memory_mib=200))
        lender.ask("c", replace(SMALL, memory_mib=100))
        await stage.until(lent=1, waiting=2)
        assert lender.served == ["a"], "c has room, but nobody overtakes"
        lender.end("a")
        await until(lambda: sorted(lender.served) == ["a", "b", "c"])
        await lender.end_all()


async def test_a_warm_sandbox_is_given_more_memory_only_within_the_budget() -> None:
    settings = PoolSettings(idle=1, memory_budget_mib=500)
    async with puppets(settings) as stage:
        await stage.until(idle=1)
        lender = Lender(stage)
        lender.ask("a", replace(SMALL, memory_mib=350))
        await lender.until_served("a")
        await stage.until(idle=1)
        lender.ask("b", replace(SMALL, memory_mib=200))
        await stage.until(waiting=1, idle=1)
        lender.end("a")
        await lender.until_served("a", "b")
        await lender.end_all()
        assert stage.stats.hits == 1


async def test_memory_that_a_warm_sandbox_does_not_need_when_lent_is_there_for_others() -> None:
    async with puppets(PoolSettings(idle=1, memory_budget_mib=150)) as stage:
        await stage.until(idle=1)
        async with stage.pool.lease(replace(SMALL, memory_mib=50)) as lease:
            await lease.sandbox()
            async with stage.pool.lease(SMALL) as other:
                await other.sandbox()


async def test_a_sandbox_that_never_fits_is_not_waited_for() -> None:
    async with puppets(PoolSettings(idle=0, memory_budget_mib=500)) as stage:
        with pytest.raises(SandboxStartError, match="600 MiB is beyond the budget of 500 MiB"):
            async with stage.pool.lease(replace(SMALL, memory_mib=600)):
                pass


async def test_a_warm_sandbox_that_nobody_wants_makes_room_for_another_kind() -> None:
    async with puppets(PoolSettings(idle=2, max_total=2)) as stage:
        await stage.until(idle=2)
        async with stage.pool.lease(STRICT) as lease:
            await lease.sandbox()
            assert (stage.stats.idle, stage.stats.lent) == (1, 1)
        await stage.until(idle=2)
        assert stage.backend.most_alive == 2


async def test_no_more_warm_sandboxes_make_room_than_must_however_long_they_take() -> None:
    async with puppets(PoolSettings(idle=3, max_total=3)) as stage:
        await stage.until(idle=3)
        stage.backend.may_end.clear()
        async with stage.pool.lease(STRICT) as lease:
            await stage.beat()
            assert (stage.stats.idle, stage.stats.ending) == (2, 1)
            stage.backend.may_end.set()
            await lease.sandbox()


async def test_nothing_is_made_ready_while_somebody_waits_for_room() -> None:
    async with puppets(PoolSettings(idle=1, memory_budget_mib=500)) as stage:
        await stage.until(idle=1)
        lender = Lender(stage)
        lender.ask("a", replace(STRICT, memory_mib=350))
        await lender.until_served("a")
        lender.ask("b", replace(STRICT, memory_mib=200))
        await stage.until(waiting=1, idle=1)
        stage.backend.guests[0].die()
        await stage.beat()
        await stage.until(replaced=1, ending=0)
        assert (stage.stats.starting, stage.stats.idle) == (0, 0)
        lender.end("a")
        await lender.until_served("a", "b")
        await stage.until(idle=1)
        await lender.end_all()


async def test_a_warm_sandbox_given_back_at_once_counts_for_what_it_was_made_for() -> None:
    async with puppets(PoolSettings(idle=1, memory_budget_mib=500)) as stage:
        await stage.until(idle=1)
        async with stage.pool.lease(replace(SMALL, memory_mib=450)):
            pass
        await stage.until(idle=1, lent=0)
        assert len(stage.backend.guests) == 1, "nobody has had it"
        async with stage.pool.lease(replace(STRICT, memory_mib=400)) as lease:
            await lease.sandbox()
            assert stage.stats.idle == 1
