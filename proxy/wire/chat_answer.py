"""A run's answer as chat completions have it, whole or as server-sent events."""

import json
from typing import Any, TypedDict

from proxy.agent.events import Event
from proxy.agent.task import Result
from proxy.errors import ProxyError
from proxy.wire.chat_response import ChunkWriter, completion
from proxy.wire.steps import Steps, StepText


class Head(TypedDict):
    """What stands at the top of a completion and of each chunk."""

    response_id: str
    created: int
    model: str


def head(run_id: str, created: int, model: str) -> Head:
    """The same for everybody who hears that run."""
    return Head(response_id=f"chatcmpl-{run_id}", created=created, model=model)


class WholeCompletion:
    """Collects what goes into the one object."""

    def __init__(self, head: Head, steps: Steps) -> None:
        self._head = head
        self._steps = StepText(steps)
        self._reasoning: list[str] = []

    def event(self, event: Event) -> None:
        """See Document."""
        self._reasoning.append(self._steps.of(event))

    def finish(self, result: Result) -> dict[str, Any]:
        """See Document."""
        return completion(result, **self._head, reasoning="".join(self._reasoning))


class StreamedCompletion:
    """Writes the frames."""

    def __init__(self, head: Head, run_id: str, steps: Steps, *, wants_usage: bool) -> None:
        self._chunks = ChunkWriter(**head, run_id=run_id, steps=steps)
        self._wants_usage = wants_usage

    def begin(self) -> str:
        """See Frames."""
        return _data(self._chunks.role())

    def event(self, event: Event) -> str:
        """See Frames."""
        frame = self._chunks.event(event)
        return _data(frame) if frame else ""

    def finish(self, result: Result) -> str:
        """See Frames."""
        usage = [self._chunks.usage(result)] if self._wants_usage else []
        return "".join(map(_data, [*self._chunks.finish(result), *usage, "[DONE]"]))

    def fail(self, error: ProxyError) -> str:
        """See Frames."""
        return _data(json.dumps(error.body())) + _data("[DONE]")


def _data(text: str) -> str:
    return f"data: {text}\n\n"
