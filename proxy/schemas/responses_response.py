"""The answer of POST /v1/responses, in one piece or streamed.

`ResponseWriter` turns the events of a run into the events of a streamed response, the last of which
holds the whole `response` object. `StreamedResponse` writes these as server-sent events;
`WholeResponse` returns the object. responses_items makes the items of the response's output.
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
    Refused,
    ToolCallStarted,
    ToolOutput,
)
from proxy.agent.result import Result, RunWarning
from proxy.errors import ProxyError, RunCancelledError
from proxy.schemas.responses_items import (
    ClientCalls,
    CodeInterpreterItems,
    HostedToolItems,
    Json,
    Message,
    Output,
    ShellItems,
    Thinking,
)
from proxy.schemas.responses_request import LOGPROBS, wants
from proxy.schemas.responses_tools import AskedTools
from proxy.schemas.result_objects import filename, json_text, place, sandbox_object, usage
from proxy.schemas.steps import EVENT_NAME, AnswerState, StepEventRenderer, StepTextRenderer

_KEEPALIVE = "keepalive"
"""The type of a step's event. It is OpenAI's own event without content: helpers of its SDKs refuse
types that they do not know."""


@dataclass(frozen=True, slots=True)
class ResponseContext:
    """What the encoders of a response need to know of its request and its run."""

    body: Mapping[str, Any]
    """The checked request."""
    run_id: str
    created: int
    container_id: str
    steps: StepsMode
    tools: AskedTools


class ResponseWriter:
    """Turns the events of a run into items and into the events of the stream."""

    def __init__(self, asked: ResponseContext) -> None:
        tools = asked.tools
        self._warnings = [asdict(_tool_left_out(kind)) for kind in tools.left_out]
        self._with_logprobs = wants(asked.body, LOGPROBS) or bool(asked.body.get("top_logprobs"))
        self._response = begun(asked.body, asked.run_id, asked.created)
        self._state = AnswerState()
        self._output = Output(asked.run_id, asked.container_id)
        encrypted = wants(asked.body, "reasoning.encrypted_content")
        self._thinking = Thinking(self._output, encrypted=encrypted)
        self._message = Message(self._output)
        self._calls = ClientCalls(self._output, tools.own, self._state)
        self._text = StepTextRenderer(asked.steps, self._state)
        self._items: HostedToolItems | None = None
        if asked.steps == "items" and tools.shows == "code_interpreter":
            with_outputs = wants(asked.body, "code_interpreter_call.outputs")
            self._items = CodeInterpreterItems(self._output, self._state, with_outputs=with_outputs)
        elif asked.steps == "items":
            self._items = ShellItems(self._output, self._state)
        self._steps = StepEventRenderer(asked.run_id) if asked.steps == "events" else None
        self._kept: list[Json] = []
        """The steps of the profile `events`, for the final `sandbox` object."""

    def begin(self) -> list[Json]:
        """Return the events that are sent before the run has begun."""
        return [
            {"type": "response.created", "response": self._response},
            {"type": "response.in_progress", "response": self._response},
        ]

    def event(self, event: Event) -> list[Json]:
        """Return the events that the client sees of an event of the run."""
        events = self._said(event)
        if self._items and (items := self._items.render(event)):
            events += self._thinking.end() if isinstance(event, ToolCallStarted) else []
            events += items
        if self._steps and (step := self._steps.render(event)):
            events.append({"type": _KEEPALIVE, "sandbox": step})
            if not isinstance(event, ToolOutput):
                self._kept.append(step)
        self._state.update(event)
        return events

    def _said(self, event: Event) -> list[Json]:
        """Return the events of the model's words, of a call, or of a step as text."""
        match event:
            case AnswerDelta(text, logprobs):
                found = log_probabilities(logprobs) if self._with_logprobs else []
                return [*self._thinking.end(), *self._message.write(text, found)]
            case AnswerRestarted() if self._state.answer_began:
                narration, self._message = self._message, Message(self._output)
                return narration.end([], [], "completed")
            case Refused(text):
                return [*self._thinking.end(), *self._message.refuse(text)]
            case ClientCallStarted() | ClientCallDelta() | ClientCallFinished():
                return [*self._thinking.end(), *self._calls.event(event)]
        return self._thinking.say(self._text.render(event))

    def finish(self, result: Result) -> list[Json]:
        """Return the last events; the very last one holds the complete response."""
        events = [*self._thinking.end(), *self._calls.abandon()]
        if self._state.answer_began or not (result.tool_calls or self._state.sent_calls):
            found = log_probabilities(result.choice.get("logprobs")) if self._with_logprobs else []
            status = "incomplete" if result.finish_reason == "length" else "completed"
            events += self._message.end(citations(result), found, status)
        for call in result.tool_calls:
            events += self._calls.whole(call)
        response = ended(self._response, result, self._output.items)
        if self._warnings:
            warnings = response["sandbox"].get("warnings", [])
            response["sandbox"]["warnings"] = [*self._warnings, *warnings]
        if self._kept:
            response["sandbox"]["events"] = self._kept
        return [*events, {"type": f"response.{response['status']}", "response": response}]

    def fail(self, error: ProxyError) -> list[Json]:
        """Return the last events of a failed run."""
        events = self._thinking.say(self._text.abandon())
        events += [*self._thinking.end(), *self._calls.abandon()]
        events += self._message.end([], [], "incomplete") if self._state.answer_began else []
        events += self._items.abandon() if self._items else []
        told = error.body()["error"]
        named = {key: told[key] for key in ("code", "message", "param")}
        # Nested too, as OpenAI's server does: its SDKs raise what they find there.
        return [
            *events,
            {"type": "error", **named, "error": told},
            {
                "type": "response.failed",
                "response": failed(self._response, error, self._output.items),
            },
        ]


