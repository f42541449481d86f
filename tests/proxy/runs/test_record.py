"""Records of runs survive conversion to JSON and back."""

import json
from dataclasses import replace

import pytest

from policies.artifacts import SkippedFile
from policies.limits import StopReason
from proxy.agent.events import (
    AnswerDelta,
    ChoiceEvent,
    ClientCallDelta,
    ClientCallFinished,
    ClientCallStarted,
    EgressDecided,
    Event,
    FileProduced,
    ModelRefused,
    ReasoningDelta,
    RuleMatched,
    RunFinished,
    RunStarted,
    StepsOmitted,
    ToolCallFinished,
    ToolCallStarted,
    ToolOutput,
    TurnStarted,
)
from proxy.agent.result import Artifact, Compaction, Result, RunStats, RunWarning
from proxy.errors import BackendError, ProxyError, RunCancelledError, RunLostError
from proxy.runs.event_log import RunRecord
from proxy.store.records import RunStatus
from sandbox_runtime.egress.decision import Decision

STRANGE = "/testbed/output/\udcff"
EVENTS: list[Event] = [
    RunStarted("r1"),
    TurnStarted(1),
    StepsOmitted(3),
    ReasoningDelta("Well."),
    ToolCallStarted(1, "c1", "execute_bash", {"command": "ls", "timeout": 3}),
    ToolOutput(1, "stderr", "no\n"),
    EgressDecided(Decision("example.com", 443, "denied", "not allowed", 1, 2, 0.5)),
    RuleMatched("no-deletion", "deny", "command", "rm -r .", "it is mine"),
    ToolCallFinished(1, "c1", "execute_bash", "Exit code: 0", 0, 1, 0.25),
    ChoiceEvent(1, AnswerDelta("b", {"content": None})),
    ClientCallStarted(0, "call_r1_1", "lookup"),
    ClientCallDelta(0, "{}"),
    ClientCallFinished(0),
    AnswerDelta("a"),
    ModelRefused("No."),
    FileProduced("cfile_1", STRANGE, 3),
    RunFinished(StopReason.SUBMITTED, {"total_tokens": 3}),
]
RESULT = Result(
    run_id="r1",
    container_id="cntr_1",
    model="m",
    answer="a",
    stop_reason=StopReason.SUBMITTED,
    finish_reason="tool_calls",
    client_calls=[{"id": "call_r1_1", "type": "function", "function": {"name": "f"}}],
    usage={"total_tokens": 3},
    usages=[{"total_tokens": 3}],
    segments=2,
    compactions=[Compaction("stubs", "nearly full", 90, 50)],
    stats=RunStats(llm_calls=2, wall_ms=5),
    artifacts=[Artifact("cfile_1", "cntr_1", STRANGE, 3, "image/png", "ab", "http://x", "data:")],
    skipped_files=[SkippedFile("/testbed/output/large", 9, "too_large")],
    choice={"logprobs": None},
    response={"system_fingerprint": "fp"},
    origin="restored",
    refusal="No.",
    warnings=[RunWarning("invalid_json", "It is none.")],
    others=[],
    tool_trouble=("malformed_call", "runaway"),
)


def round_trip(record: RunRecord) -> RunRecord:
    return RunRecord.from_json(record.status, record.to_json())


def test_results_and_events_are_equal_after_serialization() -> None:
    record = RunRecord("completed", EVENTS, replace(RESULT, others=[RESULT]))
    assert round_trip(record) == record
    assert round_trip(record).outcome().stop_reason is StopReason.SUBMITTED


def test_events_that_the_last_release_stored_are_read() -> None:
    rule = RuleMatched("keys", "deny", "file", "/k.pem", "no keys")
    written = {"rule": "keys", "action": "deny", "over": "file", "subject": "/k.pem"}
    stored = {"event": "RuleMet", **written, "reason": "no keys"}
    refused = {"event": "Refused", "text": "No."}
    events = [stored, {"event": "OfChoice", "index": 1, "of": stored}, refused]
    record = RunRecord.from_json(
        "completed", json.dumps({"events": events, "result": None, "error": None})
    )
    assert record.events == [rule, ChoiceEvent(1, rule), ModelRefused("No.")]


def test_result_with_the_field_names_of_the_last_release_is_read() -> None:
    stored = json.loads(RunRecord("completed", [], RESULT).to_json())
    old_names = {
        "stats": "tally",
        "skipped_files": "left_out",
        "warnings": "notices",
        "suspended_run": "parked",
        "client_calls": "tool_calls",
    }
    old = {old_names.get(name, name): value for name, value in stored["result"].items()}
    record = RunRecord.from_json("completed", json.dumps({**stored, "result": old}))
    assert record.result == RESULT


def test_unknown_fields_of_a_newer_release_are_ignored() -> None:
    record = RunRecord("completed", EVENTS, RESULT)
    stored = json.loads(record.to_json())
    events, result = stored["events"], stored["result"]
    parts = [result["stats"], result["artifacts"][0], result["skipped_files"][0]]
    parts += [result["warnings"][0], result["compactions"][0]]
    parts += [event[name] for event in events for name in ("decision", "of") if name in event]
    for value in (*events, result, *parts):
        value["field_of_a_newer_release"] = [1]
    assert RunRecord.from_json("completed", json.dumps(stored)) == record


def test_events_of_unknown_types_are_skipped() -> None:
    stored = json.loads(RunRecord("completed", EVENTS, RESULT).to_json())
    unknown = {"event": "EventOfANewerRelease", "text": "x"}
    stored["events"].insert(1, unknown)
    stored["events"].append({"event": "ChoiceEvent", "index": 1, "of": unknown})
    assert RunRecord.from_json("completed", json.dumps(stored)) == RunRecord(
        "completed", EVENTS, RESULT
    )


def test_unknown_fields_of_an_error_are_ignored() -> None:
    stored = json.loads(RunRecord("failed", error=RunLostError()).to_json())
    stored["error"]["new_field"] = 1
    restored = RunRecord.from_json("failed", json.dumps(stored)).error
    assert restored is not None
    assert restored.body() == RunLostError().body()


def test_error_of_a_run_is_equal_after_serialization() -> None:
    error = BackendError("full", status=429, code="full", param="p", retry_after_s=2)
    with pytest.raises(ProxyError) as caught:
        round_trip(RunRecord("failed", error=error)).outcome()
    restored = caught.value
    assert (restored.status, restored.headers, restored.body()) == (
        429,
        error.headers,
        error.body(),
    )


@pytest.mark.parametrize(
    ("status", "expected"), [("cancelled", RunCancelledError), ("lost", RunLostError)]
)
def test_outcome_of_a_cancelled_or_lost_run_raises_the_matching_error(
    status: RunStatus, expected: type[ProxyError]
) -> None:
    with pytest.raises(expected):
        round_trip(RunRecord(status)).outcome()
    with pytest.raises(expected):
        RunRecord.from_json(status, "").outcome()


def test_outcome_of_a_failed_run_without_a_stored_error_is_an_internal_error() -> None:
    with pytest.raises(ProxyError) as caught:
        round_trip(RunRecord("failed")).outcome()
    assert caught.value.code == "internal_error"
