"""The graders on labelled answers, and their processes."""

import os
import time
from pathlib import Path

import pytest

from evaluation.graders import (
    RIGHT,
    UNFORMATTED,
    WRONG,
    grade,
    grade_all,
)
from evaluation.isolation import GraderError, UngradableError, run_isolated
from evaluation.samples import Sample
from tests.evaluation.evaluation_process import answered, grades_of, rows, sample, sandbox_eval
from tests.evaluation.labelled_answers import (
    CHOICE,
    GYM,
    GYM_ENTRIES,
    JSONS,
    MATH,
    NUMBERS,
    SENTENCE,
    TEXTS,
    VERBATIM,
)

LABELS = {"right": RIGHT, "wrong": WRONG, "form": UNFORMATTED}
TABLES = {
    "number": NUMBERS,
    "text": TEXTS,
    "verbatim": VERBATIM,
    "json": JSONS,
    "math": MATH,
    "choice": CHOICE,
}


def problem(grader: str, ground_truth: str) -> Sample:
    return Sample(**sample(grader=grader, ground_truth=ground_truth))


@pytest.mark.parametrize("grader", TABLES)
def test_grader_gives_each_labelled_answer_the_grade_of_its_label(grader: str) -> None:
    if grader == "math":
        pytest.importorskip("math_verify", reason="the extra `evaluation` is not installed")
    cases = TABLES[grader]
    given = [(case, grade(problem(grader, case.truth), case.answer)) for case in cases]
    assert given == [(case, LABELS[case.label]) for case in cases]


def test_reasoning_gym_grader_agrees_with_the_labels() -> None:
    pytest.importorskip("reasoning_gym", reason="the extra `evaluation` is not installed")
    work = [
        (
            Sample(
                **sample(kind=case.family, grader="reasoning-gym", entry=GYM_ENTRIES[case.family])
            ),
            case.answer,
        )
        for case in GYM
    ]
    assert list(zip(GYM, grade_all(work), strict=True)) == [
        (case, LABELS[case.label]) for case in GYM
    ]


@pytest.mark.parametrize("grader", [*TABLES, "reasoning-gym"])
def test_each_grader_has_at_least_thirty_labelled_test_answers(grader: str) -> None:
    labels = [case.label for case in (GYM if grader == "reasoning-gym" else TABLES[grader])]
    assert len(labels) >= 30
    assert set(labels) == set(LABELS)


def test_grades_have_the_order_of_their_answers() -> None:
    work = [(problem("number", str(number)), "3") for number in range(6)]
    assert grade_all(work) == [WRONG, WRONG, WRONG, RIGHT, WRONG, WRONG]


def test_grading_beyond_its_timeout_raises_a_grader_error() -> None:
    with pytest.raises(GraderError, match=r"no result within 0\.1 s"):
        run_isolated(time.sleep, 60, timeout_s=0.1)


def test_grading_whose_process_exits_early_raises_a_grader_error() -> None:
    with pytest.raises(GraderError, match="the process ended with exit code 7"):
        run_isolated(os._exit, 7)


def test_exception_while_grading_becomes_a_grader_error() -> None:
    with pytest.raises(GraderError, match=r"ValueError: invalid literal for int\(\)"):
        run_isolated(int, "x")


def test_sample_unknown_to_its_grader_is_ungradable_and_others_are_graded() -> None:
    unknown = Sample(**sample(kind="no-such-family", grader="reasoning-gym", entry={}))
    pytest.importorskip("reasoning_gym", reason="the extra `evaluation` is not installed")
    failed, right = grade_all([(unknown, "1"), (problem("number", "1"), "1")])
    assert str(failed) == "ungradable: reasoning-gym has no family no-such-family"
    assert right == RIGHT


def allocate(size: int) -> int:
    return len(b"x" * size)


def test_grading_beyond_its_memory_limit_raises_a_grader_error() -> None:
    with pytest.raises(GraderError, match="MemoryError"):
        run_isolated(allocate, 2**33)


def test_ground_truth_that_math_verify_cannot_read_makes_the_answer_ungradable() -> None:
    pytest.importorskip("math_verify", reason="the extra `evaluation` is not installed")
    (found,) = grade_all([(problem("math", ""), "7")])
    assert str(found) == "ungradable: math-verify cannot read the right answer ''"


