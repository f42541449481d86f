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
    STRICT_INSTRUCTIONS,
    Judge,
    JudgeInstructions,
    judge_all,
    open_judgements,
    reference_instructions,
)
from evaluation.reference_graders import (
    INSTALL_COMMAND,
    REFERENCE_PACKAGE,
    grade_reference,
    has_reference_grader,
    reference_version,
)
from evaluation.results import Result
from evaluation.samples import Sample, Suite

ERROR_KINDS: tuple[ErrorKind, ...] = get_args(ErrorKind)
Graders = Literal["strict", "reference", "both"]
GRADES_FILE = "grades.jsonl"
"""The file of the results directory with the grades of the last report."""
_SampleAnswers = Sequence[tuple[Sample, str]]
_GradeOrError = Grade | GraderError | None


@dataclass(frozen=True, slots=True)
class GradedResult:
    """A result with its sample and its grade."""

    result: Result
    sample: Sample
    grade: Grade | None
    """The grade of the answer; None for an infrastructure error, an ungradable answer and a judge
    failure."""
    error: GraderError | None = None
    """The error of the grader. After a grader failure, `grade` is that of a wrong answer."""
    reference_grade: Grade | None = None
    """The grade by the reference's grader. None for the same reasons as `grade`, and also if the
    reference has no grader for the sample or if its graders were not requested."""
    reference_error: GraderError | None = None
    judge: str = ""
    """The judge of the answer; empty if the sample's grader is not `judge`, or if there is no
    judge."""

    @property
    def error_kind(self) -> ErrorKind | None:
        return self.error.kind if self.error else None

    @property
    def has_judge_failure(self) -> bool:
        """True if the judge of one of the two graders gave no verdict."""
        errors = (self.error, self.reference_error)
        return any(error is not None and error.kind == "judge failure" for error in errors)


@dataclass(frozen=True, slots=True)
class ResultGrader:
    """Grades the results of an evaluation with the chosen graders."""

    directory: Path
    """The directory of the results, where the judge's verdicts are kept."""
    graders: Graders = "strict"
    judge: Judge | None = None

    def grade_results(
        self, suites: Sequence[Suite], results: Sequence[Result]
    ) -> list[GradedResult]:
        """Grade all answers. A prompt that does not fit the context window counts as wrong, and so
        does an answer on which its grader fails.

        If `graders` is `reference`, the strict graders grade only the samples that the reference
        has no grader for. Results of samples that are not in the suites are left out. Raises
        ResultsError if the reference's graders are asked for and not installed.
        """
        samples = {sample.id: sample for suite in suites for sample in suite.samples}
        known = [result for result in results if result.sample in samples]
        answered = [result for result in known if result.status == "answered"]
        sample_answers = [(samples[result.sample], result.answer) for result in answered]
        columns = [
            {result.key: found for result, found in zip(answered, grades, strict=True)}
            for grades in self._main_and_reference_grades(sample_answers)
        ]
        return [
            self._graded_result(
                result, samples[result.sample], *(each.get(result.key) for each in columns)
            )
            for result in known
        ]

    def _main_and_reference_grades(
        self, sample_answers: _SampleAnswers
    ) -> tuple[Sequence[_GradeOrError], Sequence[_GradeOrError]]:
        """Return two sequences with an entry for each answer: the grades for `GradedResult.grade`,
        and those for `GradedResult.reference_grade`."""
        if self.graders == "strict":
            return self._strict_grades(sample_answers), [None] * len(sample_answers)
        if reference_version() is None and any(
            has_reference_grader(sample) for sample, _ in sample_answers
        ):
            raise ResultsError(
                f"the package {REFERENCE_PACKAGE} is not installed: {INSTALL_COMMAND}"
            )
        compared = [has_reference_grader(sample) for sample, _ in sample_answers]
        if self.graders == "both":
            reference = _grade_parts(
                sample_answers,
                compared,
                self._reference_grades,
                lambda without_grader: [None] * len(without_grader),
            )
            return self._strict_grades(sample_answers), reference
        grades = _grade_parts(sample_answers, compared, self._reference_grades, self._strict_grades)
        return grades, [grade if has else None for grade, has in zip(grades, compared, strict=True)]

    def _strict_grades(self, sample_answers: _SampleAnswers) -> Sequence[_GradeOrError]:
        return _grade_parts(
            sample_answers,
            [
                sample.grader == "judge" and not is_unusable(answer)
                for sample, answer in sample_answers
            ],
            lambda judged: self._judge_grades(judged, lambda _: STRICT_INSTRUCTIONS),
            grade_all,
        )

    def _reference_grades(self, sample_answers: _SampleAnswers) -> Sequence[_GradeOrError]:
        return _grade_parts(
            sample_answers,
            [sample.grader == "judge" for sample, _ in sample_answers],
            lambda judged: self._judge_grades(judged, reference_instructions),
            lambda unjudged: grade_all(unjudged, grade_reference),
        )

    def _judge_grades(
        self, sample_answers: _SampleAnswers, instructions_of: Callable[[Sample], JudgeInstructions]
    ) -> Sequence[_GradeOrError]:
        if not sample_answers:
            return []
        if self.judge is None:
            return [UngradableError("no judge: name one with --judge-model")] * len(sample_answers)
        try:
            with open_judgements(self.directory) as judgements:
                return judge_all(self.judge, sample_answers, instructions_of, judgements)
        except UngradableError as error:
            return [error] * len(sample_answers)

    def _graded_result(
        self, result: Result, sample: Sample, main_grade: _GradeOrError, reference: _GradeOrError
    ) -> GradedResult:
        if result.status == "context_overflow":
            main_grade = WRONG
            reference = WRONG if self.graders != "strict" and has_reference_grader(sample) else None
        grade, error = _grade_and_error(main_grade)
        reference_grade, reference_error = _grade_and_error(reference)
        judge = str(self.judge or "") if sample.grader == "judge" else ""
        return GradedResult(result, sample, grade, error, reference_grade, reference_error, judge)


