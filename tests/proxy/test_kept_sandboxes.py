"""Computers that conversations keep are given back to whoever finds no room."""

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

TWO = PoolSettings(idle=0, max_total=2)


@asynccontextmanager
async def kept(stage: PoolFixture, snapshots: MemorySnapshots) -> AsyncIterator[Workspaces]:
    """Workspaces that keep as many computers as the pool has."""
    workspaces = Workspaces(stage.pool, snapshots, keep_s=60, max_kept=2, clock=ManualClock())
    stage.pool.when_full(workspaces.give_back)
    try:
        yield workspaces
    finally:
        await workspaces.aclose()


async def use(workspaces: Workspaces, chat: str, state: str) -> Origin:
    """One run's use of a conversation's computer, and where it came from."""
    session = Session("somebody", chat)
    async with workspaces.use(ResumePoint(session), SMALL) as lease:
        await lease.sandbox()
        lease.leave_as = SessionState(session, state)
    return lease.origin


async def test_the_one_that_was_kept_longest_is_given_back() -> None:
    async with fake_pool(TWO) as stage, kept(stage, MemorySnapshots()) as workspaces:
        for chat in ("first", "second", "third"):
            await use(workspaces, chat, "1")
        assert await use(workspaces, "third", "2") == "kept"
        assert await use(workspaces, "second", "2") == "kept"
        assert await use(workspaces, "first", "2") == "restored"
        assert stage.backend.most_alive == 2


async def test_one_that_is_about_to_be_kept_goes_to_who_waits_already() -> None:
    async with (
        fake_pool(PoolSettings(idle=0, max_total=1)) as stage,
        kept(stage, MemorySnapshots()) as workspaces,
        anyio.create_task_group() as group,
    ):
        session = Session("somebody", "first")
        async with workspaces.use(ResumePoint(session), SMALL) as lease:
            await lease.sandbox()
            group.start_soon(use, workspaces, "second", "1")
            await stage.until(waiting=1)
            lease.leave_as = SessionState(session, "1")
        await until(lambda: len(stage.backend.guests) == 2)


async def test_one_that_nobody_waits_for_any_more_is_kept() -> None:
    async with (
        fake_pool(TWO) as stage,
        kept(stage, MemorySnapshots()) as workspaces,
        workspaces.use(None, SMALL) as busy,
    ):
        await busy.sandbox()
        async with (
            anyio.create_task_group() as group,
            workspaces.use(None, SMALL) as also_busy,
        ):
            await also_busy.sandbox()
            group.start_soon(use, workspaces, "first", "1")
            await stage.until(waiting=1)
        for state in "2", "3", "4":
            assert await use(workspaces, "first", state) == "kept"
        assert len(stage.backend.guests) == 3


async def test_files_that_only_the_computer_has_are_not_given_back() -> None:
    snapshots = MemorySnapshots()
    async with fake_pool(TWO) as stage, kept(stage, snapshots) as workspaces:
        for chat in ("first", "second"):
            await use(workspaces, chat, "1")
        await until(lambda: len(snapshots.made) == 2)
        snapshots.kept.pop(Session("somebody", "first"))
        await use(workspaces, "third", "1")
        states = [Session("somebody", chat) for chat in ("first", "second")]
        found = [await workspaces.discard(session) for session in states]
        assert found == [True, True]
        assert len(stage.backend.guests) == 3
