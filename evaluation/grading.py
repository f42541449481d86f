"""Grades answers with the strict graders, the reference implementation's graders, or both."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from evaluation.graders import WRONG, Grade, grade_all, is_unusable
from evaluation.isolation import ErrorKind, GraderError, UngradableError
from evaluation.journal import ResultsError
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
from evaluation.results import Result
from evaluation.samples import Sample, Suite

ERROR_KINDS: tuple[ErrorKind, ...] = get_args(ErrorKind)
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
    """None for an infrastructure error, an ungradable answer and a judge failure."""
    error: GraderError | None = None
    """The error of the grader. After a grader failure, `grade` is that of a wrong answer."""
    reference: Grade | None = None
    """The grade by the reference's grader. None for the same reasons as `grade`, without a
    reference grader for the sample, and if the reference's graders were not asked for."""
    reference_error: GraderError | None = None
    judge: str = ""
    """The judge of the answer; empty if the sample's grader is not `judge`, or without a judge."""

    @property
    def error_kind(self) -> ErrorKind | None:
        return self.error.kind if self.error else None

    @property
    def has_judge_failure(self) -> bool:
        """True if the judge of one of the two graders gave no verdict."""
        errors = (self.error, self.reference_error)
        return any(error is not None and error.kind == "judge failure" for error in errors)


@dataclass(frozen=True, slots=True)
class Grading:
    """The graders of a report."""

    directory: Path
    """The directory of the results, where the judge's verdicts are kept."""
    graders: Graders = "strict"
    judge: Judge | None = None

    def grade_results(self, suites: Sequence[Suite], results: Sequence[Result]) -> list[Graded]:
        """Grade all answers. A prompt that does not fit the context window counts as wrong, and so
        does an answer on which its grader fails.

        If `graders` is `reference`, the strict graders grade only the samples that the reference
        has no grader for. Results of samples that are not in the suites are left out. Raises
        ResultsError if the reference's graders are asked for and not installed.
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
        """Return the grades for `Graded.grade` and those for `Graded.reference`, of all answers."""
        if self.graders == "strict":
            return self._strict(work), [None] * len(work)
        if reference_version() is None and any(has_reference(sample) for sample, _ in work):
            raise ResultsError(f"the package {PACKAGE} is not installed: {INSTALL}")
        compared = [has_reference(sample) for sample, _ in work]
        if self.graders == "both":
            reference = _grade_parts(
                work, compared, self._reference, lambda rest: [None] * len(rest)
            )
            return self._strict(work), reference
        grades = _grade_parts(work, compared, self._reference, self._strict)
        return grades, [grade if has else None for grade, has in zip(grades, compared, strict=True)]

    def _strict(self, work: _Work) -> Sequence[_Grade]:
        return _grade_parts(
            work,
            [sample.grader == "judge" and not is_unusable(answer) for sample, answer in work],
            lambda judged: self._judge(judged, lambda _: STRICT),
            grade_all,
        )

    def _reference(self, work: _Work) -> Sequence[_Grade]:
        return _grade_parts(
            work,
            [sample.grader == "judge" for sample, _ in work],
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
        grade, error = _grade_and_error(main)
        reference_grade, reference_error = _grade_and_error(reference)
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
        "error": str(graded.error) if graded.error else None,
        "reference_score": float(reference.score) if reference else None,
        "reference_error": str(graded.reference_error) if graded.reference_error else None,
        "judge": graded.judge or None,
    }


def _grade_parts(
    work: _Work,
    is_first: Sequence[bool],
    grade_first: Callable[[_Work], Sequence[_Grade]],
    grade_second: Callable[[_Work], Sequence[_Grade]],
) -> Sequence[_Grade]:
    """Grade the answers that `is_first` marks by one function, and the others by another. Return
    the grades in the order of the answers."""
    grades: dict[int, _Grade] = {}
    for grade_part, mark in ((grade_first, True), (grade_second, False)):
        places = [place for place, each in enumerate(is_first) if each is mark]
        found = grade_part([work[place] for place in places])
        grades.update(zip(places, found, strict=True))
    return [grades[place] for place in range(len(work))]


def _grade_and_error(found: _Grade) -> tuple[Grade | None, GraderError | None]:
    """Return the grade that counts, and the error of the grader."""
    if isinstance(found, GraderError):
        return (WRONG if found.kind == "grader failure" else None), found
    return found, None
