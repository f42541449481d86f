"""Grades the answers of an evaluation, by the strict graders, by the reference's, or by both."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from evaluation.graders import UNFORMATTED, WRONG, Grade, grade_all, is_unusable
from evaluation.isolation import GraderError, UngradableError
from evaluation.judge import (
    STRICT,
    Instructions,
    Judge,
    judge_all,
    open_judgements,
    reference_instructions,
)
from evaluation.reference_graders import (
    INSTALL,
    PACKAGE,
    grade_reference,
    has_reference,
    reference_version,
)
from evaluation.results import Result, ResultsError
from evaluation.samples import Sample, Suite

Failure = Literal["ungradable", "judge failure", "grader failure"]
FAILURES: tuple[Failure, ...] = ("ungradable", "judge failure", "grader failure")
"""The kinds of answers without a grade."""
Graders = Literal["strict", "reference", "both"]
GRADES = "grades.jsonl"
"""The file of the results directory with the grades of the last report."""
_Work = Sequence[tuple[Sample, str]]
_Grade = Grade | GraderError | None


@dataclass(frozen=True, slots=True)
class Graded:
    """A result with its sample and its grade."""

    result: Result
    sample: Sample
    grade: Grade | None
    """None for an infrastructure error, and if the grader gave no judgement."""
    grader_error: str = ""
    """The reason of an answer without a grade. It begins with `ungradable: ` if a part of the
    grader is missing, and with `judge failure: ` if the judge gave no verdict."""
    reference: Grade | None = None
    """The grade of the reference's grader. None as well if it was not asked for, and for samples
    that the reference has no grader for."""
    reference_error: str = ""
    judge: str = ""
    """The judge of the answer; empty with other graders."""

    @property
    def failure(self) -> Failure | None:
        """The kind of the reason of an answer without a grade."""
        if not self.grader_error:
            return None
        kinds = (kind for kind in FAILURES if self.grader_error.startswith(f"{kind}: "))
        return next(kinds, "grader failure")

    @property
    def has_judge_failure(self) -> bool:
        """True if the judge of one of the two graders gave no verdict."""
        return "judge failure: " in self.grader_error + self.reference_error


@dataclass(frozen=True, slots=True)
class Grading:
    """The graders of a report."""

    directory: Path
    """The directory of the results, where the judge's verdicts are kept."""
    graders: Graders = "strict"
    judge: Judge | None = None

    def grade_results(self, suites: Sequence[Suite], results: Sequence[Result]) -> list[Graded]:
        """Grade all answers. A prompt that does not fit the context window counts as wrong.

        With `reference`, samples that the reference has a grader for have its grades only. Results
        of samples that the suites do not have are left out. Raises ResultsError if the reference's
        graders are asked for and not installed.
        """
        samples = {sample.id: sample for suite in suites for sample in suite.samples}
        known = [result for result in results if result.sample in samples]
        answered = [result for result in known if result.status == "answered"]
        work = [(samples[result.sample], result.answer) for result in answered]
        columns = [
            {result.key: found for result, found in zip(answered, grades, strict=True)}
            for grades in self._columns(work)
        ]
        return [
            self._graded(
                result, samples[result.sample], *(each.get(result.key) for each in columns)
            )
            for result in known
        ]

    def _columns(self, work: _Work) -> tuple[Sequence[_Grade], Sequence[_Grade]]:
        """Return the main grades and the reference's grades of all answers."""
        if self.graders == "strict":
            return self._strict(work), [None] * len(work)
        if reference_version() is None and any(has_reference(sample) for sample, _ in work):
            raise ResultsError(f"the package {PACKAGE} is not installed: {INSTALL}")
        if self.graders == "both":
            return self._strict(work), _divided(work, _has_reference, self._reference, _no_grades)
        grades = _divided(work, _has_reference, self._reference, self._strict)
        compared = map(_has_reference, work)
        return grades, [grade if has else None for grade, has in zip(grades, compared, strict=True)]

    def _strict(self, work: _Work) -> list[_Grade]:
        return _divided(work, _is_judged, self._judge_strictly, grade_all)

    def _judge_strictly(self, work: _Work) -> list[_Grade]:
        return _divided(
            work,
            lambda each: is_unusable(each[1]),
            lambda unusable: [UNFORMATTED] * len(unusable),
            lambda usable: self._judge(usable, lambda _: STRICT),
        )

    def _reference(self, work: _Work) -> list[_Grade]:
        return _divided(
            work,
            _is_judged,
            lambda judged: self._judge(judged, reference_instructions),
            lambda others: grade_all(others, grade_reference),
        )

    def _judge(
        self, work: _Work, instructions_of: Callable[[Sample], Instructions]
    ) -> Sequence[_Grade]:
        if not work:
            return []
        if self.judge is None:
            return [UngradableError("no judge: name one with --judge-model")] * len(work)
        try:
            with open_judgements(self.directory) as judgements:
                return judge_all(self.judge, work, instructions_of, judgements)
        except UngradableError as error:
            return [error] * len(work)

    def _graded(self, result: Result, sample: Sample, main: _Grade, reference: _Grade) -> Graded:
        if result.status == "context_overflow":
            main = WRONG
            reference = WRONG if self.graders != "strict" and has_reference(sample) else None
        grade, error = _split(main)
        reference_grade, reference_error = _split(reference)
        judge = str(self.judge or "") if sample.grader == "judge" else ""
        return Graded(result, sample, grade, error, reference_grade, reference_error, judge)


def write_grades(directory: Path, graded: Sequence[Graded]) -> None:
    """Write grades.jsonl: one result a line, in the order of the results."""
    lines = [json.dumps(_record(each), ensure_ascii=False) + "\n" for each in graded]
    (directory / GRADES).write_text("".join(lines), encoding="utf-8")


def _record(graded: Graded) -> Mapping[str, object]:
    grade, reference = graded.grade, graded.reference
    return {
        **graded.result.key._asdict(),
        "status": graded.result.status,
        "score": float(grade.score) if grade else None,
        "format_failure": grade.format_failure if grade else None,
        "loose": grade.loose if grade else None,
        "error": graded.grader_error or None,
        "reference_score": float(reference.score) if reference else None,
        "reference_error": graded.reference_error or None,
        "judge": graded.judge or None,
    }


def _divided(
    work: _Work,
    condition: Callable[[tuple[Sample, str]], bool],
    grade_these: Callable[[_Work], Sequence[_Grade]],
    grade_others: Callable[[_Work], Sequence[_Grade]],
) -> list[_Grade]:
    """Return the grades of all answers, in order, by one function for the answers that meet a
    condition and by another for the rest."""
    chosen = [condition(each) for each in work]
    these = iter(grade_these([each for each, is_one in zip(work, chosen, strict=True) if is_one]))
    others = iter(
        grade_others([each for each, is_one in zip(work, chosen, strict=True) if not is_one])
    )
    return [next(these if is_one else others) for is_one in chosen]


def _has_reference(each: tuple[Sample, str]) -> bool:
    return has_reference(each[0])


def _is_judged(each: tuple[Sample, str]) -> bool:
    return each[0].grader == "judge"


def _no_grades(work: _Work) -> list[_Grade]:
    return [None] * len(work)


def _split(found: _Grade) -> tuple[Grade | None, str]:
    return (None, str(found)) if isinstance(found, GraderError) else (found, "")
