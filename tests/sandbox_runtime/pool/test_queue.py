"""The order of the queue, its length, and refusals with a retry time."""

from dataclasses import replace

import pytest

from policies.pool import PoolSettings
from sandbox_runtime.errors import NoFreeSandboxError, SandboxStartError
from tests.fakes.sandbox_backend import FakeSandboxBackend
from tests.fakes.waiting import until
from tests.sandbox_runtime.pool.leaseholder import Leaseholder
from tests.sandbox_runtime.pool.pool_fixture import SMALL, fake_pool


async def test_waiters_are_served_in_order() -> None:
    async with fake_pool(PoolSettings(min_ready=0, max_sandboxes=1)) as fixture:
        holder = Leaseholder(fixture)
        for name in "abcd":
            holder.request(name)
        for number in range(1, 5):
            await holder.until_served(*"abcd"[:number])
            holder.end("abcd"[number - 1])
        await holder.end_all()


async def test_owners_with_waiters_take_turns() -> None:
    async with fake_pool(PoolSettings(min_ready=0, max_sandboxes=1)) as fixture:
        holder = Leaseholder(fixture)
        waiting = ["a1", "a2", "a3", "a4", "b1", "b2", "c1"]
        for name in waiting:
            holder.request(name, owner=name[0])
        await fixture.until(leased=1, waiting=6)
        order = ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]
        for number in range(1, 8):
            await holder.until_served(*order[:number])
            holder.end(order[number - 1])
        await holder.end_all()


async def test_owner_that_returns_to_the_queue_waits_for_the_other_owners() -> None:
    async with fake_pool(PoolSettings(min_ready=0, max_sandboxes=1)) as fixture:
        holder = Leaseholder(fixture)
        for name in ("a1", "b1", "c1"):
            holder.request(name, owner=name[0])
        await holder.until_served("a1")
        holder.end("a1")
        await holder.until_served("a1", "b1")
        holder.request("b2", owner="b")
        await fixture.until(waiting=2)
        holder.end("b1")
        await holder.until_served("a1", "b1", "c1")
        holder.end("c1")
        await holder.until_served("a1", "b1", "c1", "b2")
        await holder.end_all()


async def test_waiters_of_one_owner_do_not_delay_another_owner_in_a_large_queue() -> None:
    """A key's single run waits for one run of each other key, however many these have queued."""
    async with fake_pool(PoolSettings(min_ready=0, max_sandboxes=1, queue_size=1000)) as fixture:
        holder = Leaseholder(fixture)
        for number in range(501):
            holder.request(f"a{number}", owner="a")
        await fixture.until(leased=1, waiting=500)
        holder.request("b", owner="b")
        await fixture.until(waiting=501)
        holder.end("a0")
        await holder.until_served("a0", "a1")
        holder.end("a1")
        await holder.until_served("a0", "a1", "b")
        for number in range(2, 501):
            holder.cancel(f"a{number}")
        await holder.end_all()


async def test_full_queue_refuses_the_newest_waiter_of_the_owner_with_the_most_waiters() -> None:
    async with fake_pool(PoolSettings(min_ready=0, max_sandboxes=1, queue_size=3)) as fixture:
        holder = Leaseholder(fixture)
        for name in ("a1", "a2", "a3", "a4"):
            holder.request(name, owner="a")
        await fixture.until(leased=1, waiting=3)
        holder.request("b1", owner="b")
        await until(lambda: "a4" in holder.refused)
        holder.request("a5", owner="a")
        await until(lambda: "a5" in holder.refused)
        holder.request("b2", owner="b")
        await until(lambda: "b2" in holder.refused)
        assert holder.refused == dict.fromkeys(
            ("a4", "a5", "b2"), "3 requests wait for a sandbox already"
        )
        for served in (["a1"], ["a1", "a2"], ["a1", "a2", "b1"], ["a1", "a2", "b1", "a3"]):
            await holder.until_served(*served)
            holder.end(served[-1])
        await holder.end_all()


async def test_cancelled_waiter_frees_its_place_in_the_queue() -> None:
    async with fake_pool(PoolSettings(min_ready=0, max_sandboxes=1)) as fixture:
        holder = Leaseholder(fixture)
        for name in "abcd":
            holder.request(name)
        await fixture.until(leased=1, waiting=3)
        holder.cancel("b")
        await fixture.until(waiting=2)
        holder.end("a")
        await holder.until_served("a", "c")
        await holder.end_all()


async def test_cancelled_waiter_for_a_large_sandbox_unblocks_the_queue() -> None:
    async with fake_pool(PoolSettings(min_ready=0, memory_budget_mib=500)) as fixture:
        holder = Leaseholder(fixture)
        holder.request("a", replace(SMALL, memory_mib=400))
        await holder.until_served("a")
        holder.request("b", replace(SMALL, memory_mib=200))
        holder.request("c", SMALL)
        await fixture.until(waiting=2)
        holder.cancel("b")
        await holder.until_served("a", "c")
        await holder.end_all()


async def test_waiter_whose_idle_sandbox_is_dead_returns_to_the_front_of_the_queue() -> None:
    settings = PoolSettings(min_ready=1, max_sandboxes=1)
    async with fake_pool(settings, idle_ping_timeout_s=0.05) as fixture:
        await fixture.until(idle=1)
        fixture.backend.guests[0].answers = False
        holder = Leaseholder(fixture)
        holder.request("a")
        holder.request("b")
        await holder.until_served("a")
        await holder.end_all()


