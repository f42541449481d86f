"""The sandbox of a lease, during the lease and afterwards."""

import asyncio
from dataclasses import replace

import pytest

from policies.egress import Egress
from policies.pool import PoolSettings
from sandbox_runtime.egress.decision import Decision
from sandbox_runtime.errors import SandboxLostError, SandboxStartError
from tests.fakes.sandbox_backend import FakeSandboxBackend
from tests.fakes.waiting import until
from tests.sandbox_runtime.pool.pool_fixture import SMALL, RecordingGateways, fake_pool

WARM = PoolSettings(min_ready=2)
COLD = PoolSettings(min_ready=0)
LARGE = replace(SMALL, memory_mib=300, pids=7)
STRICT = replace(SMALL, level="strict")
ADOPTED = {"guest": {"isolation": SMALL}, "generation": 0, "jobs": {}, "retained_bytes": 0}


async def test_idle_sandbox_is_leased_after_one_ping() -> None:
    async with fake_pool(WARM) as fixture:
        await fixture.until(idle=2)
        fixture.backend.may_start.clear()
        async with fixture.pool.lease(SMALL) as lease:
            sandbox = await lease.sandbox()
            assert sandbox.id == "fake-1"
            assert (await sandbox.exec("true", timeout_s=5)).exit_code == 0
        assert [guest.pings for guest in fixture.backend.guests] == [1, 0]
        assert (fixture.stats.hits, fixture.stats.misses) == (1, 0)


async def test_leased_sandbox_is_replaced_at_once() -> None:
    async with fake_pool(WARM) as fixture:
        await fixture.until(idle=2)
        async with fixture.pool.lease(SMALL) as lease:
            await lease.sandbox()
            await fixture.until(idle=2, leased=1)


async def test_adopted_sandbox_is_leased_and_ends_with_its_lease() -> None:
    async with fake_pool(COLD) as fixture:
        async with fixture.pool.lease(SMALL, adopted=ADOPTED) as lease:
            sandbox = await lease.sandbox()
            assert (await sandbox.exec("true", timeout_s=5)).exit_code == 0
            await fixture.until(leased=1, starting=0)
        await fixture.until(leased=0, ending=0, idle=0)
        assert (fixture.backend.asked, fixture.backend.alive) == (0, set())


async def test_lease_does_not_wait_for_a_sandbox_that_another_lease_adopts() -> None:
    async with fake_pool(COLD) as fixture:
        fixture.backend.may_adopt.clear()
        async with fixture.pool.lease(SMALL, adopted=ADOPTED) as adopting:
            adoption = asyncio.create_task(adopting.sandbox())
            await until(lambda: fixture.backend.adoptions == 1)
            async with fixture.pool.lease(SMALL) as lease:
                started = await lease.sandbox()
                assert fixture.backend.asked == 1
                fixture.backend.may_adopt.set()
                assert await adoption is not started


async def test_sandbox_counts_towards_the_limits_while_it_is_adopted() -> None:
    full = asyncio.Event()
    async with fake_pool(PoolSettings(min_ready=0, max_sandboxes=1)) as fixture:
        fixture.pool.set_full_handler(lambda is_wanted: full.set())
        fixture.backend.may_adopt.clear()
        async with fixture.pool.lease(SMALL, adopted=ADOPTED):
            await until(lambda: fixture.backend.adoptions == 1)
            async with fixture.pool.lease(SMALL) as waiting:
                assert full.is_set()
                assert (fixture.stats.starting, fixture.stats.waiting) == (1, 1)
                fixture.backend.adoption_refusal = "it has ended"
                fixture.backend.may_adopt.set()
                assert (await waiting.sandbox()).id == "fake-1"


async def test_closed_pool_adopts_nothing() -> None:
    async with fake_pool(COLD) as fixture:
        await fixture.pool.aclose()
        async with fixture.pool.lease(SMALL, adopted=ADOPTED) as lease:
            with pytest.raises(SandboxStartError, match="closed"):
                await lease.sandbox()
        assert fixture.backend.adoptions == 0


async def test_failed_adoption_leaves_nothing_in_the_pool() -> None:
    async with fake_pool(COLD) as fixture:
        fixture.backend.adoption_refusal = "it has ended"
        async with fixture.pool.lease(SMALL, adopted=ADOPTED) as lease:
            with pytest.raises(SandboxStartError, match="it has ended"):
                await lease.sandbox()
        await fixture.until(leased=0, starting=0, ending=0)
        assert fixture.stats.failed == 0