def test_ground_truth_that_is_not_strict_json_makes_the_answer_ungradable() -> None:
    (found,) = grade_all([(problem("json", '{"a": 1, "a": 1}'), '{"a": 1}')])
    assert str(found) == "ungradable: the right answer is not JSON: an object has a key twice"


def test_answer_that_takes_too_long_to_compare_raises_a_grader_error() -> None:
    pytest.importorskip("math_verify", reason="the extra `evaluation` is not installed")
    power = r"\boxed{9^{9^{9^{9}}}}"
    with pytest.raises(GraderError):
        run_isolated(grade, problem("math", "1"), power, timeout_s=2)


def import_package(name: str) -> None:
    __import__(name)


def test_package_that_is_not_installed_makes_an_answer_ungradable() -> None:
    with pytest.raises(UngradableError, match=r"^ungradable: the package no_such_package is not"):
        run_isolated(import_package, "no_such_package")


CRASHING_LIBRARY = """
import os

class LatexExtractionConfig: pass
class ExprExtractionConfig: pass

def parse(text, targets, parsing_timeout):
    if "crash" in text:
        os._exit(7)
    return [text]

def verify(right, given, timeout_seconds):
    return right == given
"""


async def test_answer_that_crashes_its_grader_counts_as_wrong_and_as_a_grader_failure(
    tmp_path: Path,
) -> None:
    library = tmp_path / "packages" / "math_verify"  # takes the place of the installed one
    library.mkdir(parents=True)
    (library / "__init__.py").write_text(CRASHING_LIBRARY, encoding="utf-8")
    expression = sample(grader="math", domain="math", ground_truth="7")
    output = answered(tmp_path, [(expression, r"\boxed{7}"), (expression, r"\boxed{crash}")])
    ended = await sandbox_eval("report", output, packages=library.parent)
    assert ended.returncode == 0, ended.stderr
    message = "grader failure: the process ended with exit code 7"
    assert [(each["score"], each["error"]) for each in grades_of(output)] == [
        (1.0, None),
        (0.0, message),
    ]
    assert rows(ended.stdout, "## m")[0][1] == "50.0 [0.0, 100.0]"
    head = ["math", "plain", "2", "2", "0", "0"]
    apart = rows(ended.stdout, "### Results without an ordinary grade")[0]
    assert apart == [*head, "0", "0", "1", "0"]
    assert f"| math | plain | {message} | 1 | 0 |" in ended.stdout


async def test_empty_answer_fails_the_strict_and_the_loose_check_of_ifbench(tmp_path: Path) -> None:
    entry = {"key": "1", "prompt": "Do.", "instruction_id_list": ["x:y"], "kwargs": [{}]}
    instruction = sample(grader="ifbench", domain="instructions", ground_truth="", entry=entry)
    ended = await sandbox_eval("report", answered(tmp_path, [(instruction, "")]))
    assert rows(ended.stdout, "### Graders")[0] == [
        *("instructions", "plain", "0.0", "-", "0.0", "1", "0", "0", "0", "0")
    ]


async def test_ungradable_answers_are_counted_apart_and_not_as_wrong(tmp_path: Path) -> None:
    entry = {"key": "1", "prompt": "Do.", "instruction_id_list": ["x:y"], "kwargs": [{}]}
    instruction = sample(grader="ifbench", domain="instructions", ground_truth="", entry=entry)
    output = answered(tmp_path, [(instruction, SENTENCE), (sample(), "Answer: 0")])
    incomplete = tmp_path / "packages" / "ifbench"  # hides an installed one
    incomplete.mkdir(parents=True)
    (incomplete / "__init__.py").touch()
    ended = await sandbox_eval("report", output, packages=incomplete.parent)
    assert ended.returncode == 0, ended.stderr
    first, second = grades_of(output)
    assert (first["score"], second["score"]) == (None, 1.0)
    assert first["error"].startswith("ungradable: the package ")
    assert rows(ended.stdout, "## m")[0][:2] == ["instructions", "-"]
    assert rows(ended.stdout, "### Graders")[0] == [
        *("instructions", "plain", "-", "-", "-", "0", "1", "0", "0", "0")
    ]
    assert "| instructions | plain | ungradable: the package " in ended.stdout
