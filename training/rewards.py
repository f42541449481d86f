"""Rewards of answers, by the type of the question. They share the evaluation's graders.

    mcq1         1 if the answer is the letter of the right choice, else 0
    mcqN         F1 of the sets of letters
    number       1 if math-verify finds the answer equal, else 0
    span, free   as for number if the answer and the right answer are mathematical expressions, else
                 the F-measure of ROUGE-L

A Python function of the user can replace these rules. `reward` runs the rule or the function in a
process of its own, with a timeout.
"""

import importlib
import math
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from evaluation.graders import (
    Grade,
    final_answer,
    grade,
    is_unusable,
    last_box_content,
    math_answer,
)
from evaluation.isolation import (
    TIMEOUT_S,
    GraderError,
    UngradableError,
    UnreadableSampleError,
    preload,
    run_isolated,
)
from evaluation.samples import Sample
from training.hardcoded import is_hardcoded
from training.leaks import normalise
from training.rows import TaskError, TaskRow

MAX_LENGTH_RATIO = 4
"""Maximum length of an answer of the type span or free, as a multiple of the right answer's length.
A longer answer gets 0 instead of ROUGE-L."""
_LETTERS = re.compile(r"[A-Z](?:\s*(?:,|;|\band\b|\s)\s*[A-Z])*")
_TEXT_COMMAND = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\{([^{}]*)\}")
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_LATEX_OR_DIGIT = re.compile(r"[\d\\]")

Reason = Literal[
    "choice",
    "choices",
    "math",
    "rouge",
    "function",
    "sandbox lost",
    "grader failure",
    "not submitted",
    "empty",
    "oversized",
]


