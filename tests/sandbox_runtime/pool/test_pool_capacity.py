"""Limits on the number and memory of sandboxes, and eviction of idle ones."""

from dataclasses import replace

import pytest

from policies.pool import PoolSettings
from sandbox_runtime.errors import NoFreeSandboxError, SandboxStartError
from sandbox_runtime.pool.pool import INITIAL_LEASE_S
from tests.fakes.sandbox_backend import FakeSandboxBackend
from tests.fakes.waiting import until
from tests.sandbox_runtime.pool.leaseholder import Leaseholder
from tests.sandbox_runtime.pool.pool_fixture import SMALL, fake_pool

STRICT = replace(SMALL, level="strict")
TWO = PoolSettings(min_ready=0, max_sandboxes=2)


async def test_number_of_concurrent_sandboxes_is_limited() -> None:
    async with fake_pool(TWO) as fixture:
        holder = Leaseholder(fixture)
        for name in "abcde":
            holder.request(name)
        await fixture.until(leased=2, waiting=3)
        for name in "abcde":
            holder.end(name)
        await until(lambda: len(holder.served) == 5)
        await holder.end_all()
        assert fixture.backend.most_alive == 2


async def test_ending_sandbox_counts_towards_the_limit() -> None:
    async with fake_pool(PoolSettings(min_ready=0, max_sandboxes=1)) as fixture:
        holder = Leaseholder(fixture)
        holder.request("a")
        await holder.until_served("a")
        fixture.backend.may_end.clear()
        holder.end("a")
        holder.request("b")
        await fixture.until(ending=1, waiting=1, starting=0)
        fixture.backend.may_end.set()
        await holder.until_served("a", "b")
        await holder.end_all()


@pytest.mark.parametrize(("setting", "limit"), [(None, 4), (6, 6)])
async def test_parallel_starts_are_limited_by_the_backend_or_the_settings(
    setting: int | None, limit: int
) -> None:
    settings = PoolSettings(min_ready=0, max_parallel_starts=setting)
    async with fake_pool(settings) as fixture:
        fixture.backend.may_start.clear()
        holder = Leaseholder(fixture)
        for name in "abcdefgh":
            holder.request(name)
        await fixture.until(starting=limit, waiting=8)
        fixture.backend.may_start.set()
        await until(lambda: len(holder.served) == 8)
        assert fixture.backend.most_starting == limit
        await holder.end_all()


@pytest.mark.parametrize(("parallel", "limit"), [(4, 1), (16, 4)])
async def test_pool_is_refilled_with_at_most_a_quarter_of_the_parallel_starts(
    parallel: int, limit: int
) -> None:
    backend = FakeSandboxBackend()
    backend.parallel_starts = parallel
    backend.may_start.clear()
    async with fake_pool(PoolSettings(min_ready=8), backend) as fixture:
        await until(lambda: backend.starting == limit)
        backend.may_start.set()
        await fixture.until(idle=8)
        assert backend.most_starting == limit


async def test_waiters_get_at_most_a_quarter_of_the_parallel_starts_if_on_miss_is_wait() -> None:
    async with fake_pool(PoolSettings(min_ready=1, on_miss="wait")) as fixture:
        fixture.backend.may_start.clear()
        holder = Leaseholder(fixture)
        for name in "abcd":
            holder.request(name)
        await fixture.until(starting=1, waiting=4)
        fixture.backend.may_start.set()
        await holder.until_served(*"abcd")
        assert fixture.backend.most_starting == 1
        await holder.end_all()


async def test_total_memory_of_sandboxes_stays_within_the_budget() -> None:
    settings = PoolSettings(min_ready=0, memory_budget_mib=500)
    async with fake_pool(settings) as fixture:
        holder = Leaseholder(fixture)
        holder.request("a", replace(SMALL, memory_mib=400))
        holder.request("b", replace(SMALL, memory_mib=200))
        holder.request("c", replace(SMALL, memory_mib=100))
        await fixture.until(leased=1, waiting=2)
        await holder.until_served("a")  # c has room, but nobody overtakes
        holder.end("a")
        await until(lambda: sorted(holder.served) == ["a", "b", "c"])
        await holder.end_all()


