"""The fake sandbox beyond the conformance suite: its clock, its limits, its counts."""

import io
import tarfile

import pytest

from policies.isolation import Isolation
from sandbox_runtime.errors import SandboxFileError, SandboxLostError, SandboxStartError
from tests.fakes.memory_sandbox import MemorySandbox, MemorySandboxes
from tests.fakes.shell_syntax import UnsupportedShellError
from tests.sandbox_runtime.transfer import PLENTY_S, output, pieces, read


async def test_sleep_takes_no_real_time_but_counts_as_duration() -> None:
    result = await MemorySandbox().exec("sleep 3600; echo done", timeout_s=4000)
    assert (result.stdout, result.timed_out) == ("done\n", False)
    assert result.duration_s > 3600


async def test_command_that_sleeps_beyond_its_timeout_is_timed_out() -> None:
    result = await MemorySandbox().exec("echo before; sleep 3600", timeout_s=3000)
    assert (result.stdout, result.timed_out, result.duration_s) == ("before\n", True, 3000)


async def test_background_process_sleeps_until_a_command_advances_the_clock() -> None:
    sandbox = MemorySandbox()
    await output(sandbox, "(sleep 30; echo late > late) &")
    assert await output(sandbox, "sleep 29; ls") == "documents\noutput\n"
    assert await output(sandbox, "sleep 2; ls") == "documents\nlate\noutput\n"


@pytest.mark.parametrize(
    "command",
    [
        "ls *.txt",
        "x=$((1 + 1))",
        "[[ a = a ]]",
        "echo `pwd`",
        "set -u",
        "ls -l",
        "echo {a,b}",
        "read -t 1 x",
    ],
)
async def test_unknown_shell_syntax_is_refused(command: str) -> None:
    with pytest.raises(UnsupportedShellError):
        await MemorySandbox().exec(command, timeout_s=PLENTY_S)


@pytest.mark.parametrize("steps", range(12))
async def test_unsupported_command_is_reported_once(steps: int) -> None:
    sandbox = MemorySandbox()
    with pytest.raises(UnsupportedShellError):
        await sandbox.exec(":;" * steps + "ls -l", timeout_s=PLENTY_S)
    for _ in range(2):
        assert await output(sandbox, "echo well") == "well\n"


async def test_unsupported_command_in_the_background_is_reported() -> None:
    sandbox = MemorySandbox()
    await sandbox.exec("sleep 1; ls -l & sleep 2", timeout_s=PLENTY_S)
    with pytest.raises(UnsupportedShellError):
        await sandbox.exec("true", timeout_s=PLENTY_S)


async def test_sleep_longer_than_wait_s_does_not_become_a_job() -> None:
    command = "sleep 3600; echo done"
    result = await MemorySandbox().exec(command, timeout_s=4000, wait_s=1)
    assert (result.stdout, result.running) == ("done\n", False)


async def test_wait_for_a_blocked_job_counts_towards_its_duration() -> None:
    sandbox = MemorySandbox()
    job = await sandbox.exec("mkfifo never; cat never", timeout_s=PLENTY_S, wait_s=2)
    again = await sandbox.wait(job.job_id, wait_s=3)
    assert (job.running, job.waiting, round(job.duration_s)) == (True, False, 2)
    assert (again.running, again.waiting, round(again.duration_s)) == (True, False, 5)


async def test_job_times_out_while_other_commands_sleep() -> None:
    sandbox = MemorySandbox()
    job = await sandbox.exec("mkfifo never; echo $$; cat never", timeout_s=50, wait_s=1)
    assert await output(sandbox, f"sleep 48; kill -0 {int(job.stdout)} && echo alive") == "alive\n"
    gone = await sandbox.exec(f"sleep 2; kill -0 {int(job.stdout)}", timeout_s=PLENTY_S)
    assert gone.exit_code == 1
    end = await sandbox.wait(job.job_id, wait_s=1)
    assert (end.timed_out, round(end.duration_s)) == (True, 50)


async def test_job_continues_its_sleep_while_other_commands_sleep() -> None:
    sandbox = MemorySandbox()
    command = "mkfifo gate; read line < gate; sleep 30; echo late > late"
    job = await sandbox.exec(command, timeout_s=PLENTY_S, wait_s=1)
    await output(sandbox, "echo go > gate")
    assert await output(sandbox, "sleep 29; ls") == "documents\ngate\noutput\n"
    assert await output(sandbox, "sleep 2; cat late") == "late\n"
    end = await sandbox.wait(job.job_id, wait_s=1)
    assert (end.exit_code, round(end.duration_s)) == (0, 31)


async def test_wait_does_not_prolong_the_sleep_of_a_job() -> None:
    sandbox = MemorySandbox()
    command = "mkfifo gate; read line < gate; sleep 30; echo awake"
    job = await sandbox.exec(command, timeout_s=PLENTY_S, wait_s=1)
    await output(sandbox, "echo go > gate; sleep 10")
    end = await sandbox.wait(job.job_id, wait_s=1)
    assert (end.stdout, round(end.duration_s)) == ("awake\n", 31)


