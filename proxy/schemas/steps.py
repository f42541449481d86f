"""The steps of a run as clients see them, and the state of an answer that is being sent.

The renderers implement the values of `sandbox.steps`: `StepTextRenderer` renders steps as text in
the reasoning (`reasoning`), `StepEventRenderer` as JSON objects of server-sent events (`events`),
and `StepCardRenderer` as cards of Open WebUI (`items`, in chat completions). The encoder of each
API uses some of the renderers and an `AnswerState`.
"""

import re
from collections.abc import Mapping
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
    ModelRefused,
    ReasoningDelta,
    RuleMatched,
    RunFinished,
    RunStarted,
    StepsOmitted,
    ToolCallFinished,
    ToolCallStarted,
    ToolOutput,
)
from proxy.agent.result import Artifact, Result
from proxy.schemas.answer_objects import (
    CardFields,
    Json,
    RunEvent,
    StepEvent,
    StepExtension,
    ToolOutputEvent,
)
from proxy.schemas.result_objects import json_text


class AnswerState:
    """The state of an answer that is being sent. The encoders check it before they send reasoning
    or steps.

    An encoder calls `update` with each event of the run after encoding the event.
    """

    def __init__(self) -> None:
        self.answer_began = False
        """True if text of the answer was sent. No reasoning is sent after it, because clients would
        show the reasoning in the wrong place."""
        self.open_step: int | None = None
        """The step that has no result yet, or None."""
        self.sent_call_ids = set[str]()
        """The ids of the client's calls that were streamed while the model wrote them."""

    def update(self, event: Event) -> None:
        match event:
            case AnswerDelta() | ModelRefused():
                self.answer_began = True
            case AnswerRestarted():
                self.answer_began = False  # the text was narration: steps may follow
            case ToolCallStarted() if is_shown(event.name):
                self.open_step = event.step
            case ToolCallFinished() if event.step == self.open_step:
                self.open_step = None


# Text in the reasoning

MAX_COMMAND_CHARS = 2000
FENCE = "````"
"""Encloses a step, because clients render reasoning as Markdown and would show parts of a command's
output as headings and formulas. Programs usually print shorter fences."""
_FENCE_IN_OUTPUT = re.compile(rf"(^|\r)(?=[ \t]*{FENCE})", re.MULTILINE)
_INDENT = " " * 4
"""The indentation that keeps a fence in the output from ending the block."""


class StepTextRenderer:
    """Renders the reasoning of a run, with its steps if `steps` is `reasoning`."""

    def __init__(self, steps: StepsMode, state: AnswerState) -> None:
        self._shows_steps = steps == "reasoning"
        self._state = state
        self._at_line_start = True
        self._output = _OutputShortener()  # of the open step

    def render(self, event: Event) -> str:
        """Return the text of an event. For most events it is empty."""
        if isinstance(event, ReasoningDelta):
            return self._text_to_send(event.text)
        return self._text_to_send(self._step_text(event)) if self._shows_steps else ""

    def close_after_failure(self) -> str:
        """Return the text that closes the open step of a failed run, or an empty string."""
        is_open = self._shows_steps and self._state.open_step is not None
        return self._text_to_send(f"{NOT_FINISHED}\n{FENCE}\n") if is_open else ""

    def _step_text(self, event: Event) -> str:
        match event:
            case ToolCallStarted(_, _, name, arguments) if is_shown(name):
                self._output = _OutputShortener()
                opening = f"{FENCE}console\n{_escape_fences(command_line(name, arguments))}\n"
                return opening if self._at_line_start else f"\n{opening}"
            case StepsOmitted(steps):
                return f"[the first {steps} steps are not kept]\n"
            case ToolOutput(step, stream, text) if step == self._state.open_step:
                return _escape_fences(self._output.add(stream, text))
            case ToolCallFinished() if event.step == self._state.open_step:
                rest = self._output.end(event.observation)
                last_line = outcome_line(event.exit_code, event.duration_s, event.output_lines)
                return f"{_escape_fences(rest)}{last_line}\n{FENCE}\n"
        return ""

    def _text_to_send(self, text: str) -> str:
        """Return the text, with lone surrogates replaced by "?", or "" if the answer has begun.
        Store in `_at_line_start` whether the text ends with a newline, if it is not empty."""
        if text:
            self._at_line_start = text.endswith("\n")
        return "" if self._state.answer_began else text.encode(errors="replace").decode()


def step_extension(event: Event, run_id: str) -> StepExtension | None:
    """Return the `sandbox` object of the chunk with a step's text, or None."""
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
    """Return a tool call as a readable line."""
    if name == "execute_bash":
        job = f"[job {_shorten(arguments['job_id'])}] " if "job_id" in arguments else ""
        return f"$ {job}{_shorten(arguments.get('command'))}"
    shown = " ".join(str(arguments.get(key)) for key in ("command", "path") if key in arguments)
    return f"{name} {_shorten(shown)}".strip()


