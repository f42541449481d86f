"""The response of POST /v1/responses, as one JSON object or as a stream.

`ResponseEncoder` turns the events of a run into the events of a streamed response. The last event
has the complete `response` object. `ResponseStreamEncoder` writes the events as server-sent events,
and `ResponseBodyBuilder` returns the object. The module responses_items makes the output items.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from policies.steps import StepsMode
from proxy.agent.events import (
    AnswerDelta,
    AnswerRestarted,
    ClientCallDelta,
    ClientCallFinished,
    ClientCallStarted,
    Event,
    ModelRefused,
    ToolCallStarted,
    ToolOutput,
)
from proxy.agent.result import Result, RunWarning
from proxy.errors import ProxyError, RunCancelledError
from proxy.schemas.answer_objects import StepStreamEvent
from proxy.schemas.responses_items import (
    ClientCallItems,
    CodeInterpreterItems,
    HostedToolItems,
    Json,
    MessageItem,
    OutputItems,
    ReasoningItems,
    ShellItems,
)
from proxy.schemas.responses_request import INCLUDE_LOGPROBS, include_contains
from proxy.schemas.responses_tools import ResponsesToolSet
from proxy.schemas.result_objects import (
    filename,
    json_text,
    linked_artifacts,
    sandbox_object,
    token_details,
    usage,
)
from proxy.schemas.steps import AnswerState, StepEventRenderer, StepTextRenderer


@dataclass(frozen=True, slots=True)
class ResponseContext:
    """The request and the run of a response, for its encoders."""

    body: Mapping[str, Any]
    """The checked request."""
    run_id: str
    created: int
    container_id: str
    steps: StepsMode
    tools: ResponsesToolSet


class ResponseEncoder:
    """Turns the events of a run into output items and into the events of the stream."""

    def __init__(self, context: ResponseContext) -> None:
        body, tools = context.body, context.tools
        self._warnings = [
            asdict(
                RunWarning(
                    "tool_left_out", f"This server has no tool {kind!r}, so the model lacked it."
                )
            )
            for kind in tools.unavailable_types
        ]
        self._with_logprobs = include_contains(body, INCLUDE_LOGPROBS) or bool(
            body.get("top_logprobs")
        )
        self._response = response_in_progress(body, context.run_id, context.created)
        self._state = AnswerState()
        self._output = OutputItems(context.run_id, context.container_id)
        encrypted = include_contains(body, "reasoning.encrypted_content")
        self._reasoning_items = ReasoningItems(self._output, has_encrypted_content=encrypted)
        self._message = MessageItem(self._output)
        self._client_calls = ClientCallItems(self._output, tools.client_tools, self._state)
        self._text = StepTextRenderer(context.steps, self._state)
        self._step_items: HostedToolItems | None = None
        if context.steps == "items" and tools.step_item_tool == "code_interpreter":
            with_outputs = include_contains(body, "code_interpreter_call.outputs")
            self._step_items = CodeInterpreterItems(
                self._output, self._state, with_outputs=with_outputs
            )
        elif context.steps == "items":
            self._step_items = ShellItems(self._output, self._state)
        self._steps = StepEventRenderer(context.run_id) if context.steps == "events" else None
        self._sent_steps: list[Json] = []
        """The step events that were sent, without pieces of output, for the final `sandbox`
        object."""

    def begin(self) -> list[Json]:
        """Return the first events of the stream."""
        return [
            {"type": "response.created", "response": self._response},
            {"type": "response.in_progress", "response": self._response},
        ]

    def encode(self, event: Event) -> list[Json]:
        """Return the stream events for an event of the run."""
        events = self._encode_output(event)
        if self._step_items and (items := self._step_items.render(event)):
            events += self._reasoning_items.end() if isinstance(event, ToolCallStarted) else []
            events += items
        if self._steps and (step := self._steps.render(event)):
            events.append({"type": StepStreamEvent.RESPONSES, "sandbox": step})
            if not isinstance(event, ToolOutput):
                self._sent_steps.append(step)
        self._state.update(event)
        return events

    def _encode_output(self, event: Event) -> list[Json]:
        """Return the stream events for an event with the model's output, or with a step that is
        shown as text."""
        match event:
            case AnswerDelta(text, logprobs):
                found = text_logprobs(logprobs) if self._with_logprobs else []
                return [*self._reasoning_items.end(), *self._message.write(text, found)]
            case AnswerRestarted() if self._state.answer_began:
                narration, self._message = self._message, MessageItem(self._output)
                return narration.end([], [], "completed")
            case ModelRefused(text):
                return [*self._reasoning_items.end(), *self._message.write_refusal(text)]
            case ClientCallStarted() | ClientCallDelta() | ClientCallFinished():
                return [*self._reasoning_items.end(), *self._client_calls.encode(event)]
        return self._reasoning_items.write(self._text.render(event))

    def finish(self, result: Result) -> list[Json]:
        """Return the last events of a finished run. The very last event has the complete
        response."""
        events = [*self._reasoning_items.end(), *self._client_calls.close_after_failure()]
        if self._state.answer_began or not (result.client_calls or self._state.sent_call_ids):
            found = text_logprobs(result.choice.get("logprobs")) if self._with_logprobs else []
            status = "incomplete" if result.finish_reason == "length" else "completed"
            events += self._message.end(file_citations(result), found, status)
        for call in result.client_calls:
            events += self._client_calls.unstreamed_call_events(call)
        response = finished_response(self._response, result, self._output.items)
        if self._warnings:
            warnings = response["sandbox"].get("warnings", [])
            response["sandbox"]["warnings"] = [*self._warnings, *warnings]
        if self._sent_steps:
            response["sandbox"]["events"] = self._sent_steps
        return [*events, {"type": f"response.{response['status']}", "response": response}]

    def fail(self, error: ProxyError) -> list[Json]:
        """Return the last events of a failed run."""
        events = self._reasoning_items.write(self._text.close_after_failure())
        events += [*self._reasoning_items.end(), *self._client_calls.close_after_failure()]
        events += self._message.end([], [], "incomplete") if self._state.answer_began else []
        events += self._step_items.close_after_failure() if self._step_items else []
        return [*events, *_failure_events(self._response, error, self._output.items)]


class ResponseBodyBuilder:
    """Builds the response as one JSON object."""

    def __init__(self, context: ResponseContext) -> None:
        self._encoder = ResponseEncoder(context)

    def add_event(self, event: Event) -> None:
        if not isinstance(event, AnswerDelta | AnswerRestarted):  # the result has the final answer
            self._encoder.encode(event)

    def finish(self, result: Result) -> dict[str, Any]:
        if result.answer:
            self._encoder.encode(AnswerDelta(result.answer))
        response: dict[str, Any] = self._encoder.finish(result)[-1]["response"]
        return response

    def fail(self, error: ProxyError) -> Mapping[str, Any]:
        return error.body()


class ResponseStreamEncoder:
    """Writes the server-sent events of a response, each with its sequence number."""

    def __init__(self, context: ResponseContext) -> None:
        self._encoder = ResponseEncoder(context)
        self._next_number = 0

    def begin(self) -> str:
        return self._frames(self._encoder.begin())

    def encode(self, event: Event) -> str:
        return self._frames(self._encoder.encode(event))

    def finish(self, result: Result) -> str:
        return self._frames(self._encoder.finish(result))

    def fail(self, error: ProxyError) -> str:
        return self._frames(self._encoder.fail(error))

    def _frames(self, events: Sequence[Json]) -> str:
        frames = _numbered_frames(events, self._next_number)
        self._next_number += len(events)
        return frames


def failure_frames(response: Mapping[str, Any], error: ProxyError, first_number: int) -> str:
    """Return the last frames of a stream whose run was lost. `response` is the stored response
    object. `first_number` is the sequence number of the first frame."""
    return _numbered_frames(_failure_events(response, error, []), first_number)


def _failure_events(
    response: Mapping[str, Any], error: ProxyError, output: Sequence[Mapping[str, Any]]
) -> list[Json]:
    body = error.body()["error"]
    fields = {key: body[key] for key in ("code", "message", "param")}
    return [
        # OpenAI's server sends the error nested too, where its SDKs read it.
        {"type": "error", **fields, "error": body},
        {"type": "response.failed", "response": failed_response(response, error, output)},
    ]


def _numbered_frames(events: Iterable[Json], first_number: int) -> str:
    frames = []
    for number, event in enumerate(events, first_number):
        numbered = {"type": event["type"], "sequence_number": number, **event}
        name = (
            StepStreamEvent.CHAT_COMPLETIONS
            if event["type"] == StepStreamEvent.RESPONSES
            else event["type"]
        )
        frames.append(f"event: {name}\ndata: {json_text(numbered)}\n\n")
    return "".join(frames)


# The response object

_ECHOED_FIELDS: Mapping[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt": None,
    "prompt_cache_key": None,
    "prompt_cache_retention": None,
    "safety_identifier": None,
    "service_tier": "auto",
    "store": True,
    "temperature": None,
    "tool_choice": "auto",
    "top_logprobs": 0,
    "top_p": None,
    "truncation": "disabled",
}
"""Fields that the response repeats from the request, with their defaults. The default is null if
the backend has a default of its own."""
_ID_PREFIX = "resp_"
_ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
_INCOMPLETE_REASONS = {"length": "max_output_tokens", "content_filter": "content_filter"}


def response_id(run_id: str) -> str:
    """Return the id of a run's response."""
    return f"{_ID_PREFIX}{run_id}"


