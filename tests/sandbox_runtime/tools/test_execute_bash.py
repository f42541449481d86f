"""The model's commands run, and the observation reports their results."""

import re

import pytest

from policies.limits import Limits
from policies.observation import ObservationLimits
from sandbox_runtime.errors import SandboxLostError
from sandbox_runtime.tools import make_tools
from sandbox_runtime.tools.base import Observation
from sandbox_runtime.tools.bash import ExecuteBash
from tests.fakes.memory_sandbox import MemoryLease, MemorySandbox
from tests.sandbox_runtime.transfer import PLENTY_S, OutputRecorder, read

BASH = ExecuteBash(ObservationLimits(), Limits())


async def _run(sandbox: MemorySandbox, command: object, timeout_s: float = PLENTY_S) -> Observation:
    return await BASH.run(MemoryLease(sandbox), {"command": command}, timeout_s=timeout_s)


def test_make_tools_returns_new_tools_in_the_order_of_the_paper() -> None:
    tools = make_tools()
    names = ["str_replace_editor", "execute_bash", "submit"]
    assert [tool.name for tool in tools] == names
    assert [tool.schema["function"]["name"] for tool in tools] == names
    assert not any(one is other for one, other in zip(tools, make_tools(), strict=True))


async def test_observation_has_the_output_and_exit_code_of_a_command() -> None:
    observation = await _run(MemorySandbox(), "echo hello; echo oh >&2; exit 3")
    text = "Exit code: 3\n[stdout]\nhello\n[stderr]\noh"
    assert observation == Observation(text, exit_code=3, output_lines=2)


@pytest.mark.parametrize(
    ("command", "lines"),
    [
        ("seq 2500", 2500),
        ("seq 100000", 100_000),
        ("seq 2500 >&2; seq 3", 2503),
        ("printf 'a\\nb'", 2),
        ("true", 0),
    ],
)
async def test_line_count_of_an_observation_includes_omitted_lines(
    command: str, lines: int
) -> None:
    assert (await _run(MemorySandbox(), command)).output_lines == lines


async def test_shell_state_carries_over_from_call_to_call() -> None:
    sandbox = MemorySandbox()
    await _run(sandbox, "cd /tmp; export X=1; exit 1")
    assert (await _run(sandbox, "echo $X; pwd")).text == "Exit code: 0\n[stdout]\n1\n/tmp"


async def test_observation_of_a_timeout_has_the_output() -> None:
    observation = await _run(MemorySandbox(), "echo half; sleep 1000", timeout_s=120)
    assert observation.text.startswith("Exit code: 137 (timed out)\n[stdout]\nhalf\n[timed out")
    assert observation.exit_code == 137


async def test_command_that_exits_with_124_is_not_observed_as_timed_out() -> None:
    observation = await _run(MemorySandbox(), "echo x; exit 124")
    assert observation.text == "Exit code: 124\n[stdout]\nx"


async def test_line_of_300_000_characters_is_cut() -> None:
    command = "printf start; head -c 300000 /dev/zero | tr '\\0' x; printf end"
    observation = await _run(MemorySandbox(), command)
    assert len(observation.text) <= 30_100
    assert observation.text.startswith("Exit code: 0\n[stdout]\nstartxxx")
    assert observation.text.endswith("xxxend")
    assert observation.text.count("left out") == 1


async def test_many_lines_are_cut_in_their_middle() -> None:
    observation = await _run(MemorySandbox(), "seq 1 10000")
    lines = observation.text.splitlines()
    assert (lines[2], lines[-1]) == ("1", "10000")
    assert len(lines) <= 2003
    assert observation.text.count("left out") == 1


async def test_output_of_both_streams_is_passed_to_the_listener() -> None:
    recorder = OutputRecorder()
    arguments = {"command": "echo one; echo two >&2"}
    await BASH.run(MemoryLease(MemorySandbox()), arguments, timeout_s=PLENTY_S, on_output=recorder)
    assert recorder.pieces == [("stdout", "one\n"), ("stderr", "two\n")]


@pytest.mark.parametrize("arguments", ["ls", ["ls"], {"command": ["ls"]}, {}, None, {"cmd": "ls"}])
async def test_wrong_arguments_run_no_command_and_the_observation_shows_the_schema(
    arguments: object,
) -> None:
    observation = await BASH.run(MemoryLease(MemorySandbox()), arguments, timeout_s=PLENTY_S)
    assert observation.exit_code is None
    assert observation.text.startswith("Nothing was done")
    assert '{"command": <string>, "timeout_s": <integer, optional>' in observation.text


@pytest.mark.parametrize("command", ["", " \n ", "printf 'a\0b'"])
async def test_empty_command_and_command_with_a_nul_byte_are_refused(command: str) -> None:
    observation = await _run(MemorySandbox(), command)
    assert observation.exit_code is None
    assert observation.text.startswith("Nothing was run")


async def test_command_in_a_lost_sandbox_raises_sandbox_lost_error() -> None:
    sandbox = MemorySandbox()
    await sandbox.close()
    with pytest.raises(SandboxLostError):
        await _run(sandbox, "echo hello")


async def test_long_command_becomes_a_job_that_can_be_read_and_stopped() -> None:
    sandbox = MemorySandbox()
    bash = ExecuteBash(ObservationLimits(), Limits(command_wait_s=0.2))

    async def run(**arguments: object) -> Observation:
        return await bash.run(MemoryLease(sandbox), arguments, timeout_s=PLENTY_S)

    started = await run(command="mkfifo gate; echo before; cat gate")
    assert started.text.startswith("Still running after")
    assert started.exit_code is None
    job_id = started.text.splitlines()[0].rpartition(" ")[2]
    assert (await run(command="", job_id=job_id)).text.startswith("Still running after")
    assert (await run(command="C-c", job_id=job_id)).exit_code is not None
    gone = await run(command="", job_id=job_id)
    assert gone.text.startswith("Nothing was done: there is no job")


async def test_a_command_that_waits_for_input_can_be_answered() -> None:
    sandbox = MemorySandbox()
    asked = await _run(sandbox, "echo question; read answer; echo heard $answer")
    assert asked.text.startswith("Waiting for input")
    job_id = asked.text.splitlines()[0].rpartition(" ")[2]
    arguments = {"command": "yes", "job_id": job_id}
    answered = await BASH.run(MemoryLease(sandbox), arguments, timeout_s=PLENTY_S)
    assert answered.text == "Exit code: 0\n[stdout]\nheard yes"


async def test_timeout_argument_may_be_long_but_not_zero() -> None:
    sandbox = MemorySandbox()
    arguments: dict[str, object] = {"command": "sleep 300; echo done", "timeout_s": 600}
    slept = await BASH.run(MemoryLease(sandbox), arguments, timeout_s=120)
    assert slept.text == "Exit code: 0\n[stdout]\ndone"
    refused = await BASH.run(MemoryLease(sandbox), arguments | {"timeout_s": 0}, timeout_s=120)
    assert refused.text.startswith("Nothing was run: timeout_s")


async def test_truncated_observation_names_the_file_with_the_full_output() -> None:
    sandbox = MemorySandbox()
    observation = await _run(sandbox, "seq 1 20000")
    (path,) = re.findall(r"left out; all of it is in (\S+) \.\.\.\]", observation.text)
    assert path.startswith("/testbed/.observations/")
    assert await read(sandbox, path) == "".join(f"{n}\n" for n in range(1, 20_001)).encode()