def _tool_left_out(kind: str) -> RunWarning:
    """Return the warning about a tool of the request that is not available."""
    return RunWarning("tool_left_out", f"There is no tool {kind!r} here; the model had none.")


class WholeResponse:
    """Builds the answer in one piece."""

    def __init__(self, asked: ResponseContext) -> None:
        self._writer = ResponseWriter(asked)

    def event(self, event: Event) -> None:
        if not isinstance(event, AnswerDelta | AnswerRestarted):  # the result has the final answer
            self._writer.event(event)

    def finish(self, result: Result) -> dict[str, Any]:
        if result.answer:
            self._writer.event(AnswerDelta(result.answer))
        response: dict[str, Any] = self._writer.finish(result)[-1]["response"]
        return response

    def fail(self, error: ProxyError) -> Mapping[str, Any]:
        return error.body()


class StreamedResponse:
    """Writes the frames of a streamed answer, each with its sequence number."""

    def __init__(self, asked: ResponseContext) -> None:
        self._writer = ResponseWriter(asked)
        self._next = 0

    def begin(self) -> str:
        return self._frames(self._writer.begin())

    def event(self, event: Event) -> str:
        return self._frames(self._writer.event(event))

    def finish(self, result: Result) -> str:
        return self._frames(self._writer.finish(result))

    def fail(self, error: ProxyError) -> str:
        return self._frames(self._writer.fail(error))

    def _frames(self, events: Iterable[Json]) -> str:
        frames = []
        for number, event in enumerate(events, self._next):
            numbered = {"type": event["type"], "sequence_number": number, **event}
            name = EVENT_NAME if event["type"] == _KEEPALIVE else event["type"]
            frames.append(f"event: {name}\ndata: {json_text(numbered)}\n\n")
        self._next += len(frames)
        return "".join(frames)


# The response object

_ECHOED: Mapping[str, Any] = {
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
"""Fields that the response repeats from the request, and their values if the request has none.
Null: the backend has a default of its own."""
_INPUT_DETAILS = {"cache_write_tokens": 0, "cached_tokens": 0}
_OUTPUT_DETAILS = {"reasoning_tokens": 0}
"""OpenAI's types require these fields, also if the backend does not count them."""
_PREFIX = "resp_"
_ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}


