"""Export samples to the formats of lm-eval and inspect_ai.

Only samples without input files can be exported: neither harness sends files. The graders of the
harnesses are their own ones, which compare the answer that a regular expression finds.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from evaluation.samples import Sample

LAST_LINE = r"(?:\A|\n)(?:Answer: *)?([^\n]+?)\s*\Z"
"""Finds the answer in the last line, as the graders `number` and `text` do."""
WHOLE_TEXT = r"\A\s*([\s\S]*?)\s*\Z"
"""Finds the whole answer, without white space around it."""
PATTERNS = {"number": LAST_LINE, "text": LAST_LINE, "json": WHOLE_TEXT, "verbatim": WHOLE_TEXT}


def tasks_of(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    """Return the samples without input files of each pattern, by the name of a task."""
    found: dict[str, list[Sample]] = {"last_line": [], "whole_text": []}
    for sample in samples:
        if not sample.files and sample.grader in PATTERNS:
            is_last_line = PATTERNS[sample.grader] == LAST_LINE
            found["last_line" if is_last_line else "whole_text"].append(sample)
    return {name: group for name, group in found.items() if group}


def export_to_lm_eval(
    samples: Iterable[Sample], folder: Path, sandbox: Mapping[str, Any] | None
) -> list[str]:
    """Write a task of lm-eval for each pattern: its data, and its YAML file, which may be JSON.
    `sandbox` is sent with each request, unless it is None. Return the names of the tasks."""
    tasks = tasks_of(samples)
    for name, group in tasks.items():
        data = folder / f"{name}.jsonl"
        _write_rows(data, group, ("id", "problem", "answer"))
        task = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            "output_type": "generate_until",
            "doc_to_text": "problem",
            "doc_to_target": "answer",
            "generation_kwargs": {"until": [], **({"sandbox": sandbox} if sandbox else {})},
            "filter_list": [
                {
                    "name": "answer",
                    "filter": [
                        {"function": "regex", "regex_pattern": PATTERNS[group[0].grader]},
                        {"function": "take_first"},
                    ],
                }
            ],
            "metric_list": [{"metric": "exact_match"}],
        }
        (folder / f"{name}.yaml").write_text(json.dumps(task, indent=2), encoding="utf-8")
    return list(tasks)


def export_to_inspect(samples: Iterable[Sample], folder: Path) -> list[str]:
    """Write the data and the pattern of a task of inspect_ai for each pattern. Return the names of
    the tasks."""
    tasks = tasks_of(samples)
    for name, group in tasks.items():
        _write_rows(folder / f"{name}.jsonl", group, ("id", "input", "target"))
        (folder / f"{name}.txt").write_text(PATTERNS[group[0].grader], encoding="utf-8")
    return list(tasks)


def _write_rows(path: Path, samples: Sequence[Sample], names: Sequence[str]) -> None:
    """Write the id, the problem and the answer of each sample under these names, as JSON lines."""
    rows = [
        dict(zip(names, (each.id, each.problem, each.ground_truth), strict=True))
        for each in samples
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
