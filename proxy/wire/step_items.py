"""Steps as Open WebUI shows them (profile `items`): tool cards, a status line, files.

Each is what stands beside `choices` in a chunk that says nothing, so that every other client passes
over it. Open WebUI takes `event` for its own, and `type` and `item` for those of /v1/responses.
"""

from typing import Any

from policies.history import step_id
from policies.observation import ObservationLimits, clip, readable
from policies.steps import is_shown
from proxy.agent.events import (
    AnswerDelta,
    AnswerRestarted,
    Event,
    ReasoningDelta,
    ToolCallFinished,
    ToolCallStarted,
    ToolOutput,
)
from proxy.agent.result import Artifact, Result
from proxy.wire.json_text import json_text
from proxy.wire.steps import called

Keys = dict[str, Any]
MAX_STATUS_CHARS = 100
SHOWN = ObservationLimits(max_chars=10_000, max_lines=400)
"""How much of a result goes into a card: Open WebUI keeps it and sends it back with each turn."""
UNFINISHED = "It was not finished."


def call_item(event: ToolCallStarted, run_id: str) -> Keys:
    """A call as an item of /v1/responses."""
    return {
        "type": "function_call",
        "id": f"fc_{run_id}_{event.step}",
        "call_id": step_id(run_id, event.step),
        "name": event.name,
        "arguments": json_text(dict(event.arguments)),
        "status": "completed",
    }


def output_item(step: int, run_id: str, text: str, status: str = "completed") -> Keys:
    """What came of a call as an item of /v1/responses."""
    return {
        "type": "function_call_output",
        "id": f"fco_{run_id}_{step}",
        "call_id": step_id(run_id, step),
        "output": [{"type": "input_text", "text": clip(text, SHOWN)}],
        "status": status,
    }


class StepItems:
    """The cards of one run, in the order in which Open WebUI will have them."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._last = ""
        self._index = -1
        self._running: int | None = None
        """The step whose card is open; Open WebUI would run a call that has no result."""
        self._called = ""
        self._pieces = 0
        self._steps = 0
        self._answer_began = False

    def of(self, event: Event) -> list[Keys]:
        """The frames of an event."""
        match event:
            case ReasoningDelta(text) if text and not self._answer_began:
                self._follow("reasoning")
            case AnswerDelta():
                self._answer_began = True
                self._follow("message")
            case AnswerRestarted():
                self._answer_began = False  # what was sent was narration: thinking may follow it
            case ToolCallStarted() if is_shown(event.name):
                return self._started(event)
            case ToolOutput(step, _, text) if step == self._running:
                return self._heard(text)
            case ToolCallFinished() if event.step == self._running:
                ended = _status(f"Ran: {self._called}", done=False)
                return [self._result(event.observation), ended]
        return []

    def abandoned(self) -> list[Keys]:
        """What leaves nothing open where a run fails."""
        pending = [] if self._running is None else [self._result(UNFINISHED, "incomplete")]
        if not self._steps:
            return pending
        return [*pending, _status(f"Stopped after {_count(self._steps, 'step')}", done=True)]

    def finished(self, result: Result) -> list[Keys]:
        """The files, but for pictures inside the message, and the end of the status line."""
        files = [_file(artifact) for artifact in result.artifacts if not artifact.data_url]
        frames = [{"event": {"type": "files", "data": {"files": files}}}] if files else []
        if self._steps:
            told = [_count(self._steps, "step")]
            told += [_count(len(result.artifacts), "file")] if result.artifacts else []
            frames.append(_status(", ".join(told), done=True))
        return frames

    def _follow(self, kind: str) -> None:
        """Count as Open WebUI does: it makes one item of all text of a kind that comes in a row."""
        if kind != self._last:
            self._index += 1
            self._last = kind

    def _started(self, event: ToolCallStarted) -> list[Keys]:
        self._steps += 1
        self._running = event.step
        self._pieces = 0
        self._called = _line(called(event.name, event.arguments).removeprefix("$ "))
        item = call_item(event, self._run_id)
        self._index += 1
        self._last = "item"
        begun = {**item, "arguments": "", "status": "in_progress"}
        return [
            _status(f"Running: {self._called}", done=False),
            {"type": "response.output_item.added", "output_index": self._index, "item": begun},
            {"type": "response.output_item.done", "output_index": self._index, "item": item},
        ]

    def _heard(self, text: str) -> list[Keys]:
        """The last line of the output, for the first piece, the second, the fourth, the eighth …:
        Open WebUI keeps every status it was ever sent."""
        self._pieces += 1
        if self._pieces & (self._pieces - 1):
            return []
        lines = readable(text).strip().splitlines()
        if not lines:
            return []
        return [_status(f"Running: {self._called} - {_line(lines[-1])}", done=False)]

    def _result(self, text: str, status: str = "completed") -> Keys:
        assert self._running is not None
        item = output_item(self._running, self._run_id, text, status)
        self._running = None
        self._index += 1
        return {"type": "response.output_item.added", "output_index": self._index, "item": item}


def _status(description: str, *, done: bool) -> Keys:
    data = {"action": "sandbox", "description": description, "done": done}
    return {"event": {"type": "status", "data": data}}


def _line(text: str) -> str:
    lines = text.strip().splitlines() or [""]
    more = len(lines) > 1 or len(lines[0]) > MAX_STATUS_CHARS
    return lines[0][:MAX_STATUS_CHARS] + (" ..." if more else "")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _file(artifact: Artifact) -> Keys:
    kind = "image" if artifact.mime_type.startswith("image/") else "file"
    shown = {"type": kind, "url": artifact.url, "name": artifact.path.rpartition("/")[2]}
    return {**shown, "size": artifact.bytes} if kind == "file" else shown
