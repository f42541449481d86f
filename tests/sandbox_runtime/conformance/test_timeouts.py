"""A timed-out command and its children are stopped; other processes keep running."""

import pytest

from sandbox_runtime.sandbox import OutputCap, Sandbox, ShellState
from tests.sandbox_runtime.transfer import PLENTY_S, output

SOON_S = 0.5


async def test_timed_out_command_is_stopped_and_its_output_returned(
    sandbox: Sandbox,
) -> None:
    command = "echo before; echo warning >&2; sleep 600; echo after"
    result = await sandbox.exec(command, timeout_s=SOON_S)
    assert (result.timed_out, result.exit_code != 0) == (True, True)
    assert (result.stdout, result.stderr) == ("before\n", "warning\n")


async def test_loop_that_ignores_signals_is_killed_at_the_timeout(sandbox: Sandbox) -> None:
    command = "trap '' TERM INT HUP; echo $$; while :; do :; done"
    result = await sandbox.exec(command, timeout_s=SOON_S)
    assert result.timed_out
    assert await _is_gone(sandbox, result.stdout)


async def test_children_of_a_timed_out_command_are_killed(sandbox: Sandbox) -> None:
    command = "sh -c 'echo $$; sleep 600; echo; exit 1' | cat"
    result = await sandbox.exec(command, timeout_s=SOON_S)
    assert result.timed_out
    assert await _is_gone(sandbox, result.stdout)


async def test_shell_state_survives_a_timeout(sandbox: Sandbox) -> None:
    await output(sandbox, "x=1; cd /tmp")
    result = await sandbox.exec("x=2; cd /; sleep 600", timeout_s=SOON_S)
    assert result.timed_out
    assert await output(sandbox, "echo $x; pwd") == "1\n/tmp\n"


async def test_command_with_endless_output_times_out_and_its_output_is_capped(
    sandbox: Sandbox,
) -> None:
    command = "while :; do echo 0123456789; done"
    cap = OutputCap(max_bytes=220, max_lines=1000)
    result = await sandbox.exec(command, timeout_s=SOON_S, cap=cap)
    assert (result.timed_out, result.truncated) == (True, True)
    assert result.stdout.startswith("0123456789\n" * 10)
    assert len(result.stdout) < 400


@pytest.mark.parametrize("shell_state", ["snapshot", "none"])
async def test_a_command_that_ends_in_time_is_not_timed_out(
    sandbox: Sandbox, shell_state: ShellState
) -> None:
    command = "sleep 0.2; echo done"
    result = await sandbox.exec(command, timeout_s=PLENTY_S, shell_state=shell_state)
    assert (result.exit_code, result.stdout, result.timed_out) == (0, "done\n", False)


async def test_background_process_outlives_its_command(sandbox: Sandbox) -> None:
    started = "mkfifo go ack; (cat go > heard; echo alive > ack) & echo started"
    assert await output(sandbox, started) == "started\n"
    assert await output(sandbox, "echo hello > go; cat ack heard") == "alive\nhello\n"


async def test_a_background_process_may_print_after_its_command_has_ended(
    sandbox: Sandbox,
) -> None:
    await output(sandbox, "mkfifo go ack; (cat go; seq 1 20000; echo alive > ack) &")
    assert await output(sandbox, "echo hello > go; cat ack") == "alive\n"


async def test_background_process_runs_during_a_later_command(sandbox: Sandbox) -> None:
    await output(sandbox, "(sleep 0.3; echo done > result) &")
    command = "until [ -s result ]; do sleep 0.1; done; cat result"
    assert await output(sandbox, command) == "done\n"


async def test_a_background_process_can_be_killed_by_a_later_command(sandbox: Sandbox) -> None:
    await output(sandbox, "mkfifo never; sh -c 'exec cat never' & pid=$!")
    await output(sandbox, "kill -9 $pid")
    assert await _is_gone(sandbox, await output(sandbox, "echo $pid"))


async def _is_gone(sandbox: Sandbox, pid: str) -> bool:
    """Return True if a process ends within a short time."""
    command = f"while kill -0 {int(pid)} 2> /dev/null; do sleep 0.05; done"
    return not (await sandbox.exec(command, timeout_s=10)).timed_out
