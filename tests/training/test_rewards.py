"""Rewards on labelled answers, the guards, and `sandbox-train reward`."""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluation.graders import MAX_ANSWER_CHARS
from tests.training.labelled_rewards import (
    HARDCODED,
    NUMBER,
    ONE_CHOICE,
    OPEN,
    SEVERAL_CHOICES,
    SOURCED,
)
from tests.training.made_rows import made_row
from tests.training.made_sources import build
from training.__main__ import main
from training.hardcoded import is_hardcoded
from training.rewards import Attempt, Reward, reward, score
from training.rows import TaskError

FUNCTIONS = "tests.training.reward_functions"


def attempt(answer: str, **fields: Any) -> Attempt:
    return Attempt(id="made/1", answer=answer, **{"submitted": True, **fields})


@pytest.mark.parametrize(("gold", "answer", "expected"), ONE_CHOICE)
def test_answer_to_a_single_choice_question_is_scored_by_its_letter(
    gold: str, answer: str, expected: float
) -> None:
    assert score(made_row(gold, "mcq1"), answer) == (expected, "choice")


@pytest.mark.parametrize(("gold", "answer", "expected"), SEVERAL_CHOICES)
def test_answer_to_a_multiple_choice_question_is_scored_by_its_letters(
    gold: str, answer: str, expected: float
) -> None:
    assert score(made_row(gold, "mcqN"), answer) == (pytest.approx(expected), "choices")


@pytest.mark.parametrize(("gold", "answer", "expected", "reason"), OPEN)
def test_open_answer_is_scored_by_math_equality_or_rouge(
    gold: str, answer: str, expected: float, reason: str
) -> None:
    pytest.importorskip("math_verify", reason="the extra `training` is not installed")
    pytest.importorskip("rouge_score", reason="the extra `training` is not installed")
    found = score(made_row(gold, "span"), answer)
    assert found == (pytest.approx(expected, abs=1e-4), reason)


@pytest.mark.parametrize(("gold", "answer", "expected"), NUMBER)
def test_answer_that_is_a_number_is_scored_by_its_value(
    gold: str, answer: str, expected: float
) -> None:
    pytest.importorskip("math_verify", reason="the extra `training` is not installed")
    assert score(made_row(gold, "number"), answer) == (expected, "math")


def test_reward_without_the_package_of_rouge_is_an_error() -> None:
    if importlib.util.find_spec("rouge_score"):
        pytest.skip("the extra `training` is installed")
    with pytest.raises(TaskError, match="rouge_score is not installed: install the extra `tra"):
        reward(made_row("France", "span"), attempt("in France"))


LETTERS = st.sets(st.sampled_from("ABCDEFGH"), min_size=1)


@given(LETTERS, LETTERS)
def test_reward_of_choices_is_the_f1_of_precision_and_recall(
    right: set[str], given: set[str]
) -> None:
    found, _ = score(made_row(",".join(sorted(right)), "mcqN"), ", ".join(sorted(given)))
    precision, recall = (len(right & given) / len(each) for each in (given, right))
    expected = 2 * precision * recall / (precision + recall) if right & given else 0
    assert found == pytest.approx(expected)
    assert (found == 1) == (right == given)


# Guards


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (attempt("B"), Reward(1.0, "choice")),
        (attempt(""), Reward(0.0, "empty")),
        (attempt(" \n\t"), Reward(0.0, "empty")),
        (attempt("B" * (MAX_ANSWER_CHARS + 1)), Reward(0.0, "oversized")),
        (attempt("B", submitted=False), Reward(0.0, "not submitted")),
        (attempt("B", sandbox_lost=True), Reward(None, "sandbox lost")),
        (attempt("", sandbox_lost=True), Reward(None, "sandbox lost")),
        (attempt("B", sandbox_lost=True, submitted=False), Reward(None, "sandbox lost")),
        (attempt("B", commands=("echo B > answer.txt",)), Reward(1.0, "choice", True)),
        (attempt("B", commands=("grep B *", "echo B")), Reward(1.0, "choice")),
        (attempt("", commands=("echo B > answer.txt",)), Reward(0.0, "empty", True)),
    ],
    ids=lambda each: each.reason if isinstance(each, Reward) else "",
)
def test_unusable_attempt_gets_reward_0_or_none_and_a_hardcoded_one_is_flagged(
    made: Attempt, expected: Reward
) -> None:
    assert reward(made_row("B", "mcq1"), made) == expected


def test_answer_without_submit_is_rewarded_in_an_evaluation() -> None:
    made = attempt("B", submitted=False)
    assert reward(made_row("B", "mcq1"), made, needs_submit=False) == Reward(1.0, "choice")


@pytest.mark.parametrize("commands", HARDCODED)
def test_commands_that_print_a_constant_answer_are_flagged_as_hardcoded(
    commands: Sequence[str],
) -> None:
    assert is_hardcoded(commands)


@pytest.mark.parametrize("commands", SOURCED)
def test_commands_that_read_files_or_compute_or_write_no_answer_are_not_flagged_as_hardcoded(
    commands: Sequence[str],
) -> None:
    assert not is_hardcoded(commands)


