"""The execute_bash tool in the paper's manner: each command in a shell of its own."""

import shlex
from collections.abc import Mapping

from policies.observation import ObservationLimits
from policies.reference_style import NO_COMMAND, bash_words, nothing_run_words
from policies.workspace import WORKING_DIR
from sandbox_runtime.sandbox import Lease, OnOutput, OutputCap
from sandbox_runtime.tools.arguments import typed
from sandbox_runtime.tools.base import Mistake, Observation, ToolSchema
from sandbox_runtime.tools.outcomes import observed, outcome_of

QUIET_PIP = {
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_ROOT_USER_ACTION": "ignore",
    "PIP_NO_WARN_SCRIPT_LOCATION": "1",
}
_UNSET = "unset PIP_RETRIES UV_HTTP_RETRIES"
"""pip retries as often as it does by itself."""
_MAX_ARGUMENT_BYTES = (128 << 10) - 1
"""Linux takes no longer one."""
SCHEMA: ToolSchema = {
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


class PaperBash:
    """Runs the model's commands and keeps nothing of their shells."""

    name = "execute_bash"

    def __init__(self, shown: ObservationLimits, schema: ToolSchema = SCHEMA) -> None:
        self.schema = schema
        self._shown = shown

    async def run(
        self,
        lease: Lease,
        arguments: object,
        *,
        timeout_s: float,
        on_output: OnOutput | None = None,
    ) -> Observation:
        if not isinstance(arguments, Mapping):
            return Observation(nothing_run_words())
        try:
            command: str = typed(SCHEMA, arguments).get("command", "")
        except Mistake as mistake:
            return Observation(str(mistake))
        if not command:
            return Observation(NO_COMMAND)
        sandbox = await lease.sandbox()
        result = await sandbox.exec(
            _in_a_shell(command),
            timeout_s=timeout_s,
            cwd=WORKING_DIR,
            env=QUIET_PIP,
            cap=OutputCap(max_bytes=self._shown.max_chars),
            shell_state="none",
            on_output=on_output,
        )
        return observed(bash_words(outcome_of(result, timeout_s), self._shown), result)


def _in_a_shell(command: str) -> str:
    """As `bash -c` runs it, whose complaints are worded otherwise than those of `eval`."""
    if len(command.encode()) > _MAX_ARGUMENT_BYTES:
        return f"{_UNSET}; {command}"
    return f"{_UNSET}; exec bash -c {shlex.quote(command)}"
