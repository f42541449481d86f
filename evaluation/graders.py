"""Graders: functions that compare an answer with the right answer. All are strict.

An answer that does not have the form that its problem asks for is wrong, and counts as a format
failure too. Each grading runs in a process of its own with a timeout.
"""

import json
import multiprocessing
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from evaluation.reasoning_gym_suite import load_reasoning_gym
from evaluation.samples import GraderName, Sample

TIMEOUT_S = 30.0
"""Timeout of one grading, in seconds."""
MAX_ANSWER_CHARS = 100_000
"""A longer answer is a format failure."""
_NUMBER = re.compile(r"[+-]?(\d+|\d{1,3}(,\d{3})+)(\.\d+)?", re.ASCII)
_ANSWER_LINE = re.compile(r"answer:\s*(\S.*)", re.IGNORECASE)
_PROCESSES = multiprocessing.get_context("forkserver")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Grade:
    """The judgement on one answer."""

    score: int
    """1 if the answer is right, else 0."""
    format_failure: bool = False
    """True if the answer does not have the form that the problem asks for."""


RIGHT, WRONG, UNFORMATTED = Grade(1), Grade(0), Grade(0, format_failure=True)


class GraderError(Exception):
    """A grading gave no judgement: it exceeded its timeout, or its process failed."""


def grade(sample: Sample, answer: str) -> Grade:
    """Return the grade of an answer, in this process."""
    if not answer.strip() or len(answer) > MAX_ANSWER_CHARS:
        return UNFORMATTED
    return _GRADERS[sample.grader](sample, answer)


def grade_all(work: Sequence[tuple[Sample, str]]) -> list[Grade | GraderError]:
    """Return the grades of all answers, in order, each from a process of its own."""
    if any(sample.grader == "reasoning-gym" for sample, _ in work):
        load_reasoning_gym()  # reports a missing package once, and not for each answer
        _PROCESSES.set_forkserver_preload([__name__, "reasoning_gym"])
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return list(threads.map(lambda each: _grade_or_error(*each), work))


def run_isolated(
    function: Callable[..., _Result], *arguments: Any, timeout_s: float = TIMEOUT_S
) -> _Result:
    """Return the function's result from a new process. Raises GraderError if there is none."""
    receiving, sending = _PROCESSES.Pipe(duplex=False)
    process = _PROCESSES.Process(target=_send_result, args=(sending, function, arguments))
    process.start()
    sending.close()
    try:
        if not receiving.poll(timeout_s):
            raise GraderError(f"no result within {timeout_s:g} s")
        succeeded, result = receiving.recv()
    except EOFError as error:
        process.join()
        raise GraderError(f"the process ended with exit code {process.exitcode}") from error
    finally:
        process.kill()
        process.join()
        process.close()
        receiving.close()
    if not succeeded:
        raise GraderError(result)
    value: _Result = result
    return value


def final_answer(text: str) -> str | None:
    """Return the answer in the last line `Answer: …` of a text, or a text of one line; None if the
    last line has another form."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if lines and (found := _ANSWER_LINE.fullmatch(lines[-1])):
        return found[1]
    return lines[0] if len(lines) == 1 else None


def _grade_or_error(sample: Sample, answer: str) -> Grade | GraderError:
    try:
        return run_isolated(grade, sample, answer)
    except GraderError as error:
        return error


def _send_result(
    sending: Connection, function: Callable[..., object], arguments: Sequence[Any]
) -> None:
    try:
        sending.send((True, function(*arguments)))
    except Exception as error:  # noqa: BLE001 - any error is the result of the process
        sending.send((False, f"{type(error).__name__}: {error}"))


def _grade_number(sample: Sample, text: str) -> Grade:
    """Compare decimal numbers by value. Thousands may be separated by commas."""
    answer = _number(final_answer(text))
    if answer is None:
        return UNFORMATTED
    return RIGHT if answer == _number(sample.ground_truth) else WRONG


def _number(text: str | None) -> Decimal | None:
    found = _NUMBER.fullmatch((text or "").replace("\N{MINUS SIGN}", "-"))
    return Decimal(found[0].replace(",", "")) if found else None


def _grade_text(sample: Sample, text: str) -> Grade:
    """Compare texts of one line, character by character, but with any white space."""
    answer = final_answer(text)
    if answer is None:
        return UNFORMATTED
    return RIGHT if answer.split() == sample.ground_truth.split() else WRONG


def _grade_verbatim(sample: Sample, text: str) -> Grade:
    """Compare the whole answer, apart from empty lines around it and the kind of line ends."""
    if "```" in text and "```" not in sample.ground_truth:
        return UNFORMATTED
    return RIGHT if _lines(text) == _lines(sample.ground_truth) else WRONG


def _lines(text: str) -> list[str]:
    return text.replace("\r\n", "\n").strip("\n").split("\n")


def _grade_json(sample: Sample, text: str) -> Grade:
    """Compare JSON values. The order of keys does not matter, the types of values do."""
    try:
        answer = _parse_json(text)
    except (ValueError, RecursionError):
        return UNFORMATTED
    return RIGHT if _is_same(answer, _parse_json(sample.ground_truth)) else WRONG


def _parse_json(text: str) -> Any:
    return json.loads(
        text, object_pairs_hook=_object, parse_constant=_refuse_constant, parse_float=Decimal
    )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
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
    score = load_reasoning_gym().get_score_answer_fn(sample.kind)
    try:
        return RIGHT if score(answer, sample.entry) == 1.0 else WRONG
    except ValueError:  # the function cannot parse the answer
        return UNFORMATTED


_GRADERS: Mapping[GraderName, Callable[[Sample, str], Grade]] = {
    "number": _grade_number,
    "text": _grade_text,
    "verbatim": _grade_verbatim,
    "json": _grade_json,
    "reasoning-gym": _grade_reasoning_gym,
}
