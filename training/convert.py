"""Converts tasks to the formats of trainers and to a suite of the evaluation, and describes them.

The documents of a task are in files or, for comparison, in the prompt. Both come from the same row.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Literal

from evaluation.paper_suites import PLAIN_LETTER_FORM
from evaluation.samples import Draft, GraderName, write_suite
from evaluation.synthetic import ANSWER_LINE
from training.rows import QaType, Split, TaskError, TaskRow, TaskSet

Target = Literal["trl", "verl", "bench"]
Placement = Literal["files", "prompt"]
_SUITE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
GRADERS: Mapping[QaType, GraderName] = {
    "mcq1": "choice",
    "mcqN": "text",
    "number": "number",
    "span": "text",
    "free": "judge",
}
"""The evaluation's grader for each type of question. The graders are strict: a span must be the
right answer exactly."""


def prompt_of(row: TaskRow, placement: Placement) -> str:
    """Return the prompt of a task. With the placement `prompt`, it contains the documents between
    the lines `BEGIN DOCUMENT name` and `END DOCUMENT name`, as in the evaluation's plain mode."""
    if placement == "files":
        return row.problem_statement
    from evaluation.runner import plain_prompt

    return plain_prompt(row.problem_statement, row.files)


def convert(tasks: TaskSet, target: Target, out: Path, placement: Placement, split: Split) -> int:
    """Write the rows of a split to a file, or to a directory if the target is `bench`, and return
    their number. Raises TaskError if there are none, or if `out` cannot be written."""
    rows = tasks.rows.get(split, ())
    if not rows:
        raise TaskError(f"{tasks.directory}: there are no rows in the split {split}")
    try:
        if target == "bench":
            return _write_suite(tasks, rows, out, placement)
        convert_row = _ROW_CONVERTERS[target]
        lines = (
            json.dumps(convert_row(row, number, placement, split), ensure_ascii=False) + "\n"
            for number, row in enumerate(rows)
        )
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        raise TaskError(f"{error.filename}: {error.strerror}") from error
    return len(rows)


def _trl_row(row: TaskRow, number: int, placement: Placement, split: Split) -> dict[str, Any]:
    """Return a row of TRL's conversational prompt-only format. The other columns reach reward
    functions and the `reset` of an environment."""
    return {
        "prompt": [{"role": "user", "content": prompt_of(row, placement)}],
        **row.model_dump(include={"id", "domain", "problem_statement", "ground_truth", "qa_type"}),
        "input_files": row.input_files if placement == "files" else "{}",
    }


def _verl_row(row: TaskRow, number: int, placement: Placement, split: Split) -> dict[str, Any]:
    """Return a row of verl's format for data (verl documentation, "Prepare Data for
    Post-Training")."""
    return {
        "data_source": row.domain,
        "prompt": [{"role": "user", "content": prompt_of(row, placement)}],
        "ability": row.qa_type,
        "reward_model": {"style": "rule", "ground_truth": row.ground_truth},
        "extra_info": {
            "split": split,
            "index": number,
            "id": row.id,
            "qa_type": row.qa_type,
            "input_files": row.input_files if placement == "files" else "{}",
        },
    }


_ROW_CONVERTERS: Mapping[
    Literal["trl", "verl"], Callable[[TaskRow, int, Placement, Split], dict[str, Any]]
] = {"trl": _trl_row, "verl": _verl_row}


def _write_suite(tasks: TaskSet, rows: Sequence[TaskRow], out: Path, placement: Placement) -> int:
    if not _SUITE_NAME.fullmatch(out.name):
        raise TaskError(f"{out}: the name of a suite has letters, digits and ._- only")
    manifest = tasks.manifest
    drafts = [_draft(row, placement) for row in rows]
    write_suite(out, out.name, drafts, licence=manifest.licence, source=manifest.source)
    return len(drafts)


def _draft(row: TaskRow, placement: Placement) -> Draft:
    problem = prompt_of(row, placement)
    form = PLAIN_LETTER_FORM if row.qa_type == "mcq1" else ANSWER_LINE
    grader = GRADERS[row.qa_type]
    is_judged = grader == "judge"
    entry = {"question": row.meta.question, "rubric": "long-context"} if is_judged else None
    fields = {
        "id": row.id,
        "domain": re.sub(r"[^A-Za-z0-9._-]+", "-", row.domain).strip("-._") or "tasks",
        "kind": row.qa_type,
        "problem": problem,
        "plain_problem": None if is_judged else f"{problem}\n\n{form}",
        "ground_truth": row.ground_truth,
        "grader": grader,
        "entry": entry,
    }
    return Draft(fields, row.files if placement == "files" else {})


def describe(tasks: TaskSet) -> str:
    """Return the counts of a set of tasks as Markdown."""
    return "\n".join(_description_lines(tasks)) + "\n"


def _description_lines(tasks: TaskSet) -> Iterator[str]:
    manifest, rows = tasks.manifest, tasks.all_rows
    yield f"{manifest.source}; licence: {manifest.licence}; seed {manifest.seed}"
    yield ""
    yield "| tasks | " + " | ".join([*tasks.rows, "all"]) + " |"
    yield "| --- |" + " --- |" * (len(tasks.rows) + 1)
    columns = [*tasks.rows.values(), rows]
    yield "| all types | " + " | ".join(str(len(column)) for column in columns) + " |"
    for qa_type in GRADERS:
        counts = [sum(row.qa_type == qa_type for row in column) for column in columns]
        if counts[-1]:
            yield f"| {qa_type} | " + " | ".join(map(str, counts)) + " |"
    yield ""
    yield "| of a task | median | maximum |"
    yield "| --- | --- | --- |"
    measures: Mapping[str, Callable[[TaskRow], int]] = {
        "files": lambda row: row.meta.n_files,
        "distractors": lambda row: row.meta.n_distractors,
        "examples": lambda row: row.meta.n_examples,
        "characters of the files": lambda row: sum(row.meta.sizes),
    }
    for name, measure in measures.items():
        values = list(map(measure, rows)) or [0]
        yield f"| {name} | {median(values):g} | {max(values)} |"
    yield ""
    yield f"{manifest.contexts} contexts and {manifest.questions} questions in the source"
    for reason, count in Counter(manifest.dropped).most_common():
        yield f"left out, {reason}: {count}"