async def test_sandbox_started_for_a_cancelled_waiter_goes_to_the_next_waiter() -> None:
    async with fake_pool(PoolSettings(min_ready=0, max_sandboxes=1)) as fixture:
        fixture.backend.may_start.clear()
        holder = Leaseholder(fixture)
        holder.request("a")
        holder.request("b")
        await fixture.until(starting=1, waiting=2)
        holder.cancel("a")
        await fixture.until(waiting=1)
        fixture.backend.may_start.set()
        await holder.until_served("b")
        assert fixture.backend.asked == 1
        await holder.end_all()


async def test_sandbox_started_for_a_cancelled_waiter_is_kept_idle_in_the_pool() -> None:
    async with fake_pool(PoolSettings(min_ready=1, on_miss="wait")) as fixture:
        fixture.backend.may_start.clear()
        holder = Leaseholder(fixture)
        holder.request("a")
        await fixture.until(starting=1, waiting=1)
        holder.cancel("a")
        await fixture.until(waiting=0)
        fixture.backend.may_start.set()
        await fixture.until(idle=1)
        assert fixture.backend.asked == 1


async def test_leases_without_an_idle_sandbox_start_their_sandboxes_concurrently() -> None:
    async with fake_pool(PoolSettings(min_ready=1)) as fixture:
        fixture.backend.may_start.clear()
        holder = Leaseholder(fixture)
        for name in "abc":
            holder.request(name)
        await fixture.until(starting=3)
        fixture.backend.may_start.set()
        await until(lambda: len(holder.served) == 3)
        await holder.end_all()


async def test_lease_without_an_idle_sandbox_is_refused_with_a_retry_time_if_on_miss_is_fail() -> (
    None
):
    async with fake_pool(PoolSettings(min_ready=1, on_miss="fail")) as fixture:
        await fixture.until(idle=1)
        fixture.backend.may_start.clear()
        async with fixture.pool.lease(SMALL) as lease:
            await lease.sandbox()
            with pytest.raises(NoFreeSandboxError, match="no sandbox is ready") as refusal:
                async with fixture.pool.lease(SMALL):
                    pass
        assert refusal.value.retry_after_s >= 1
        assert (fixture.stats.hits, fixture.stats.misses, fixture.stats.refused) == (1, 1, 1)


async def test_dead_idle_sandbox_fails_the_lease_if_on_miss_is_fail() -> None:
    async with fake_pool(PoolSettings(min_ready=1, on_miss="fail")) as fixture:
        await fixture.until(idle=1)
        fixture.backend.may_start.clear()
        fixture.backend.guests[0].die()
        async with fixture.pool.lease(SMALL) as lease:
            with pytest.raises(NoFreeSandboxError):
                await lease.sandbox()


async def test_full_queue_refuses_the_next_waiter() -> None:
    async with fake_pool(PoolSettings(min_ready=0, max_sandboxes=1, queue_size=1)) as fixture:
        holder = Leaseholder(fixture)
        for name in "abc":
            holder.request(name)
        await holder.until_served("a")
        assert holder.refused == {"c": "1 requests wait for a sandbox already"}
        holder.end("a")
        await holder.until_served("a", "b")
        await holder.end_all()


async def test_waiter_whose_sandbox_is_starting_takes_no_place_in_the_queue() -> None:
    async with fake_pool(PoolSettings(min_ready=0, queue_size=0)) as fixture:
        fixture.backend.may_start.clear()
        holder = Leaseholder(fixture)
        for name in "abc":
            holder.request(name)
        await fixture.until(starting=3, refused=0)
        fixture.backend.may_start.set()
        await until(lambda: len(holder.served) == 3)
        await holder.end_all()


async def test_timed_out_waiter_is_refused_and_skipped() -> None:
    async with fake_pool(
        PoolSettings(min_ready=0, max_sandboxes=1, queue_timeout_s=0.05)
    ) as fixture:
        holder = Leaseholder(fixture)
        holder.request("a")
        await holder.until_served("a")
        async with fixture.pool.lease(SMALL) as lease:
            with pytest.raises(NoFreeSandboxError, match=r"no sandbox came free in 0\.05 s"):
                await lease.sandbox()
            assert (fixture.stats.refused, fixture.stats.waiting) == (1, 0)
            holder.request("b")
            holder.end("a")
            await holder.until_served("a", "b")
        await holder.end_all()


async def test_failed_start_fails_its_waiter() -> None:
    async with fake_pool(PoolSettings(min_ready=0)) as fixture:
        fixture.backend.refusal = "the engine is down"
        async with fixture.pool.lease(SMALL) as lease:
            with pytest.raises(SandboxStartError, match="the engine is down"):
                await lease.sandbox()
        fixture.backend.refusal = None
        async with fixture.pool.lease(SMALL) as lease:
            await lease.sandbox()
        assert (fixture.stats.failed, fixture.stats.started) == (1, 1)


async def test_failing_backend_fails_every_waiter() -> None:
    async with fake_pool(PoolSettings(min_ready=0, max_sandboxes=1)) as fixture:
        fixture.backend.may_start.clear()
        holder = Leaseholder(fixture)
        for name in "abc":
            holder.request(name)
        await fixture.until(starting=1, waiting=3)
        fixture.backend.refusal = "the engine is down"
        fixture.backend.may_start.set()
        await until(lambda: len(holder.refused) == 3)
        assert set(holder.refused.values()) == {"the engine is down"}


async def test_unexpected_backend_error_fails_the_lease_and_not_the_pool() -> None:
    backend = FakeSandboxBackend()
    async with fake_pool(PoolSettings(min_ready=0), backend) as fixture:

        def stumble() -> None:
            raise ZeroDivisionError

        backend.on_start = stumble
        async with fixture.pool.lease(SMALL) as lease:
            with pytest.raises(ZeroDivisionError):
                await lease.sandbox()
        backend.on_start = lambda: None
        async with fixture.pool.lease(SMALL) as lease:
            await lease.sandbox()
