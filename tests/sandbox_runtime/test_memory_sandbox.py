"""What the fake adds to the contract all sandboxes pass: its own time, its limits, its counts."""

import pytest

from policies.isolation import Isolation
from sandbox_runtime.errors import SandboxLostError, SandboxStartError
from tests.fakes.memory_sandbox import MemorySandbox, MemorySandboxes
from tests.fakes.shell_syntax import UnsupportedShellError
from tests.sandbox_runtime.transfer import PLENTY_S, output, read


async def test_a_sleep_takes_no_time_and_counts_all_the_same() -> None:
    result = await MemorySandbox().exec("sleep 3600; echo done", timeout_s=4000)
    assert (result.stdout, result.timed_out) == ("done\n", False)
    assert result.duration_s > 3600


async def test_a_sleep_beyond_the_timeout_is_timed_out() -> None:
    result = await MemorySandbox().exec("echo before; sleep 3600", timeout_s=3000)
    assert (result.stdout, result.timed_out, result.duration_s) == ("before\n", True, 3000)


async def test_a_background_job_sleeps_until_a_command_has_let_the_time_pass() -> None:
    sandbox = MemorySandbox()
    await output(sandbox, "(sleep 30; echo late > late) &")
    assert await output(sandbox, "sleep 29; ls") == "documents\noutput\n"
    assert await output(sandbox, "sleep 2; ls") == "documents\nlate\noutput\n"


@pytest.mark.parametrize(
    "command",
    ["ls *.txt", "x=$((1 + 1))", "[[ a = a ]]", "echo `pwd`", "set -u", "ls -l", "echo {a,b}"],
)
async def test_shell_it_does_not_know_is_refused_loudly(command: str) -> None:
    with pytest.raises(UnsupportedShellError):
        await MemorySandbox().exec(command, timeout_s=PLENTY_S)


async def test_a_background_job_it_cannot_do_is_not_lost() -> None:
    sandbox = MemorySandbox()
    await sandbox.exec("sleep 1; ls -l & sleep 2", timeout_s=PLENTY_S)
    with pytest.raises(UnsupportedShellError):
        await sandbox.exec("true", timeout_s=PLENTY_S)


async def test_it_can_start_with_files() -> None:
    sandbox = MemorySandbox({"/testbed/documents/a/b.txt": b"text"})
    assert await read(sandbox, "/testbed/documents/a/b.txt") == b"text"


async def test_a_lease_is_one_sandbox_that_is_closed_at_its_end() -> None:
    sandboxes = MemorySandboxes()
    async with sandboxes.lease(Isolation()) as lease:
        sandbox = await lease.sandbox()
        assert await lease.sandbox() is sandbox
        assert (sandboxes.opened, sandboxes.closed) == (1, 0)
    assert (sandboxes.opened, sandboxes.closed) == (1, 1)
    with pytest.raises(SandboxLostError):
        await sandbox.exec("true", timeout_s=PLENTY_S)


async def test_a_start_that_is_to_fail_fails_when_the_sandbox_is_asked_for() -> None:
    failure = SandboxStartError("no room")
    sandboxes = MemorySandboxes(failure)
    async with sandboxes.lease(Isolation()) as lease:
        with pytest.raises(SandboxStartError, match="no room"):
            await lease.sandbox()
    assert (sandboxes.opened, sandboxes.closed) == (0, 0)
