"""A run as the events of a streamed message of Anthropic's; what is sent whole adds them up."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from policies.limits import StopReason
from policies.steps import Steps
from proxy.agent.events import (
    AnswerDelta,
    AnswerRestarted,
    ClientCallDelta,
    ClientCallFinished,
    ClientCallStarted,
    Event,
    Narration,
    Refused,
    ToolCallStarted,
    TurnStarted,
)
from proxy.agent.result import Result
from proxy.agent.result import tokens
from proxy.wire.chat_response import sandbox_object, usage
from proxy.wire.json_text import json_text
from proxy.wire.messages_steps import CodeSteps
from proxy.wire.step_events import StepEvents
from proxy.wire.steps import StepText

Told = dict[str, Any]
"""An event of the stream."""
_STOP_REASONS = {
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}
INVALID = "invalid_arguments"
"""What holds a call's arguments that are no JSON object."""
_STOPPED_AT = ("stop_reason", "matched_stop")
"""Where vLLM and SGLang say at which text an answer was stopped."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What of a run its client wants to see."""

    model: str
    """As the client calls it."""
    steps: Steps
    thinking: bool
    stop_sequences: tuple[str, ...] = ()
    container_expires: int | None = None
    """When the container goes that the client has asked for, if it has."""


class MessageEvents:
    """The events of one run."""

    def __init__(self, run_id: str, shown: Shown) -> None:
        self._run_id = run_id
        self._shown = shown
        self._thoughts = StepText(shown.steps)
        self._code = CodeSteps(run_id) if shown.steps == "items" else None
        self._events = StepEvents(run_id) if shown.steps == "events" else None
        self._answer_began = False
        self._index = -1
        self._open = ""
        """The kind of the block that is begun."""
        self._sent_calls = set[str]()
        """The ids of the client's calls that were sent as the model wrote them."""
        self._narrated = ""
        """What this turn says beside its calls, while nothing has shown it."""

    def begin(self) -> list[Told]:
        """What is sent before anything is known."""
        message: Told = {
            "id": f"msg_{self._run_id}",
            "type": "message",
            "role": "assistant",
            "model": self._shown.model,
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

    def event(self, event: Event) -> list[Told]:
        """What shows of an event."""
        if isinstance(event, Narration):
            self._narrated += event.text
            return []
        told = self._narration_over(event)
        if isinstance(event, AnswerDelta | Refused):
            self._answer_began = True
            return [*told, *self._say("text", event.text)]
        if isinstance(event, AnswerRestarted):
            self._answer_began = False
        if isinstance(event, ClientCallStarted | ClientCallDelta | ClientCallFinished):
            return self._client_call(event)
        if thought := self._thoughts.of(event):
            told += self._think(thought)
        if self._code and (block := self._code.of(event)):
            told += self._whole(block)
        if self._events and (step := self._events.of(event)):
            # SDKs pass over a ping, whatever stands in it.
            told.append({"type": "ping", "sandbox": step})
        return told

    def _narration_over(self, event: Event) -> list[Told]:
        """It is thinking where a step of ours, a further turn or the answer follows."""
        text = self._narrated
        step_shows = self._shown.thinking and isinstance(event, ToolCallStarted)
        if not text or not (step_shows or isinstance(event, TurnStarted | AnswerDelta | Refused)):
            return []
        self._narrated = ""
        return self._think(self._thoughts.of(Narration(text)))

    def abandoned(self) -> list[Told]:
        """What ends what was begun where a run fails."""
        text = self._thoughts.abandoned()
        return [*(self._think(text) if text else ()), *self._close()]

    def finish(self, result: Result) -> list[Told]:
        """What follows the answer."""
        told: list[Told] = []
        for block in self._code.files(result.artifacts) if self._code else ():
            told += self._whole(block)
        if result.tool_calls:
            told += self._narration_before_call()
        for call in result.tool_calls:
            told += [] if call["id"] in self._sent_calls else self._whole(_tool_use(call))
        end = {"type": "message_delta", "delta": self._end(result), "usage": message_usage(result)}
        return [
            *told,
            *self._close(),
            {**end, "sandbox": sandbox_object(result)},
            {"type": "message_stop"},
        ]

    def _client_call(
        self, event: ClientCallStarted | ClientCallDelta | ClientCallFinished
    ) -> list[Told]:
        match event:
            case ClientCallStarted(_, call_id, name):
                self._sent_calls.add(call_id)
                block = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
                return [*self._narration_before_call(), *self._start(block)]
            case ClientCallDelta(_, text):
                return [self._delta({"type": "input_json_delta", "partial_json": text})]
        return self._close()

    def _narration_before_call(self) -> list[Told]:
        said, self._narrated = self._narrated.strip(), ""
        return self._say("text", said) if said else []

    def _is_cut(self, call: Mapping[str, Any]) -> bool:
        """Whether a call was sent that is no whole object."""
        return call["id"] in self._sent_calls and INVALID in _tool_use(call)["input"]

    def _end(self, result: Result) -> Told:
        reason, sequence = _stop(result, self._shown.stop_sequences)
        if reason == "tool_use" and any(map(self._is_cut, result.tool_calls)):
            reason = "max_tokens"  # SDKs take half an object for a whole one
        details = {"type": "refusal", "category": None, "explanation": result.refusal}
        ended = {
            "stop_reason": reason,
            "stop_sequence": sequence,
            "stop_details": details if reason == "refusal" else None,
        }
        if (expires := self._shown.container_expires) is None:
            return ended
        until = datetime.fromtimestamp(expires, UTC).isoformat().replace("+00:00", "Z")
        container = {"id": result.container_id, "expires_at": until, "skills": None}
        return {**ended, "container": container}

    # Blocks

    def _think(self, text: str) -> list[Told]:
        """Nothing of it divides an answer that has begun, or a call."""
        if self._answer_began or self._open == "tool_use" or not self._shown.thinking:
            return []
        return self._say("thinking", text)

    def _say(self, kind: str, text: str) -> list[Told]:
        told: list[Told] = []
        if self._open != kind:
            # No `citations: null` beside a text: AI SDK 6 refuses it.
            signature = {"signature": ""} if kind == "thinking" else {}
            told += self._start({"type": kind, kind: "", **signature})
        return [*told, self._delta({"type": f"{kind}_delta", kind: text})]

    def _whole(self, block: Told) -> list[Told]:
        """A block that is there from its start to its end; what calls a tool is written as JSON."""
        if "input" not in block:
            return [*self._start(block), *self._close()]
        started = self._start({**block, "input": {}})
        written = {"type": "input_json_delta", "partial_json": json_text(block["input"])}
        return [*started, self._delta(written), *self._close()]

    def _start(self, block: Told) -> list[Told]:
        closed = self._close()
        self._index += 1
        self._open = block["type"]
        started = {"type": "content_block_start", "index": self._index, "content_block": block}
        return [*closed, started]

    def _delta(self, delta: Told) -> Told:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _close(self) -> list[Told]:
        was_open, self._open = self._open, ""
        return [{"type": "content_block_stop", "index": self._index}] if was_open else []


def added_up(events: list[Told]) -> Told:
    """The message that a client makes of the events."""
    message: Told = {}
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
                pieces[event["index"]].append(delta[_PIECE[delta["type"]]])
            case "content_block_stop":
                _fill(message["content"][event["index"]], "".join(pieces[event["index"]]))
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
                message["sandbox"] = event["sandbox"]
    return message


_PIECE = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}