def _escape_fences(lines: str) -> str:
    """Indent the fences in complete lines, so that none of them ends the block."""
    return _FENCE_IN_OUTPUT.sub(rf"\1{_INDENT}", lines) if FENCE in lines else lines


def _shorten(value: object) -> str:
    text = str(value if value is not None else "")
    return text if len(text) <= MAX_COMMAND_CHARS else text[:MAX_COMMAND_CHARS] + " ..."


HEAD_LINES, HEAD_CHARS = 20, 2000
TAIL_LINES, TAIL_CHARS = 10, 1000
_MAX_LINE_CHARS = 4000
"""Maximum number of characters of an incomplete line."""


class _OutputShortener:
    """Shortens the output of one command to its first lines and its last lines."""

    def __init__(self) -> None:
        self._unfinished_lines: dict[str, str] = {}
        self._lines_left = HEAD_LINES
        self._chars_left = HEAD_CHARS
        self._withheld_lines: list[str] = []
        self._is_long = False

    def add(self, stream: str, text: str) -> str:
        """Add a piece of output. Return the lines that the piece completes, if they are among the
        first lines of the output."""
        *lines, unfinished = (self._unfinished_lines.get(stream, "") + text).split("\n")
        self._unfinished_lines[stream] = unfinished[-_MAX_LINE_CHARS:]
        return "".join(map(self._show, lines))

    def end(self, observation: str) -> str:
        """Return the rest of the output if the output is short, else the last lines of the
        observation."""
        unfinished = [text for text in self._unfinished_lines.values() if text]
        rest = "".join([*map(self._show, unfinished), *self._withheld_lines])
        if not self._is_long:
            return rest
        tail = "\n".join(observation.split("\n")[-TAIL_LINES:])[-TAIL_CHARS:]
        return f"{OUTPUT_LEFT_OUT}\n{tail}\n"

    def _show(self, line: str) -> str:
        line = terminal_text(line) + "\n"
        if not self._withheld_lines and self._lines_left and len(line) <= self._chars_left:
            self._lines_left -= 1
            self._chars_left -= len(line)
            return line
        self._withhold(line)
        return ""

    def _withhold(self, line: str) -> None:
        if self._is_long:
            return
        self._withheld_lines.append(line)
        chars = sum(map(len, self._withheld_lines))
        self._is_long = len(self._withheld_lines) > TAIL_LINES or chars > TAIL_CHARS


# Server-sent events

MAX_OUTPUT_CHARS = 100_000
"""Maximum number of characters of one step's output in its `tool_output` events. The observation in
its `tool_end` event is not shortened."""


