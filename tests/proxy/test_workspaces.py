"""Workspaces of sessions: states, snapshots and idle sandboxes."""

from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from policies.sessions import ResumePoint, Session
from proxy.workspaces import Workspaces
from sandbox_runtime.errors import SandboxStartError
from sandbox_runtime.sandbox import Sink
from tests.fakes.memory_sandbox import MemorySandbox, MemorySandboxes
from tests.fakes.memory_snapshots import MemorySnapshots
from tests.fakes.waiting import until
from tests.proxy.workspace_fixture import CHAT, ISOLATION, KEEP_S, Harness
from tests.stores import open_store


class SmallSandbox(MemorySandbox):
    """A sandbox with a lower limit on the size of a snapshot."""

    async def snapshot(self, sink: Sink, *, max_bytes: int) -> int:
        return await super().snapshot(sink, max_bytes=30_000)


@pytest.fixture(params=["memory", "store"])
async def harness(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Harness]:
    store = open_store(tmp_path) if request.param == "store" else None
    harness = Harness(store.workspaces if store else MemorySnapshots())
    with anyio.fail_after(20):
        yield harness
        await harness.workspaces.aclose()
    assert harness.alive == 0
    if store:
        store.close()


async def test_next_request_of_a_session_gets_the_files_and_the_idle_sandbox(
    harness: Harness,
) -> None:
    assert await harness.run("echo one > file", "1") == ("", "new")
    assert await harness.run("cat file", "2", "1") == ("one\n", "kept")
    assert harness.sandboxes.opened == 1


async def test_request_keeps_its_idle_sandbox_if_it_cannot_adopt_that_of_another_server(
    harness: Harness,
) -> None:
    await harness.run("echo one > file", "1")
    async with harness.use("2", "1") as workspace:
        assert await workspace.adopt({"guest": {}}) is None
        result = await (await workspace.sandbox()).exec("cat file", timeout_s=5)
    assert (result.stdout, workspace.origin) == ("one\n", "kept")


async def test_request_after_the_idle_time_gets_the_files_in_a_new_sandbox(
    harness: Harness,
) -> None:
    await harness.run("echo one > file", "1")
    await until(lambda: harness.clock.alarms == [KEEP_S])
    harness.clock.advance(KEEP_S)
    await until(lambda: harness.alive == 0)
    assert await harness.run("cat file", "2", "1") == ("one\n", "restored")


@pytest.mark.parametrize("earlier_states", [(), ("0",)])
async def test_workspace_too_large_for_a_snapshot_lasts_as_long_as_its_idle_sandbox(
    earlier_states: tuple[str, ...],
) -> None:
    snapshots = MemorySnapshots()
    harness = Harness(snapshots, sandboxes=MemorySandboxes(make_sandbox=SmallSandbox))
    for state in earlier_states:
        await harness.run("echo zero > file", state)
    await harness.run("seq 10000 > large; echo one > file", "1")
    assert await harness.run("cat file", "2") == ("one\n", "kept")
    await harness.workspaces.aclose()
    assert [state.name for state in snapshots.made] == list(earlier_states)
    assert harness.alive == 0


async def test_branched_session_starts_from_its_parent_state(harness: Harness) -> None:
    await harness.run("echo one > file", "1")
    await harness.run("echo two >> file", "2", "1")
    assert await harness.run("cat file", "2b", "1") == ("one\n", "restored")
    assert await harness.run("cat file", "3", "2", "1") == ("one\ntwo\n", "kept")


async def test_concurrent_requests_get_a_sandbox_each(harness: Harness) -> None:
    await harness.run("echo one > file", "1")
    async with (
        harness.use("2", "1") as first,
        harness.use("2b", "1") as second,
    ):
        sandboxes = await first.sandbox(), await second.sandbox()
        assert sandboxes[0] is not sandboxes[1]
        for n, sandbox in enumerate(sandboxes):
            await sandbox.exec(f"echo {n} >> file", timeout_s=5)
    assert await harness.run("cat file", "3", "2") == ("one\n0\n", "kept")
    assert await harness.run("cat file", "3b", "2b") == ("one\n1\n", "kept")


async def test_request_with_an_unknown_parent_starts_from_the_newest_state(
    harness: Harness,
) -> None:
    await harness.run("echo one > file", "1")
    await harness.run("echo two > file", "2", "1")
    assert await harness.run("cat file", "3", "unknown") == ("two\n", "kept")


async def test_run_without_a_sandbox_leaves_the_files_unchanged(harness: Harness) -> None:
    await harness.run("echo one > file", "1")
    async with harness.use("2", "1"):
        pass
    assert await harness.run("cat file", "3", "2", "1") == ("one\n", "kept")


async def test_failed_run_saves_no_workspace_state(harness: Harness) -> None:
    await harness.run("echo one > file", "1")

    async def fail() -> None:
        async with harness.use("2", "1") as lease:
            await (await lease.sandbox()).exec("echo spoilt > file", timeout_s=5)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    assert await harness.run("cat file", "2", "1") == ("one\n", "restored")


