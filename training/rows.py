"""The rows of a set of tasks: their format on disk, its manifest and its validation.

A set of tasks is a directory:

    manifest.json   origin, licence, seed, options, counts, and the hash of each file of rows
    train.jsonl     one row a line
    val.jsonl       the rows of other contexts, if a part of the contexts is held out

The columns of a row are those of the reference implementation of arXiv 2601.16206, and `meta`.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from evaluation.journal import first_fault
from evaluation.row_sources import MAX_BYTES

QaType = Literal["mcq1", "mcqN", "number", "span", "free"]
"""mcq1: one choice; mcqN: several choices; number; span: words of the context; free: other text."""
Split = Literal["train", "val"]
SPLITS: tuple[Split, ...] = ("train", "val")
MANIFEST_FILE = "manifest.json"
MAX_ANSWER_CHARS = 10_000
"""Maximum length of a right answer."""


class TaskError(ValueError):
    """A source or a set of tasks is missing or malformed. The message is one line for the user."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Meta(_Record):
    """The origin of a row, and counts."""

    source: str
    licence: str
    seed: int
    context: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """The SHA-256 of the context's words. It decides the split of the row."""
    question: str
    """The question without examples and without the form of the answer."""
    n_examples: int
    n_files: int
    n_distractors: int
    sizes: Annotated[tuple[int, ...], Field(strict=False)]
    """The number of characters of each file, in the order of `input_files`."""
    gold_files: Annotated[tuple[str, ...], Field(strict=False)]
    """The names of the files that contain the right answer, or of all files of the context if
    none contains it literally."""


class TaskRow(_Record):
    """One task: a problem, its files and its right answer."""

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$", max_length=200)]
    domain: Annotated[str, Field(min_length=1, max_length=100)]
    problem_statement: Annotated[str, Field(min_length=1)]
    ground_truth: Annotated[str, Field(min_length=1, max_length=MAX_ANSWER_CHARS)]
    input_files: str
    """A JSON object: the texts of the files by name."""
    qa_type: QaType
    meta: Meta

    @property
    def files(self) -> dict[str, str]:
        """Return the texts of the files by name. Raises TaskError."""
        try:
            files = json.loads(self.input_files)
        except (ValueError, RecursionError) as error:
            raise TaskError(f"{self.id}: input_files: not JSON: {error}") from error
        if not isinstance(files, dict) or not all(isinstance(each, str) for each in files.values()):
            raise TaskError(f"{self.id}: input_files: not an object of texts by name")
        return files


class FileRecord(_Record):
    """The manifest's entry for a file of rows, which has the rows of one split."""

    count: int
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Manifest(_Record):
    """The origin, the options and the counts of a set of tasks."""

    version: Literal[1] = 1
    kind: str
    source: str
    licence: str
    seed: int
    options: Mapping[str, Any]
    contexts: int
    """The number of contexts in the source, after contexts with the same words were merged."""
    questions: int
    """The number of questions in the source."""
    dropped: Mapping[str, int]
    """The numbers of questions and contexts that were left out, by reason."""
    files: Mapping[str, FileRecord]
    """The files of rows by name."""


@dataclass(frozen=True, slots=True)
class TaskSet:
    """A set of tasks in a directory."""

    directory: Path
    manifest: Manifest
    rows: Mapping[Split, Sequence[TaskRow]]

    @property
    def all_rows(self) -> list[TaskRow]:
        """Return the rows of all splits."""
        return [row for rows in self.rows.values() for row in rows]


def write_tasks(
    directory: Path, manifest: Manifest, rows: Mapping[Split, Sequence[TaskRow]]
) -> TaskSet:
    """Write a set of tasks and return it. An earlier set in the directory is replaced.

    `manifest.files` is replaced by the written files. The manifest is written last: a set without a
    manifest is incomplete. Raises TaskError if the directory cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / MANIFEST_FILE).unlink(missing_ok=True)
        files = {}
        for split in SPLITS:
            path = directory / f"{split}.jsonl"
            path.unlink(missing_ok=True)
            if rows.get(split):
                data = b"".join(f"{_row_json(row)}\n".encode() for row in rows[split])
                path.write_bytes(data)
                digest = hashlib.sha256(data).hexdigest()
                files[path.name] = FileRecord(count=len(rows[split]), sha256=digest)
        written = manifest.model_copy(update={"files": files})
        text = written.model_dump_json(indent=2) + "\n"
        (directory / MANIFEST_FILE).write_text(text, encoding="utf-8")
    except OSError as error:
        raise TaskError(f"{error.filename}: {error.strerror}") from error
    return TaskSet(directory, written, rows)


def read_tasks(directory: Path) -> TaskSet:
    """Return the set of tasks in a directory. Raises TaskError with the file, the line and the
    field that is wrong."""
    path = directory / MANIFEST_FILE
    try:
        manifest = Manifest.model_validate_json(path.read_bytes())
        rows: dict[Split, Sequence[TaskRow]] = {}
        for split in SPLITS:
            if record := manifest.files.get(f"{split}.jsonl"):
                rows[split] = tuple(_read_rows(directory / f"{split}.jsonl", record))
    except OSError as error:
        raise TaskError(
            f"{error.filename}: {error.strerror}. Build the tasks: sandbox-train tasks build"
        ) from error
    except ValidationError as error:
        raise TaskError(f"{path}: {first_fault(error)}") from error
    return TaskSet(directory, manifest, rows)


def files_json(files: Mapping[str, str]) -> str:
    """Return the value of the column `input_files`: a JSON object of the files' texts by name."""
    return json.dumps(files, ensure_ascii=False)


def _row_json(row: TaskRow) -> str:
    return json.dumps(row.model_dump(mode="json"), ensure_ascii=False)


def _read_rows(path: Path, record: FileRecord) -> Iterator[TaskRow]:
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise TaskError(f"{path}: {size} bytes; at most {MAX_BYTES} are supported")
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != record.sha256:
        raise TaskError(f"{path}: the file's hash is not the manifest's. Build the tasks again.")
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        try:
            row = TaskRow.model_validate_json(line)
        except ValidationError as error:
            raise TaskError(f"{path}:{number}: {first_fault(error)}") from error
        yield row
