"""Idle sandboxes of sessions are evicted if a request waits for one."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from policies.pool import PoolSettings
from policies.sessions import ResumePoint, Session, SessionState
from proxy.workspaces import Origin, Workspaces
from tests.fakes.manual_clock import ManualClock
from tests.fakes.memory_snapshots import MemorySnapshots
from tests.fakes.waiting import until
from tests.sandbox_runtime.pool.pool_fixture import SMALL, PoolFixture, fake_pool

TWO = PoolSettings(min_ready=0, max_sandboxes=2)


@asynccontextmanager
async def open_workspaces(
    pool_fixture: PoolFixture, snapshots: MemorySnapshots
) -> AsyncIterator[Workspaces]:
    """Yield Workspaces that keep up to two idle sandboxes."""
    workspaces = Workspaces(
        pool_fixture.pool, snapshots, keep_s=60, max_kept=2, clock=ManualClock()
    )
    pool_fixture.pool.set_full_handler(workspaces.evict_idle)
    try:
        yield workspaces
    finally:
        await workspaces.aclose()


async def use(workspaces: Workspaces, chat: str, state: str) -> Origin:
    """Use the sandbox of a session in one run. Return its origin."""
    session = Session("somebody", chat)
    async with workspaces.use(ResumePoint(session), SMALL) as lease:
        await lease.sandbox()
        lease.save_as = SessionState(session, state)
    return lease.origin


async def test_longest_idle_sandbox_is_evicted_first() -> None:
    async with (
        fake_pool(TWO) as pool_fixture,
        open_workspaces(pool_fixture, MemorySnapshots()) as workspaces,
    ):
        for chat in ("first", "second", "third"):
            await use(workspaces, chat, "1")
        assert await use(workspaces, "third", "2") == "kept"
        assert await use(workspaces, "second", "2") == "kept"
        assert await use(workspaces, "first", "2") == "restored"
        assert pool_fixture.backend.most_alive == 2


async def test_sandbox_is_evicted_as_soon_as_it_is_idle_if_a_request_waits() -> None:
    async with (
        fake_pool(PoolSettings(min_ready=0, max_sandboxes=1)) as pool_fixture,
        open_workspaces(pool_fixture, MemorySnapshots()) as workspaces,
        anyio.create_task_group() as group,
    ):
        session = Session("somebody", "first")
        async with workspaces.use(ResumePoint(session), SMALL) as lease:
            await lease.sandbox()
            group.start_soon(use, workspaces, "second", "1")
            await pool_fixture.until(waiting=1)
            lease.save_as = SessionState(session, "1")
        await until(lambda: len(pool_fixture.backend.guests) == 2)


async def test_idle_sandbox_is_kept_if_no_request_waits_any_more() -> None:
    async with (
        fake_pool(TWO) as pool_fixture,
        open_workspaces(pool_fixture, MemorySnapshots()) as workspaces,
        workspaces.use(None, SMALL) as busy,
    ):
        await busy.sandbox()
        async with (
            anyio.create_task_group() as group,
            workspaces.use(None, SMALL) as also_busy,
        ):
            await also_busy.sandbox()
            group.start_soon(use, workspaces, "first", "1")
            await pool_fixture.until(waiting=1)
        for state in "2", "3", "4":
            assert await use(workspaces, "first", state) == "kept"
        assert len(pool_fixture.backend.guests) == 3


async def test_idle_sandbox_without_a_snapshot_is_not_evicted() -> None:
    snapshots = MemorySnapshots()
    async with (
        fake_pool(TWO) as pool_fixture,
        open_workspaces(pool_fixture, snapshots) as workspaces,
    ):
        for chat in ("first", "second"):
            await use(workspaces, chat, "1")
        await until(lambda: len(snapshots.made) == 2)
        snapshots.kept.pop(Session("somebody", "first"))
        await use(workspaces, "third", "1")
        states = [Session("somebody", chat) for chat in ("first", "second")]
        found = [await workspaces.discard(session) for session in states]
        assert found == [True, True]
        assert len(pool_fixture.backend.guests) == 3
