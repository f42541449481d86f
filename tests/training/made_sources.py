"""Made sources of each kind, in the format of their authors, and the command that reads them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training.__main__ import main
from training.rows import TaskRow, TaskSet, read_tasks

NORMANS = (
    "The Normans gave their name to Normandy, a region in France. They came from Denmark, Iceland"
    " and Norway under their leader Rollo, who swore fealty to King Charles III in 911."
)
HARBOUR = "The harbour of Tallow was dredged in 1874 by Edda Crane. It has 12 piers."


def qa(question: str, *answers: str, is_impossible: bool | None = None) -> dict[str, Any]:
    """Return a question of SQuAD; with `is_impossible` in the format of version 2.0."""
    marked = [{"text": answer, "answer_start": 0} for answer in answers]
    fields: dict[str, Any] = {"question": question, "id": "56ddde6b", "answers": marked}
    if is_impossible is not None:
        fields["is_impossible"] = is_impossible
        if is_impossible:
            fields["plausible_answers"] = [{"text": "Rollo", "answer_start": 0}]
    return fields


SQUAD_1 = {
    "version": "1.1",
    "data": [
        {
            "title": "Normans",
            "paragraphs": [
                {
                    "context": NORMANS,
                    "qas": [
                        qa("In what country is Normandy located?", "France", "France", "in France"),
                        qa("Who was the Norse leader?", "Rollo"),
                        qa("When did Rollo swear fealty?", "911"),
                    ],
                }
            ],
        },
        {
            "title": "Tallow",
            "paragraphs": [{"context": HARBOUR, "qas": [qa("How many piers are there?", "12")]}],
        },
    ],
}
SQUAD_2 = {
    "version": "v2.0",
    "data": [
        {
            "title": "Normans",
            "paragraphs": [
                {
                    "qas": [
                        qa("Who was the Norse leader?", "Rollo", is_impossible=False),
                        qa("Who ruled Sweden?", is_impossible=True),
                    ],
                    "context": NORMANS,
                }
            ],
        }
    ],
}
RACE = {
    "answers": ["B", "D"],
    "options": [
        ["A dentist.", "A baker.", "A pilot.", "A nurse."],
        ["Bread", "Milk", "Salt", "Honey cake"],
    ],
    "questions": ["What does Omar do?", "Omar is famous for his  _  ."],
    "article": "Omar rises at three. His honey cake is known in the whole valley.",
    "id": "high1234.txt",
}


def write_json(path: Path, value: object) -> Path:
    """Write a value as JSON on one line, as the authors do, and return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), "utf-8")
    return path


def write_lines(path: Path, *rows: Mapping[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
    return path


def build(source: Path | str, kind: str, out: Path, *options: str, seed: int = 1) -> TaskSet:
    """Build tasks with the command and return them."""
    command = ["tasks", "build", str(source), "--kind", kind, "--out", str(out)]
    assert main([*command, "--seed", str(seed), *options]) == 0
    return read_tasks(out)


def build_all(source: Path | str, kind: str, out: Path, *options: str) -> dict[str, TaskRow]:
    """Build a task of each question, and return them by question."""
    tasks = build(source, kind, out, "--tasks-per-context", "100", *options)
    return {row.meta.question.split("\n")[0]: row for row in tasks.all_rows}
