"""The response of POST /v1/messages, as one JSON object or as a stream.

`MessagesEncoder` turns the events of a run into the events of a streamed message.
`MessageStreamEncoder` writes the stream's events as server-sent events, and `MessageBuilder`
accumulates the stream's events into a message. `CodeExecutionBlocks` renders steps as blocks of
Anthropic's code execution.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from policies.limits import StopReason
from policies.steps import StepsMode
from policies.workspace import OUTPUT_DIR
from proxy.agent.events import (
    AnswerDelta,
    AnswerRestarted,
    ClientCallDelta,
    ClientCallFinished,
    ClientCallStarted,
    Event,
    ModelRefused,
    Narration,
    ToolCallFinished,
    ToolCallStarted,
    ToolOutput,
    TurnStarted,
)
from proxy.agent.result import Artifact, Result, usage_count
from proxy.errors import ProxyError, anthropic_error_body, request_id
from proxy.schemas.answer_objects import StepStreamEvent
from proxy.schemas.result_objects import json_text, sandbox_object, token_details, usage
from proxy.schemas.steps import AnswerState, StepEventRenderer, StepTextRenderer

_Json = dict[str, Any]
"""An event of the stream, or a block of the message."""
_STOP_REASONS = {
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}
_INVALID_ARGUMENTS = "invalid_arguments"
"""The field of a call's input that contains the arguments if these are not a JSON object."""
_STOP_SEQUENCE_FIELDS = ("stop_reason", "matched_stop")
"""The fields in which vLLM and SGLang name the stop sequence that ended the answer."""


@dataclass(frozen=True, slots=True)
class MessageContext:
    """The options of a request that the encoders of its message need."""

    model: str
    steps: StepsMode
    has_thinking: bool
    """True if the message has thinking blocks. If `steps` is `reasoning`, these blocks contain the
    steps too."""
    stop_sequences: tuple[str, ...] = ()
    container_expires: int | None = None
    """The Unix time at which the container expires, or None if the message has no container."""


class MessageBuilder:
    """Builds the message as one JSON object."""

    def __init__(self, run_id: str, context: MessageContext) -> None:
        self._run_id = run_id
        self._steps = context.steps
        self._encoder = MessagesEncoder(run_id, context)
        self._events = self._encoder.begin()

    def add_event(self, event: Event) -> None:
        if not isinstance(event, AnswerDelta | AnswerRestarted):  # the result has the final answer
            self._events += self._encoder.encode(event)

    def finish(self, result: Result) -> dict[str, Any]:
        if result.answer:
            self._events += self._encoder.encode(AnswerDelta(result.answer))
        message = accumulate_message([*self._events, *self._encoder.finish(result)])
        if self._steps == "events":
            steps = (
                event["sandbox"]
                for event in self._events
                if event["type"] == StepStreamEvent.MESSAGES
            )
            message["sandbox"]["events"] = [step for step in steps if step["kind"] != "tool_output"]
        sendable: dict[str, Any] = json.loads(json_text(message))
        return sendable

    def fail(self, error: ProxyError) -> dict[str, Any]:
        return anthropic_error_body(error, request_id(self._run_id))


class MessageStreamEncoder:
    """Writes a message as server-sent events."""

    def __init__(self, run_id: str, context: MessageContext) -> None:
        self._run_id = run_id
        self._encoder = MessagesEncoder(run_id, context)

    def begin(self) -> str:
        return _frames(self._encoder.begin())

    def encode(self, event: Event) -> str:
        return _frames(self._encoder.encode(event))

    def finish(self, result: Result) -> str:
        return _frames(self._encoder.finish(result))

    def fail(self, error: ProxyError) -> str:
        body = anthropic_error_body(error, request_id(self._run_id))
        return _frames([*self._encoder.close_after_failure(), body])


def _frames(events: Iterable[_Json]) -> str:
    return "".join(f"event: {event['type']}\ndata: {json_text(event)}\n\n" for event in events)


