"""A conversation's files are there again, whoever has the computer meanwhile."""

from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from policies.sessions import ResumePoint, Session
from proxy.store.store import Store
from proxy.workspaces import Workspaces
from sandbox_runtime.errors import SandboxStartError
from tests.fakes.memory_sandbox import MemorySandboxes
from tests.fakes.memory_snapshots import MemorySnapshots
from tests.fakes.waiting import until
from tests.proxy.workspace_fixture import CHAT, ISOLATION, KEEP_S, House


@pytest.fixture(params=["memory", "store"])
async def house(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[House]:
    store = Store(tmp_path) if request.param == "store" else None
    house = House(store.workspaces if store else MemorySnapshots())
    with anyio.fail_after(20):
        yield house
        await house.workspaces.aclose()
    assert house.alive == 0
    if store:
        store.close()


async def test_the_next_request_has_the_files_and_the_computer_of_the_one_before(
    house: House,
) -> None:
    assert await house.run("echo one > file", "1") == ("", "new")
    assert await house.run("cat file", "2", "1") == ("one\n", "kept")
    assert house.sandboxes.opened == 1


async def test_a_conversation_that_comes_back_late_has_its_files_in_a_new_computer(
    house: House,
) -> None:
    await house.run("echo one > file", "1")
    await until(lambda: house.clock.alarms == [KEEP_S])
    house.clock.advance(KEEP_S)
    await until(lambda: house.alive == 0)
    assert await house.run("cat file", "2", "1") == ("one\n", "restored")


async def test_a_conversation_that_branches_goes_on_from_where_it_was(house: House) -> None:
    await house.run("echo one > file", "1")
    await house.run("echo two >> file", "2", "1")
    assert await house.run("cat file", "2b", "1") == ("one\n", "restored")
    assert await house.run("cat file", "3", "2", "1") == ("one\ntwo\n", "kept")


async def test_two_requests_at_once_have_a_computer_each(house: House) -> None:
    await house.run("echo one > file", "1")
    async with (
        house.use("2", "1") as first,
        house.use("2b", "1") as second,
    ):
        computers = await first.sandbox(), await second.sandbox()
        assert computers[0] is not computers[1]
        for n, computer in enumerate(computers):
            await computer.exec(f"echo {n} >> file", timeout_s=5)
    assert await house.run("cat file", "3", "2") == ("one\n0\n", "kept")
    assert await house.run("cat file", "3b", "2b") == ("one\n1\n", "kept")


async def test_a_request_that_does_not_say_from_where_goes_on_from_the_newest(
    house: House,
) -> None:
    await house.run("echo one > file", "1")
    await house.run("echo two > file", "2", "1")
    assert await house.run("cat file", "3", "unknown") == ("two\n", "kept")


async def test_a_run_that_used_no_computer_leaves_the_files_as_they_were(house: House) -> None:
    await house.run("echo one > file", "1")
    async with house.use("2", "1"):
        pass
    assert await house.run("cat file", "3", "2", "1") == ("one\n", "kept")


async def test_a_run_that_fails_leaves_nothing(house: House) -> None:
    await house.run("echo one > file", "1")

    async def fail() -> None:
        async with house.use("2", "1") as lease:
            await (await lease.sandbox()).exec("echo spoilt > file", timeout_s=5)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    assert await house.run("cat file", "2", "1") == ("one\n", "restored")


async def test_who_is_not_its_owner_has_another_workspace(house: House) -> None:
    await house.run("echo one > file", "1")
    other = Session("somebody else", CHAT.name)
    assert await house.run("ls", "2", "1", session=other) == ("documents\noutput\n", "new")


async def test_a_computer_that_is_lost_is_replaced_by_one_with_the_files_of_before(
    house: House,
) -> None:
    await house.run("echo one > file", "1")
    async with house.use("2", "1") as lease:
        computer = await lease.sandbox()
        await computer.exec("echo lost > file", timeout_s=5)
        await computer.close()
        again = await lease.sandbox()
        assert (await again.exec("cat file", timeout_s=5)).stdout == "one\n"
        assert lease.origin == "restored"


async def test_a_computer_that_died_in_a_runs_last_command_is_not_kept(house: House) -> None:
    await house.run("echo one > file", "1")
    async with house.use("2", "1") as lease:
        computer = await lease.sandbox()
        await computer.exec("echo lost > file", timeout_s=5)
        await computer.close()
    assert await house.run("cat file", "3", "2") == ("one\n", "restored")


async def test_two_runs_that_leave_the_same_state_leave_the_later_ones(house: House) -> None:
    await house.run("echo one > file", "1")
    async with house.use("2", "1") as first, house.use("2", "1") as second:
        await (await first.sandbox()).exec("echo first > file", timeout_s=5)
        await (await second.sandbox()).exec("echo second > file", timeout_s=5)
    printed, _ = await house.run("cat file", "3", "2")
    assert printed in ("first\n", "second\n")


@pytest.mark.parametrize("parents", [(), ("0",)])
async def test_a_conversation_that_begins_anew_has_no_files(
    house: House, parents: tuple[str, ...]
) -> None:
    await house.run("echo one > file", "1")
    async with house.workspaces.use(
        ResumePoint(CHAT, parents, starts_empty=True), ISOLATION
    ) as lease:
        result = await (await lease.sandbox()).exec("ls", timeout_s=5)
    assert (result.stdout, lease.goes_on) == ("documents\noutput\n", False)


async def test_a_conversation_whose_files_are_lost_begins_anew(house: House) -> None:
    await house.run("echo one > file", "1")
    async with house.use("2", "1") as lease:
        await house.snapshots.discard(CHAT)
        await (await lease.sandbox()).close()
        again = await lease.sandbox()
        assert (await again.exec("ls", timeout_s=5)).stdout == "documents\noutput\n"
        assert lease.origin == "new"


async def test_no_more_computers_are_kept_than_may_be(house: House) -> None:
    for n in range(4):
        await house.run("echo one > file", "1", session=Session("somebody", f"chat {n}"))
    await until(lambda: house.alive == 2)
    first = Session("somebody", "chat 0")
    assert await house.run("cat file", "2", "1", session=first) == ("one\n", "restored")


async def test_a_conversation_that_is_ended_is_forgotten(house: House) -> None:
    await house.run("echo one > file", "1")
    assert await house.workspaces.discard(CHAT)
    assert not await house.workspaces.discard(CHAT)
    assert house.alive == 0
    assert await house.run("ls", "2", "1") == ("documents\noutput\n", "new")


async def test_a_run_that_belongs_to_no_conversation_leaves_nothing(house: House) -> None:
    async with house.workspaces.use(None, ISOLATION) as lease:
        await (await lease.sandbox()).exec("echo one > file", timeout_s=5)
    await until(lambda: house.alive == 0)
    assert await house.snapshots.newest(CHAT) is None


async def test_where_no_computer_can_be_had_the_request_hears_why() -> None:
    failing = MemorySandboxes(SandboxStartError("the engine is down"))
    workspaces = Workspaces(failing, MemorySnapshots(), keep_s=KEEP_S, max_kept=2)
    async with workspaces.use(ResumePoint(CHAT), ISOLATION) as lease:
        with pytest.raises(SandboxStartError, match="the engine is down"):
            await lease.sandbox()
    await workspaces.aclose()


async def test_files_that_no_run_has_touched_are_not_packed_again() -> None:
    snapshots = MemorySnapshots()
    house = House(snapshots)
    await house.run("echo one > file", "1")
    async with house.use("2", "1"):
        pass
    assert await house.run("cat file", "3", "2") == ("one\n", "kept")
    await house.workspaces.aclose()
    assert [state.name for state in snapshots.made] == ["1", "3"]
    assert house.alive == 0
