"""Steps as items of the hosted tools that OpenAI has: its shell, its code interpreter."""

from collections.abc import Mapping
from typing import Any, Protocol

from policies.history import step_id
from proxy.agent.events import ToolCallFinished, ToolCallStarted, ToolOutput
from proxy.wire.responses_items import Output, Place, Told
from proxy.wire.step_events import MAX_OUTPUT_CHARS
from proxy.wire.step_items import UNFINISHED
from proxy.wire.steps import called


class StepsShown(Protocol):
    """The items of one run's steps, one step after the other."""

    def started(self, event: ToolCallStarted) -> list[Told]:
        """A call begins."""

    def heard(self, event: ToolOutput) -> list[Told]:
        """It has written something."""

    def finished(self, event: ToolCallFinished) -> list[Told]:
        """It is over."""

    def abandoned(self) -> list[Told]:
        """Nobody will finish it."""


class _Streams:
    """What one command has written, as far as it is kept."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[str]] = {"stdout": [], "stderr": []}
        self._left = MAX_OUTPUT_CHARS

    def take(self, event: ToolOutput) -> str:
        """What is kept of a piece."""
        text = event.text[: self._left]
        self._left -= len(text)
        self._pieces[event.stream].append(text)
        return text

    def written(self, observation: str) -> dict[str, str]:
        """All of it; where nothing was written, what the model was told."""
        found = {stream: "".join(pieces) for stream, pieces in self._pieces.items()}
        return found if any(found.values()) else {"stdout": observation, "stderr": ""}


class ShellSteps:
    """Each step a `shell_call` and a `shell_call_output`."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._place: Place | None = None
        """That of the result, while the command runs."""
        self._streams = _Streams()

    def started(self, event: ToolCallStarted) -> list[Told]:
        """See StepsShown."""
        self._streams = _Streams()
        command, call_id = shown(event), step_id(self._output.run_id, event.step)
        item = {
            "type": "shell_call",
            "call_id": call_id,
            "action": _action(""),
            "environment": {
                "type": "container_reference",
                "container_id": self._output.container_id,
            },
            "status": "in_progress",
        }
        place, added = self._output.begin("sh", item)
        result: Told = {
            "type": "shell_call_output",
            "call_id": call_id,
            "output": [],
            "max_output_length": None,
            "status": "in_progress",
        }
        at = {"output_index": place.index, "command_index": 0}
        events = [
            added,
            {"type": "response.shell_call_command.added", **at, "command": ""},
            {"type": "response.shell_call_command.delta", **at, "delta": command},
            {"type": "response.shell_call_command.done", **at, "command": command},
            self._output.end(place, action=_action(command), status="completed"),
        ]
        self._place, begun = self._output.begin("sho", result)
        return [*events, begun]

    def heard(self, event: ToolOutput) -> list[Told]:
        """See StepsShown."""
        if self._place is None or not (text := self._streams.take(event)):
            return []
        delta = {event.stream: text}
        return [self._place.event("shell_call_output_content.delta", command_index=0, delta=delta)]

    def finished(self, event: ToolCallFinished) -> list[Told]:
        """See StepsShown."""
        return self._end(event.observation, _outcome(event), "completed")

    def abandoned(self) -> list[Told]:
        """See StepsShown."""
        return self._end(UNFINISHED, {"type": "timeout"}, "incomplete")

    def _end(self, observation: str, outcome: Told, status: str) -> list[Told]:
        if self._place is None:
            return []
        place, self._place = self._place, None
        content = [{**self._streams.written(observation), "outcome": outcome}]
        return [
            place.event("shell_call_output_content.done", command_index=0, output=content),
            self._output.end(place, output=content, status=status),
        ]


class CodeSteps:
    """Each step a `code_interpreter_call`."""

    def __init__(self, output: Output, *, with_outputs: bool) -> None:
        """`with_outputs`: whether the client asked for what came of the calls."""
        self._output = output
        self._with_outputs = with_outputs
        self._place: Place | None = None
        self._code = ""
        self._streams = _Streams()

    def started(self, event: ToolCallStarted) -> list[Told]:
        """See StepsShown."""
        self._streams = _Streams()
        code = shown(event)
        item = {
            "type": "code_interpreter_call",
            "container_id": self._output.container_id,
            "code": "",
            "outputs": None,
            "status": "in_progress",
        }
        place, added = self._output.begin("ci", item)
        self._place, self._code = place, code
        return [
            added,
            place.event("code_interpreter_call.in_progress"),
            place.event("code_interpreter_call_code.delta", delta=code),
            place.event("code_interpreter_call_code.done", code=code),
            place.event("code_interpreter_call.interpreting"),
        ]

    def heard(self, event: ToolOutput) -> list[Told]:
        """See StepsShown."""
        self._streams.take(event)
        return []

    def finished(self, event: ToolCallFinished) -> list[Told]:
        """See StepsShown."""
        return self._end(event.observation, "completed")

    def abandoned(self) -> list[Told]:
        """See StepsShown."""
        return self._end(UNFINISHED, "incomplete")

    def _end(self, observation: str, status: str) -> list[Told]:
        if self._place is None:
            return []
        place, self._place = self._place, None
        written = "".join(self._streams.written(observation).values())
        outputs = [{"type": "logs", "logs": written}] if self._with_outputs else None
        ended = [place.event("code_interpreter_call.completed")] if status == "completed" else []
        return [*ended, self._output.end(place, code=self._code, outputs=outputs, status=status)]


def shown(event: ToolCallStarted) -> str:
    """A call as a person would type it."""
    arguments: Mapping[str, Any] = event.arguments
    if event.name == "execute_bash" and "job_id" not in arguments:
        return str(arguments.get("command") or "")
    return called(event.name, arguments).removeprefix("$ ")


def _action(command: str) -> Told:
    return {"commands": [command], "timeout_ms": None, "max_output_length": None}


def _outcome(event: ToolCallFinished) -> Told:
    """OpenAI has two: it ended, or it still ran when its time was up."""
    if event.exit_code is not None:
        return {"type": "exit", "exit_code": event.exit_code}
    return {"type": "exit", "exit_code": 0} if event.output_lines is None else {"type": "timeout"}