class MessagesEncoder:
    """Turns the events of a run into the events of a streamed message."""

    def __init__(self, run_id: str, context: MessageContext) -> None:
        self._run_id = run_id
        self._context = context
        self._state = AnswerState()
        self._text = StepTextRenderer(context.steps, self._state)
        self._code = CodeExecutionBlocks(run_id) if context.steps == "items" else None
        self._steps = StepEventRenderer(run_id) if context.steps == "events" else None
        self._index = -1
        self._open_type = ""
        """The type of the open block, or an empty string."""
        self._narration = ""
        """The narration of the current turn, until it is sent."""

    def begin(self) -> list[_Json]:
        """Return the first events of the stream."""
        message: _Json = {
            "id": f"msg_{self._run_id}",
            "type": "message",
            "role": "assistant",
            "model": self._context.model,
            "content": [],
            "container": None,
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "usage": {
                "input_tokens": 0,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
                "output_tokens": 0,
                "service_tier": "standard",
            },
        }
        return [{"type": "message_start", "message": message}]

    def encode(self, event: Event) -> list[_Json]:
        """Return the stream events for an event of the run."""
        if isinstance(event, Narration):
            self._narration += event.text
            return []
        events = [*self._narration_as_thinking(event), *self._encode_output(event)]
        if self._code and (block := self._code.render(event)):
            events += self._block_events(block)
        if self._steps and (step := self._steps.render(event)):
            # SDKs ignore a ping, whatever fields it has.
            events.append({"type": StepStreamEvent.MESSAGES, "sandbox": step})
        self._state.update(event)
        return events

    def _encode_output(self, event: Event) -> list[_Json]:
        """Return the stream events for an event with the model's output, or with a step that is
        shown as text."""
        match event:
            case AnswerDelta() | ModelRefused():
                return self._write("text", event.text)
            case ClientCallStarted(_, call_id, name):
                self._state.sent_call_ids.add(call_id)
                block = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
                return [*self._narration_as_text(), *self._start(block)]
            case ClientCallDelta(_, text):
                return [self._delta({"type": "input_json_delta", "partial_json": text})]
            case ClientCallFinished():
                return self._close()
        return self._write_thinking(self._text.render(event))

    def _narration_as_thinking(self, event: Event) -> list[_Json]:
        """Return the narration as thinking, and clear it, if `event` begins a turn, belongs to the
        answer or, in a message with thinking blocks, begins a step. Otherwise return an empty
        list."""
        text = self._narration
        if not text:
            return []
        is_shown_step = self._context.has_thinking and isinstance(event, ToolCallStarted)
        if not is_shown_step and not isinstance(event, TurnStarted | AnswerDelta | ModelRefused):
            return []
        self._narration = ""
        return self._write_thinking(self._text.render(Narration(text)))

    def _narration_as_text(self) -> list[_Json]:
        """Return the narration before a call of the client's tools as text, and clear it."""
        text, self._narration = self._narration.strip(), ""
        return self._write("text", text) if text else []

    def close_after_failure(self) -> list[_Json]:
        """Return the events that close the open step and block of a failed run."""
        return [*self._write_thinking(self._text.close_after_failure()), *self._close()]

    def finish(self, result: Result) -> list[_Json]:
        """Return the events after the answer: produced files, the client's calls that were not
        streamed, and the end of the message."""
        events: list[_Json] = []
        for block in self._code.file_list_blocks(result.artifacts) if self._code else ():
            events += self._block_events(block)
        if result.client_calls:
            events += self._narration_as_text()
        for call in result.client_calls:
            if call["id"] not in self._state.sent_call_ids:
                events += self._block_events(_tool_use(call))
        message_delta = {
            "type": "message_delta",
            "delta": self._final_fields(result),
            "usage": message_usage(result),
            "sandbox": sandbox_object(result),
        }
        return [*events, *self._close(), message_delta, {"type": "message_stop"}]

    def _is_incomplete(self, call: Mapping[str, Any]) -> bool:
        """Return True if a call was streamed and its arguments are not complete JSON."""
        return (
            call["id"] in self._state.sent_call_ids
            and _INVALID_ARGUMENTS in _tool_use(call)["input"]
        )

    def _final_fields(self, result: Result) -> _Json:
        """Return the fields of the message that are known at the end of the run."""
        reason, sequence = _find_stop(result, self._context.stop_sequences)
        if reason == "tool_use" and any(map(self._is_incomplete, result.client_calls)):
            reason = "max_tokens"  # SDKs accept incomplete JSON as a complete object
        refusal = {"type": "refusal", "category": None, "explanation": result.refusal}
        fields = {
            "stop_reason": reason,
            "stop_sequence": sequence,
            "stop_details": refusal if reason == "refusal" else None,
        }
        if (expires := self._context.container_expires) is None:
            return fields
        expires_at = datetime.fromtimestamp(expires, UTC).isoformat().replace("+00:00", "Z")
        container = {"id": result.container_id, "expires_at": expires_at, "skills": None}
        return {**fields, "container": container}

    # Blocks

    def _write_thinking(self, text: str) -> list[_Json]:
        """Return the events that add `text` as thinking. Return no events if the text is empty, if
        the message has no thinking blocks, or while a `tool_use` block is open: thinking would
        close the block."""
        if not text or self._open_type == "tool_use" or not self._context.has_thinking:
            return []
        return self._write("thinking", text)

    def _write(self, kind: str, text: str) -> list[_Json]:
        """Return the events that add text to the open block if its type is `kind`, else to a new
        block."""
        events: list[_Json] = []
        if self._open_type != kind:
            # A text has no `citations: null`, which AI SDK 6 refuses.
            signature = {"signature": ""} if kind == "thinking" else {}
            events = self._start({"type": kind, kind: "", **signature})
        return [*events, self._delta({"type": f"{kind}_delta", kind: text})]

    def _block_events(self, block: _Json) -> list[_Json]:
        """Return the events of a complete block. The input of a call is sent as one delta."""
        if "input" not in block:
            return [*self._start(block), *self._close()]
        started = self._start({**block, "input": {}})
        delta = {"type": "input_json_delta", "partial_json": json_text(block["input"])}
        return [*started, self._delta(delta), *self._close()]

    def _start(self, block: _Json) -> list[_Json]:
        closed = self._close()
        self._index += 1
        self._open_type = block["type"]
        started = {"type": "content_block_start", "index": self._index, "content_block": block}
        return [*closed, started]

    def _delta(self, delta: _Json) -> _Json:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _close(self) -> list[_Json]:
        was_open, self._open_type = self._open_type, ""
        return [{"type": "content_block_stop", "index": self._index}] if was_open else []