class StepEventRenderer:
    """Renders the steps of a run as JSON objects."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._output_chars_left = MAX_OUTPUT_CHARS

    def render(self, event: Event) -> dict[str, Any] | None:
        """Return the JSON object of an event, or None."""
        fields = self._event_fields(event)
        return {"v": 1, "run_id": self._run_id, **fields} if fields else None

    def _event_fields(self, event: Event) -> StepEvent | None:
        match event:
            case ToolOutput(step, stream, text):
                kept = text[: self._output_chars_left]
                self._output_chars_left -= len(kept)
                output = ToolOutputEvent(kind="tool_output", step=step, stream=stream, text=kept)
                return output if kept else None
            case ToolCallStarted(step, _, name, arguments) if is_shown(name):
                self._output_chars_left = MAX_OUTPUT_CHARS
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
        return _run_fields(event)


def _run_fields(event: Event) -> RunEvent | None:
    """Return the fields of an event about the run. Return None for any other event."""
    match event:
        case RunStarted():
            return {"kind": "run_started"}
        case StepsOmitted(steps):
            return {"kind": "steps_omitted", "steps": steps}
        case EgressDecided(decision):
            return {
                "kind": "egress",
                "verdict": decision.verdict,
                "host": decision.host,
                "port": decision.port,
                "reason": decision.reason,
                "bytes_up": decision.bytes_up,
                "bytes_down": decision.bytes_down,
            }
        case RuleMatched(rule, action, over, subject, reason):
            return {
                "kind": "rule",
                "rule": rule,
                "action": action,
                "over": over,
                "subject": subject,
                "reason": reason,
            }
        case FileProduced(file_id, path, size):
            return {"kind": "file", "id": file_id, "path": path, "bytes": size}
        case RunFinished(stop_reason):
            return {"kind": "run_finished", "stop_reason": str(stop_reason)}
    return None


# Open WebUI's tool cards, status line and files
#
# Each of them is sent as top-level fields of a chunk with an empty delta, which other clients
# ignore. Open WebUI reads `event` as an event of its own, and `type` and `item` as in a stream of
# /v1/responses.

MAX_STATUS_CHARS = 100
_CARD_LIMITS = ObservationLimits(max_chars=10_000, max_lines=400)
"""The limits of a result in a card. Open WebUI sends the result back with every turn."""
UNFINISHED_OUTPUT = "It was not finished."


class StepCardRenderer:
    """Renders the steps of a run as cards, with the item numbers that Open WebUI expects."""

    def __init__(self, run_id: str, state: AnswerState) -> None:
        self._run_id = run_id
        self._state = state
        self._last_kind = ""
        """The kind of the last item: "reasoning", "message" or "card"."""
        self._index = -1
        self._command = ""
        """The open step as one line."""
        self._piece_count = 0
        """The number of pieces of output of the open step."""
        self._step_count = 0

    def render(self, event: Event) -> list[CardFields]:
        """Return the fields of each chunk for an event. Most events have no chunk."""
        match event:
            case ReasoningDelta(text) if text and not self._state.answer_began:
                self._count_item("reasoning")
            case AnswerDelta():
                self._count_item("message")
            case ToolCallStarted() if is_shown(event.name):
                return self._begin(event)
            case ToolOutput(step, _, text) if step == self._state.open_step:
                return self._output_status(text)
            case ToolCallFinished() if event.step == self._state.open_step:
                status = _status_fields(f"Ran: {self._command}", done=False)
                return [self._result_card(event.step, event.observation), status]
        return []

    def close_after_failure(self) -> list[CardFields]:
        """Return the chunk fields that close the open card and the status line of a failed run.

        Every card needs a result, because Open WebUI itself runs calls without a result.
        """
        step = self._state.open_step
        pending = [] if step is None else [self._result_card(step, UNFINISHED_OUTPUT, "incomplete")]
        if not self._step_count:
            return pending
        return [
            *pending,
            _status_fields(f"Stopped after {_count_text(self._step_count, 'step')}", done=True),
        ]

    def finish(self, result: Result) -> list[CardFields]:
        """Return the chunk fields of files that are not in the message, and of the last status."""
        files = [_file_entry(artifact) for artifact in result.artifacts if not artifact.data_url]
        fields: list[CardFields] = (
            [{"event": {"type": "files", "data": {"files": files}}}] if files else []
        )
        if self._step_count:
            counts = [_count_text(self._step_count, "step")]
            counts += [_count_text(len(result.artifacts), "file")] if result.artifacts else []
            fields.append(_status_fields(", ".join(counts), done=True))
        return fields

    def _count_item(self, kind: str) -> None:
        """Count an item as Open WebUI does: consecutive text of one kind is one item."""
        if kind != self._last_kind:
            self._index += 1
            self._last_kind = kind

    def _begin(self, event: ToolCallStarted) -> list[CardFields]:
        self._step_count += 1
        self._piece_count = 0
        self._command = _first_line(command_line(event.name, event.arguments).removeprefix("$ "))
        self._index += 1
        self._last_kind = "card"
        call = {
            "type": "function_call",
            "id": f"fc_{self._run_id}_{event.step}",
            "call_id": step_id(self._run_id, event.step),
            "name": event.name,
            "arguments": json_text(dict(event.arguments)),
            "status": "completed",
        }
        started = {**call, "arguments": "", "status": "in_progress"}
        return [
            _status_fields(f"Running: {self._command}", done=False),
            {"type": "response.output_item.added", "output_index": self._index, "item": started},
            {"type": "response.output_item.done", "output_index": self._index, "item": call},
        ]

    def _output_status(self, text: str) -> list[CardFields]:
        """Return a status with the last line of a piece of output, for pieces 1, 2, 4, 8 and so on:
        Open WebUI stores every status."""
        self._piece_count += 1
        if self._piece_count & (self._piece_count - 1):
            return []
        lines = terminal_text(text).strip().splitlines()
        if not lines:
            return []
        return [_status_fields(f"Running: {self._command} - {_first_line(lines[-1])}", done=False)]

    def _result_card(self, step: int, text: str, status: str = "completed") -> CardFields:
        self._index += 1
        item = {
            "type": "function_call_output",
            "id": f"fco_{self._run_id}_{step}",
            "call_id": step_id(self._run_id, step),
            "output": [{"type": "input_text", "text": truncate_middle(text, _CARD_LIMITS)}],
            "status": status,
        }
        return {"type": "response.output_item.added", "output_index": self._index, "item": item}


def _status_fields(description: str, *, done: bool) -> CardFields:
    data = {"action": "sandbox", "description": description, "done": done}
    return {"event": {"type": "status", "data": data}}


def _first_line(text: str) -> str:
    lines = text.strip().splitlines() or [""]
    more = len(lines) > 1 or len(lines[0]) > MAX_STATUS_CHARS
    return lines[0][:MAX_STATUS_CHARS] + (" ..." if more else "")


def _count_text(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _file_entry(artifact: Artifact) -> Json:
    kind = "image" if artifact.mime_type.startswith("image/") else "file"
    shown = {"type": kind, "url": artifact.url, "name": artifact.path.rpartition("/")[2]}
    return {**shown, "size": artifact.bytes} if kind == "file" else shown
