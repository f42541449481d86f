"""A run's answer as Anthropic's Messages API has it, whole or as server-sent events."""

import json
from collections.abc import Iterable
from typing import Any

from proxy.agent.events import AnswerDelta, AnswerRestarted, Event
from proxy.agent.result import Result
from proxy.errors import ProxyError
from proxy.wire.json_text import json_text
from proxy.wire.messages_errors import error_body
from proxy.wire.messages_events import MessageEvents, Shown, Told, added_up


class WholeMessage:
    """Collects what goes into the one object."""

    def __init__(self, run_id: str, shown: Shown) -> None:
        self._run_id = run_id
        self._profile = shown.steps
        self._events = MessageEvents(run_id, shown)
        self._told = self._events.begin()

    def event(self, event: Event) -> None:
        """See Document."""
        if not isinstance(event, AnswerDelta | AnswerRestarted):
            self._told += self._events.event(event)

    def finish(self, result: Result) -> dict[str, Any]:
        """See Document."""
        if result.answer:
            self._told += self._events.event(AnswerDelta(result.answer))
        message = added_up([*self._told, *self._events.finish(result)])
        if self._profile == "events":
            steps = (told["sandbox"] for told in self._told if told["type"] == "ping")
            message["sandbox"]["events"] = [step for step in steps if step["kind"] != "tool_output"]
        answer: dict[str, Any] = json.loads(json_text(message))
        return answer

    def fail(self, error: ProxyError) -> dict[str, Any]:
        """See Document."""
        return error_body(error, request_id(self._run_id))


class StreamedMessage:
    """Writes the frames."""

    def __init__(self, run_id: str, shown: Shown) -> None:
        self._run_id = run_id
        self._events = MessageEvents(run_id, shown)

    def begin(self) -> str:
        """See Frames."""
        return _frames(self._events.begin())

    def event(self, event: Event) -> str:
        """See Frames."""
        return _frames(self._events.event(event))

    def finish(self, result: Result) -> str:
        """See Frames."""
        return _frames(self._events.finish(result))

    def fail(self, error: ProxyError) -> str:
        """See Frames."""
        told = error_body(error, request_id(self._run_id))
        return _frames([*self._events.abandoned(), told])


def request_id(run_id: str) -> str:
    """What Anthropic's SDKs name a request by."""
    return f"req_{run_id}"


def _frames(events: Iterable[Told]) -> str:
    return "".join(f"event: {event['type']}\ndata: {json_text(event)}\n\n" for event in events)