def response_id(run_id: str) -> str:
    """Return the id of a run's response."""
    return f"{_PREFIX}{run_id}"


def run_id(response_id: str) -> str:
    """Return the id of a response's run."""
    return response_id.removeprefix(_PREFIX)


def begun(body: Mapping[str, Any], run_id: str, created: int) -> dict[str, Any]:
    """Return the response to a request while its run is in progress."""
    asked = {name: body.get(name) for name in _ECHOED}
    settings, thinking = body.get("text") or {}, body.get("reasoning") or {}
    return {
        "id": response_id(run_id),
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "background": bool(body.get("background")),
        "completed_at": None,
        "conversation": _conversation(body.get("conversation")),
        "error": None,
        "incomplete_details": None,
        "model": body["model"],
        "output": [],
        **{name: _ECHOED[name] if asked[name] is None else asked[name] for name in _ECHOED},
        "reasoning": {"effort": None, "summary": None, **thinking},
        "text": {**settings, "format": settings.get("format") or {"type": "text"}},
        "tools": [_tool(tool) for tool in body.get("tools") or []],
        **({"user": body["user"]} if body.get("user") else {}),
    }


def ended(
    response: Mapping[str, Any], result: Result, output: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the response of a finished run."""
    reason = _INCOMPLETE.get(result.finish_reason)
    # Not from the clock: the response is built more than once, and is stored too.
    over = response["created_at"] + result.stats.wall_ms // 1000
    tier = result.response.get("service_tier")
    return {
        **response,
        "status": "incomplete" if reason else "completed",
        "completed_at": None if reason else over,
        "incomplete_details": {"reason": reason} if reason else None,
        "output": list(output),
        "service_tier": tier if isinstance(tier, str) else response["service_tier"],
        "usage": _usage(result),
        "sandbox": sandbox_object(result),
    }


def failed(
    response: Mapping[str, Any], error: ProxyError, output: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the response of a failed or cancelled run."""
    if isinstance(error, RunCancelledError):
        return {**response, "status": "cancelled", "output": list(output)}
    code = _ERROR_CODES.get(error.status, "server_error")
    told = {"code": code, "message": error.message}
    return {**response, "status": "failed", "error": told, "output": list(output)}


def citations(result: Result) -> list[dict[str, Any]]:
    """Return a citation for each produced file, at its link in the answer, else at the end."""
    found = []
    for artifact in result.artifacts:
        start, end = place(result.answer, artifact.url)
        found.append(
            {
                "type": "container_file_citation",
                "container_id": artifact.container_id,
                "file_id": artifact.file_id,
                "filename": filename(artifact),
                "start_index": start,
                "end_index": end,
            }
        )
    return found


def log_probabilities(logprobs: Any) -> list[dict[str, Any]]:
    """Return the `logprobs` of a chat completion's choice as a part of text has them."""
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


def _conversation(asked: Any) -> dict[str, Any] | None:
    """Return the conversation as an object; the request may name it by its id."""
    return {"id": asked} if isinstance(asked, str) else asked


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool with the fields that clients read unconditionally."""
    if tool["type"] == "function":
        return {"parameters": None, "strict": None, **tool}
    return dict(tool)


def _details(counted: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    details = counted.get(name)
    return details if isinstance(details, Mapping) else {}


def _usage(result: Result) -> dict[str, Any]:
    counted = usage(result)
    return {
        "input_tokens": counted["prompt_tokens"],
        "input_tokens_details": {**_INPUT_DETAILS, **_details(counted, "prompt_tokens_details")},
        "output_tokens": counted["completion_tokens"],
        "output_tokens_details": {
            **_OUTPUT_DETAILS,
            **_details(counted, "completion_tokens_details"),
        },
        "total_tokens": counted["total_tokens"],
        "sandbox": counted["sandbox"],
    }
