"""The logs that were begun on one day, and the index that holds them together."""

import errno
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from proxy.audit.chain import Chain, Fields, is_torn, read

INDEX = "index"
TAIL_BYTES = 65_536
"""More than the last line of an index has."""
UNREADABLE = "the last line of the day's index cannot be read"


def day_of(seconds: float) -> str:
    """The day of a time, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).date().isoformat()


def time_of(seconds: float) -> str:
    """A time as it is written, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds")


def oldest_kept(now: float, keep_days: float) -> str:
    """The first day that is kept, if logs are kept for so many days."""
    return day_of(max(0.0, now - keep_days * 86_400))


def log_path(directory: Path, run_id: str) -> Path:
    """Where a run's log lies."""
    return directory / f"{run_id}.jsonl"


def days(root: Path) -> list[Path]:
    """Their directories, oldest first."""
    return sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []


class LogFile:
    """One file, at the end of which lines are put. What it does raises OSError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)

    def append(self, data: bytes) -> None:
        write_all(self._file, data)

    def finish(self) -> None:
        """Have all of it outlive a power cut."""
        os.fsync(self._file)
        directory = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def close(self) -> None:
        os.close(self._file)


class Index:
    """A day's: which logs were begun, and how they ended. Several processes write it."""

    def __init__(self, directory: Path, key: bytes | None) -> None:
        self._directory = directory
        self._key = key

    def append(self, time: str, fields: Fields) -> None:
        """Add a line that outlives a power cut. Raises OSError."""
        with self._locked() as file:
            last = _last_line(file)
            chain = Chain(self._directory.name, self._key, at=last)
            first = b"" if last else chain.line(time, {"kind": "day", "after": self._before()})
            write_all(file, first + chain.line(time, fields))
            os.fsync(file)

    def _before(self) -> Fields | None:
        """The day before, as far as it has come."""
        earlier = [day for day in days(self._directory.parent) if day < self._directory]
        if not earlier:
            return None
        path = log_path(earlier[-1], INDEX)
        written = path.read_bytes() if path.exists() else b""
        entries = read(written, earlier[-1].name, self._key).entries
        return {"day": earlier[-1].name, "head": entries[-1]["hash"] if entries else ""}

    @contextmanager
    def _locked(self) -> Iterator[int]:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
        file = os.open(log_path(self._directory, INDEX), flags, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file
        finally:
            os.close(file)


def _last_line(file: int) -> Fields | None:
    """The last whole line; what a killed process has left of one behind it is taken away."""
    size = os.fstat(file).st_size
    tail = os.pread(file, TAIL_BYTES, max(0, size - TAIL_BYTES))
    whole = tail[: tail.rfind(b"\n") + 1]
    torn = tail[len(whole) :]
    if torn and not is_torn(torn):  # taken away, it would be missed by nobody
        raise OSError(errno.EIO, UNREADABLE)
    last = _place(whole) if whole else None
    if torn:
        os.ftruncate(file, size - len(torn))
    return last


def _place(whole: bytes) -> Fields:
    try:
        entry = json.loads(whole.splitlines()[-1])
        return {"seq": int(entry["seq"]), "hash": str(entry["hash"])}
    except (ValueError, KeyError, TypeError) as error:
        raise OSError(errno.EIO, UNREADABLE) from error


def write_all(file: int, data: bytes) -> None:
    """Put all of it at the end. Raises OSError."""
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]
