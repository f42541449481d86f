"""The steps of an answer that is sent whole, gathered while it is made."""

from typing import Any

from policies.steps import Steps, is_shown
from proxy.agent.events import Event, ToolCallFinished, ToolCallStarted, ToolOutput
from proxy.wire.step_events import StepEvents
from proxy.wire.step_items import call_item, output_item
from proxy.wire.steps import StepText


class StepRecord:
    """Listens to a run."""

    def __init__(self, steps: Steps, run_id: str) -> None:
        self._steps = steps
        self._run_id = run_id
        self._text = StepText(steps)
        self._events = StepEvents(run_id)
        self._thinking: list[str] = []
        self._shown: list[dict[str, Any]] = []

    def take(self, event: Event) -> None:
        """Note what shows of an event."""
        self._thinking.append(self._text.of(event))
        if self._steps == "items":
            self._take_item(event)
        elif self._steps == "events" and not isinstance(event, ToolOutput):
            told = self._events.of(event)
            self._shown += [told] if told else []

    def _take_item(self, event: Event) -> None:
        if isinstance(event, ToolCallStarted) and is_shown(event.name):
            self._shown.append(call_item(event, self._run_id))
        elif isinstance(event, ToolCallFinished) and is_shown(event.name):
            self._shown.append(output_item(event.step, self._run_id, event.observation))

    @property
    def thinking(self) -> str:
        """The answer's `reasoning`."""
        return "".join(self._thinking)

    @property
    def beside(self) -> dict[str, Any]:
        """What the answer's `sandbox` object has of them, under the profile's name."""
        return {self._steps: self._shown} if self._steps in ("items", "events") else {}
