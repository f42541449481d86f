"""The output items of a response, and the stream events about them.

`ReasoningItems`, `MessageItem` and `ClientCallItems` render the model's output. `ShellItems` and
`CodeInterpreterItems` render steps as calls of OpenAI's hosted tools (`sandbox.steps` is `items`).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from policies.history import step_id
from policies.steps import is_shown
from proxy.agent.events import (
    ClientCallDelta,
    ClientCallFinished,
    ClientCallStarted,
    Event,
    ToolCallFinished,
    ToolCallStarted,
    ToolOutput,
)
from proxy.schemas.responses_tools import ITEM_ID_PREFIXES, call_fields
from proxy.schemas.steps import MAX_OUTPUT_CHARS, UNFINISHED_OUTPUT, AnswerState, command_line

Json = dict[str, Any]
"""An event of the stream without its sequence number, an item, or a part of an item."""


class OutputItems:
    """The output items so far. An item's id consists of a prefix, the run id and the item's
    index."""

    def __init__(self, run_id: str, container_id: str) -> None:
        self.run_id = run_id
        self.container_id = container_id
        self.items: list[Json] = []

    def begin(self, prefix: str, item: Json) -> tuple["ItemRef", Json]:
        """Add an item. Return a reference to the item, and the event that adds the item."""
        index = len(self.items)
        ref = ItemRef(index, f"{prefix}_{self.run_id}_{index}")
        self.items.append({"id": ref.id, **item})
        return ref, self._item_event("added", index)

    def end(self, ref: "ItemRef", **changes: Any) -> Json:
        """Complete an item. Return the event that completes the item."""
        self.items[ref.index] = {**self.items[ref.index], **changes}
        return self._item_event("done", ref.index)

    def _item_event(self, change: str, index: int) -> Json:
        type = f"response.output_item.{change}"
        return {"type": type, "output_index": index, "item": self.items[index]}


@dataclass(frozen=True, slots=True)
class ItemRef:
    """The index and the id of an output item."""

    index: int
    id: str

    def event(self, name: str, /, **fields: Any) -> Json:
        """Return an event about the item."""
        return {
            "type": f"response.{name}",
            "item_id": self.id,
            "output_index": self.index,
            **fields,
        }


class ReasoningItems:
    """Writes the reasoning items. Consecutive reasoning becomes one item, with the text in
    `summary`."""

    def __init__(self, output: OutputItems, *, has_encrypted_content: bool) -> None:
        """`has_encrypted_content` is True if the request includes `encrypted_content`."""
        self._output = output
        self._item: ItemRef | None = None
        self._text: list[str] = []
        # Null, because the proxy does not read the field in a later request.
        self._fields: Json = {"encrypted_content": None} if has_encrypted_content else {}

    def write(self, text: str) -> list[Json]:
        """Return the events that add text. Return no events for an empty text."""
        if not text:
            return []
        events: list[Json] = []
        if self._item is None:
            item = {"type": "reasoning", "summary": [], **self._fields, "status": "in_progress"}
            self._item, added = self._output.begin("rs", item)
            events = [added, self._part("added", "")]
        self._text.append(text)
        delta = self._item.event("reasoning_summary_text.delta", summary_index=0, delta=text)
        return [*events, delta]

    def end(self) -> list[Json]:
        """Return the events that end the open item, if any."""
        item = self._item
        if item is None:
            return []
        text = "".join(self._text)
        done = item.event("reasoning_summary_text.done", summary_index=0, text=text)
        part = self._part("done", text)
        self._item, self._text = None, []
        summary = [{"type": "summary_text", "text": text}]
        return [done, part, self._output.end(item, summary=summary, status="completed")]

    def _part(self, change: str, text: str) -> Json:
        assert self._item is not None
        part = {"type": "summary_text", "text": text}
        return self._item.event(f"reasoning_summary_part.{change}", summary_index=0, part=part)


class MessageItem:
    """A message item: narration before a tool call, the answer, or a refusal."""

    def __init__(self, output: OutputItems) -> None:
        self._output = output
        self._item: ItemRef | None = None
        self._parts: list[Json] = []
        self._pieces: list[str] = []
        """Pieces of the text of the last part."""

    def write(self, text: str, logprobs: Sequence[Json] = ()) -> list[Json]:
        events = self._open_part("output_text")
        self._pieces.append(text)
        return [*events, self._event("output_text.delta", delta=text, logprobs=list(logprobs))]

    def write_refusal(self, text: str) -> list[Json]:
        events = self._open_part("refusal")
        self._pieces.append(text)
        return [*events, self._event("refusal.delta", delta=text)]

    def end(self, annotations: Sequence[Json], logprobs: Sequence[Json], status: str) -> list[Json]:
        """Return the events that end the message. If nothing was written, the message has one empty
        text."""
        opening = [] if self._item else self._open_part("output_text")
        assert self._item is not None
        cited = [] if self._is_last_part("refusal") else self._cite(annotations, logprobs)
        done = self._end_part()
        return [
            *opening,
            *cited,
            *done,
            self._output.end(self._item, content=self._parts, status=status),
        ]

    def _open_part(self, kind: str) -> list[Json]:
        """Return the events that begin the message or end its last part, and open a part of the
        type `kind`. Return no events if the last part has that type."""
        events: list[Json] = []
        if self._item is None:
            item = {"type": "message", "role": "assistant", "content": [], "status": "in_progress"}
            self._item, added = self._output.begin("msg", item)
            events.append(added)
        elif self._is_last_part(kind):
            return []
        else:
            events += self._end_part()
        self._parts.append(_empty_part(kind))
        self._pieces = []
        return [*events, self._event("content_part.added", part=self._parts[-1])]

    def _is_last_part(self, kind: str) -> bool:
        return bool(self._parts) and self._parts[-1]["type"] == kind

    def _cite(self, annotations: Sequence[Json], logprobs: Sequence[Json]) -> list[Json]:
        cited = {"annotations": list(annotations), "logprobs": list(logprobs)}
        self._parts[-1] = {**self._parts[-1], **cited}
        return [
            self._event("output_text.annotation.added", annotation_index=n, annotation=annotation)
            for n, annotation in enumerate(annotations)
        ]

    def _end_part(self) -> list[Json]:
        text = "".join(self._pieces)
        if self._is_last_part("refusal"):
            self._parts[-1] = part = {**self._parts[-1], "refusal": text}
            done = self._event("refusal.done", refusal=text)
        else:
            self._parts[-1] = part = {**self._parts[-1], "text": text}
            done = self._event("output_text.done", text=text, logprobs=part["logprobs"])
        return [done, self._event("content_part.done", part=part)]

    def _event(self, name: str, /, **fields: Any) -> Json:
        assert self._item is not None
        return self._item.event(name, content_index=len(self._parts) - 1, **fields)


def _empty_part(kind: str) -> Json:
    if kind == "refusal":
        return {"type": "refusal", "refusal": ""}
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


class ClientCallItem:
    """The item of a call of a client's function or custom tool, written piece by piece."""

    def __init__(self, output: OutputItems, call_id: str, tool: Mapping[str, Any]) -> None:
        """`tool` is the tool as the request defines it."""
        self._output = output
        is_custom = tool["type"] == "custom"
        kind = "custom_tool_call" if is_custom else "function_call"
        self._event_prefix = "custom_tool_call_input" if is_custom else "function_call_arguments"
        self._text_field = "input" if is_custom else "arguments"
        self._done_fields = {} if is_custom else {"name": tool["name"]}
        namespace = {"namespace": tool["namespace"]} if tool.get("namespace") else {}
        item = {
            "type": kind,
            "call_id": call_id,
            **namespace,
            "name": tool["name"],
            self._text_field: "",
        }
        self._item, self.added_event = output.begin(
            ITEM_ID_PREFIXES[kind], {**item, "status": "in_progress"}
        )
        self._pieces: list[str] = []

    def write(self, text: str) -> list[Json]:
        self._pieces.append(text)
        return [self._item.event(f"{self._event_prefix}.delta", delta=text)]

    def end(self) -> list[Json]:
        written = {self._text_field: "".join(self._pieces)}
        done = self._item.event(f"{self._event_prefix}.done", **self._done_fields, **written)
        return [done, self._output.end(self._item, **written, status="completed")]

    def close_after_failure(self) -> list[Json]:
        """Return the events that end an incomplete call."""
        written = {self._text_field: "".join(self._pieces)}
        return [self._output.end(self._item, **written, status="incomplete")]