async def test_idle_sandbox_gets_more_memory_only_within_the_budget() -> None:
    settings = PoolSettings(min_ready=1, memory_budget_mib=500)
    async with fake_pool(settings) as fixture:
        await fixture.until(idle=1)
        holder = Leaseholder(fixture)
        holder.request("a", replace(SMALL, memory_mib=350))
        await holder.until_served("a")
        await fixture.until(idle=1)
        holder.request("b", replace(SMALL, memory_mib=200))
        await fixture.until(waiting=1, idle=1)
        holder.end("a")
        await holder.until_served("a", "b")
        await holder.end_all()
        assert fixture.stats.hits == 1


async def test_lease_with_less_memory_than_the_idle_sandbox_leaves_the_rest_to_others() -> None:
    async with fake_pool(PoolSettings(min_ready=1, memory_budget_mib=150)) as fixture:
        await fixture.until(idle=1)
        async with fixture.pool.lease(replace(SMALL, memory_mib=50)) as lease:
            await lease.sandbox()
            async with fixture.pool.lease(SMALL) as other:
                await other.sandbox()


async def test_sandbox_larger_than_the_budget_is_refused_at_once() -> None:
    async with fake_pool(PoolSettings(min_ready=0, memory_budget_mib=500)) as fixture:
        with pytest.raises(SandboxStartError, match="600 MiB is beyond the budget of 500 MiB"):
            async with fixture.pool.lease(replace(SMALL, memory_mib=600)):
                pass


async def test_retry_after_is_the_expected_lease_time_if_too_little_memory_is_left() -> None:
    settings = PoolSettings(min_ready=0, memory_budget_mib=500, queue_size=0)
    large, medium = (replace(SMALL, memory_mib=memory_mib) for memory_mib in (400, 200))
    async with fake_pool(settings) as fixture, fixture.pool.lease(large) as lease:
        await lease.sandbox()
        with pytest.raises(NoFreeSandboxError) as refusal:
            async with fixture.pool.lease(medium):
                pass
    assert refusal.value.retry_after_s == INITIAL_LEASE_S


async def test_idle_sandbox_is_evicted_to_make_room_for_a_lease_with_another_isolation() -> None:
    async with fake_pool(PoolSettings(min_ready=2, max_sandboxes=2)) as fixture:
        await fixture.until(idle=2)
        async with fixture.pool.lease(STRICT) as lease:
            await lease.sandbox()
            assert (fixture.stats.idle, fixture.stats.leased) == (1, 1)
        await fixture.until(idle=2)
        assert fixture.backend.most_alive == 2


async def test_only_as_many_idle_sandboxes_are_evicted_as_needed() -> None:
    async with fake_pool(PoolSettings(min_ready=3, max_sandboxes=3)) as fixture:
        await fixture.until(idle=3)
        fixture.backend.may_end.clear()
        async with fixture.pool.lease(STRICT) as lease:
            await fixture.run_monitor()
            assert (fixture.stats.idle, fixture.stats.ending) == (2, 1)
            fixture.backend.may_end.set()
            await lease.sandbox()


async def test_pool_is_not_refilled_while_a_waiter_needs_capacity() -> None:
    async with fake_pool(PoolSettings(min_ready=1, memory_budget_mib=500)) as fixture:
        await fixture.until(idle=1)
        holder = Leaseholder(fixture)
        holder.request("a", replace(STRICT, memory_mib=350))
        await holder.until_served("a")
        holder.request("b", replace(STRICT, memory_mib=200))
        await fixture.until(waiting=1, idle=1)
        fixture.backend.guests[0].die()
        await fixture.run_monitor()
        await fixture.until(replaced=1, ending=0)
        assert (fixture.stats.starting, fixture.stats.idle) == (0, 0)
        holder.end("a")
        await holder.until_served("a", "b")
        await fixture.until(idle=1)
        await holder.end_all()


async def test_sandbox_returned_unused_counts_with_its_original_memory_in_the_budget() -> None:
    async with fake_pool(PoolSettings(min_ready=1, memory_budget_mib=500)) as fixture:
        await fixture.until(idle=1)
        async with fixture.pool.lease(replace(SMALL, memory_mib=450)):
            pass
        await fixture.until(idle=1, leased=0)
        assert len(fixture.backend.guests) == 1, "nobody has had it"
        async with fixture.pool.lease(replace(STRICT, memory_mib=400)) as lease:
            await lease.sandbox()
            assert fixture.stats.idle == 1
