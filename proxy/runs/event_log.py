"""The event log of a run, which later subscribers read, and the record of a run for the store."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from inspect import signature
from typing import Any, TypeVar

from policies.artifacts import SkippedFile
from policies.limits import StopReason
from proxy.agent.events import (
    ALL_EVENTS,
    AnswerDelta,
    AnswerRestarted,
    ChoiceEvent,
    ClientCallDelta,
    EgressDecided,
    Event,
    ModelRefused,
    ReasoningDelta,
    RuleMatched,
    RunFinished,
    StepsOmitted,
    ToolCallFinished,
    ToolCallStarted,
    ToolOutput,
    TurnStarted,
)
from proxy.agent.result import Artifact, Compaction, Result, RunStats, RunWarning
from proxy.errors import ProxyError, RunCancelledError, RunLostError, internal_error
from proxy.store.records import RunStatus
from sandbox_runtime.egress.decision import Decision

T = TypeVar("T")
MAX_CHARS = 1_000_000
"""Number of characters beyond which a log drops its oldest turns. The answer is never dropped."""
MAX_LIVE_CHARS = 100_000
"""Approximate maximum number of characters of one command's live output in a log."""
OVERHEAD_CHARS = 100
"""Number of characters that are counted for each event in addition to its text."""


class EventLog:
    """The events of a run so far. The log joins the pieces of one text and truncates a command's
    live output. Beyond `max_chars`, the log drops the oldest turns, except for the answer and the
    number of dropped steps."""

    def __init__(self, max_chars: int = MAX_CHARS) -> None:
        self._max_chars = max_chars
        self._events: list[Event] = []
        self._pieces: list[str] = []
        """The pieces of the last event's text, while the text still grows."""
        self._growing_event: AnswerDelta | ReasoningDelta | ToolOutput | ClientCallDelta | None = (
            None
        )
        """The event that contains the first of `_pieces`; None if no text is growing."""
        self._choice_logs: dict[int, EventLog] = {}
        """The logs of further choices, by the choice's index."""
        self._live_chars = 0
        """Number of characters of the running command's output in the log."""
        self._chars = 0
        self._drop_above_chars = max_chars

    def add(self, event: Event) -> None:
        """Append an event."""
        match event:
            case ChoiceEvent():
                other = self._choice_logs.setdefault(event.index, EventLog(self._max_chars))
                other.add(event.event)
                return
            case ToolOutput():
                if self._live_chars > MAX_LIVE_CHARS:
                    return
                self._live_chars += len(event.text)
            case ToolCallStarted():
                self._live_chars = 0
        self._append(event)
        self._chars += _char_count(event)
        if self._chars > self._drop_above_chars:
            self._drop_oldest()

    def events(self) -> list[Event]:
        """Return the events in the log, in order. The events of further choices come last."""
        self._end_growing_event()
        others = (
            ChoiceEvent(index, event)
            for index, log in self._choice_logs.items()
            for event in log.events()
        )
        return [*self._events, *others]

    def _append(self, event: Event) -> None:
        match event:
            case AnswerDelta(_, None) | ReasoningDelta() | ToolOutput() | ClientCallDelta():
                if self._growing_event is None or not _is_same_text(self._growing_event, event):
                    self._end_growing_event()
                    self._growing_event = event
                self._pieces.append(event.text)
            case _:
                self._end_growing_event()
                self._events.append(event)

    def _end_growing_event(self) -> None:
        if self._growing_event is not None:
            is_one = len(self._pieces) == 1
            joined = (
                self._growing_event
                if is_one
                else replace(self._growing_event, text="".join(self._pieces))
            )
            self._events.append(joined)
            self._growing_event = None
            self._pieces = []

    def _drop_oldest(self) -> None:
        """Drop about the older half of the log, up to the start of a turn. Keep the answer and the
        number of dropped steps."""
        self._end_growing_event()
        turns = list(self._turn_positions())
        half = self._max_chars // 2
        latest = turns[-1][0] if turns else 0
        first = next((at for at, chars in turns if chars <= half), latest)
        dropped = self._events[:first]
        answer = [event for event in dropped if isinstance(event, AnswerDelta | AnswerRestarted)]
        steps = sum(map(_step_count, dropped))
        omitted = [StepsOmitted(steps)] if steps else []
        self._events = [*answer, *omitted, *self._events[first:]]
        self._chars = sum(map(_char_count, self._events))
        # The rest may be one long turn: the log drops events again only once its size has doubled.
        self._drop_above_chars = max(self._max_chars, 2 * self._chars)

    def _turn_positions(self) -> Iterator[tuple[int, int]]:
        """Yield, for each turn, the index of its first event and the number of characters from this
        event to the end of the log."""
        left = self._chars
        for at, event in enumerate(self._events):
            if isinstance(event, TurnStarted):
                yield at, left
            left -= _char_count(event)


def _is_same_text(first: Event, second: Event) -> bool:
    """Return True if both pieces belong to one text."""
    if isinstance(first, ToolOutput) and isinstance(second, ToolOutput):
        return (first.step, first.stream) == (second.step, second.stream)
    if isinstance(first, ClientCallDelta) and isinstance(second, ClientCallDelta):
        return first.index == second.index
    return type(first) is type(second)


def _step_count(event: Event) -> int:
    """Return the number of steps that an event stands for."""
    if isinstance(event, StepsOmitted):
        return event.steps
    return int(isinstance(event, ToolCallStarted))


def _char_count(event: Event) -> int:
    match event:
        case (
            AnswerDelta(text)
            | ReasoningDelta(text)
            | ToolOutput(text=text)
            | ClientCallDelta(text=text)
            | ToolCallFinished(observation=text)
        ):
            return OVERHEAD_CHARS + len(text)
        case ToolCallStarted(arguments=arguments):
            texts = (value for value in arguments.values() if isinstance(value, str))
            return OVERHEAD_CHARS + sum(map(len, texts))
    return OVERHEAD_CHARS