async def test_unused_sandbox_of_a_lease_is_leased_again() -> None:
    gateways = RecordingGateways()
    async with fake_pool(PoolSettings(min_ready=1), gateways=gateways) as fixture:
        await fixture.until(idle=1)
        guest = fixture.backend.guests[0]
        for number in range(5):
            async with fixture.pool.lease(SMALL) as idler:
                await until(lambda pings=number + 1: guest.pings == pings)
                await fixture.until(leased=1, idle=0)
                assert not gateways.created
            await fixture.until(leased=0, idle=1)
        with pytest.raises(SandboxLostError, match="the lease is over"):
            await idler.sandbox()
        async with fixture.pool.lease(SMALL) as lease:
            assert fixture.backend.asked == 1
            assert (await lease.sandbox()).id == "fake-1"
            assert gateways.open == 1
            await fixture.until(leased=1, idle=1)
            assert fixture.backend.asked == 2


async def test_resized_unused_sandbox_is_not_leased_again() -> None:
    async with fake_pool(PoolSettings(min_ready=1)) as fixture:
        await fixture.until(idle=1)
        async with fixture.pool.lease(LARGE):
            await until(lambda: bool(fixture.backend.guests[0].limited))
        await fixture.until(leased=0, ending=0, idle=1)
        assert len(fixture.backend.guests) == 2


async def test_replacement_starts_after_the_lease_has_its_sandbox() -> None:
    async with fake_pool(PoolSettings(min_ready=1)) as fixture:
        await fixture.until(idle=1)
        guest = fixture.backend.guests[0]
        guest.answers = False
        async with fixture.pool.lease(SMALL) as lease:
            await until(lambda: guest.pings == 1)
            assert fixture.backend.asked == 1
            guest.answer()
            await lease.sandbox()
            await fixture.until(idle=1)


async def test_lease_returns_the_same_sandbox_at_every_call() -> None:
    async with fake_pool(WARM) as fixture, fixture.pool.lease(SMALL) as lease:
        assert await lease.sandbox() is await lease.sandbox()


async def test_used_sandbox_ends_with_its_lease_and_is_never_leased_again() -> None:
    async with fake_pool(PoolSettings(min_ready=1)) as fixture:
        seen = []
        for _ in range(5):
            async with fixture.pool.lease(SMALL) as lease:
                sandbox = await lease.sandbox()
                seen.append(sandbox.id)
            await fixture.until(leased=0, ending=0)
            with pytest.raises(SandboxLostError):
                await sandbox.exec("true", timeout_s=5)
        assert len(set(seen)) == 5


async def test_sandbox_is_closed_in_the_background_after_its_lease() -> None:
    async with fake_pool(COLD) as fixture:
        async with fixture.pool.lease(SMALL) as lease:
            await lease.sandbox()
            fixture.backend.may_end.clear()
        await fixture.until(ending=1)
        fixture.backend.may_end.set()
        await fixture.until(ending=0)


async def test_lease_can_be_entered_before_its_sandbox_has_started() -> None:
    async with fake_pool(COLD) as fixture:
        fixture.backend.may_start.clear()
        async with fixture.pool.lease(SMALL) as lease:
            await fixture.until(starting=1)
            fixture.backend.may_start.set()
            assert (await lease.sandbox()).id == "fake-1"
        assert (fixture.stats.hits, fixture.stats.misses) == (0, 1)


async def test_sandbox_counts_as_starting_before_the_backend_starts_it() -> None:
    backend = FakeSandboxBackend()
    async with fake_pool(COLD, backend) as fixture:
        counted = []
        backend.on_start = lambda: counted.append(fixture.stats.starting)
        async with fixture.pool.lease(SMALL) as lease:
            await lease.sandbox()
        assert counted == [1]


@pytest.mark.parametrize("end", ["it died", "it hangs"])
async def test_unresponsive_idle_sandbox_is_replaced_and_never_leased(
    end: str,
) -> None:
    async with fake_pool(PoolSettings(min_ready=1), idle_ping_timeout_s=0.01) as fixture:
        await fixture.until(idle=1)
        bad = fixture.backend.guests[0]
        if end == "it died":
            bad.die()
        bad.answers = False
        async with fixture.pool.lease(SMALL) as lease:
            assert (await lease.sandbox()).id != bad.id
        assert fixture.stats.replaced == 1
        assert bad not in fixture.backend.alive


async def test_limits_of_an_idle_sandbox_are_changed_at_the_lease_only_if_they_differ() -> None:
    async with fake_pool(WARM) as fixture:
        await fixture.until(idle=2)
        for isolation in (LARGE, SMALL):
            async with fixture.pool.lease(isolation) as lease:
                await lease.sandbox()
        assert [guest.limited for guest in fixture.backend.guests[:2]] == [[LARGE], []]
        assert fixture.stats.hits == 2


