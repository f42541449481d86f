"""What came of a run, whole, and as JSON carries it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

from policies.artifacts import LeftOut
from policies.limits import StopReason
from proxy.agent.events import EgressDecided, Event, OfChoice, RunFinished
from proxy.agent.result import Artifact, Compaction, Notice, Result, Tally
from proxy.errors import ProxyError, RunCancelledError, RunLostError, internal_error
from proxy.store.records import RunStatus
from sandbox_runtime.egress.decision import Decision

_EVENTS: Mapping[str, Any] = {kind.__name__: kind for kind in get_args(Event)}


@dataclass(frozen=True, slots=True)
class Record:
    """A run that has ended; or, with neither result nor error, one of which no more is known."""

    status: RunStatus
    events: Sequence[Event] = ()
    result: Result | None = None
    error: ProxyError | None = None
    is_summary: bool = False
    """Whether no more is known than how it ended and what it has cost."""

    def outcome(self) -> Result:
        """The result. Raises what the run failed with, RunCancelledError, RunLostError."""
        if self.result is not None:
            return self.result
        if self.status == "cancelled":
            raise RunCancelledError
        raise self.error or (RunLostError() if self.status == "lost" else internal_error())

    def summary(self) -> "Record":
        """How the run ended and what it has cost, without anything that was said in it."""
        result = _without_text(self.result) if self.result else None
        return Record(self.status, (), result, self.error, is_summary=True)

    def to_json(self) -> str:
        """What `from_json` reads."""
        return json.dumps(
            {
                "events": [_event_to_json(event) for event in self.events],
                "result": asdict(self.result) if self.result else None,
                "error": _error_to_json(self.error) if self.error else None,
            }
        )

    @classmethod
    def from_json(cls, status: RunStatus, text: str) -> "Record":
        """What `to_json` wrote; of a run without, its status alone."""
        if not text:
            return cls(status)
        value = json.loads(text)
        return cls(
            status,
            [_event(each) for each in value["events"]],
            _result(value["result"]) if value["result"] else None,
            _error(value["error"]) if value["error"] else None,
        )


def _without_text(result: Result) -> Result:
    return Result(
        run_id=result.run_id,
        container_id=result.container_id,
        model=result.model,
        answer="",
        stop_reason=result.stop_reason,
        finish_reason=result.finish_reason,
        tool_calls=(),
        usage=result.usage,
        segments=result.segments,
        tally=result.tally,
        artifacts=(),
        left_out=(),
        choice={},
        response={},
        route=result.route,
        steps=result.steps,
        others=[_without_text(other) for other in result.others],
    )


def _event_to_json(event: Event) -> dict[str, Any]:
    kind = {"event": type(event).__name__}
    if isinstance(event, OfChoice):
        return {**kind, "index": event.index, "of": _event_to_json(event.event)}
    return {**kind, **asdict(event)}


def _event(value: Mapping[str, Any]) -> Event:
    fields = {name: each for name, each in value.items() if name != "event"}
    kind = _EVENTS[value["event"]]
    if kind is OfChoice:
        return OfChoice(value["index"], _event(value["of"]))
    if kind is EgressDecided:
        return EgressDecided(Decision(**value["decision"]))
    if kind is RunFinished:
        return RunFinished(StopReason(value["stop_reason"]), value["usage"])
    event: Event = kind(**fields)
    return event


def _result(value: Mapping[str, Any]) -> Result:
    return replace(
        Result(**value),
        stop_reason=StopReason(value["stop_reason"]),
        tally=Tally(**value["tally"]),
        artifacts=[Artifact(**each) for each in value["artifacts"]],
        left_out=[LeftOut(**each) for each in value["left_out"]],
        notices=[Notice(**each) for each in value["notices"]],
        compactions=[Compaction(**each) for each in value.get("compactions", ())],
        tool_trouble=tuple(value.get("tool_trouble", ())),
        others=[_result(each) for each in value["others"]],
    )


def _error_to_json(error: ProxyError) -> dict[str, Any]:
    return {
        **{name: getattr(error, name) for name in ("message", "type", "param", "code")},
        "status": error.status,
        "headers": error.headers,
        "beside": error.beside,
    }


def _error(value: Mapping[str, Any]) -> ProxyError:
    fields = {name: each for name, each in value.items() if name != "message"}
    return ProxyError(value["message"], **fields)
