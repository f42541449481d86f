"""A run's answer as /v1/responses has it, whole or as server-sent events."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from policies.steps import Steps, is_shown
from proxy.agent.events import (
    AnswerDelta,
    AnswerRestarted,
    ClientCallDelta,
    ClientCallFinished,
    ClientCallStarted,
    Event,
    Refused,
    ToolCallFinished,
    ToolCallStarted,
    ToolOutput,
)
from proxy.agent.result import Notice, Result
from proxy.errors import ProxyError
from proxy.wire.json_text import json_text
from proxy.wire.response_object import (
    begun,
    citations,
    ended,
    failed,
    log_probabilities,
)
from proxy.wire.responses_items import ClientCalls, Message, Output, Thinking, Told
from proxy.wire.responses_request import LOGPROBS, wants
from proxy.wire.responses_steps import CodeSteps, ShellSteps, StepsShown
from proxy.wire.responses_tools import AskedTools
from proxy.wire.step_events import EVENT_NAME, StepEvents
from proxy.wire.steps import StepText

NOTHING = "keepalive"
"""The one event of OpenAI's that says nothing: helpers of its SDKs refuse such as they do not know,
whatever it is called outside."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What every telling of one response begins with."""

    body: Mapping[str, Any]
    """The request, checked."""
    run_id: str
    created: int
    container_id: str
    steps: Steps
    tools: AskedTools


class ResponseWriter:
    """Turns what happens into items, and into the events that tell of them."""

    def __init__(self, asked: Asked) -> None:
        tools = asked.tools
        self._warnings = [asdict(tool_left_out(kind)) for kind in tools.left_out]
        self._with_logprobs = wants(asked.body, LOGPROBS) or bool(asked.body.get("top_logprobs"))
        self._response = begun(asked.body, asked.run_id, asked.created)
        self._output = Output(asked.run_id, asked.container_id)
        encrypted = wants(asked.body, "reasoning.encrypted_content")
        self._thinking = Thinking(self._output, encrypted=encrypted)
        self._message = Message(self._output)
        self._calls = ClientCalls(self._output, tools.own)
        self._text = StepText(asked.steps)
        self._items: StepsShown | None = None
        if asked.steps == "items" and tools.shows == "code_interpreter":
            with_outputs = wants(asked.body, "code_interpreter_call.outputs")
            self._items = CodeSteps(self._output, with_outputs=with_outputs)
        elif asked.steps == "items":
            self._items = ShellSteps(self._output)
        self._events = StepEvents(asked.run_id) if asked.steps == "events" else None
        self._kept: list[Told] = []
        """The steps of the profile `events`, for an answer in one piece."""

    def begin(self) -> list[Told]:
        """What is sent before anything is known."""
        return [
            {"type": "response.created", "response": self._response},
            {"type": "response.in_progress", "response": self._response},
        ]

    def event(self, event: Event) -> list[Told]:
        """What shows of an event."""
        match event:
            case AnswerDelta(text, logprobs):
                found = log_probabilities(logprobs) if self._with_logprobs else []
                return [*self._thinking.end(), *self._message.write(text, found)]
            case AnswerRestarted():
                narration, self._message = self._message, Message(self._output)
                return narration.end([], [], "completed") if narration.began else []
            case Refused(text):
                return [*self._thinking.end(), *self._message.refuse(text)]
            case ClientCallStarted() | ClientCallDelta() | ClientCallFinished():
                return [*self._thinking.end(), *self._calls.event(event)]
        text = self._text.of(event)
        # Thinking that follows the answer would stand below it: mostly it is how it was handed in.
        thought = self._thinking.say(text) if text and not self._message.began else []
        return [*thought, *self._step(event), *self._told(event)]

    def finish(self, result: Result) -> list[Told]:
        """What comes last; the last of it is the whole response."""
        events = [*self._thinking.end(), *self._calls.abandon()]
        if self._message.began or not (result.tool_calls or self._calls.began):
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

    def fail(self, error: ProxyError) -> list[Told]:
        """The same where the run has failed."""
        text = self._text.abandoned()
        events = self._thinking.say(text) if text and not self._message.began else []
        events += [*self._thinking.end(), *self._calls.abandon()]
        events += self._message.end([], [], "incomplete") if self._message.began else []
        events += self._items.abandoned() if self._items else []
        told = error.body()["error"]
        named = {key: told[key] for key in ("code", "message", "param")}
        # Nested too: OpenAI's own server says it so, and its SDKs raise what they find there.
        return [
            *events,
            {"type": "error", **named, "error": told},
            {
                "type": "response.failed",
                "response": failed(self._response, error, self._output.items),
            },
        ]

    def _step(self, event: Event) -> list[Told]:
        """A step as items."""
        if self._items is None:
            return []
        match event:
            case ToolCallStarted() if is_shown(event.name):
                return [*self._thinking.end(), *self._items.started(event)]
            case ToolOutput():
                return self._items.heard(event)
            case ToolCallFinished() if is_shown(event.name):
                return self._items.finished(event)
        return []

    def _told(self, event: Event) -> list[Told]:
        """A step as an event of ours."""
        step = self._events.of(event) if self._events else None
        if step is None:
            return []
        if not isinstance(event, ToolOutput):
            self._kept.append(step)
        return [{"type": NOTHING, "sandbox": step}]


def tool_left_out(kind: str) -> Notice:
    """What its reader is told of an answer that was made without a tool asked for."""
    return Notice("tool_left_out", f"There is no tool {kind!r} here; the model had none.")


class WholeResponse:
    """Collects what goes into the one object: of what was streamed for an answer, the answer."""

    def __init__(self, asked: Asked) -> None:
        self._writer = ResponseWriter(asked)

    def event(self, event: Event) -> None:
        """See Document."""
        if not isinstance(event, AnswerDelta | AnswerRestarted):
            self._writer.event(event)

    def finish(self, result: Result) -> dict[str, Any]:
        """See Document."""
        if result.answer:
            self._writer.event(AnswerDelta(result.answer))
        response: dict[str, Any] = self._writer.finish(result)[-1]["response"]
        return response

    def fail(self, error: ProxyError) -> Mapping[str, Any]:
        """See Document."""
        return error.body()


class StreamedResponse:
    """Writes the frames, each with its number."""

    def __init__(self, asked: Asked) -> None:
        self._writer = ResponseWriter(asked)
        self._next = 0

    def begin(self) -> str:
        """See Frames."""
        return self._frames(self._writer.begin())

    def event(self, event: Event) -> str:
        """See Frames."""
        return self._frames(self._writer.event(event))

    def finish(self, result: Result) -> str:
        """See Frames."""
        return self._frames(self._writer.finish(result))

    def fail(self, error: ProxyError) -> str:
        """See Frames."""
        return self._frames(self._writer.fail(error))

    def _frames(self, events: Iterable[Told]) -> str:
        frames = []
        for number, event in enumerate(events, self._next):
            numbered = {"type": event["type"], "sequence_number": number, **event}
            name = EVENT_NAME if event["type"] == NOTHING else event["type"]
            frames.append(f"event: {name}\ndata: {json_text(numbered)}\n\n")
        self._next += len(frames)
        return "".join(frames)
