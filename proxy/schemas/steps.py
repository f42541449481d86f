"""The state of an answer that is being encoded, and the steps of a run as clients are shown them.

`AnswerState` records what was sent of an answer. There is one renderer for each way in which
clients can ask for steps (`sandbox.steps`): `StepTextRenderer` for text among the thinking
(`reasoning`), `StepEventRenderer` for JSON objects of server-sent events (`events`), and
`StepCardRenderer` for the cards of Open WebUI (`items`). The encoders in chat_response,
messages_response and responses_response use them.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from policies.history import step_id
from policies.observation import ObservationLimits, terminal_text, truncate_middle
from policies.steps import NOT_FINISHED, OUTPUT_LEFT_OUT, StepsMode, is_shown, outcome_line
from proxy.agent.events import (
    AnswerDelta,
    AnswerRestarted,
    EgressDecided,
    Event,
    FileProduced,
    ReasoningDelta,
    Refused,
    RuleMatched,
    RunFinished,
    RunStarted,
    StepsOmitted,
    ToolCallFinished,
    ToolCallStarted,
    ToolOutput,
)
from proxy.agent.result import Artifact, Result
from proxy.schemas.result_objects import json_text


class AnswerState:
    """What a client was sent of an answer, as far as it decides what may follow.

    An encoder calls `update` with each event of the run after it has encoded the event.
    """

    def __init__(self) -> None:
        self.answer_began = False
        """True if text of the answer was sent. Thinking is withheld then: clients would show it in
        the wrong place."""
        self.open_step: int | None = None
        """The step that has begun and has no result yet."""
        self.sent_calls = set[str]()
        """The ids of the client's calls that were sent as the model wrote them."""

    def update(self, event: Event) -> None:
        """Record an event."""
        match event:
            case AnswerDelta() | Refused():
                self.answer_began = True
            case AnswerRestarted():
                self.answer_began = False  # what was sent was narration: steps follow it
            case ToolCallStarted() if is_shown(event.name):
                self.open_step = event.step
            case ToolCallFinished() if event.step == self.open_step:
                self.open_step = None


# Text among the thinking

MAX_COMMAND_CHARS = 2000
FENCE = "````"
"""Encloses a step, because clients render thinking as Markdown, which would take a shell's output
for headings and formulas. It is longer than the fences that programs usually print."""
_LIKE_FENCE = re.compile(rf"(^|\r)(?=[ \t]*{FENCE})", re.MULTILINE)
_INDENT = " " * 4
"""Goes before a fence in the output: with this indentation it does not end the block."""


class StepTextRenderer:
    """Renders the thinking of a run, with its steps if the profile is `reasoning`."""

    def __init__(self, steps: StepsMode, state: AnswerState) -> None:
        self._shows_steps = steps == "reasoning"
        self._state = state
        self._at_line_start = True
        self._output = _OutputDigest()
        """The output of the open step."""

    def render(self, event: Event) -> str:
        """Return the text that an event adds, mostly empty."""
        if isinstance(event, ReasoningDelta):
            return self._sendable(event.text)
        return self._sendable(self._step(event)) if self._shows_steps else ""

    def abandon(self) -> str:
        """Return the text that closes the open step of a failed run, or an empty string."""
        is_open = self._shows_steps and self._state.open_step is not None
        return self._sendable(f"{NOT_FINISHED}\n{FENCE}\n") if is_open else ""

    def _step(self, event: Event) -> str:
        match event:
            case ToolCallStarted(_, _, name, arguments) if is_shown(name):
                self._output = _OutputDigest()
                begin = f"{FENCE}console\n{_inside(command_line(name, arguments))}\n"
                return begin if self._at_line_start else f"\n{begin}"
            case StepsOmitted(steps):
                return f"[the first {steps} steps are not kept]\n"
            case ToolOutput(step, stream, text) if step == self._state.open_step:
                return _inside(self._output.take(stream, text))
            case ToolCallFinished() if event.step == self._state.open_step:
                rest = self._output.end(event.observation)
                ended = outcome_line(event.exit_code, event.duration_s, event.output_lines)
                return f"{_inside(rest)}{ended}\n{FENCE}\n"
        return ""

    def _sendable(self, text: str) -> str:
        """Return the text without halves of surrogate pairs, or "" if the answer has begun."""
        if text:
            self._at_line_start = text.endswith("\n")
        return "" if self._state.answer_began else text.encode(errors="replace").decode()


def extension(event: Event, run_id: str) -> dict[str, Any] | None:
    """Return the `sandbox` object of a chunk that carries a step's text."""
    match event:
        case ToolCallStarted(step, _, name, _):
            return {"v": 1, "run_id": run_id, "step": step, "kind": "tool_start", "tool": name}
        case ToolOutput(step, _, _):
            return {"v": 1, "step": step, "kind": "tool_output"}
        case ToolCallFinished(step=step, exit_code=exit_code, duration_s=duration_s):
            ms = round(duration_s * 1000)
            return {"v": 1, "step": step, "kind": "tool_end", "exit_code": exit_code, "ms": ms}
    return None