async def test_unsupported_command_in_a_job_is_reported() -> None:
    sandbox = MemorySandbox()
    command = "mkfifo gate; read line < gate; ls -l"
    await sandbox.exec(command, timeout_s=PLENTY_S, wait_s=1)
    await output(sandbox, "echo go > gate; sleep 1")
    with pytest.raises(UnsupportedShellError):
        await sandbox.exec("true", timeout_s=PLENTY_S)


async def test_output_of_a_jobs_background_process_is_dropped() -> None:
    sandbox = MemorySandbox()
    command = "mkfifo gate later; read line < gate; (cat later; touch done) & echo end"
    job = await sandbox.exec(command, timeout_s=PLENTY_S, wait_s=1)
    await output(sandbox, "echo go > gate; sleep 1")
    await output(sandbox, "echo late > later; until [ -e done ]; do sleep 1; done")
    assert (await sandbox.wait(job.job_id, wait_s=1)).stdout == "end\n"


async def test_a_job_can_be_killed_by_a_command() -> None:
    sandbox = MemorySandbox()
    job = await sandbox.exec("mkfifo never; echo $$; cat never", timeout_s=PLENTY_S, wait_s=1)
    await output(sandbox, f"kill -9 {int(job.stdout)}")
    end = await sandbox.wait(job.job_id, wait_s=1)
    assert (end.running, end.exit_code, end.timed_out) == (False, 137, False)


async def test_job_counts_as_waiting_for_input_until_a_whole_line_is_typed() -> None:
    sandbox = MemorySandbox()
    command = "read -r one rest; echo $rest, $one"
    job = await sandbox.exec(command, timeout_s=PLENTY_S, wait_s=PLENTY_S, stdin=None)
    half = await sandbox.wait(job.job_id, wait_s=PLENTY_S, typed_bytes=b"one  two ")
    assert (job.running, job.waiting, half.running, half.waiting) == (True, True, True, True)
    end = await sandbox.wait(job.job_id, wait_s=PLENTY_S, typed_bytes=b"three\n")
    assert (end.running, end.waiting, end.stdout) == (False, False, "two three, one\n")


async def test_job_waits_for_input_only_after_all_earlier_input_was_processed() -> None:
    sandbox = MemorySandbox()
    command = "cat | tr a b | cat"
    job = await sandbox.exec(command, timeout_s=PLENTY_S, wait_s=PLENTY_S, stdin=None)
    more = await sandbox.wait(job.job_id, wait_s=PLENTY_S, typed_bytes=b"a\na\n")
    assert (more.waiting, more.stdout) == (True, "b\nb\n")


@pytest.mark.parametrize("name", ["../out", "/etc/out", "inside/../../out"])
async def test_snapshot_with_paths_outside_the_workspace_is_refused(name: str) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("inside"))
        archive.addfile(tarfile.TarInfo(name))
    sandbox = MemorySandbox()
    with pytest.raises(SandboxFileError, match="leads out"):
        await sandbox.restore(pieces(packed.getvalue()))
    assert await output(sandbox, "ls") == "documents\noutput\n"


@pytest.mark.parametrize("kept", [0, 512, 50_000])
async def test_truncated_snapshot_is_refused(kept: int) -> None:
    packed = bytearray()

    async def keep(piece: bytes) -> None:
        packed.extend(piece)

    await MemorySandbox({"/testbed/file": bytes(100_000)}).snapshot(keep, max_bytes=1 << 20)
    sandbox = MemorySandbox()
    with pytest.raises(SandboxFileError):
        await sandbox.restore(pieces(bytes(packed[:kept])))
    assert await output(sandbox, "ls") == "documents\noutput\n"


async def test_snapshot_excludes_shared_inputs() -> None:
    packed = bytearray()

    async def keep(piece: bytes) -> None:
        packed.extend(piece)

    await MemorySandbox({"/testbed/shared/data": b"x"}).snapshot(keep, max_bytes=1 << 20)
    sandbox = MemorySandbox()
    await sandbox.restore(pieces(bytes(packed)))
    assert await output(sandbox, "ls") == "documents\noutput\n"


async def test_memory_sandbox_can_start_with_files() -> None:
    sandbox = MemorySandbox({"/testbed/documents/a/b.txt": b"text"})
    assert await read(sandbox, "/testbed/documents/a/b.txt") == b"text"


async def test_lease_has_one_sandbox_which_is_closed_with_the_lease() -> None:
    sandboxes = MemorySandboxes()
    async with sandboxes.lease(Isolation()) as lease:
        sandbox = await lease.sandbox()
        assert await lease.sandbox() is sandbox
        assert (sandboxes.opened, sandboxes.closed) == (1, 0)
    assert (sandboxes.opened, sandboxes.closed) == (1, 1)
    with pytest.raises(SandboxLostError):
        await sandbox.exec("true", timeout_s=PLENTY_S)


async def test_configured_start_failure_is_raised_by_the_lease() -> None:
    failure = SandboxStartError("no room")
    sandboxes = MemorySandboxes(failure)
    async with sandboxes.lease(Isolation()) as lease:
        with pytest.raises(SandboxStartError, match="no room"):
            await lease.sandbox()
    assert (sandboxes.opened, sandboxes.closed) == (0, 0)
