"""The execute_bash tool."""

from typing import Any

from policies.limits import Limits
from policies.observation import (
    ObservationLimits,
    bash_observation,
    output_cap,
)
from policies.workspace import OBSERVATION_DIR
from sandbox_runtime.errors import JobMissingError
from sandbox_runtime.sandbox import ExecResult, Lease, OnOutput, OutputCap, Sandbox
from sandbox_runtime.tools.arguments import checked
from sandbox_runtime.tools.base import Mistake, Observation, ToolSchema
from sandbox_runtime.tools.outcomes import observed, outcome_of

GRACE_S = 5.0
"""How long the end of a command is waited for whose time is up."""
INTERRUPT, END_OF_INPUT = "C-c", "C-d"
SCHEMA: ToolSchema = {
    "type": "function",
    "function": {
        "name": "execute_bash",
        "description": (
            "Run a bash command and get its exit code, stdout and stderr. Directory, variables, "
            "functions and background processes (&) carry over to the next call. A command that "
            "takes long or waits for input becomes a job: read on or type into it by its job_id."
        ),
        "parameters": {
            "type": "object",
            "properties": {
                "command": {"type": "string"},
                "timeout_s": {"type": "integer"},
                "job_id": {"type": "string"},
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
        patience_s = self._limits.command_wait_s
        try:
            given = _given(arguments)
            if "job_id" in given:
                sandbox = await lease.sandbox()
                result = await _go_on(sandbox, given, min(patience_s, timeout_s), on_output)
            else:
                asked = given.get("timeout_s", timeout_s)
                timeout_s = min(asked, self._limits.max_command_timeout_s)
                # One whose time is up by then is no job: it is seen to its end.
                wait_s = patience_s if patience_s < timeout_s else timeout_s + GRACE_S
                sandbox = await lease.sandbox()
                cap = output_cap(self._shown)
                result = await sandbox.exec(
                    given["command"],
                    timeout_s=timeout_s,
                    stdin=None,
                    cap=OutputCap(cap.max_bytes, cap.max_lines, keep_in=OBSERVATION_DIR),
                    on_output=on_output,
                    wait_s=wait_s,
                )
        except Mistake as mistake:
            return Observation(str(mistake))
        return observed(bash_observation(outcome_of(result, timeout_s), self._shown), result)


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
