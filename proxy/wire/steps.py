"""Steps as text a client can show as thinking (profile `reasoning`)."""

import re
from collections.abc import Mapping
from typing import Any

from policies.steps import NOT_FINISHED, Steps, is_shown, outcome
from proxy.agent.events import (
    Event,
    ReasoningDelta,
    StepsOmitted,
    ToolCallFinished,
    ToolCallStarted,
    ToolOutput,
)
from proxy.wire.output_digest import OutputDigest

MAX_COMMAND_CHARS = 2000
FENCE = "````"
"""Around a step: clients show thinking as Markdown, to which a shell's text is mathematics and
headings. Longer than the fences that programs print as a rule."""
_LIKE_FENCE = re.compile(rf"(^|\r)(?=[ \t]*{FENCE})", re.MULTILINE)
_INDENT = " " * 4
"""Before what would end the block: so far to the right it is text."""


class StepText:
    """The thinking of one run, piece by piece."""

    def __init__(self, steps: Steps) -> None:
        self._shows_steps = steps == "reasoning"
        self._at_line_start = True
        self._output: OutputDigest | None = None
        """That of the call that runs."""

    def of(self, event: Event) -> str:
        """What an event adds; "" for most."""
        text = ""
        if isinstance(event, ReasoningDelta):
            text = event.text
        elif self._shows_steps:
            text = self._of_step(event)
        return self._said(text)

    def abandoned(self) -> str:
        """What ends a step that nobody will finish; "" where none runs."""
        unfinished, self._output = self._output, None
        return self._said(f"{NOT_FINISHED}\n{FENCE}\n" if unfinished else "")

    def _of_step(self, event: Event) -> str:
        match event:
            case ToolCallStarted(_, _, name, arguments) if is_shown(name):
                self._output = OutputDigest()
                begin = f"{FENCE}console\n{_inside(called(name, arguments))}\n"
                return begin if self._at_line_start else f"\n{begin}"
            case StepsOmitted(steps):
                return f"[the first {steps} steps are not kept]\n"
            case ToolOutput(_, stream, text) if self._output:
                return _inside(self._output.take(stream, text))
            case ToolCallFinished() if self._output:
                rest, self._output = self._output.end(event.observation), None
                ended = outcome(event.exit_code, event.duration_s, event.output_lines)
                return f"{_inside(rest)}{ended}\n{FENCE}\n"
        return ""

    def _said(self, text: str) -> str:
        if not text:
            return ""
        self._at_line_start = text.endswith("\n")
        return text.encode(errors="replace").decode()  # half a surrogate pair is no text


def extension(event: Event, run_id: str) -> dict[str, Any] | None:
    """The `sandbox` object that rides on a step's frame."""
    match event:
        case ToolCallStarted(step, _, name, _):
            return {"v": 1, "run_id": run_id, "step": step, "kind": "tool_start", "tool": name}
        case ToolOutput(step, _, _):
            return {"v": 1, "step": step, "kind": "tool_output"}
        case ToolCallFinished(step=step, exit_code=exit_code, duration_s=duration_s):
            ms = round(duration_s * 1000)
            return {"v": 1, "step": step, "kind": "tool_end", "exit_code": exit_code, "ms": ms}
    return None


def called(name: str, arguments: Mapping[str, Any]) -> str:
    """A call as a person reads it."""
    if name == "execute_bash":
        job = f"[job {_short(arguments['job_id'])}] " if "job_id" in arguments else ""
        return f"$ {job}{_short(arguments.get('command'))}"
    shown = " ".join(str(arguments.get(key)) for key in ("command", "path") if key in arguments)
    return f"{name} {_short(shown)}".strip()


def _inside(text: str) -> str:
    """Whole lines, so that none of them ends the block."""
    return _LIKE_FENCE.sub(rf"\1{_INDENT}", text) if FENCE in text else text


def _short(value: object) -> str:
    text = str(value if value is not None else "")
    return text if len(text) <= MAX_COMMAND_CHARS else text[:MAX_COMMAND_CHARS] + " ..."
