"""Journals: files that survive a kill of the process that writes them, such as results.jsonl.

A journal has one record a line, in JSON. A kill during a write leaves an incomplete last line:
readers skip it, and the next writer removes it.
"""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from os import SEEK_END
from pathlib import Path
from typing import IO, TypeVar

from pydantic import BaseModel, ValidationError

_BLOCK_BYTES = 1 << 16
_Record = TypeVar("_Record", bound=BaseModel)


class ResultsError(ValueError):
    """The files of an evaluation cannot be used. The message is one line for the user."""


@contextmanager
def open_journal(path: Path) -> Iterator[IO[bytes]]:
    """Create or continue a journal, and yield its file, which is open for appending.

    Raises ResultsError if another process has it open.
    """
    with path.open("a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ResultsError(f"{path}: another process writes to it.") from error
        _remove_unfinished_line(file)
        yield file


def append_record(file: IO[bytes], record: BaseModel) -> None:
    """Write a record at the end of a journal. It survives a later kill of this process."""
    file.write(record.model_dump_json().encode() + b"\n")
    file.flush()


def read_records(path: Path, model: type[_Record]) -> Iterator[_Record]:
    """Yield the records of a journal, in order, one in memory at a time. Raises ResultsError if the
    file cannot be read or if a record is malformed."""
    for number, _, line in read_lines(path):
        yield parse_record(path, number, line, model)


def read_lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Yield each complete line of a journal: its number, counted from 1, its offset in bytes, and
    the line. Raises ResultsError if the file cannot be read."""
    try:
        with path.open("rb") as file:
            offset = 0
            for number, line in enumerate(file, 1):
                if line.endswith(b"\n"):
                    yield number, offset, line
                offset += len(line)
    except OSError as error:
        raise ResultsError(f"{path}: {error.strerror}.") from error


def parse_record(path: Path, line_number: int, line: bytes, model: type[_Record]) -> _Record:
    """Return the record of a line. Raises ResultsError with the file, the line's number and the
    field that is wrong."""
    try:
        return model.model_validate_json(line)
    except ValidationError as error:
        raise ResultsError(f"{path}:{line_number}: {first_fault(error)}") from error


def first_fault(error: ValidationError) -> str:
    """Return the first field that is wrong and the reason, such as `mode: Field required`."""
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"])) or "the object"
    return f"{place}: {first['msg']}"


def _remove_unfinished_line(file: IO[bytes]) -> None:
    """Remove an incomplete last line. The file is read backwards, as it may be large."""
    end = file.seek(0, SEEK_END)
    while end:
        start = max(0, end - _BLOCK_BYTES)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            file.truncate(start + newline + 1)
            return
        end = start
    file.truncate(0)