def run_id(response_id: str) -> str:
    """Return the id of a response's run."""
    return response_id.removeprefix(_ID_PREFIX)


def response_in_progress(body: Mapping[str, Any], run_id: str, created: int) -> dict[str, Any]:
    """Return the response object of a run in progress."""
    echoed = {name: body.get(name) for name in _ECHOED_FIELDS}
    conversation = body.get("conversation")
    settings, reasoning = body.get("text") or {}, body.get("reasoning") or {}
    return {
        "id": response_id(run_id),
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "background": bool(body.get("background")),
        "completed_at": None,
        "conversation": {"id": conversation} if isinstance(conversation, str) else conversation,
        "error": None,
        "incomplete_details": None,
        "model": body["model"],
        "output": [],
        **{
            name: _ECHOED_FIELDS[name] if value is None else value for name, value in echoed.items()
        },
        "reasoning": {"effort": None, "summary": None, **reasoning},
        "text": {**settings, "format": settings.get("format") or {"type": "text"}},
        "tools": [_tool_object(tool) for tool in body.get("tools") or []],
        **({"user": body["user"]} if body.get("user") else {}),
    }


def finished_response(
    response: Mapping[str, Any], result: Result, output: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the response object of a finished run."""
    reason = _INCOMPLETE_REASONS.get(result.finish_reason)
    # Not the clock: a response that is built more than once must be the same each time.
    completed_at = response["created_at"] + result.stats.wall_ms // 1000
    tier = result.response.get("service_tier")
    return {
        **response,
        "status": "incomplete" if reason else "completed",
        "completed_at": None if reason else completed_at,
        "incomplete_details": {"reason": reason} if reason else None,
        "output": list(output),
        "service_tier": tier if isinstance(tier, str) else response["service_tier"],
        "usage": _usage_object(result),
        "sandbox": sandbox_object(result),
    }


def failed_response(
    response: Mapping[str, Any], error: ProxyError, output: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the response object of a failed or cancelled run."""
    if isinstance(error, RunCancelledError):
        return {**response, "status": "cancelled", "output": list(output)}
    code = _ERROR_CODES.get(error.status, "server_error")
    body = {"code": code, "message": error.message}
    return {**response, "status": "failed", "error": body, "output": list(output)}


def file_citations(result: Result) -> list[dict[str, Any]]:
    """Return a citation of each produced file, at the file's link in the answer, or at the end of
    the answer if it has no such link."""
    return [
        {
            "type": "container_file_citation",
            "container_id": artifact.container_id,
            "file_id": artifact.file_id,
            "filename": filename(artifact),
            "start_index": start,
            "end_index": end,
        }
        for artifact, start, end in linked_artifacts(result)
    ]


def text_logprobs(logprobs: Any) -> list[dict[str, Any]]:
    """Return a chat completion choice's `logprobs` in the form of an `output_text` part."""
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    return [
        {
            "token": token["token"],
            "bytes": token.get("bytes") or [],
            "logprob": token["logprob"],
            "top_logprobs": [
                {**other, "bytes": other.get("bytes") or []}
                for other in token.get("top_logprobs") or []
            ],
        }
        for token in content or []
    ]


def _tool_object(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a tool. A function gets the fields `parameters` and `strict`, as null, if it
    lacks them: clients read them without a check."""
    if tool["type"] == "function":
        return {"parameters": None, "strict": None, **tool}
    return dict(tool)


def _usage_object(result: Result) -> dict[str, Any]:
    counted = usage(result)
    # OpenAI's types require all of these details.
    input_details = {
        "cache_write_tokens": 0,
        "cached_tokens": 0,
        **token_details(counted, "prompt"),
    }
    output_details = {"reasoning_tokens": 0, **token_details(counted, "completion")}
    return {
        "input_tokens": counted["prompt_tokens"],
        "input_tokens_details": input_details,
        "output_tokens": counted["completion_tokens"],
        "output_tokens_details": output_details,
        "total_tokens": counted["total_tokens"],
        "sandbox": counted["sandbox"],
    }
