"""What one lease gets, and what becomes of it afterwards."""

import asyncio
from dataclasses import replace

import pytest

from policies.egress import Egress
from policies.isolation import Isolation
from policies.pool import PoolSettings
from sandbox_runtime.egress.decision import Decision, OnDecision
from sandbox_runtime.errors import SandboxLostError
from sandbox_runtime.guest_sandbox import GuestSandbox
from sandbox_runtime.pool.pool import Undo
from tests.fakes.puppet_backend import PuppetBackend
from tests.fakes.waiting import until
from tests.sandbox_runtime.pool.stage import SMALL, puppets

WARM = PoolSettings(idle=2)
COLD = PoolSettings(idle=0)
LARGE = replace(SMALL, memory_mib=300, pids=7)
STRICT = replace(SMALL, level="strict")


async def test_a_warm_sandbox_is_lent_after_one_ping() -> None:
    async with puppets(WARM) as stage:
        await stage.until(idle=2)
        stage.backend.may_start.clear()
        async with stage.pool.lease(SMALL) as lease:
            sandbox = await lease.sandbox()
            assert sandbox.id == "puppet-1"
            assert (await sandbox.exec("true", timeout_s=5)).exit_code == 0
        assert [guest.pings for guest in stage.backend.guests] == [1, 0]
        assert (stage.stats.hits, stage.stats.misses) == (1, 0)


async def test_using_one_has_another_made_at_once() -> None:
    async with puppets(WARM) as stage:
        await stage.until(idle=2)
        async with stage.pool.lease(SMALL) as lease:
            await lease.sandbox()
            await stage.until(idle=2, lent=1)


async def test_one_that_was_never_asked_for_is_lent_to_the_next() -> None:
    bound: list[str] = []

    def bind(sandbox: GuestSandbox, *_: object) -> Undo:
        async def undo() -> None:
            bound.remove(sandbox.id)

        bound.append(sandbox.id)
        return undo

    async with puppets(PoolSettings(idle=1), on_lend=bind) as stage:
        await stage.until(idle=1)
        guest = stage.backend.guests[0]
        for number in range(5):
            async with stage.pool.lease(SMALL) as idler:
                await until(lambda pings=number + 1: guest.pings == pings)
                await stage.until(lent=1, idle=0)
                assert not bound
            await stage.until(lent=0, idle=1)
        with pytest.raises(SandboxLostError, match="the lease is over"):
            await idler.sandbox()
        async with stage.pool.lease(SMALL) as lease:
            assert stage.backend.asked == 1
            assert [(await lease.sandbox()).id] == bound == ["puppet-1"]
            await stage.until(lent=1, idle=1)
            assert stage.backend.asked == 2


async def test_one_whose_limits_were_changed_is_not_lent_again_though_it_was_not_used() -> None:
    async with puppets(PoolSettings(idle=1)) as stage:
        await stage.until(idle=1)
        async with stage.pool.lease(LARGE):
            await until(lambda: bool(stage.backend.guests[0].limited))
        await stage.until(lent=0, ending=0, idle=1)
        assert len(stage.backend.guests) == 2


async def test_nothing_is_started_ahead_in_the_very_moment_of_lending() -> None:
    async with puppets(PoolSettings(idle=1)) as stage:
        await stage.until(idle=1)
        guest = stage.backend.guests[0]
        guest.answers = False
        async with stage.pool.lease(SMALL) as lease:
            await until(lambda: guest.pings == 1)
            assert stage.backend.asked == 1
            guest.answer()
            await lease.sandbox()
            await stage.until(idle=1)


async def test_a_lease_is_the_same_sandbox_at_every_call() -> None:
    async with puppets(WARM) as stage, stage.pool.lease(SMALL) as lease:
        assert await lease.sandbox() is await lease.sandbox()


async def test_a_sandbox_ends_with_its_lease_and_is_never_lent_again() -> None:
    async with puppets(PoolSettings(idle=1)) as stage:
        seen = []
        for _ in range(5):
            async with stage.pool.lease(SMALL) as lease:
                sandbox = await lease.sandbox()
                seen.append(sandbox.id)
            await stage.until(lent=0, ending=0)
            with pytest.raises(SandboxLostError):
                await sandbox.exec("true", timeout_s=5)
        assert len(set(seen)) == 5


async def test_ending_a_sandbox_takes_no_time_of_the_lease() -> None:
    async with puppets(COLD) as stage:
        async with stage.pool.lease(SMALL) as lease:
            await lease.sandbox()
            stage.backend.may_end.clear()
        await stage.until(ending=1)
        stage.backend.may_end.set()
        await stage.until(ending=0)


async def test_without_a_warm_one_a_sandbox_is_started_beside_the_block() -> None:
    async with puppets(COLD) as stage:
        stage.backend.may_start.clear()
        async with stage.pool.lease(SMALL) as lease:
            await stage.until(starting=1)
            stage.backend.may_start.set()
            assert (await lease.sandbox()).id == "puppet-1"
        assert (stage.stats.hits, stage.stats.misses) == (0, 1)


async def test_a_sandbox_is_in_the_books_before_the_backend_is_asked_for_it() -> None:
    backend = PuppetBackend()
    async with puppets(COLD, backend) as stage:
        counted = []
        backend.on_start = lambda: counted.append(stage.stats.starting)
        async with stage.pool.lease(SMALL) as lease:
            await lease.sandbox()
        assert counted == [1]