async def test_sandbox_is_started_with_the_leased_limits_if_limits_cannot_be_changed() -> None:
    async with fake_pool(WARM) as fixture:
        fixture.backend.limits_are_fixed = True
        await fixture.until(idle=2)
        async with fixture.pool.lease(LARGE) as lease:
            lent = await lease.sandbox()
        (guest,) = [guest for guest in fixture.backend.guests if guest.id == lent.id]
        assert (guest.made, guest.limited) == (LARGE, [])
        assert fixture.stats.replaced == 1


async def test_egress_gateway_is_attached_at_the_lease_and_closed_before_the_sandbox() -> None:
    closed: list[bool] = []
    backend, gateways = FakeSandboxBackend(), RecordingGateways()

    def decided(decision: Decision) -> None:
        raise AssertionError("nobody goes out here")

    open_isolation = replace(SMALL, network=Egress(mode="open"))
    async with fake_pool(COLD, backend, gateways=gateways) as fixture:
        async with fixture.pool.lease(open_isolation, decided) as lease:
            sandbox = await lease.sandbox()
            gateways.on_close = lambda: closed.append(sandbox.lost is None)
            assert gateways.created == [(open_isolation.network, decided)]
            assert gateways.open == 1
        await fixture.until(leased=0, ending=0)
        assert (gateways.open, closed) == (0, [True])
    assert {guest.made for guest in backend.guests} == {SMALL}


async def test_failed_creation_of_a_gateway_closes_the_sandbox_and_fails_the_lease() -> None:
    gateways = RecordingGateways(error=ValueError("no such preset"))
    async with fake_pool(COLD, gateways=gateways) as fixture:
        async with fixture.pool.lease(SMALL) as lease:
            with pytest.raises(ValueError, match="no such preset"):
                await lease.sandbox()
        await fixture.until(leased=0, ending=0)


async def test_sandbox_started_with_the_limits_of_an_ended_lease_is_closed() -> None:
    backend = FakeSandboxBackend()
    backend.refusal = "the engine is down"
    async with fake_pool(PoolSettings(min_ready=1), backend) as fixture:
        await fixture.until(failed=1)
        backend.refusal = None
        backend.may_start.clear()
        async with fixture.pool.lease(LARGE):
            await fixture.until(starting=1)
        backend.may_start.set()
        await fixture.until(idle=1, starting=0, ending=0)
        assert [guest.made for guest in backend.alive] == [SMALL]


async def test_sandbox_with_an_isolation_that_is_not_pooled_is_started_on_demand_and_not_kept() -> (
    None
):
    async with fake_pool(WARM) as fixture:
        await fixture.until(idle=2)
        async with fixture.pool.lease(STRICT) as lease:
            lent = await lease.sandbox()
        (guest,) = [guest for guest in fixture.backend.guests if guest.id == lent.id]
        assert guest.made == STRICT
        await fixture.until(ending=0)
        assert (fixture.stats.idle, fixture.stats.hits) == (2, 0)
        assert len(fixture.backend.guests) == 3


async def test_lease_whose_sandbox_is_lost_gets_a_replacement() -> None:
    async with fake_pool(PoolSettings(min_ready=0, max_sandboxes=1)) as fixture:
        async with fixture.pool.lease(SMALL) as lease:
            first = await lease.sandbox()
            fixture.backend.guests[0].die()
            with pytest.raises(SandboxLostError):
                await first.exec("true", timeout_s=5)
            second = await lease.sandbox()
            assert second is not first
            assert (await second.exec("true", timeout_s=5)).exit_code == 0
        await fixture.until(leased=0, ending=0)
        assert len(fixture.backend.guests) == 2
        assert (await lease.sandbox()).lost, "a lease that is over begins no other"


async def test_concurrent_callers_of_a_lease_with_a_lost_sandbox_get_the_same_replacement() -> None:
    async with fake_pool(COLD) as fixture:
        async with fixture.pool.lease(SMALL) as lease:
            first = await lease.sandbox()
            fixture.backend.guests[0].die()
            await until(lambda: first.lost is not None)
            one, other = await asyncio.gather(lease.sandbox(), lease.sandbox())
            assert one is other
            assert one.id == "fake-2"
        await fixture.until(leased=0, ending=0)
        assert len(fixture.backend.guests) == 2


async def test_lease_cancelled_during_the_start_leaves_no_sandbox() -> None:
    async with fake_pool(COLD) as fixture:
        fixture.backend.may_start.clear()

        async def run() -> None:
            async with fixture.pool.lease(SMALL) as lease:
                await lease.sandbox()

        running = asyncio.create_task(run())
        await fixture.until(starting=1)
        running.cancel()
        await asyncio.wait([running])
        fixture.backend.may_start.set()
        await fixture.until(starting=0, idle=0, ending=0)
        assert not fixture.backend.alive