def accumulate_message(events: list[_Json]) -> _Json:
    """Return the message that a client builds from the events."""
    message: _Json = {}
    pieces: dict[int, list[str]] = {}
    for event in events:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                message["content"].append(event["content_block"])
                pieces[event["index"]] = []
            case "content_block_delta":
                delta = event["delta"]
                pieces[event["index"]].append(delta[_PIECE_FIELDS[delta["type"]]])
            case "content_block_stop":
                _fill_block(message["content"][event["index"]], "".join(pieces[event["index"]]))
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
                message["sandbox"] = event["sandbox"]
    return message


_PIECE_FIELDS = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "input_json_delta": "partial_json",
}


def _fill_block(block: _Json, text: str) -> None:
    match block["type"]:
        case "text" | "thinking" as kind:
            block[kind] = text
        case "tool_use" | "server_tool_use":
            block["input"] = _parse_arguments(text)


def message_usage(result: Result) -> _Json:
    """Return the usage in Anthropic's form, which counts cached tokens separately, with the field
    `sandbox`."""
    counted = usage(result)
    thinking_tokens = usage_count(token_details(counted, "completion"), "reasoning_tokens")
    return {
        **_token_counts(counted),
        "output_tokens_details": {"thinking_tokens": thinking_tokens},
        "server_tool_use": None,
        # Clients read the size of the context from the last iteration.
        "iterations": [{"type": "message", **_token_counts(each)} for each in result.usages],
        "sandbox": counted["sandbox"],
    }


def _token_counts(usage_fields: Mapping[str, Any]) -> _Json:
    cached = usage_count(token_details(usage_fields, "prompt"), "cached_tokens")
    return {
        "input_tokens": usage_count(usage_fields, "prompt_tokens") - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage_count(usage_fields, "completion_tokens"),
    }


def _find_stop(result: Result, sequences: tuple[str, ...]) -> tuple[str, str | None]:
    """Return the stop reason, and the stop sequence that ended the answer, if any."""
    if result.refusal:
        return "refusal", None
    if result.finish_reason == "length" and result.stop_reason is StopReason.CONTEXT_WINDOW:
        return "model_context_window_exceeded", None
    if result.finish_reason == "stop":
        for field in _STOP_SEQUENCE_FIELDS:
            if (stopped_at := result.choice.get(field)) in sequences:
                return "stop_sequence", stopped_at
    return _STOP_REASONS.get(result.finish_reason, "end_turn"), None


