"""Graders: functions that compare an answer with the right answer. All are strict.

An answer that does not have the form that its problem asks for is wrong, and counts as a format
failure too. `grade_all` grades each answer in a process of its own.

The grader `judge` is in evaluation/judge.py.
"""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

from evaluation.ifbench_grader import check_instructions
from evaluation.isolation import (
    GraderError,
    UngradableError,
    UnreadableSampleError,
    preload,
    run_isolated,
)
from evaluation.reasoning_gym_suite import load_reasoning_gym
from evaluation.samples import GraderName, Sample

MAX_ANSWER_CHARS = 100_000
"""Maximum length of an answer; a longer answer is a format failure."""
_NUMBER = re.compile(r"[+-]?(\d+|\d{1,3}(,\d{3})+)(\.\d+)?", re.ASCII)
_ANSWER_LINE = re.compile(r"answer:\s*(\S.*)", re.IGNORECASE)
_CHOICE = re.compile(r"([A-Z])|\\(?:text|mathrm|textbf|mathbf)\{([A-Z])\}")
_BOX_START = "\\boxed{"
_LATEX_COMMAND = re.compile(r"\\[A-Za-z]+")
_WORD = re.compile(r"[A-Za-z]{2,}")
_MATH_WORDS = frozenset(("sqrt", "pi", "sin", "cos", "tan", "exp", "log", "ln", "oo"))
"""The words that may stand in an expression that is not LaTeX."""
_SLOW_MODULES: Mapping[str, Sequence[str]] = {
    "reasoning-gym": ("reasoning_gym",),
    "math": ("math_verify",),
    "ifbench": ("nltk", "emoji", "syllapy"),
}
"""The modules that take long to import, by grader."""


@dataclass(frozen=True, slots=True)
class Grade:
    """The judgement on one answer."""

    score: Fraction
    """1 if the answer is right, else 0. A judge with several votes also gives values between."""
    format_failure: bool = False
    """True if the answer does not have the form that the problem asks for."""
    passes_loose_test: bool | None = None
    """True if the answer passes IFBench's loose test; None without such a test."""


RIGHT, WRONG = Grade(Fraction(1)), Grade(Fraction(0))
UNFORMATTED = Grade(Fraction(0), format_failure=True)
Grader = Callable[[Sample, str], Grade]


def grade(sample: Sample, answer: str) -> Grade:
    """Return the grade of an answer, in this process. Raises UngradableError or ModuleNotFoundError
    if the sample cannot be graded here."""
    if is_unusable(answer):
        return UNFORMATTED
    return _GRADERS[sample.grader](sample, answer)


def is_unusable(answer: str) -> bool:
    """Return True if an answer is empty or too long to be graded."""
    return not answer.strip() or len(answer) > MAX_ANSWER_CHARS


def grade_all(
    sample_answers: Sequence[tuple[Sample, str]], grader: Grader = grade
) -> list[Grade | GraderError]:
    """Grade each answer in a process of its own. Return the grades in order, with a GraderError in
    place of a grade if the grading failed.

    Raises ModuleNotFoundError if a sample needs the package reasoning-gym and it is not installed.
    """
    names = {sample.grader for sample, _ in sample_answers}
    if "reasoning-gym" in names:
        load_reasoning_gym()  # reports a missing package once, and not for each answer
    preload(
        [__name__, *(module for name in sorted(names) for module in _SLOW_MODULES.get(name, ()))]
    )
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return list(threads.map(lambda each: _grade_or_error(grader, *each), sample_answers))