@given(st.lists(st.text(max_size=200), max_size=5))
def test_answer_after_commands_that_end_with_reading_a_document_is_never_hardcoded(
    commands: list[str],
) -> None:
    assert is_hardcoded([*commands, "grep x documents/a.txt"]) is False


def test_answer_that_the_grader_cannot_grade_in_time_is_wrong_and_not_unscorable() -> None:
    pytest.importorskip("math_verify", reason="the extra `training` is not installed")
    found = reward(made_row("588", "number"), attempt("9^(9^9)"), timeout_s=10)
    assert found == Reward(0.0, "grader failure", detail="no result within 10 s")


def test_attempt_is_unscorable_if_the_grader_cannot_evaluate_the_ground_truth_in_time() -> None:
    pytest.importorskip("math_verify", reason="the extra `training` is not installed")
    nested = "(" * 3000 + "1" + ")" * 3000
    found = reward(made_row(nested, "span"), attempt("588"), timeout_s=5)
    assert found == Reward(None, "grader failure", detail="no result within 5 s")


# Functions of one's own


def own(name: str, answer: str = "Edda", **options: Any) -> Reward:
    function = f"{FUNCTIONS}:{name}"
    return reward(made_row("Omar", "span"), attempt(answer), function=function, **options)


def test_custom_reward_function_gets_the_row_and_the_answer() -> None:
    assert own("same_length") == Reward(1.0, "function")
    assert own("same_length", "Rollo") == Reward(0.5, "function")


@pytest.mark.parametrize(
    ("name", "detail"),
    [
        ("too_large", "ValueError: tests.training.reward_functions:too_large returned 1.5, not a"),
        ("not_a_number", "returned nan, not a number from 0 to 1"),
        ("a_text", "returned '1', not a number from 0 to 1"),
        ("failing", "KeyError: 'Edda'"),
        ("killed", "the process ended with exit code -6"),
    ],
)
def test_custom_reward_function_that_fails_gives_no_reward(name: str, detail: str) -> None:
    found = own(name)
    assert (found.value, found.reason) == (None, "grader failure")
    assert detail in found.detail


def test_custom_reward_function_has_a_timeout() -> None:
    assert own("endless", timeout_s=0.5) == Reward(
        None, "grader failure", detail="no result within 0.5 s"
    )


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("no_such_module:f", "the package no_such_module is not installed"),
        (f"{FUNCTIONS}:nothing", f"{FUNCTIONS} has no function nothing"),
        (f"{FUNCTIONS}:CONSTANT", f"{FUNCTIONS} has no function CONSTANT"),
        ("no colon", "no colon: not of the form package.module:function"),
        ("a:b:c", "a:b:c: not of the form package.module:function"),
    ],
)
def test_custom_reward_function_that_does_not_exist_is_an_error(
    function: str, message: str
) -> None:
    with pytest.raises(TaskError) as caught:
        reward(made_row("B", "mcq1"), attempt("B"), function=function)
    assert str(caught.value) == message


# The command


def test_reward_command_prints_a_reward_for_each_attempt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = build("20", "synthetic", tmp_path / "tasks")
    one = next(row for row in tasks.all_rows if row.qa_type == "mcq1")
    several = next(row for row in tasks.all_rows if row.qa_type == "mcqN")
    lines = [
        {"id": one.id, "answer": one.ground_truth, "submitted": True, "commands": ["echo A"]},
        {"id": one.id, "answer": one.ground_truth},
        {"id": several.id, "answer": several.ground_truth, "submitted": True},
        {"id": several.id, "sandbox_lost": True},
    ]
    path = tmp_path / "attempts.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), "utf-8")
    assert main(["reward", str(tmp_path / "tasks"), str(path)]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(each["id"], each["reward"], each["reason"]) for each in printed] == [
        (one.id, 1.0, "choice"),
        (one.id, 0.0, "not submitted"),
        (several.id, 1.0, "choices"),
        (several.id, None, "sandbox lost"),
    ]
    assert [each["hardcoded"] for each in printed] == [True, False, False, False]
    function = f"{FUNCTIONS}:same_length"
    options = ["--without-submit", "--function", function]
    assert main(["reward", str(tmp_path / "tasks"), str(path), *options]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["reward"] for each in printed] == [1.0, 1.0, 1.0, None]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ({"answer": "x"}, "attempts.jsonl:1: id: Field required"),
        ({"id": "a", "answer": "x", "score": 1}, "score: Extra inputs are not permitted"),
        ({"id": "a", "answer": "x"}, "attempts.jsonl:1: id: a is no task of "),
    ],
)
def test_error_names_a_malformed_attempt_in_one_line(
    line: dict[str, Any], fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build("2", "synthetic", tmp_path / "tasks")
    capsys.readouterr()
    (tmp_path / "attempts.jsonl").write_text(json.dumps(line), "utf-8")
    assert main(["reward", str(tmp_path / "tasks"), str(tmp_path / "attempts.jsonl")]) == 1
    message = capsys.readouterr().err
    assert (message.count("\n"), fault in message) == (1, True), message
