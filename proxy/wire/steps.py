"""Steps as text a client can show as thinking (profile `reasoning`)."""

from collections.abc import Mapping
from typing import Any, Literal

from proxy.agent.events import (
    Event,
    ReasoningDelta,
    ToolCallFinished,
    ToolCallStarted,
)

MAX_COMMAND_CHARS = 2000

Steps = Literal["off", "reasoning"]
"""Profiles: `off` shows the model's own thinking alone, `reasoning` its steps in it too."""


class StepText:
    """The thinking of one run, piece by piece."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._at_line_start = True

    def of(self, event: Event) -> str:
        """What an event adds; "" for most."""
        text = ""
        match event:
            case ReasoningDelta(thought):
                text = thought
            case ToolCallStarted(_, _, name, arguments) if self._steps == "reasoning":
                text = ("" if self._at_line_start else "\n") + _call(name, arguments) + "\n"
            case ToolCallFinished() if self._steps == "reasoning":
                text = f"[{_outcome(event)}]\n"
        if text:
            self._at_line_start = text.endswith("\n")
        return text.encode(errors="replace").decode()  # half a surrogate pair is no text


def extension(event: Event, run_id: str) -> dict[str, Any] | None:
    """The `sandbox` object that rides on a step's frame."""
    match event:
        case ToolCallStarted(step, _, name, _):
            return {"v": 1, "run": run_id, "step": step, "kind": "tool_start", "tool": name}
        case ToolCallFinished(step=step, exit_code=exit_code, duration_s=duration_s):
            ms = round(duration_s * 1000)
            return {"v": 1, "step": step, "kind": "tool_end", "exit_code": exit_code, "ms": ms}
    return None


def _call(name: str, arguments: Mapping[str, Any]) -> str:
    if name == "execute_bash":
        return f"$ {_short(arguments.get('command'))}"
    if name == "submit":
        return "submit"
    shown = " ".join(str(arguments.get(key)) for key in ("command", "path") if key in arguments)
    return f"{name} {_short(shown)}".strip()


def _short(value: object) -> str:
    text = str(value if value is not None else "")
    return text if len(text) <= MAX_COMMAND_CHARS else text[:MAX_COMMAND_CHARS] + " ..."


def _outcome(event: ToolCallFinished) -> str:
    outcome = [] if event.exit_code is None else [f"exit {event.exit_code}"]
    outcome.append(f"{event.duration_s:.1f} s")
    if event.output_lines is not None:
        outcome.append(f"{event.output_lines} {'line' if event.output_lines == 1 else 'lines'}")
    return ", ".join(outcome)
