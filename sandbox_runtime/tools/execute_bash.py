"""The execute_bash tool."""

from policies.observation import ObservationLimits, bash_observation, output_cap
from sandbox_runtime.sandbox import Lease, OnOutput, OutputCap
from sandbox_runtime.tools.arguments import checked
from sandbox_runtime.tools.base import Mistake, Observation, ToolSchema

SCHEMA: ToolSchema = {
    "type": "function",
    "function": {
        "name": "execute_bash",
        "description": (
            "Run a bash command in your sandbox and get its exit code, stdout and stderr. The "
            "working directory, variables and functions carry over from one call to the next, "
            "and processes started in the background (&) keep running. Nobody can type into a "
            "command: stdin is empty, so pass flags such as -y instead of waiting for a prompt. "
            "A command that exceeds the time limit is stopped and what it printed so far is "
            "shown. Long output is cut in the middle; write it to a file and look at the parts "
            "you need."
        ),
        "parameters": {
            "type": "object",
            "properties": {
                "command": {
                    "type": "string",
                    "description": "The command or script, one line or many.",
                }
            },
            "required": ["command"],
        },
    },
}


class ExecuteBash:
    """Runs the model's commands."""

    name = "execute_bash"
    schema = SCHEMA

    def __init__(self, limits: ObservationLimits) -> None:
        self._limits = limits

    async def run(
        self,
        lease: Lease,
        arguments: object,
        *,
        timeout_s: float,
        on_output: OnOutput | None = None,
    ) -> Observation:
        try:
            command = _command(arguments)
        except Mistake as mistake:
            return Observation(str(mistake))
        cap = output_cap(self._limits)
        sandbox = await lease.sandbox()
        result = await sandbox.exec(
            command,
            timeout_s=timeout_s,
            cap=OutputCap(max_bytes=cap.max_bytes, max_lines=cap.max_lines),
            on_output=on_output,
        )
        text = bash_observation(
            exit_code=result.exit_code,
            stdout=result.stdout,
            stderr=result.stderr,
            timed_out=result.timed_out,
            timeout_s=timeout_s,
            limits=self._limits,
        )
        return Observation(
            text,
            exit_code=result.exit_code,
            output_lines=len(result.stdout.splitlines()) + len(result.stderr.splitlines()),
            cpu_s=result.cpu_s,
            peak_memory_bytes=result.peak_memory_bytes,
        )


def _command(arguments: object) -> str:
    command: str = checked(SCHEMA, arguments)["command"]
    if not command.strip():
        raise Mistake("Nothing was run: the command is empty.")
    if "\0" in command:
        raise Mistake("Nothing was run: a command cannot hold a NUL character; use printf '\\0'.")
    return command