class ClientCallItems:
    """Writes the calls of the client's tools. Calls of functions and custom tools are streamed;
    calls of OpenAI's tools are sent complete."""

    def __init__(
        self, output: OutputItems, tools: Mapping[str, Mapping[str, Any]], state: AnswerState
    ) -> None:
        """`tools` are the client's tools by the name of their function."""
        self._output = output
        self._tools = tools
        self._state = state
        self._open_items: dict[int, ClientCallItem] = {}

    def encode(self, event: ClientCallStarted | ClientCallDelta | ClientCallFinished) -> list[Json]:
        """Return the events of a piece of a call."""
        match event:
            case ClientCallStarted(index, call_id, name) if self._is_streamed(name):
                self._state.sent_call_ids.add(call_id)
                self._open_items[index] = call = ClientCallItem(
                    self._output, call_id, self._tools[name]
                )
                return [call.added_event]
            case ClientCallDelta(index, text) if index in self._open_items:
                return self._open_items[index].write(text)
            case ClientCallFinished(index) if index in self._open_items:
                return self._open_items.pop(index).end()
        return []

    def close_after_failure(self) -> list[Json]:
        """Return the events that end the calls that are still open."""
        calls, self._open_items = self._open_items, {}
        return [event for call in calls.values() for event in call.close_after_failure()]

    def unstreamed_call_events(self, call: Mapping[str, Any]) -> list[Json]:
        """Return the events of a complete call, or an empty list if the call was streamed."""
        if call["id"] in self._state.sent_call_ids:
            return []
        function = call[call["type"]]
        arguments = function["input" if call["type"] == "custom" else "arguments"]
        tool = self._tools[function["name"]]
        if self._is_streamed(function["name"]):
            item = ClientCallItem(self._output, call["id"], tool)
            return [item.added_event, *item.write(arguments), *item.end()]
        kind = f"{tool['type']}_call"
        fields = {"call_id": call["id"], **call_fields(tool["type"], arguments)}
        ref, added = self._output.begin(
            ITEM_ID_PREFIXES[kind], {"type": kind, "status": "in_progress", **fields}
        )
        return [added, self._output.end(ref, status="completed")]

    def _is_streamed(self, name: str) -> bool:
        return self._tools[name]["type"] in ("function", "custom")


