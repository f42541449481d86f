"""A run's answer as chat completions have it, whole or as server-sent events."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, TypedDict

from policies.steps import Steps
from proxy.agent.events import Event, OfChoice
from proxy.agent.result import Result
from proxy.errors import ProxyError
from proxy.wire.chat_response import ChunkWriter, completion
from proxy.wire.step_record import StepRecord


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

    def __init__(self, head: Head, run_id: str, steps: Steps) -> None:
        self._head = head
        self._choices = defaultdict[int, StepRecord](lambda: StepRecord(steps, run_id))

    def event(self, event: Event) -> None:
        """See Document."""
        if isinstance(event, OfChoice):
            self._choices[event.index].take(event.event)
        else:
            self._choices[0].take(event)

    def finish(self, result: Result) -> dict[str, Any]:
        """See Document."""
        others = [self._choices[index].thinking for index, _ in enumerate(result.others, 1)]
        reasoning = self._choices[0].thinking
        content = completion(result, **self._head, reasoning=reasoning, other_reasoning=others)
        content["sandbox"] |= self._choices[0].beside
        for choice in content["choices"] if result.others else ():
            choice["sandbox"] |= self._choices[choice["index"]].beside
        return content

    def fail(self, error: ProxyError) -> Mapping[str, Any]:
        """See Document."""
        return error.body()


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
        return "".join(map(_data, self._chunks.event(event)))

    def finish(self, result: Result) -> str:
        """See Frames."""
        usage = [self._chunks.usage(result)] if self._wants_usage else []
        return "".join(map(_data, [*self._chunks.finish(result), *usage, "[DONE]"]))

    def fail(self, error: ProxyError) -> str:
        """See Frames."""
        return "".join(map(_data, [*self._chunks.fail(error.body()), "[DONE]"]))


def _data(frame: str) -> str:
    named = frame.startswith("event: ")
    return f"{'' if named else 'data: '}{frame}\n\n"
