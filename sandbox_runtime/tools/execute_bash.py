"""The execute_bash tool."""

from typing import Any

from policies.limits import Limits
from policies.observation import (
    CommandOutcome,
    ObservationLimits,
    bash_observation,
    output_cap,
)
from sandbox_runtime.errors import JobMissingError
from sandbox_runtime.sandbox import ExecResult, Lease, OnOutput, OutputCap, Sandbox
from sandbox_runtime.tools.arguments import checked
from sandbox_runtime.tools.base import Mistake, Observation, ToolSchema

INTERRUPT, END_OF_INPUT = "C-c", "C-d"
SCHEMA: ToolSchema = {
    "type": "function",
    "function": {
        "name": "execute_bash",
        "description": (
            "Run a bash command in your sandbox and get its exit code, stdout and stderr. The "
            "working directory, variables and functions carry over from one call to the next, "
            "and processes started in the background (&) keep running. A command that exceeds "
            "its time limit is stopped and what it printed so far is shown. One that takes long "
            "or waits for input is returned as a job: call again with its job_id to read on or "
            "to type into it. Long output is cut in the middle; write it to a file and look at "
            "the parts you need."
        ),
        "parameters": {
            "type": "object",
            "properties": {
                "command": {
                    "type": "string",
                    "description": (
                        "The command or script, one line or many. With job_id: text to type, "
                        "empty to read on, C-d for the end of input, C-c to stop the job."
                    ),
                },
                "timeout_s": {
                    "type": "integer",
                    "description": "Seconds the command may take, if not the usual limit.",
                },
                "job_id": {"type": "string", "description": "A job that still runs."},
            },
            "required": ["command"],
        },
    },
}


class ExecuteBash:
    """Runs the model's commands."""

    name = "execute_bash"
    schema = SCHEMA

    def __init__(self, shown: ObservationLimits, limits: Limits) -> None:
        self._shown = shown
        self._limits = limits

    async def run(
        self,
        lease: Lease,
        arguments: object,
        *,
        timeout_s: float,
        on_output: OnOutput | None = None,
    ) -> Observation:
        wait_s = min(self._limits.command_wait_s, timeout_s)
        try:
            given = _given(arguments)
            if "job_id" in given:
                sandbox = await lease.sandbox()
                result = await _go_on(sandbox, given, wait_s, on_output)
            else:
                asked = given.get("timeout_s", timeout_s)
                timeout_s = min(asked, self._limits.max_command_timeout_s)
                sandbox = await lease.sandbox()
                cap = output_cap(self._shown)
                result = await sandbox.exec(
                    given["command"],
                    timeout_s=timeout_s,
                    stdin=None,
                    cap=OutputCap(max_bytes=cap.max_bytes, max_lines=cap.max_lines),
                    on_output=on_output,
                    wait_s=wait_s,
                )
        except Mistake as mistake:
            return Observation(str(mistake))
        return self._observation(result, timeout_s)

    def _observation(self, result: ExecResult, timeout_s: float) -> Observation:
        outcome = CommandOutcome(
            exit_code=result.exit_code,
            stdout=result.stdout,
            stderr=result.stderr,
            timeout_s=timeout_s,
            duration_s=result.duration_s,
            timed_out=result.timed_out,
            oom_kills=result.oom_kills,
            pids_refused=result.pids_refused,
            job_id=result.job_id,
            waiting=result.waiting,
        )
        return Observation(
            bash_observation(outcome, self._shown),
            exit_code=None if result.running else result.exit_code,
            output_lines=len(result.stdout.splitlines()) + len(result.stderr.splitlines()),
            cpu_s=result.cpu_s,
            peak_memory_bytes=result.peak_memory_bytes,
        )


def _given(arguments: object) -> dict[str, Any]:
    given = checked(SCHEMA, arguments)
    command: str = given["command"]
    if "job_id" in given:
        return given
    if not command.strip():
        raise Mistake("Nothing was run: the command is empty.")
    if "\0" in command:
        raise Mistake("Nothing was run: a command cannot hold a NUL character; use printf '\\0'.")
    if given.get("timeout_s", 1) < 1:
        raise Mistake("Nothing was run: timeout_s must be at least 1.")
    return given


async def _go_on(
    sandbox: Sandbox, given: dict[str, Any], wait_s: float, on_output: OnOutput | None
) -> ExecResult:
    """Type into a job, stop it, or just read on."""
    job_id, text = given["job_id"], given["command"]
    typed = b""
    try:
        if text == INTERRUPT:
            await sandbox.stop(job_id)
        elif text and text != END_OF_INPUT:
            typed = text.removesuffix("\n").encode() + b"\n"
        return await sandbox.wait(
            job_id,
            wait_s=wait_s,
            typed=typed,
            end_of_input=text == END_OF_INPUT,
            on_output=on_output,
        )
    except JobMissingError as error:
        raise Mistake(f"Nothing was done: {error}.") from error