def _tool_use(call: Mapping[str, Any]) -> _Json:
    function = call["function"]
    arguments = _parse_arguments(function["arguments"])
    return {"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments}


def _parse_arguments(arguments: Any) -> dict[str, Any]:
    """Return a call's arguments as an object. Arguments that are not a JSON object are returned in
    the field `invalid_arguments` of an object."""
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        parsed = None
    return parsed if isinstance(parsed, dict) else {_INVALID_ARGUMENTS: arguments}


# Steps as blocks of Anthropic's code execution (`sandbox.steps` is `items`)

_BASH, _EDITOR = "bash_code_execution", "text_editor_code_execution"
_BLOCK_NAMES = {"execute_bash": _BASH, "str_replace_editor": _EDITOR}
_MAX_STREAM_CHARS = 100_000
"""Maximum number of characters of a command's stdout, and of its stderr."""
_TRUNCATION_MARKER = "\n[... the rest is left out ...]"
_NO_EXIT_CODE = -1
"""The return code of a command without an exit code. The `stderr` of such a command is the
observation."""


class CodeExecutionBlocks:
    """Renders the steps of a run as complete blocks."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._streams = {"stdout": "", "stderr": ""}

    def render(self, event: Event) -> _Json | None:
        """Return the block of an event, or None."""
        match event:
            case ToolCallStarted(step, _, name, arguments) if name in _BLOCK_NAMES:
                self._streams = {"stdout": "", "stderr": ""}
                return self._tool_use_block(f"{step}", _BLOCK_NAMES[name], dict(arguments))
            case ToolOutput(_, stream, text):
                if len(self._streams[stream]) <= _MAX_STREAM_CHARS:
                    self._streams[stream] += text
            case ToolCallFinished(name="execute_bash"):
                return self._result_block(f"{event.step}", _BASH, self._command_result(event))
            case ToolCallFinished(name="str_replace_editor"):
                return self._result_block(
                    f"{event.step}", _EDITOR, _editor_result(event.observation)
                )
        return None

    def file_list_blocks(self, artifacts: Sequence[Artifact]) -> list[_Json]:
        """Return the call and the result of a command that lists the produced files. Clients find
        the ids of the files in the result."""
        if not artifacts:
            return []
        paths = "".join(f"{artifact.path}\n" for artifact in artifacts)
        outputs = [{"type": f"{_BASH}_output", "file_id": each.file_id} for each in artifacts]
        listing = {"command": f"find {OUTPUT_DIR} -type f"}
        return [
            self._tool_use_block("files", _BASH, listing),
            self._result_block("files", _BASH, _bash_result(paths, "", 0, outputs)),
        ]

    def _tool_use_block(self, step: str, name: str, arguments: dict[str, Any]) -> _Json:
        return {
            "type": "server_tool_use",
            "id": self._call_id(step),
            "name": name,
            "input": arguments,
        }

    def _result_block(self, step: str, name: str, content: _Json) -> _Json:
        return {
            "type": f"{name}_tool_result",
            "tool_use_id": self._call_id(step),
            "content": content,
        }

    def _call_id(self, step: str) -> str:
        return f"srvtoolu_{self._run_id}_{step}"

    def _command_result(self, event: ToolCallFinished) -> _Json:
        out, err = (
            _truncate_stream(self._streams["stdout"]),
            _truncate_stream(self._streams["stderr"]),
        )
        if event.exit_code is None:
            return _bash_result(out, event.observation, _NO_EXIT_CODE)
        return _bash_result(out, err, event.exit_code)


def _bash_result(stdout: str, stderr: str, code: int, outputs: Sequence[_Json] = ()) -> _Json:
    return {
        "type": f"{_BASH}_result",
        "stdout": stdout,
        "stderr": stderr,
        "return_code": code,
        "content": list(outputs),
    }


def _editor_result(observation: str) -> _Json:
    """Return the result of an editor call. Its content is the observation, which shows the file or
    the result of the edit."""
    return {
        "type": f"{_EDITOR}_view_result",
        "file_type": "text",
        "content": observation,
        **dict.fromkeys(("num_lines", "start_line", "total_lines")),
    }


def _truncate_stream(text: str) -> str:
    return text if len(text) <= _MAX_STREAM_CHARS else text[:_MAX_STREAM_CHARS] + _TRUNCATION_MARKER
