"""The sections of the report that the scripted model does not cover, against numbers by hand."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from evaluation.results import Failure
from evaluation.samples import Draft, write_suite
from tests.evaluation.evaluation_process import report_of, rows, sample, sums
from tests.evaluation.made_results import STARTED, USE, plain, trajectory, turn, with_sandbox, write

pytest.importorskip("rich", reason="the extra `evaluation` is not installed")


async def test_report_splits_trajectory_tokens_by_prompt_and_model_and_environment(
    tmp_path: Path,
) -> None:
    # 150 tokens: 30 of the model, 20 of the environment, and the first prompt.
    records = [(plain("sum/0", "0"), None), (with_sandbox("sum/0", "0"), None)]
    write(tmp_path / "output", sums(tmp_path / "data"), records)
    (row, total) = rows(await report_of(tmp_path / "output"), "### Tokens")
    shares = ["66.7%", "20.0%", "13.3%"]
    assert row == ["sums", "100", "30", "100", "30", "150", *shares, "1.15", "1", "0"]
    assert total == ["all domains", *row[1:]]


async def test_token_ratio_covers_only_problems_and_repeats_answered_in_both_modes(
    tmp_path: Path,
) -> None:
    large = USE.model_copy(update={"trajectory_tokens": 13_000})
    failed = [Failure(code="context_length_exceeded", message="m")]
    overflow = {"status": "context_overflow", "failures": failed}
    records = [
        (plain("sum/0", "0"), None),
        (with_sandbox("sum/0", "0"), None),
        (plain("sum/0", "", repeat=1, **overflow), None),
        (with_sandbox("sum/0", "0", repeat=1, sandbox=large), None),
        (plain("sum/1", "", **overflow), None),
        (with_sandbox("sum/1", "2", sandbox=large), None),
        (with_sandbox("sum/2", "4", sandbox=large), None),  # its plain request was not sent yet
    ]
    write(tmp_path / "output", sums(tmp_path / "data", 3), records)
    report = await report_of(tmp_path / "output")
    row = rows(report, "### Tokens")[0]
    assert (row[5], row[9:]) == ("9,788", ["1.15", "1", "2"])


async def test_p_value_is_marked_as_estimated_if_the_exact_test_is_too_large(
    tmp_path: Path,
) -> None:
    count = 24  # the problem number n has n + 1 repeats, one of which is right with a sandbox
    suite = sums(tmp_path / "data", count)
    records = [(plain(each.id, "Answer: -1"), None) for each in suite.samples]
    for number, each in enumerate(suite.samples):
        for repeat in range(number + 1):
            answer = f"Answer: {each.ground_truth if repeat == 0 else -1}"
            records.append((with_sandbox(each.id, answer, repeat=repeat), None))
    write(tmp_path / "output", suite, records)
    report = await report_of(tmp_path / "output")
    assert [row[5] for row in rows(report, "## made-model")] == ["≈ 0.0001", "≈ 0.0001"]
    assert "A p with ≈ is estimated from 9,999 random sign flips." in report


async def test_report_has_the_turns_tools_and_capabilities_of_two_runs(tmp_path: Path) -> None:
    long = USE.model_copy(
        update={"turns": 6, "tool_calls": 5, "failed_tool_calls": 3, "stop_reason": "max_turns"}
    )
    first = with_sandbox("sum/0", "0")
    second = with_sandbox("sum/1", "2", sandbox=long)
    records = [
        (first, trajectory(first, "cat a | python3 -c 'range(1)'")),
        (second, trajectory(second, "pip install x", *["echo"] * 4)),
    ]
    write(tmp_path / "output", sums(tmp_path / "data", 2), records)
    report = await report_of(tmp_path / "output")
    tools = ["4.0", "2", "6", "2.0", "6", "3", "50.0%"]
    assert rows(report, "### Turns and tools")[0] == ["sums", *tools]
    # 8 turns, of which each run used one for computation, and the first one submitted in one.
    proxy = ["25.0%", "0.0%", "0.0%", "62.5%"]
    patterns = ["12.5%", "12.5%", "12.5%", "62.5%"]
    assert rows(report, "### Capabilities")[0] == ["sums", *proxy, *patterns]


CALLS = ("cat a", "cat b", "python3 -c 'print(sum(range(9)))'", "cat c", "echo", "cat d")
"""The calls of a run with two in the first turn, two in the second, one in the third, and one in
the fourth, which also submits."""
FOUR_TURNS = USE.model_copy(
    update={
        "turns": 4,
        "tool_calls": 6,
        "capability_turns": {"computation": 1, "external_resources": 0, "file_management": 3},
    }
)
FILES, BOTH = ("file_management",), ("computation", "file_management")
TURNS = [
    turn(1, 1, 2, capabilities=FILES),
    turn(2, 3, 4, capabilities=BOTH),
    turn(3, 5),
    turn(4, 6, capabilities=FILES),
]
PROXY_SHARES = ["25.0%", "0.0%", "75.0%"]


async def test_capability_shares_are_exact_if_the_turns_of_all_runs_were_captured(
    tmp_path: Path,
) -> None:
    result = with_sandbox("sum/0", "0", sandbox=FOUR_TURNS)
    records = [(result, trajectory(result, *CALLS, turns=TURNS))]
    write(tmp_path / "output", sums(tmp_path / "data"), records)
    report = await report_of(tmp_path / "output")
    row = rows(report, "### Capabilities")[0]
    assert row[1:] == [*PROXY_SHARES, "25.0%", "25.0%", "0.0%", "75.0%", "25.0%"]
    assert "The turns of all runs were captured, so that the shares are exact." in report
    assert "lower bounds" not in report


@pytest.mark.parametrize(
    "changes",
    [
        {"turns": None},
        {"turns": TURNS[:3], "turns_left_out": 1},
        {"turns": TURNS[:3]},
        {"turns": TURNS, "steps_left_out": 1},
        {"turns": [each.model_copy(update={"capabilities": None}) for each in TURNS]},
    ],
    ids=["not captured", "turns left out", "a turn missing", "steps left out", "not classified"],
)
async def test_capability_shares_are_estimated_from_calls_if_turns_were_not_captured(
    changes: Any, tmp_path: Path
) -> None:
    result = with_sandbox("sum/0", "0", sandbox=FOUR_TURNS)
    records = [(result, trajectory(result, *CALLS, **changes))]
    write(tmp_path / "output", sums(tmp_path / "data"), records)
    report = await report_of(tmp_path / "output")
    row = rows(report, "### Capabilities")[0]
    assert row[1:] == [*PROXY_SHARES, "0.0%", "25.0%", "0.0%", "100.0%", "0.0%"]
    assert "The turns of no run were captured" in report
    assert "the idle shares are lower bounds" in report


async def test_report_says_how_many_runs_have_captured_turns(tmp_path: Path) -> None:
    first = with_sandbox("sum/0", "0", sandbox=FOUR_TURNS)
    second = with_sandbox("sum/1", "2", sandbox=FOUR_TURNS)
    records = [
        (first, trajectory(first, *CALLS, turns=TURNS)),
        (second, trajectory(second, *CALLS)),
    ]
    write(tmp_path / "output", sums(tmp_path / "data", 2), records)
    report = await report_of(tmp_path / "output")
    row = rows(report, "### Capabilities")[0]
    assert row[1:] == [*PROXY_SHARES, "12.5%", "25.0%", "0.0%", "87.5%", "12.5%"]
    assert "The turns of 1 of 2 runs were captured" in report


async def test_report_counts_no_patterns_for_runs_without_trajectories(tmp_path: Path) -> None:
    write(tmp_path / "output", sums(tmp_path / "data"), [(with_sandbox("sum/0", "0"), None)])
    report = await report_of(tmp_path / "output")
    assert rows(report, "### Capabilities")[0][5:] == ["-"] * 4
    assert rows(report, "### Reasoning patterns")[0] == ["sums", "sandbox", "0", "0.00", "0.00"]


async def test_reasoning_patterns_are_averaged_over_the_answers(tmp_path: Path) -> None:
    first, second = plain("sum/0", "I checked it.\n\n- one\n- two"), plain("sum/1", "2")
    records = [(first, trajectory(first)), (second, trajectory(second))]
    write(tmp_path / "output", sums(tmp_path / "data", 2), records)
    report = await report_of(tmp_path / "output")
    assert rows(report, "### Reasoning patterns")[0] == ["sums", "plain", "2", "0.50", "1.00"]


async def test_report_has_the_speed_of_each_domain_and_mode(tmp_path: Path) -> None:
    drafts = [Draft(sample(0)), Draft(sample(1, domain="others")), Draft(sample(2))]
    data = tmp_path / "data" / "synthetic"
    failure = Failure(code="timeout", message="m")
    suite = write_suite(data, "synthetic", drafts, licence="none", source="a test")
    records = [
        (plain("sum/0", "0", latency_s=1.0), None),
        (with_sandbox("sum/0", "0", latency_s=4.0), None),
        (plain("sum/1", "2", latency_s=5.0), None),
        (with_sandbox("sum/1", "2", latency_s=8.0), None),
        (plain("sum/2", "4", latency_s=119.0), None),
        (with_sandbox("sum/2", "", status="infra_error", failures=[failure], sandbox=None), None),
    ]
    write(tmp_path / "output", suite, records)
    report = await report_of(tmp_path / "output")
    assert rows(report, "## Speed") == [  # with 4 requests at a time
        ["made-model", "others", "plain", "1", "48.0", "-", "5.00", "5.00", "-", "-", "-"],
        ["made-model", "others", "sandbox", "1", "30.0", "-", "8.00", "8.00", "0.62", "1", "0"],
        ["made-model", "sums", "plain", "2", "4.0", "-", "1.00", "119.00", "-", "-", "-"],
        ["made-model", "sums", "sandbox", "1", "60.0", "-", "4.00", "4.00", "0.25", "1", "1"],
        ["made-model", "all domains", "plain", "3", "5.8", "1.5", "5.00", "119.00", "-", "-", "-"],
        [
            *("made-model", "all domains", "sandbox", "2", "40.0", "15.0", "4.00", "8.00"),
            *("0.50", "2", "1"),
        ],
    ]


def at(second: float, latency_s: float, **changes: Any) -> dict[str, Any]:
    """Return the fields of a result whose request began `second` seconds after the first one."""
    started = datetime.fromisoformat(STARTED) + timedelta(seconds=second)
    return {"started": started.isoformat(), "latency_s": latency_s, **changes}


RETRIED = {"first_started": at(10, 0)["started"]}
FAILED = {"status": "infra_error", "failures": [Failure(code="timeout", message="m")]}


@pytest.mark.parametrize(
    ("requests", "per_minute"),
    [
        ([at(0, 10), at(1, 4), at(9, 21)], "6.0"),  # 3 answers in 30 s
        ([at(0, 10), at(1, 4, **FAILED), at(9, 21)], "4.0"),
        ([at(0, 10), at(12, 18), at(12, 7)], "6.0"),  # for 2 of 30 s no request was running
        ([at(0, 10), at(14, 16), at(14, 7)], "-"),  # for 4 of 30 s
        ([at(0, 10), at(14, 16, **RETRIED), at(14, 7)], "6.0"),
        ([at(0, 10), at(1, 4, concurrency=8), at(9, 21)], "-"),
        ([at(0, 0), at(0, 0), at(0, 0)], "-"),
    ],
    ids=[
        *("one part", "a failure", "a short pause", "a pause", "a retry", "two concurrencies"),
        "no duration",
    ],
)
async def test_measured_speed_covers_the_time_from_the_first_start_to_the_last_end_in_a_mode(
    requests: Sequence[Any], per_minute: str, tmp_path: Path
) -> None:
    records = [(plain(f"sum/{number}", "0", **each), None) for number, each in enumerate(requests)]
    # The other mode, much later, is no part of it.
    records += [(with_sandbox("sum/0", "0", **at(5000, 60)), None)]
    write(tmp_path / "output", sums(tmp_path / "data", 3), records)
    found = rows(await report_of(tmp_path / "output"), "## Speed")
    measured = {(row[1], row[2]): row[5] for row in found}
    assert measured == {
        ("sums", "plain"): "-",
        ("sums", "sandbox"): "-",
        ("all domains", "plain"): per_minute,
        ("all domains", "sandbox"): "1.0",
    }


async def test_markdown_report_escapes_html_and_pipes_of_hostile_text(tmp_path: Path) -> None:
    failure = Failure(code="<script>alert(1)</script>|x", message="m")
    result = plain("sum/0", "", status="infra_error", failures=[failure])
    write(tmp_path / "output", sums(tmp_path / "data"), [(result, None)])
    report = await report_of(tmp_path / "output")
    assert r"| sums | plain | &lt;script>alert(1)&lt;/script>\|x | 1 | 0 |" in report
    assert "<script" not in report


async def test_markdown_report_escapes_images_and_backslashed_pipes(
    tmp_path: Path,
) -> None:
    failure = Failure(code=r"![x](http://e/x.png) a\|b", message="m")
    result = plain("sum/0", "", status="infra_error", failures=[failure])
    write(tmp_path / "output", sums(tmp_path / "data"), [(result, None)])
    report = await report_of(tmp_path / "output")
    assert r"| sums | plain | ![x\](http://e/x.png) a\\\|b | 1 | 0 |" in report
