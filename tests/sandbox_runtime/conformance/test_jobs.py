"""A command may become a job, which can be read, given input and stopped; no command runs twice."""

import anyio
import pytest

from sandbox_runtime.errors import JobMissingError
from sandbox_runtime.sandbox import OutputCap, Sandbox
from tests.sandbox_runtime.transfer import PLENTY_S, output

AT_ONCE_S = 0.3
GATED = "mkfifo gate; echo before; read line < gate; echo after $line"
"""A command that continues when `gate` is written to."""


async def start_waiting_job(sandbox: Sandbox) -> str:
    """Start the command and return its job id once "before" was printed."""
    result = await sandbox.exec(GATED, timeout_s=PLENTY_S, wait_s=AT_ONCE_S)
    job_id, said = result.job_id, result.stdout
    with anyio.fail_after(PLENTY_S):
        while said != "before\n":
            result = await sandbox.wait(job_id, wait_s=AT_ONCE_S)
            said += result.stdout
    assert result.running
    return job_id


async def test_command_that_ends_in_time_does_not_become_a_job(sandbox: Sandbox) -> None:
    result = await sandbox.exec("echo done", timeout_s=PLENTY_S, wait_s=PLENTY_S)
    assert (result.stdout, result.running, result.job_id) == ("done\n", False, "")


async def test_background_process_outlives_a_command_with_a_terminal(
    sandbox: Sandbox,
) -> None:
    started = "mkfifo go ack; (cat go > heard; echo alive > ack) & echo started"
    result = await sandbox.exec(started, timeout_s=PLENTY_S, stdin=None, wait_s=PLENTY_S)
    assert (result.stdout, result.running) == ("started\n", False)
    assert await output(sandbox, "echo hello > go; cat ack heard") == "alive\nhello\n"


async def test_long_command_continues_as_a_job(sandbox: Sandbox) -> None:
    job_id = await start_waiting_job(sandbox)
    await output(sandbox, "echo now > gate")
    end = await sandbox.wait(job_id, wait_s=PLENTY_S)
    assert (end.running, end.exit_code, end.stdout) == (False, 0, "after now\n")


async def test_output_of_a_job_between_two_waits_is_not_lost(sandbox: Sandbox) -> None:
    await output(sandbox, "mkfifo one two")
    command = "read a < one; seq 3; read b < two"
    job = await sandbox.exec(command, timeout_s=PLENTY_S, wait_s=AT_ONCE_S)
    await output(sandbox, "echo go > one")
    await output(sandbox, "echo go > two")
    assert (await sandbox.wait(job.job_id, wait_s=PLENTY_S)).stdout == "1\n2\n3\n"


async def test_waiting_again_reports_an_unfinished_job_as_running(sandbox: Sandbox) -> None:
    job_id = await start_waiting_job(sandbox)
    again = await sandbox.wait(job_id, wait_s=AT_ONCE_S)
    assert (again.running, again.job_id, again.stdout) == (True, job_id, "")


async def test_other_commands_run_beside_a_job(sandbox: Sandbox) -> None:
    await sandbox.exec(GATED, timeout_s=PLENTY_S, wait_s=AT_ONCE_S)
    assert await output(sandbox, "x=1; echo $x") == "1\n"


async def test_ended_job_does_not_overwrite_the_shell_state_of_later_commands(
    sandbox: Sandbox,
) -> None:
    job = await sandbox.exec(f"x=old; {GATED}", timeout_s=PLENTY_S, wait_s=AT_ONCE_S)
    await output(sandbox, "x=new")
    await output(sandbox, "echo go > gate")
    await sandbox.wait(job.job_id, wait_s=PLENTY_S)
    assert await output(sandbox, "echo $x") == "new\n"