def _fill(block: Told, text: str) -> None:
    match block["type"]:
        case "text" | "thinking" as kind:
            block[kind] = text
        case "tool_use" | "server_tool_use":
            block["input"] = _object(text)


def message_usage(result: Result) -> Told:
    """Anthropic's usage, in which what came from a cache is no input, and ours beside it."""
    counted = usage(result)
    details = counted.get("completion_tokens_details")
    thinking = tokens(details, "reasoning_tokens") if isinstance(details, Mapping) else 0
    return {
        **_tokens(counted),
        "output_tokens_details": {"thinking_tokens": thinking},
        "server_tool_use": None,
        # Clients learn from the last of them how full the context is.
        "iterations": [{"type": "message", **_tokens(each)} for each in result.usages],
        "sandbox": counted["sandbox"],
    }


def _tokens(counted: Mapping[str, Any]) -> Told:
    details = counted.get("prompt_tokens_details")
    cached = tokens(details, "cached_tokens") if isinstance(details, Mapping) else 0
    return {
        "input_tokens": tokens(counted, "prompt_tokens") - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": tokens(counted, "completion_tokens"),
    }


def _stop(result: Result, sequences: tuple[str, ...]) -> tuple[str, str | None]:
    """Why it ended, and at which of the client's texts."""
    if result.refusal:
        return "refusal", None
    if result.finish_reason == "length" and result.stop_reason is StopReason.CONTEXT_WINDOW:
        return "model_context_window_exceeded", None
    if result.finish_reason == "stop":
        for field in _STOPPED_AT:
            if (stopped_at := result.choice.get(field)) in sequences:
                return "stop_sequence", stopped_at
    return _STOP_REASONS.get(result.finish_reason, "end_turn"), None


def _tool_use(call: Mapping[str, Any]) -> Told:
    function = call["function"]
    given = _object(function["arguments"])
    return {"type": "tool_use", "id": call["id"], "name": function["name"], "input": given}


def _object(written: Any) -> dict[str, Any]:
    """A call's arguments, which models do not always write as they should."""
    try:
        given = json.loads(written) if isinstance(written, str) else written
    except (ValueError, RecursionError):
        given = written
    return given if isinstance(given, dict) else {INVALID: written}