def command_line(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a tool call as a line that a person can read."""
    if name == "execute_bash":
        job = f"[job {_short(arguments['job_id'])}] " if "job_id" in arguments else ""
        return f"$ {job}{_short(arguments.get('command'))}"
    shown = " ".join(str(arguments.get(key)) for key in ("command", "path") if key in arguments)
    return f"{name} {_short(shown)}".strip()


def _inside(text: str) -> str:
    """Return whole lines, changed so that none of them ends the block."""
    return _LIKE_FENCE.sub(rf"\1{_INDENT}", text) if FENCE in text else text


def _short(value: object) -> str:
    text = str(value if value is not None else "")
    return text if len(text) <= MAX_COMMAND_CHARS else text[:MAX_COMMAND_CHARS] + " ..."


HEAD_LINES, HEAD_CHARS = 20, 2000
TAIL_LINES, TAIL_CHARS = 10, 1000
_MAX_LINE_CHARS = 4000
"""Characters that are kept of an incomplete line."""


class _OutputDigest:
    """Shortens the output of one command to its first lines, as they come, and its last lines."""

    def __init__(self) -> None:
        self._unfinished: dict[str, str] = {}
        self._lines_left = HEAD_LINES
        self._chars_left = HEAD_CHARS
        self._kept_back: list[str] = []
        self._is_long = False

    def take(self, stream: str, text: str) -> str:
        """Return the lines of the beginning that this piece completes."""
        *lines, unfinished = (self._unfinished.get(stream, "") + text).split("\n")
        self._unfinished[stream] = unfinished[-_MAX_LINE_CHARS:]
        return "".join(map(self._shown, lines))

    def end(self, observation: str) -> str:
        """Return the rest of a short output, else the last lines of the observation."""
        left = [text for text in self._unfinished.values() if text]
        rest = "".join([*map(self._shown, left), *self._kept_back])
        if not self._is_long:
            return rest
        tail = "\n".join(observation.split("\n")[-TAIL_LINES:])[-TAIL_CHARS:]
        return f"{OUTPUT_LEFT_OUT}\n{tail}\n"

    def _shown(self, line: str) -> str:
        line = terminal_text(line) + "\n"
        if not self._kept_back and self._lines_left and len(line) <= self._chars_left:
            self._lines_left -= 1
            self._chars_left -= len(line)
            return line
        self._keep_back(line)
        return ""

    def _keep_back(self, line: str) -> None:
        if self._is_long:
            return
        self._kept_back.append(line)
        chars = sum(map(len, self._kept_back))
        self._is_long = len(self._kept_back) > TAIL_LINES or chars > TAIL_CHARS


# Server-sent events

EVENT_NAME = "sandbox.step"
MAX_OUTPUT_CHARS = 100_000
"""Characters of one command's output. The observation at its end is always complete."""


class StepEventRenderer:
    """Renders the steps of a run as JSON objects."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._output_left = MAX_OUTPUT_CHARS

    def render(self, event: Event) -> dict[str, Any] | None:
        """Return the JSON object of an event, or None."""
        match event:
            case ToolCallStarted() | ToolOutput() | ToolCallFinished():
                told = self._step(event)
            case _:
                told = _beside_steps(event)
        return {"v": 1, "run_id": self._run_id, **told} if told else None

    def _step(
        self, event: ToolCallStarted | ToolOutput | ToolCallFinished
    ) -> dict[str, Any] | None:
        match event:
            case ToolOutput(step, stream, text):
                kept = text[: self._output_left]
                self._output_left -= len(kept)
                told = {"kind": "tool_output", "step": step, "stream": stream, "text": kept}
                return told if kept else None
            case ToolCallStarted(step, _, name, arguments) if is_shown(name):
                self._output_left = MAX_OUTPUT_CHARS
                return {
                    "kind": "tool_start",
                    "step": step,
                    "call_id": step_id(self._run_id, step),
                    "tool": name,
                    "arguments": dict(arguments),
                }
            case ToolCallFinished() if is_shown(event.name):
                return {
                    "kind": "tool_end",
                    "step": event.step,
                    "exit_code": event.exit_code,
                    "ms": round(event.duration_s * 1000),
                    "observation": event.observation,
                }
        return None


def _beside_steps(event: Event) -> dict[str, Any] | None:
    match event:
        case RunStarted():
            return {"kind": "run_started"}
        case StepsOmitted(steps):
            return {"kind": "steps_omitted", "steps": steps}
        case EgressDecided(decision):
            fields = ("verdict", "host", "port", "reason", "bytes_up", "bytes_down")
            return {"kind": "egress", **{name: getattr(decision, name) for name in fields}}
        case RuleMatched():
            return {"kind": "rule", **asdict(event)}
        case FileProduced(file_id, path, size):
            return {"kind": "file", "id": file_id, "path": path, "bytes": size}
        case RunFinished(stop_reason):
            return {"kind": "run_finished", "stop_reason": str(stop_reason)}
    return None


# Open WebUI's tool cards, status line and files
#
# Each is a set of keys beside `choices` in a chunk with an empty delta, so that other clients
# ignore it. Open WebUI reads `event` as its own, `type` and `item` as those of /v1/responses.

Keys = dict[str, Any]
MAX_STATUS_CHARS = 100
_CARD_LIMITS = ObservationLimits(max_chars=10_000, max_lines=400)
"""The bounds of a result in a card, which Open WebUI sends back with every turn."""
UNFINISHED = "It was not finished."


class StepCardRenderer:
    """Renders the steps of a run as cards, numbered as Open WebUI numbers its items."""

    def __init__(self, run_id: str, state: AnswerState) -> None:
        self._run_id = run_id
        self._state = state
        self._last = ""
        """What the last item is: "reasoning", "message" or "card"."""
        self._index = -1
        self._command = ""
        """The open step as a line."""
        self._pieces = 0
        """Pieces of output of the open step."""
        self._steps = 0

    def render(self, event: Event) -> list[Keys]:
        """Return the keys of each frame that an event makes."""
        match event:
            case ReasoningDelta(text) if text and not self._state.answer_began:
                self._follow("reasoning")
            case AnswerDelta():
                self._follow("message")
            case ToolCallStarted() if is_shown(event.name):
                return self._begin(event)
            case ToolOutput(step, _, text) if step == self._state.open_step:
                return self._write(text)
            case ToolCallFinished() if event.step == self._state.open_step:
                ended = _status(f"Ran: {self._command}", done=False)
                return [self._result(event.step, event.observation), ended]
        return []

    def abandon(self) -> list[Keys]:
        """Return the frames that close the open card and the status line of a failed run.

        A card has to get a result: Open WebUI would run a call without one itself.
        """
        step = self._state.open_step
        pending = [] if step is None else [self._result(step, UNFINISHED, "incomplete")]
        if not self._steps:
            return pending
        return [*pending, _status(f"Stopped after {_count(self._steps, 'step')}", done=True)]

    def finish(self, result: Result) -> list[Keys]:
        """Return the frames of the files that are not in the message, and of the last status."""
        files = [_file(artifact) for artifact in result.artifacts if not artifact.data_url]
        frames = [{"event": {"type": "files", "data": {"files": files}}}] if files else []
        if self._steps:
            told = [_count(self._steps, "step")]
            told += [_count(len(result.artifacts), "file")] if result.artifacts else []
            frames.append(_status(", ".join(told), done=True))
        return frames

    def _follow(self, kind: str) -> None:
        """Count items as Open WebUI does, which makes one item of consecutive text of a kind."""
        if kind != self._last:
            self._index += 1
            self._last = kind

    def _begin(self, event: ToolCallStarted) -> list[Keys]:
        self._steps += 1
        self._pieces = 0
        self._command = _line(command_line(event.name, event.arguments).removeprefix("$ "))
        self._index += 1
        self._last = "card"
        call = {
            "type": "function_call",
            "id": f"fc_{self._run_id}_{event.step}",
            "call_id": step_id(self._run_id, event.step),
            "name": event.name,
            "arguments": json_text(dict(event.arguments)),
            "status": "completed",
        }
        begun = {**call, "arguments": "", "status": "in_progress"}
        return [
            _status(f"Running: {self._command}", done=False),
            {"type": "response.output_item.added", "output_index": self._index, "item": begun},
            {"type": "response.output_item.done", "output_index": self._index, "item": call},
        ]

    def _write(self, text: str) -> list[Keys]:
        """Return a status with the output's last line for pieces 1, 2, 4, 8 and so on: Open WebUI
        stores every status that it gets."""
        self._pieces += 1
        if self._pieces & (self._pieces - 1):
            return []
        lines = terminal_text(text).strip().splitlines()
        if not lines:
            return []
        return [_status(f"Running: {self._command} - {_line(lines[-1])}", done=False)]

    def _result(self, step: int, text: str, status: str = "completed") -> Keys:
        self._index += 1
        item = {
            "type": "function_call_output",
            "id": f"fco_{self._run_id}_{step}",
            "call_id": step_id(self._run_id, step),
            "output": [{"type": "input_text", "text": truncate_middle(text, _CARD_LIMITS)}],
            "status": status,
        }
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
