"""Evidence from runs on whether a model can use tools."""

from dataclasses import replace

import pytest

from policies.tool_support import FAILED_TOOLS_VERDICT_TTL_S, SUPPORTED
from proxy.agent.result import Result, RunStats, ToolTrouble
from proxy.models.tool_support import MAX_MODELS, ToolSupportSettings, ToolVerdicts
from tests.fakes.manual_clock import ManualClock
from tests.fakes.results import SUBMITTED

PROBE = ToolSupportSettings("probe")


def result_with_trouble(*trouble: ToolTrouble, **fields: RunStats) -> Result:
    return replace(SUBMITTED, tool_trouble=trouble, **fields)


def test_failed_tool_calls_withdraw_tools_from_the_key_and_model_for_an_hour() -> None:
    clock = ManualClock()
    verdicts = ToolVerdicts(PROBE, now=clock.time)
    verdicts.note_run("ours", result_with_trouble("runaway", "echo"))
    verdict = verdicts.verdict_for("ours", "m")
    assert verdict.reason == "tools_failed"
    assert "(echo, runaway)" in verdict.message
    assert (
        verdicts.verdict_for("theirs", "m") == verdicts.verdict_for("ours", "another") == SUPPORTED
    )
    clock.advance(FAILED_TOOLS_VERDICT_TTL_S)
    assert verdicts.verdict_for("ours", "m") == SUPPORTED


def test_failed_tool_calls_of_a_further_choice_withdraw_tools() -> None:
    verdicts = ToolVerdicts(PROBE)
    verdicts.note_run("ours", replace(SUBMITTED, others=[result_with_trouble("echo")]))
    assert verdicts.verdict_for("ours", "m").reason == "tools_failed"


@pytest.mark.parametrize(
    "result",
    [
        SUBMITTED,
        result_with_trouble("malformed_call", stats=RunStats(commands=2, peak_mem_bytes=4096)),
    ],
    ids=["no call at all", "one bad call among others"],
)
def test_run_with_mostly_valid_tool_calls_does_not_withdraw_tools(result: Result) -> None:
    verdicts = ToolVerdicts(PROBE)
    verdicts.note_run("ours", result)
    assert verdicts.verdict_for("ours", "m") == SUPPORTED


def test_failed_tool_calls_do_not_withdraw_tools_if_tool_support_is_always() -> None:
    verdicts = ToolVerdicts(ToolSupportSettings("always"))
    verdicts.note_run("ours", result_with_trouble("runaway"))
    assert verdicts.verdict_for("ours", "m") == SUPPORTED


def test_oldest_evidence_of_missing_tool_support_is_evicted_first() -> None:
    verdicts = ToolVerdicts(PROBE)
    for number in range(MAX_MODELS + 1):
        verdicts.note_run(f"key-{number}", result_with_trouble("runaway"))
    assert verdicts.verdict_for("key-0", "m") == SUPPORTED
    assert verdicts.verdict_for(f"key-{MAX_MODELS}", "m").reason == "tools_failed"