def final_answer(text: str) -> str | None:
    """Return X if the last line of a text is `Answer: X`. Otherwise return the only line of the
    text, or None if it has several lines or none. Empty lines do not count."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if lines and (found := _ANSWER_LINE.fullmatch(lines[-1])):
        return found[1]
    return lines[0] if len(lines) == 1 else None


def last_box_content(text: str) -> str | None:
    """Return the content of the last `\\boxed{…}` of a text. None if there is none, or if its brace
    is not closed."""
    start = text.rfind(_BOX_START)
    if start < 0:
        return None
    depth = 0
    for end in range(start + len(_BOX_START) - 1, len(text)):
        if text[end] in "{}" and text[end - 1] != "\\":
            depth += 1 if text[end] == "{" else -1
        if not depth:
            return text[start + len(_BOX_START) : end].strip()
    return None


def math_answer(text: str) -> str | None:
    """Return the content of the last box of a text, or None if the box is not closed. Without a
    box, return the text if it is one expression, else None."""
    if "\\boxed" in text:
        return last_box_content(text)
    alone = text.strip().strip("$").strip()
    words = _WORD.findall(_LATEX_COMMAND.sub(" ", alone))
    return alone if "\n" not in alone and _MATH_WORDS.issuperset(words) else None


def _grade_or_error(grader: Grader, sample: Sample, answer: str) -> Grade | GraderError:
    try:
        return run_isolated(grader, sample, answer)
    except GraderError as error:
        return error


def _grade_number(sample: Sample, text: str) -> Grade:
    """Compare decimal numbers by value. Thousands may be separated by commas."""
    answer = _parse_number(final_answer(text))
    if answer is None:
        return UNFORMATTED
    return RIGHT if answer == _parse_number(sample.ground_truth) else WRONG


def _parse_number(text: str | None) -> Decimal | None:
    found = _NUMBER.fullmatch((text or "").replace("\N{MINUS SIGN}", "-"))
    return Decimal(found[0].replace(",", "")) if found else None


def _grade_text(sample: Sample, text: str) -> Grade:
    """Compare texts of one line word by word. The amount of white space does not matter."""
    answer = final_answer(text)
    if answer is None:
        return UNFORMATTED
    return RIGHT if answer.split() == sample.ground_truth.split() else WRONG


def _grade_verbatim(sample: Sample, text: str) -> Grade:
    """Compare the whole answer. Empty lines around it and the kind of line endings are ignored."""
    if "```" in text and "```" not in sample.ground_truth:
        return UNFORMATTED
    return RIGHT if _split_lines(text) == _split_lines(sample.ground_truth) else WRONG


def _split_lines(text: str) -> list[str]:
    return text.replace("\r\n", "\n").strip("\n").split("\n")


def _grade_json(sample: Sample, text: str) -> Grade:
    """Compare JSON values. The order of keys does not matter. Numbers are compared by value. A
    text, a number and a boolean are never equal to each other."""
    try:
        right = _parse_json(sample.ground_truth)
    except ValueError as error:
        raise UnreadableSampleError(f"the right answer is not JSON: {error}") from error
    try:
        answer = _parse_json(text)
    except ValueError:
        return UNFORMATTED
    return RIGHT if _is_same(answer, right) else WRONG


def _parse_json(text: str) -> Any:
    """Return the value of a JSON text, with decimal numbers. Raises ValueError."""
    try:
        return json.loads(
            text,
            object_pairs_hook=_object_of_pairs,
            parse_constant=_refuse_constant,
            parse_float=Decimal,
        )
    except (ArithmeticError, RecursionError) as error:  # Decimal raises InvalidOperation
        raise ValueError(str(error)) from error


def _object_of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("an object has a key twice")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_is_same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_is_same, a, b))
    return bool(a == b)


def _grade_reasoning_gym(sample: Sample, text: str) -> Grade:
    """Ask the scoring function of reasoning-gym. Its partial credit counts as wrong."""
    answer = final_answer(text)
    if answer is None:
        return UNFORMATTED
    try:
        score = load_reasoning_gym().get_score_answer_fn(sample.kind)
    except ValueError as error:
        raise UngradableError(f"reasoning-gym has no family {sample.kind}") from error
    try:
        return RIGHT if score(answer, sample.entry) == 1.0 else WRONG
    except ValueError:  # the function cannot parse the answer
        return UNFORMATTED


def _grade_math(sample: Sample, text: str) -> Grade:
    """Compare mathematical expressions with math-verify. The answer is the last box, or a text that
    is one expression."""
    answer = math_answer(text)
    if not answer:
        return UNFORMATTED
    import math_verify

    latex = math_verify.LatexExtractionConfig()
    # run_isolated has a timeout. After one of its own, math-verify would find the answer wrong.
    right, given = (
        math_verify.parse(f"{_BOX_START}{each}}}", targets, parsing_timeout=None)
        for each, targets in (
            (sample.ground_truth, [latex]),
            (answer, [math_verify.ExprExtractionConfig(), latex]),
        )
    )
    if not right:
        message = f"math-verify cannot read the right answer {sample.ground_truth!r}"
        raise UnreadableSampleError(message)
    return RIGHT if math_verify.verify(right, given, timeout_seconds=None) else WRONG


def _grade_choice(sample: Sample, text: str) -> Grade:
    """Compare the letter of the answer with the letter of the right choice. The letter of the
    answer is in a last line `Answer: X`, in the last box, or alone."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    line = _ANSWER_LINE.fullmatch(lines[-1])
    box = last_box_content(text)
    answer = line[1] if line else box if box is not None else text.strip()
    found = _CHOICE.fullmatch(answer)
    if not found:
        return UNFORMATTED
    return RIGHT if sample.ground_truth in found.groups() else WRONG


def _grade_ifbench(sample: Sample, text: str) -> Grade:
    """Run IFBench's checkers. An answer that passes only its loose test is a format failure."""
    strict, loose = check_instructions(sample.entry or {}, text)
    return Grade(Fraction(strict), format_failure=loose and not strict, passes_loose_test=loose)


_GRADERS: Mapping[GraderName, Grader] = {
    "number": _grade_number,
    "text": _grade_text,
    "verbatim": _grade_verbatim,
    "json": _grade_json,
    "reasoning-gym": _grade_reasoning_gym,
    "math": _grade_math,
    "choice": _grade_choice,
    "ifbench": _grade_ifbench,
}