def write_grades(directory: Path, graded: Sequence[GradedResult]) -> None:
    """Write grades.jsonl: one result a line, in the order of the results."""
    lines = [json.dumps(_grade_record(each), ensure_ascii=False) + "\n" for each in graded]
    (directory / GRADES_FILE).write_text("".join(lines), encoding="utf-8")


def _grade_record(graded: GradedResult) -> Mapping[str, object]:
    grade, reference = graded.grade, graded.reference_grade
    return {
        **graded.result.key._asdict(),
        "status": graded.result.status,
        "score": float(grade.score) if grade else None,
        "format_failure": grade.format_failure if grade else None,
        "loose": grade.passes_loose_test if grade else None,
        "error": str(graded.error) if graded.error else None,
        "reference_score": float(reference.score) if reference else None,
        "reference_error": str(graded.reference_error) if graded.reference_error else None,
        "judge": graded.judge or None,
    }


def _grade_parts(
    sample_answers: _SampleAnswers,
    first_part_mask: Sequence[bool],
    grade_first: Callable[[_SampleAnswers], Sequence[_GradeOrError]],
    grade_second: Callable[[_SampleAnswers], Sequence[_GradeOrError]],
) -> Sequence[_GradeOrError]:
    """Grade the answers that `first_part_mask` marks with `grade_first`, and all others with
    `grade_second`. Return the grades in the order of the answers."""
    grades: dict[int, _GradeOrError] = {}
    for grade_part, mark in ((grade_first, True), (grade_second, False)):
        places = [place for place, each in enumerate(first_part_mask) if each is mark]
        found = grade_part([sample_answers[place] for place in places])
        grades.update(zip(places, found, strict=True))
    return [grades[place] for place in range(len(sample_answers))]


def _grade_and_error(grade_or_error: _GradeOrError) -> tuple[Grade | None, GraderError | None]:
    """Return the grade of an answer and the error of its grader, either of which may be None. An
    answer on which the grader fails has both: it counts as wrong."""
    if isinstance(grade_or_error, GraderError):
        return (WRONG if grade_or_error.kind == "grader failure" else None), grade_or_error
    return grade_or_error, None
