"""`sandbox-train report`: trajectories before and after training beside each other."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from training.__main__ import main


def trajectory(
    task: str,
    reward: float | None,
    *,
    turns: int = 2,
    outcome: str = "submitted",
    segments: int = 0,
    **changes: Any,
) -> dict[str, Any]:
    """Return the parts of a native trajectory that the report reads."""
    stats = {
        "turns": turns,
        "tool_calls": turns - 1,
        "completion_tokens": 40,
        "env_tokens": 10 * (turns - 1),
        "capability_turns": {"computation": turns - 1, "file_management": 0},
    }
    reply = {"role": "assistant", "content": "Wait, let me check.\n- one\n- two"}
    return {
        "object": "run.trajectory",
        "id": f"run-{task}",
        "task_id": task,
        "outcome": outcome,
        "result": {"stats": stats},
        "rewards": [] if reward is None else [{"value": 0.0}, {"value": reward}],
        "messages": [reply],
        "model_calls": [{"reply": 0}, {"reply": None}],
        "tool_calls": [{"exit_code": 1}, {"exit_code": 0}, {}],
        "token_segments": [{}] * segments,
        **changes,
    }


def write(path: Path, *trajectories: dict[str, Any]) -> str:
    path.write_text("".join(f"{json.dumps(each)}\n" for each in trajectories), encoding="utf-8")
    return str(path)


def cells(output: str) -> dict[str, list[str]]:
    """Return the cells of each line of the table, by its name."""
    rows = [line.strip("| ").split(" | ") for line in output.splitlines()[2:]]
    return {name: [cell.strip(" |") for cell in rest] for name, *rest in rows}


def test_report_compares_rewards_and_turns_and_capabilities(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = write(
        tmp_path / "before.jsonl",
        trajectory("a", 0.0, turns=1, outcome="answered", segments=1),
        trajectory("a", 1.0, segments=2),
        trajectory("b", 0.0, turns=7, outcome="max_turns", segments=1),
        trajectory("c", 0.0, outcome="infra_error"),
        trajectory("d", None),
    )
    after = write(tmp_path / "after.jsonl", trajectory("a", 1.0), trajectory("b", 0.5))
    assert main(["report", before, after]) == 0
    table = cells(capsys.readouterr().out)
    assert table["trajectories"][:2] == ["5", "2"]
    assert table["infrastructure errors, left out"][:2] == ["1", "0"]
    # The mean of the tasks a (0.5) and b (0), not of the runs.
    assert table["mean reward (95 % interval)"] == [
        "0.250 (0.000 to 0.500)",
        "0.750 (0.500 to 1.000)",
        "+0.500",
    ]
    # One of three scored runs and one of two; the run without a reward does not count.
    assert table["accuracy (runs with reward 1)"] == ["33.3%", "50.0%", "+16.7 points"]
    assert table["runs with tokens that are split"] == ["33.3%", "none"]
    assert table["runs that submitted"] == ["50.0%", "100.0%", "+50.0 points"]
    assert table["runs that ended at a limit"] == ["25.0%", "0.0%", "-25.0 points"]
    assert table["turns with computation"] == ["66.7%", "50.0%", "-16.7 points"]
    assert table["turns, of a run"] == ["3.00", "2.00", "-1.00"]
    assert table["failed commands, of a run"][:2] == ["1.00", "1.00"]
    assert table["words of checking, of a run"][:2] == ["2.00", "2.00"]
    assert table["marks of structure, of a run"][:2] == ["2.00", "2.00"]


def test_chart_has_separate_scales_for_shares_turns_and_tokens(tmp_path: Path) -> None:
    before = write(tmp_path / "before.jsonl", trajectory("a", 0.5, turns=7))
    after = write(tmp_path / "after.jsonl", trajectory("a", 1.0))
    chart = tmp_path / "chart.svg"
    assert main(["report", before, after, "--chart", str(chart)]) == 0
    svg = "{http://www.w3.org/2000/svg}"
    picture = ElementTree.fromstring(chart.read_text(encoding="utf-8"))
    texts = [each.text for each in picture.findall(f"{svg}text")]
    ticks = [each.text for each in picture.findall(f"{svg}text[@class='tick']")]
    bars = [each.attrib["d"] for each in picture.findall(f"{svg}path")]
    assert ticks == [
        *("0", "0.25", "0.5", "0.75", "1"),
        *("0", "2", "4", "6", "8"),
        *("0", "20", "40", "60", "80"),
    ]
    # Nine pairs without the split rate, as no run has tokens; three of turns and two of tokens.
    assert len(bars) == 2 * (8 + 3 + 2)
    for title in ("Rewards and shares", "Turns of a run", "Tokens of a run"):
        assert title in texts
    turns = texts.index("turns")
    assert texts[turns : turns + 3] == ["turns", "7.00", "2.00"]
    tokens = texts.index("tokens of tool output")
    assert texts[tokens : tokens + 3] == ["tokens of tool output", "60.00", "10.00"]
    # 7 of 8 turns, 60 of 80 tokens, and a reward of 1 at the end of an axis of 340.
    assert [bars[number].split("v")[0].partition("h")[2] for number in (1, 16, 24)] == [
        "340.0",
        "297.5",
        "255.0",
    ]


def test_report_of_empty_files_shows_none_instead_of_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = write(tmp_path / "empty.jsonl")
    assert main(["report", empty, empty]) == 0
    table = cells(capsys.readouterr().out)
    assert table["mean reward (95 % interval)"][:2] == ["none", "none"]
    assert table["turns, of a run"][:2] == ["none", "none"]


@pytest.mark.parametrize("line", ["{", "[]", "{}", '{"outcome": "answered", "result": {}}', "null"])
def test_error_names_a_line_that_is_no_trajectory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    good = write(tmp_path / "good.jsonl", trajectory("a", 1.0))
    bad = tmp_path / "bad.jsonl"
    bad.write_text(f"{json.dumps(trajectory('a', 1.0))}\n{line}\n")
    assert main(["report", good, str(bad)]) == 1
    assert f"{bad}:2: not a trajectory" in capsys.readouterr().err


def test_report_of_a_missing_file_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path / "none"), str(tmp_path / "none")]) == 1
    assert "No such file" in capsys.readouterr().err