async def test_a_job_can_be_stopped(sandbox: Sandbox) -> None:
    job = await sandbox.exec(GATED, timeout_s=PLENTY_S, wait_s=AT_ONCE_S)
    await sandbox.stop(job.job_id)
    end = await sandbox.wait(job.job_id, wait_s=PLENTY_S)
    assert (end.running, end.timed_out, end.exit_code != 0) == (False, False, True)


async def test_job_times_out_at_the_deadline_of_its_command(sandbox: Sandbox) -> None:
    job = await sandbox.exec(GATED, timeout_s=1.0, wait_s=AT_ONCE_S)
    end = await sandbox.wait(job.job_id, wait_s=PLENTY_S)
    assert (job.running, end.running, end.timed_out) == (True, False, True)


async def test_output_cap_applies_to_each_output_segment_of_a_job(sandbox: Sandbox) -> None:
    command = "mkfifo gate; seq 1000; read a < gate; seq 1000"
    cap = OutputCap(max_bytes=100)
    job = await sandbox.exec(command, timeout_s=PLENTY_S, wait_s=AT_ONCE_S, cap=cap)
    await output(sandbox, "echo go > gate")
    end = await sandbox.wait(job.job_id, wait_s=PLENTY_S)
    assert (job.truncated, end.truncated, end.stdout_bytes) == (True, True, job.stdout_bytes)
    assert end.stdout == job.stdout


async def test_waiting_for_or_stopping_an_unknown_job_raises_job_missing_error(
    sandbox: Sandbox,
) -> None:
    with pytest.raises(JobMissingError):
        await sandbox.wait("nothing", wait_s=PLENTY_S)
    with pytest.raises(JobMissingError):
        await sandbox.stop("nothing")


async def test_result_of_an_ended_job_is_returned_once(sandbox: Sandbox) -> None:
    job = await sandbox.exec(GATED, timeout_s=PLENTY_S, wait_s=AT_ONCE_S)
    await sandbox.stop(job.job_id)
    await sandbox.wait(job.job_id, wait_s=PLENTY_S)
    with pytest.raises(JobMissingError):
        await sandbox.wait(job.job_id, wait_s=PLENTY_S)


async def test_command_that_waits_for_input_becomes_a_job_that_accepts_input(
    sandbox: Sandbox,
) -> None:
    command = "echo question; read answer; echo heard $answer"
    job = await sandbox.exec(command, timeout_s=PLENTY_S, wait_s=3.0, stdin=None)
    assert (job.running, job.stdout) == (True, "question\n")
    end = await sandbox.wait(job.job_id, wait_s=PLENTY_S, typed_bytes=b"yes\n")
    assert (end.running, end.stdout) == (False, "heard yes\n")


async def test_end_of_input_reaches_a_job_on_a_terminal(
    sandbox: Sandbox, request: pytest.FixtureRequest
) -> None:
    if "runsc" in request.node.name:
        pytest.skip("the terminals of Debian's gVisor know no end of input")
    job = await sandbox.exec("cat; echo end", timeout_s=PLENTY_S, wait_s=3.0, stdin=None)
    end = await sandbox.wait(job.job_id, wait_s=PLENTY_S, typed_bytes=b"text\n", end_of_input=True)
    assert (end.running, end.stdout) == (False, "text\nend\n")


async def test_command_that_ignores_its_terminal_ends_normally(sandbox: Sandbox) -> None:
    result = await sandbox.exec("echo done", timeout_s=PLENTY_S, wait_s=PLENTY_S, stdin=None)
    assert (result.running, result.stdout) == (False, "done\n")


async def test_second_exec_with_the_same_command_id_returns_the_same_job(
    sandbox: Sandbox,
) -> None:
    first = await sandbox.exec(GATED, timeout_s=PLENTY_S, wait_s=AT_ONCE_S, command_id="one")
    again = await sandbox.exec(GATED, timeout_s=PLENTY_S, wait_s=AT_ONCE_S, command_id="one")
    assert (first.job_id, again.job_id, again.stdout) == ("one", "one", first.stdout)