async def test_session_of_the_same_name_of_another_owner_has_its_own_workspace(
    harness: Harness,
) -> None:
    await harness.run("echo one > file", "1")
    other = Session("somebody else", CHAT.name)
    assert await harness.run("ls", "2", "1", session=other) == ("documents\noutput\n", "new")


async def test_lost_sandbox_is_replaced_by_one_with_the_earlier_files(
    harness: Harness,
) -> None:
    await harness.run("echo one > file", "1")
    async with harness.use("2", "1") as lease:
        sandbox = await lease.sandbox()
        await sandbox.exec("echo lost > file", timeout_s=5)
        await sandbox.close()
        replacement = await lease.sandbox()
        assert (await replacement.exec("cat file", timeout_s=5)).stdout == "one\n"
        assert lease.origin == "restored"


async def test_sandbox_lost_in_the_last_command_is_not_kept(harness: Harness) -> None:
    await harness.run("echo one > file", "1")
    async with harness.use("2", "1") as lease:
        sandbox = await lease.sandbox()
        await sandbox.exec("echo lost > file", timeout_s=5)
        await sandbox.close()
    assert await harness.run("cat file", "3", "2") == ("one\n", "restored")


async def test_concurrent_runs_may_save_the_same_state(harness: Harness) -> None:
    await harness.run("echo one > file", "1")
    async with harness.use("2", "1") as first, harness.use("2", "1") as second:
        await (await first.sandbox()).exec("echo first > file", timeout_s=5)
        await (await second.sandbox()).exec("echo second > file", timeout_s=5)
    printed, _ = await harness.run("cat file", "3", "2")
    assert printed in ("first\n", "second\n")


@pytest.mark.parametrize("parents", [(), ("0",)])
async def test_workspace_that_is_requested_to_start_empty_has_no_earlier_files(
    harness: Harness, parents: tuple[str, ...]
) -> None:
    await harness.run("echo one > file", "1")
    async with harness.workspaces.use(
        ResumePoint(CHAT, parents, starts_empty=True), ISOLATION
    ) as lease:
        result = await (await lease.sandbox()).exec("ls", timeout_s=5)
    assert (result.stdout, lease.has_earlier_files) == ("documents\noutput\n", False)


async def test_session_with_a_lost_snapshot_starts_empty(harness: Harness) -> None:
    await harness.run("echo one > file", "1")
    async with harness.use("2", "1") as lease:
        await harness.snapshots.discard(CHAT)
        await (await lease.sandbox()).close()
        replacement = await lease.sandbox()
        assert (await replacement.exec("ls", timeout_s=5)).stdout == "documents\noutput\n"
        assert lease.origin == "new"


async def test_number_of_idle_sandboxes_is_limited(harness: Harness) -> None:
    for n in range(4):
        session = Session("somebody", f"chat {n}")
        await harness.run("echo one > file", "1", session=session)
        # Waits until the state is saved, so that the sandboxes become idle in this order.
        await harness.workspaces.pin(ResumePoint(session, ["1"]))
    await until(lambda: harness.alive == 2)
    first = Session("somebody", "chat 0")
    assert await harness.run("cat file", "2", "1", session=first) == ("one\n", "restored")


async def test_discarded_session_loses_its_sandbox_and_its_states(harness: Harness) -> None:
    await harness.run("echo one > file", "1")
    assert await harness.workspaces.discard(CHAT)
    assert not await harness.workspaces.discard(CHAT)
    assert harness.alive == 0
    assert await harness.run("ls", "2", "1") == ("documents\noutput\n", "new")


async def test_run_without_a_session_saves_no_workspace_state(harness: Harness) -> None:
    async with harness.workspaces.use(None, ISOLATION) as lease:
        await (await lease.sandbox()).exec("echo one > file", timeout_s=5)
    await until(lambda: harness.alive == 0)
    assert await harness.snapshots.newest_state_name(CHAT) is None


async def test_unavailable_sandbox_is_reported_to_the_request() -> None:
    failing = MemorySandboxes(SandboxStartError("the engine is down"))
    workspaces = Workspaces(failing, MemorySnapshots(), keep_s=KEEP_S, max_kept=2)
    async with workspaces.use(ResumePoint(CHAT), ISOLATION) as lease:
        with pytest.raises(SandboxStartError, match="the engine is down"):
            await lease.sandbox()
    await workspaces.aclose()


async def test_unchanged_files_are_not_saved_again() -> None:
    snapshots = MemorySnapshots()
    harness = Harness(snapshots)
    await harness.run("echo one > file", "1")
    async with harness.use("2", "1"):
        pass
    assert await harness.run("cat file", "3", "2") == ("one\n", "kept")
    await harness.workspaces.aclose()
    assert [state.name for state in snapshots.made] == ["1", "3"]
    assert harness.alive == 0
