"""The execute_bash tool: ExecuteBash, whose shell state and jobs persist between calls, and
ReferenceBash of the reference agent, which runs each command in a new shell."""

import shlex
from collections.abc import Mapping
from typing import Any

from policies.limits import Limits
from policies.observation import (
    CommandOutcome,
    ObservationLimits,
    bash_observation,
    output_cap,
)
from policies.reference_style import NO_COMMAND, command_observation, invalid_arguments_observation
from policies.workspace import OBSERVATION_DIR, WORKING_DIR
from sandbox_runtime.errors import JobMissingError
from sandbox_runtime.sandbox import ExecResult, Lease, OnOutput, OutputCap, Sandbox
from sandbox_runtime.tools.base import (
    Observation,
    ToolInputError,
    ToolSchema,
    parse_arguments,
    parse_known_arguments,
)

_GRACE_S = 5.0
"""Maximum time that a call waits for the end of a command that has reached its timeout."""
_INTERRUPT, _END_OF_INPUT = "C-c", "C-d"
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
    """Runs the model's commands in a shell whose state persists between calls; a command that takes
    long or waits for input becomes a job."""

    name = "execute_bash"
    schema = SCHEMA

    def __init__(self, observation_limits: ObservationLimits, limits: Limits) -> None:
        self._observation_limits = observation_limits
        self._limits = limits

    async def run(
        self,
        lease: Lease,
        arguments: object,
        *,
        timeout_s: float,
        on_output: OnOutput | None = None,
    ) -> Observation:
        job_after_s = self._limits.command_wait_s
        try:
            fields = _parse(arguments)
            if "job_id" in fields:
                sandbox = await lease.sandbox()
                wait_s = min(job_after_s, timeout_s)
                result = await _continue_job(sandbox, fields, wait_s, on_output)
            else:
                requested_s = fields.get("timeout_s", timeout_s)
                timeout_s = min(requested_s, self._limits.max_command_timeout_s)
                # A command that times out before it would become a job is awaited to its end.
                wait_s = job_after_s if job_after_s < timeout_s else timeout_s + _GRACE_S
                sandbox = await lease.sandbox()
                cap = output_cap(self._observation_limits)
                result = await sandbox.exec(
                    fields["command"],
                    timeout_s=timeout_s,
                    stdin=None,
                    cap=OutputCap(
                        cap.max_bytes, cap.max_lines, retention_directory=OBSERVATION_DIR
                    ),
                    on_output=on_output,
                    wait_s=wait_s,
                    command_id=lease.command_id,
                )
        except ToolInputError as error:
            return Observation(str(error))
        return _observation(
            bash_observation(_command_outcome(result, timeout_s), self._observation_limits), result
        )


def _parse(arguments: object) -> dict[str, Any]:
    """Return the arguments. Raises ToolInputError if their types are wrong or, for a call without
    `job_id`, if the command or the timeout is invalid."""
    fields = parse_arguments(SCHEMA, arguments)
    command: str = fields["command"]
    if "job_id" in fields:
        return fields
    if not command.strip():
        raise ToolInputError("Nothing was run: the command is empty.")
    if "\0" in command:
        raise ToolInputError(
            "Nothing was run: a command cannot hold a NUL character; use printf '\\0'."
        )
    if fields.get("timeout_s", 1) < 1:
        raise ToolInputError("Nothing was run: timeout_s must be at least 1.")
    return fields


async def _continue_job(
    sandbox: Sandbox, fields: dict[str, Any], wait_s: float, on_output: OnOutput | None
) -> ExecResult:
    """Type into a job, end its input or interrupt it, then wait for it; return its new output.
    Raises ToolInputError if there is no such job."""
    job_id, text = fields["job_id"], fields["command"]
    typed_bytes = b""
    try:
        if text == _INTERRUPT:
            await sandbox.stop(job_id)
        elif text and text != _END_OF_INPUT:
            typed_bytes = text.removesuffix("\n").encode() + b"\n"
        return await sandbox.wait(
            job_id,
            wait_s=wait_s,
            typed_bytes=typed_bytes,
            end_of_input=text == _END_OF_INPUT,
            on_output=on_output,
        )
    except JobMissingError as error:
        raise ToolInputError(f"Nothing was done: {error}.") from error


_QUIET_PIP = {
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_ROOT_USER_ACTION": "ignore",
    "PIP_NO_WARN_SCRIPT_LOCATION": "1",
}
_UNSET_RETRIES = "unset PIP_RETRIES UV_HTTP_RETRIES"
"""A shell command that restores the number of retries that pip and uv have by default."""
_MAX_ARGUMENT_BYTES = (128 << 10) - 1
"""The length in bytes of the longest argument that Linux passes to a program."""
_REFERENCE_SCHEMA: ToolSchema = {
    "type": "function",
    "function": {
        "name": "execute_bash",
        "description": (
            f"Run a bash command in {WORKING_DIR} and get its exit code, stdout and stderr. Each"
            " command has a shell of its own: directory and variables do not carry over to the"
            " next. Of long output the middle is left out."
        ),
        "parameters": {
            "type": "object",
            "properties": {
                "command": {
                    "type": "string",
                    "description": "The command or script, such as `python3 solve.py`.",
                }
            },
            "required": ["command"],
        },
    },
}


class ReferenceBash:
    """Runs the model's commands as the reference agent does: each in a new shell."""

    name = "execute_bash"

    def __init__(
        self, observation_limits: ObservationLimits, schema: ToolSchema = _REFERENCE_SCHEMA
    ) -> None:
        self.schema = schema
        self._observation_limits = observation_limits

    async def run(
        self,
        lease: Lease,
        arguments: object,
        *,
        timeout_s: float,
        on_output: OnOutput | None = None,
    ) -> Observation:
        if not isinstance(arguments, Mapping):
            return Observation(invalid_arguments_observation())
        try:
            command: str = parse_known_arguments(_REFERENCE_SCHEMA, arguments).get("command", "")
        except ToolInputError as error:
            return Observation(str(error))
        if not command:
            return Observation(NO_COMMAND)
        sandbox = await lease.sandbox()
        result = await sandbox.exec(
            _wrap_in_shell(command),
            timeout_s=timeout_s,
            cwd=WORKING_DIR,
            env=_QUIET_PIP,
            cap=OutputCap(max_bytes=self._observation_limits.max_chars),
            shell_state="none",
            on_output=on_output,
            command_id=lease.command_id,
        )
        return _observation(
            command_observation(_command_outcome(result, timeout_s), self._observation_limits),
            result,
        )


def _wrap_in_shell(command: str) -> str:
    """Wrap a command in `bash -c`, because the error messages of the sandbox's own `eval` differ
    from those of the reference agent. A command that is too long for an argument is not wrapped."""
    if len(command.encode()) > _MAX_ARGUMENT_BYTES:
        return f"{_UNSET_RETRIES}; {command}"
    return f"{_UNSET_RETRIES}; exec bash -c {shlex.quote(command)}"


def _command_outcome(result: ExecResult, timeout_s: float) -> CommandOutcome:
    return CommandOutcome(
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


def _observation(text: str, result: ExecResult) -> Observation:
    return Observation(
        text,
        exit_code=None if result.running else result.exit_code,
        timed_out=result.timed_out,
        output_lines=result.output_lines,
        cpu_s=result.cpu_s,
        peak_memory_bytes=result.peak_memory_bytes,
    )