_EVENT_TYPES: Mapping[str, Any] = {
    **{kind.__name__: kind for kind in ALL_EVENTS},
    # The names of these events in runs that the last release stored.
    "OfChoice": ChoiceEvent,
    "RuleMet": RuleMatched,
    "Refused": ModelRefused,
}
_OLD_FIELDS = {
    "tally": "stats",
    "left_out": "skipped_files",
    "notices": "warnings",
    "parked": "suspended_run",
    "tool_calls": "client_calls",
}
"""The present name of each field of a result, by its name in the last release."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The stored form of a run. A run that has not ended is stored with only its status."""

    status: RunStatus
    events: Sequence[Event] = ()
    result: Result | None = None
    error: ProxyError | None = None
    is_summary: bool = False
    """True if events and texts were removed from the record."""

    def outcome(self) -> Result:
        """Return the result. Raises the error of the run, RunCancelledError if it was cancelled, or
        RunLostError if it was lost."""
        if self.result is not None:
            return self.result
        if self.status == "cancelled":
            raise RunCancelledError
        raise self.error or (RunLostError() if self.status == "lost" else internal_error())

    def summary(self) -> "RunRecord":
        """Return the record without the events and the answer; the usage and the error stay."""
        result = _without_text(self.result) if self.result else None
        return RunRecord(self.status, (), result, self.error, is_summary=True)

    def to_json(self) -> str:
        """Return the events, the result and the error as the JSON text that `from_json` reads. The
        status and `is_summary` are not included."""
        return json.dumps(
            {
                "events": [event_to_json(event) for event in self.events],
                "result": asdict(self.result) if self.result else None,
                "error": _error_to_json(self.error) if self.error else None,
            }
        )

    @classmethod
    def from_json(cls, status: RunStatus, text: str) -> "RunRecord":
        """Return the record that `to_json` wrote, with this status. An empty text gives a record
        with only the status. Fields and event types that this release does not know, because a
        newer server wrote them, are left out."""
        if not text:
            return cls(status)
        value = json.loads(text)
        return cls(
            status,
            [event for each in value["events"] if (event := event_from_json(each))],
            _result_from_json(value["result"]) if value["result"] else None,
            _error_from_json(value["error"]) if value["error"] else None,
        )


def _without_text(result: Result) -> Result:
    return Result(
        run_id=result.run_id,
        container_id=result.container_id,
        model=result.model,
        answer="",
        stop_reason=result.stop_reason,
        finish_reason=result.finish_reason,
        client_calls=(),
        usage=result.usage,
        segments=result.segments,
        stats=result.stats,
        artifacts=(),
        skipped_files=(),
        choice={},
        response={},
        route=result.route,
        steps=result.steps,
        others=[_without_text(other) for other in result.others],
    )


def event_to_json(event: Event) -> dict[str, Any]:
    """Return an event as the JSON value that `event_from_json` reads."""
    kind = {"event": type(event).__name__}
    if isinstance(event, ChoiceEvent):
        return {**kind, "index": event.index, "of": event_to_json(event.event)}
    return {**kind, **asdict(event)}


def event_from_json(value: Mapping[str, Any]) -> Event | None:
    """Return the event that `event_to_json` wrote, without its unknown fields. Return None if the
    type of the event is unknown."""
    kind = _EVENT_TYPES.get(value["event"])
    if kind is None:
        return None
    if kind is ChoiceEvent:
        event_of_choice = event_from_json(value["of"])
        return ChoiceEvent(value["index"], event_of_choice) if event_of_choice else None
    if kind is EgressDecided:
        return EgressDecided(_from_known_fields(Decision, value["decision"]))
    if kind is RunFinished:
        return RunFinished(StopReason(value["stop_reason"]), value["usage"])
    event: Event = _from_known_fields(kind, value)
    return event


def _from_known_fields(kind: Callable[..., T], value: Mapping[str, Any]) -> T:
    """Return an instance of a class, without the fields of `value` that the class does not know."""
    names = _parameters(kind)
    return kind(**{name: each for name, each in value.items() if name in names})


@cache
def _parameters(kind: Callable[..., object]) -> frozenset[str]:
    """Return the names of the parameters of a class."""
    return frozenset(signature(kind).parameters)


def _result_from_json(value: Mapping[str, Any]) -> Result:
    value = {_OLD_FIELDS.get(name, name): each for name, each in value.items()}
    return replace(
        _from_known_fields(Result, value),
        stop_reason=StopReason(value["stop_reason"]),
        stats=_from_known_fields(RunStats, value["stats"]),
        artifacts=[_from_known_fields(Artifact, each) for each in value["artifacts"]],
        skipped_files=[_from_known_fields(SkippedFile, each) for each in value["skipped_files"]],
        warnings=[_from_known_fields(RunWarning, each) for each in value["warnings"]],
        compactions=[_from_known_fields(Compaction, each) for each in value.get("compactions", ())],
        tool_trouble=tuple(value.get("tool_trouble", ())),
        others=[_result_from_json(each) for each in value["others"]],
    )


def _error_to_json(error: ProxyError) -> dict[str, Any]:
    return {
        **{name: getattr(error, name) for name in ("message", "type", "param", "code")},
        "status": error.status,
        "headers": error.headers,
        "beside": error.extra_fields,
    }


def _error_from_json(value: Mapping[str, Any]) -> ProxyError:
    return _from_known_fields(ProxyError, {**value, "extra_fields": value.get("beside")})