class Attempt(BaseModel):
    """The end of one run on a task."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    """The id of the task."""
    answer: str = ""
    submitted: bool = False
    """True if the model called the tool that ends the run."""
    sandbox_lost: bool = False
    """True if the sandbox or the proxy failed, so that the answer says nothing about the model."""
    commands: Annotated[tuple[str, ...], Field(max_length=10_000)] = ()
    """The commands and programs of the run, in order."""


@dataclass(frozen=True, slots=True)
class Reward:
    """The reward of one attempt."""

    value: float | None
    """The value from 0 to 1. None: the attempt cannot be scored, and a trainer must leave it out of
    its group."""
    reason: Reason
    """The rule that decided the value."""
    is_hardcoded: bool = False
    """True if the run wrote its answer without reading a file or computing."""
    detail: str = ""
    """The error of a grader that failed."""


def reward(
    row: TaskRow,
    attempt: Attempt,
    *,
    function: str | None = None,
    needs_submit: bool = True,
    timeout_s: float = TIMEOUT_S,
) -> Reward:
    """Return the reward of an attempt.

    `function` is `package.module:function`, which is called with the row as a dictionary and the
    answer, and returns a number from 0 to 1. With `needs_submit`, as in training, an attempt that
    was not submitted gets 0. The value is None if the sandbox was lost or if `function` fails. If a
    rule of this module fails, for example because math-verify takes too long, the value is 0, or
    None if the rule does not give 1 to the right answer either. Raises TaskError if a package of
    the grader or the function is missing, or if `function` is not of this form.
    """
    if function is not None and not _FUNCTION.fullmatch(function):
        raise TaskError(f"{function}: not of the form package.module:function")
    if attempt.sandbox_lost:
        return Reward(None, "sandbox lost")
    is_flagged = is_hardcoded(attempt.commands)
    if needs_submit and not attempt.submitted:
        return Reward(0.0, "not submitted", is_flagged)
    if is_unusable(attempt.answer):
        return Reward(0.0, "oversized" if attempt.answer.strip() else "empty", is_flagged)
    try:
        if function is not None:
            value, reason = run_isolated(
                _call_function, function, row.model_dump(), attempt.answer, timeout_s=timeout_s
            )
        else:
            value, reason = run_isolated(score, row, attempt.answer, timeout_s=timeout_s)
    except UngradableError as error:
        remedy = "" if function else ": install the extra `training`"
        raise TaskError(f"{error.reason}{remedy}") from error
    except GraderError as error:
        is_at_fault = function is None and _accepts_ground_truth(row, timeout_s)
        return Reward(0.0 if is_at_fault else None, "grader failure", is_flagged, error.reason)
    return Reward(value, reason, is_flagged)


def reward_all(
    attempts: Sequence[tuple[TaskRow, Attempt]],
    *,
    function: str | None = None,
    needs_submit: bool = True,
    timeout_s: float = TIMEOUT_S,
) -> list[Reward]:
    """Return the rewards of all attempts, in order. The other arguments and the errors are those
    of `reward`."""
    preload([__name__, "math_verify", "rouge_score.rouge_scorer"])

    def reward_one(each: tuple[TaskRow, Attempt]) -> Reward:
        row, attempt = each
        return reward(
            row, attempt, function=function, needs_submit=needs_submit, timeout_s=timeout_s
        )

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return list(threads.map(reward_one, attempts))


def _accepts_ground_truth(row: TaskRow, timeout_s: float) -> bool:
    """Return True if the rules give 1 to the right answer.

    If they do, an answer at which the grader fails gets 0, not None. With None, a model could learn
    to write such an answer where it does not know the right one.
    """
    try:
        value, _ = run_isolated(score, row, row.ground_truth, timeout_s=timeout_s)
    except GraderError:
        return False
    return value == 1


def score(row: TaskRow, answer: str) -> tuple[float, Reason]:
    """Return the value of an answer and the rule that decided, in this process."""
    if row.qa_type == "mcq1":
        return float(_grade_answer(row, answer, "choice").score), "choice"
    if row.qa_type == "mcqN":
        return _f1(set(row.ground_truth.split(",")), _answer_letters(answer)), "choices"
    is_equal = _is_math_equal(row, answer)
    if is_equal is not None or row.qa_type == "number":
        return float(is_equal or False), "math"
    given = final_answer(answer) or answer.strip()
    if len(given) > MAX_LENGTH_RATIO * len(row.ground_truth):
        return 0.0, "oversized"
    return _rouge_l(row.ground_truth, given), "rouge"


def _answer_letters(answer: str) -> set[str]:
    """Return the letters of an answer: a last line `Answer: A,C`, the last box, or letters alone.
    Return no letters if there is other text."""
    given = _TEXT_COMMAND.sub(r"\1", last_box_content(answer) or final_answer(answer) or "")
    return set(re.findall("[A-Z]", given)) if _LETTERS.fullmatch(given.strip()) else set()


def _f1(right: set[str], given: set[str]) -> float:
    """Return the harmonic mean of precision and recall of a set of choices."""
    return 2 * len(right & given) / (len(right) + len(given)) if given else 0.0


def _is_math_equal(row: TaskRow, answer: str) -> bool | None:
    """Return whether math-verify finds the answer equal to the right answer; None if one of them
    is not an expression.

    An expression has a digit or a LaTeX command and no words. math-verify reads a word as the
    product of its letters, and would find Pairs equal to Paris. ROUGE-L ignores signs, and would
    find -588 equal to 588.
    """
    gold = math_answer(row.ground_truth)
    if not gold or not _LATEX_OR_DIGIT.search(gold):
        return None
    given = answer if "\\boxed" in answer else final_answer(answer) or answer
    try:
        found = _grade_answer(row, given, "math")
    except UnreadableSampleError:  # such as a date
        return None
    return None if found.format_failure else found.score == 1


def _grade_answer(row: TaskRow, answer: str, grader: Literal["choice", "math"]) -> Grade:
    return grade(
        Sample(
            id=row.id,
            domain="training",
            kind=row.qa_type,
            problem=row.problem_statement,
            ground_truth=row.ground_truth,
            grader=grader,
        ),
        answer,
    )


def _rouge_l(gold_answer: str, given_answer: str) -> float:
    """Return the F-measure of ROUGE-L (Lin, 2004) with stemmed words, as the package rouge-score
    computes it. Return 1 for equal words, because the package drops letters other than a to z."""
    from rouge_score import rouge_scorer

    if normalise(gold_answer) and normalise(gold_answer) == normalise(given_answer):
        return 1.0
    scorer = rouge_scorer.RougeScorer(["rougeL"], use_stemmer=True)
    return float(scorer.score(gold_answer, given_answer)["rougeL"].fmeasure)


def _call_function(name: str, row: dict[str, Any], answer: str) -> tuple[float, Reason]:
    """Call the user's function and return its value. Raises UngradableError if the module has no
    such function, and ValueError if its result is not a number from 0 to 1."""
    module_name, _, function_name = name.partition(":")
    function = getattr(importlib.import_module(module_name), function_name, None)
    if not callable(function):
        raise UngradableError(f"{module_name} has no function {function_name}")
    value = function(row, answer)
    is_number = isinstance(value, int | float | Fraction)
    if not is_number or not math.isfinite(value) or not 0 <= value <= 1:
        raise ValueError(f"{name} returned {value!r:.40}, not a number from 0 to 1")
    return float(value), "function"