# Steps as items of hosted tools


class _CommandOutput:
    """The output of one command, up to MAX_OUTPUT_CHARS."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[str]] = {"stdout": [], "stderr": []}
        self._chars_left = MAX_OUTPUT_CHARS

    def add(self, stream: str, text: str) -> str:
        """Add a piece, and return the part of the piece below the limit."""
        kept = text[: self._chars_left]
        self._chars_left -= len(kept)
        self._pieces[stream].append(kept)
        return kept

    def text_by_stream(self, observation: str) -> dict[str, str]:
        """Return the output by stream, or the observation as stdout if there is no output."""
        found = {stream: "".join(pieces) for stream, pieces in self._pieces.items()}
        return found if any(found.values()) else {"stdout": observation, "stderr": ""}


class HostedToolItems(ABC):
    """Renders the steps of a run as items of a hosted tool."""

    def __init__(self, output: OutputItems, state: AnswerState) -> None:
        self._output = output
        self._state = state
        self._command_output = _CommandOutput()
        """The output of the open step."""

    def render(self, event: Event) -> list[Json]:
        """Return the stream events for an event of the run."""
        match event:
            case ToolCallStarted() if is_shown(event.name):
                self._command_output = _CommandOutput()
                return self._begin(event)
            case ToolOutput(step, stream, text) if step == self._state.open_step:
                kept = self._command_output.add(stream, text)
                return self._delta(stream, kept) if kept else []
            case ToolCallFinished() if event.step == self._state.open_step:
                streams = self._command_output.text_by_stream(event.observation)
                return self._end(streams, _outcome(event), "completed")
        return []

    def close_after_failure(self) -> list[Json]:
        """Return the events that end the open step of a failed run."""
        if self._state.open_step is None:
            return []
        return self._end(
            self._command_output.text_by_stream(UNFINISHED_OUTPUT),
            {"type": "timeout"},
            "incomplete",
        )

    @abstractmethod
    def _begin(self, event: ToolCallStarted) -> list[Json]: ...

    @abstractmethod
    def _delta(self, stream: str, text: str) -> list[Json]: ...

    @abstractmethod
    def _end(self, streams: Mapping[str, str], outcome: Json, status: str) -> list[Json]: ...


class ShellItems(HostedToolItems):
    """Renders each step as a `shell_call` and a `shell_call_output`."""

    _item: ItemRef
    """The `shell_call_output` of the open step."""

    def _begin(self, event: ToolCallStarted) -> list[Json]:
        command, call_id = _command(event), step_id(self._output.run_id, event.step)
        item = {
            "type": "shell_call",
            "call_id": call_id,
            "action": _shell_action(""),
            "environment": {
                "type": "container_reference",
                "container_id": self._output.container_id,
            },
            "status": "in_progress",
        }
        ref, added = self._output.begin("sh", item)
        result: Json = {
            "type": "shell_call_output",
            "call_id": call_id,
            "output": [],
            "max_output_length": None,
            "status": "in_progress",
        }
        at = {"output_index": ref.index, "command_index": 0}
        events = [
            added,
            {"type": "response.shell_call_command.added", **at, "command": ""},
            {"type": "response.shell_call_command.delta", **at, "delta": command},
            {"type": "response.shell_call_command.done", **at, "command": command},
            self._output.end(ref, action=_shell_action(command), status="completed"),
        ]
        self._item, output_added = self._output.begin("sho", result)
        return [*events, output_added]

    def _delta(self, stream: str, text: str) -> list[Json]:
        delta = {stream: text}
        return [self._item.event("shell_call_output_content.delta", command_index=0, delta=delta)]

    def _end(self, streams: Mapping[str, str], outcome: Json, status: str) -> list[Json]:
        content = [{**streams, "outcome": outcome}]
        return [
            self._item.event("shell_call_output_content.done", command_index=0, output=content),
            self._output.end(self._item, output=content, status=status),
        ]


class CodeInterpreterItems(HostedToolItems):
    """Renders each step as a `code_interpreter_call`."""

    _item: ItemRef
    _code: str

    def __init__(self, output: OutputItems, state: AnswerState, *, with_outputs: bool) -> None:
        """`with_outputs` is True if the request includes the outputs of the calls."""
        super().__init__(output, state)
        self._with_outputs = with_outputs

    def _begin(self, event: ToolCallStarted) -> list[Json]:
        self._code = _command(event)
        item = {
            "type": "code_interpreter_call",
            "container_id": self._output.container_id,
            "code": "",
            "outputs": None,
            "status": "in_progress",
        }
        self._item, added = self._output.begin("ci", item)
        return [
            added,
            self._item.event("code_interpreter_call.in_progress"),
            self._item.event("code_interpreter_call_code.delta", delta=self._code),
            self._item.event("code_interpreter_call_code.done", code=self._code),
            self._item.event("code_interpreter_call.interpreting"),
        ]

    def _delta(self, stream: str, text: str) -> list[Json]:
        return []  # OpenAI has no event for a piece of output

    def _end(self, streams: Mapping[str, str], outcome: Json, status: str) -> list[Json]:
        outputs = None
        if self._with_outputs:
            outputs = [{"type": "logs", "logs": "".join(streams.values())}]
        completed = [self._item.event("code_interpreter_call.completed")]
        item = self._output.end(self._item, code=self._code, outputs=outputs, status=status)
        return [*completed, item] if status == "completed" else [item]


def _command(event: ToolCallStarted) -> str:
    """Return a step as a shell command, or as the tool's name and its main arguments."""
    arguments: Mapping[str, Any] = event.arguments
    if event.name == "execute_bash" and "job_id" not in arguments:
        return str(arguments.get("command") or "")
    return command_line(event.name, arguments).removeprefix("$ ")


def _shell_action(command: str) -> Json:
    return {"commands": [command], "timeout_ms": None, "max_output_length": None}


def _outcome(event: ToolCallFinished) -> Json:
    """Return OpenAI's outcome of a step: a timeout for a command that was ended at its timeout or
    that has no exit code yet, an exit with the command's exit code, or an exit with 0 if the tool
    ran no command."""
    if event.exit_code is not None and not event.timed_out:
        return {"type": "exit", "exit_code": event.exit_code}
    return {"type": "exit", "exit_code": 0} if event.output_lines is None else {"type": "timeout"}
