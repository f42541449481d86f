"""Steps as the blocks of Anthropic's code execution (profile `items`)."""

from collections.abc import Sequence
from typing import Any

from policies.workspace import OUTPUT_DIR
from proxy.agent.events import Event, ToolCallFinished, ToolCallStarted, ToolOutput
from proxy.agent.result import Artifact

Block = dict[str, Any]
BASH, EDITOR = "bash_code_execution", "text_editor_code_execution"
_NAMES = {"execute_bash": BASH, "str_replace_editor": EDITOR}
MAX_OUTPUT_CHARS = 100_000
"""Of one command, in each of its two streams."""
LEFT_OUT = "\n[... the rest is left out ...]"
NO_EXIT_CODE = -1
"""Stands where a command goes on, or none was run; `stderr` then has what the model was told."""


class CodeSteps:
    """The blocks of one run, each whole."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._heard = {"stdout": "", "stderr": ""}

    def of(self, event: Event) -> Block | None:
        """The block of an event, if it has one."""
        match event:
            case ToolCallStarted(step, _, name, arguments) if name in _NAMES:
                self._heard = {"stdout": "", "stderr": ""}
                return self._use(f"{step}", _NAMES[name], dict(arguments))
            case ToolOutput(_, stream, text):
                heard = self._heard[stream]
                if len(heard) <= MAX_OUTPUT_CHARS:
                    self._heard[stream] = heard + text
            case ToolCallFinished(name="execute_bash"):
                return self._result(f"{event.step}", BASH, self._of_command(event))
            case ToolCallFinished(name="str_replace_editor"):
                return self._result(f"{event.step}", EDITOR, _of_editor(event.observation))
        return None

    def files(self, artifacts: Sequence[Artifact]) -> list[Block]:
        """What the run has left: Anthropic's clients look for files in a command's result."""
        if not artifacts:
            return []
        paths = "".join(f"{artifact.path}\n" for artifact in artifacts)
        outputs = [{"type": f"{BASH}_output", "file_id": each.file_id} for each in artifacts]
        listing = {"command": f"find {OUTPUT_DIR} -type f"}
        return [
            self._use("files", BASH, listing),
            self._result("files", BASH, _of_bash(paths, "", 0, outputs)),
        ]

    def _use(self, step: str, name: str, given: dict[str, Any]) -> Block:
        return {"type": "server_tool_use", "id": self._id(step), "name": name, "input": given}

    def _result(self, step: str, name: str, content: Block) -> Block:
        return {"type": f"{name}_tool_result", "tool_use_id": self._id(step), "content": content}

    def _id(self, step: str) -> str:
        return f"srvtoolu_{self._run_id}_{step}"

    def _of_command(self, event: ToolCallFinished) -> Block:
        out, err = _bounded(self._heard["stdout"]), _bounded(self._heard["stderr"])
        if event.exit_code is None:
            return _of_bash(out, event.observation, NO_EXIT_CODE)
        return _of_bash(out, err, event.exit_code)


def _of_bash(stdout: str, stderr: str, code: int, outputs: Sequence[Block] = ()) -> Block:
    return {
        "type": f"{BASH}_result",
        "stdout": stdout,
        "stderr": stderr,
        "return_code": code,
        "content": list(outputs),
    }


def _of_editor(observation: str) -> Block:
    """The editor's words, which say whether it was done and show what became of the text."""
    lines = {"num_lines": None, "start_line": None, "total_lines": None}
    return {
        "type": f"{EDITOR}_view_result",
        "file_type": "text",
        "content": observation,
        **lines,
    }


def _bounded(text: str) -> str:
    return text if len(text) <= MAX_OUTPUT_CHARS else text[:MAX_OUTPUT_CHARS] + LEFT_OUT