@pytest.mark.parametrize("end", ["it died", "it hangs"])
async def test_a_warm_sandbox_that_does_not_answer_is_replaced_and_never_handed_out(
    end: str,
) -> None:
    async with puppets(PoolSettings(idle=1), idle_patience_s=0.01) as stage:
        await stage.until(idle=1)
        bad = stage.backend.guests[0]
        if end == "it died":
            bad.die()
        bad.answers = False
        async with stage.pool.lease(SMALL) as lease:
            assert (await lease.sandbox()).id != bad.id
        assert stage.stats.replaced == 1
        assert bad not in stage.backend.alive


async def test_limits_are_changed_when_the_sandbox_is_lent_and_only_if_they_differ() -> None:
    async with puppets(WARM) as stage:
        await stage.until(idle=2)
        for isolation in (LARGE, SMALL):
            async with stage.pool.lease(isolation) as lease:
                await lease.sandbox()
        assert [guest.limited for guest in stage.backend.guests[:2]] == [[LARGE], []]
        assert stage.stats.hits == 2


async def test_where_limits_cannot_be_changed_a_sandbox_is_made_with_them() -> None:
    async with puppets(WARM) as stage:
        stage.backend.limits_are_fixed = True
        await stage.until(idle=2)
        async with stage.pool.lease(LARGE) as lease:
            lent = await lease.sandbox()
        (guest,) = [guest for guest in stage.backend.guests if guest.id == lent.id]
        assert (guest.made, guest.limited) == (LARGE, [])
        assert stage.stats.replaced == 1


async def test_egress_is_bound_when_a_sandbox_is_lent_and_undone_before_it_ends() -> None:
    bound: list[tuple[str, Isolation, OnDecision | None]] = []
    undone: list[bool] = []
    backend = PuppetBackend()

    def bind(
        sandbox: GuestSandbox, isolation: Isolation, on_decision: OnDecision | None, *_: object
    ) -> Undo:
        async def undo() -> None:
            undone.append(sandbox.lost is None)

        bound.append((sandbox.id, isolation, on_decision))
        return undo

    def decided(decision: Decision) -> None:
        raise AssertionError("nobody goes out here")

    open_isolation = replace(SMALL, egress=Egress(mode="open"))
    async with puppets(COLD, backend, on_lend=bind) as stage:
        async with stage.pool.lease(open_isolation, decided) as lease:
            sandbox = await lease.sandbox()
            assert bound == [(sandbox.id, open_isolation, decided)]
            assert not undone
        await stage.until(lent=0, ending=0)
        assert undone == [True]
    assert {guest.made for guest in backend.guests} == {SMALL}


async def test_a_sandbox_whose_binding_fails_ends_and_its_lease_hears_why() -> None:
    def bind(
        sandbox: GuestSandbox, isolation: Isolation, on_decision: OnDecision | None, *_: object
    ) -> Undo:
        raise ValueError("no such preset")

    async with puppets(COLD, on_lend=bind) as stage:
        async with stage.pool.lease(SMALL) as lease:
            with pytest.raises(ValueError, match="no such preset"):
                await lease.sandbox()
        await stage.until(lent=0, ending=0)


async def test_one_made_with_other_limits_for_who_left_is_not_kept() -> None:
    backend = PuppetBackend()
    backend.refusal = "the engine is down"
    async with puppets(PoolSettings(idle=1), backend) as stage:
        await stage.until(failed=1)
        backend.refusal = None
        backend.may_start.clear()
        async with stage.pool.lease(LARGE):
            await stage.until(starting=1)
        backend.may_start.set()
        await stage.until(idle=1, starting=0, ending=0)
        assert [guest.made for guest in backend.alive] == [SMALL]


async def test_another_kind_of_sandbox_is_made_for_its_lease_and_not_kept() -> None:
    async with puppets(WARM) as stage:
        await stage.until(idle=2)
        async with stage.pool.lease(STRICT) as lease:
            lent = await lease.sandbox()
        (guest,) = [guest for guest in stage.backend.guests if guest.id == lent.id]
        assert guest.made == STRICT
        await stage.until(ending=0)
        assert (stage.stats.idle, stage.stats.hits) == (2, 0)
        assert len(stage.backend.guests) == 3


async def test_a_lease_whose_sandbox_is_lost_gets_another() -> None:
    async with puppets(PoolSettings(idle=0, max_total=1)) as stage:
        async with stage.pool.lease(SMALL) as lease:
            first = await lease.sandbox()
            stage.backend.guests[0].die()
            with pytest.raises(SandboxLostError):
                await first.exec("true", timeout_s=5)
            second = await lease.sandbox()
            assert second is not first
            assert (await second.exec("true", timeout_s=5)).exit_code == 0
        await stage.until(lent=0, ending=0)
        assert len(stage.backend.guests) == 2
        assert (await lease.sandbox()).lost, "a lease that is over begins no other"


async def test_all_who_find_the_sandbox_of_a_lease_lost_get_the_same_other_one() -> None:
    async with puppets(COLD) as stage:
        async with stage.pool.lease(SMALL) as lease:
            first = await lease.sandbox()
            stage.backend.guests[0].die()
            await until(lambda: first.lost is not None)
            one, other = await asyncio.gather(lease.sandbox(), lease.sandbox())
            assert one is other
            assert one.id == "puppet-2"
        await stage.until(lent=0, ending=0)
        assert len(stage.backend.guests) == 2


async def test_a_lease_that_is_cancelled_while_its_sandbox_starts_leaves_nothing() -> None:
    async with puppets(COLD) as stage:
        stage.backend.may_start.clear()

        async def run() -> None:
            async with stage.pool.lease(SMALL) as lease:
                await lease.sandbox()

        running = asyncio.create_task(run())
        await stage.until(starting=1)
        running.cancel()
        await asyncio.wait([running])
        stage.backend.may_start.set()
        await stage.until(starting=0, idle=0, ending=0)
        assert not stage.backend.alive
