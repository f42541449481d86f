"""Audit logs on the disk: a log file for each run, whose lines are a hash chain, and an index for
each day, which contains the last hash of each log.

Functions that read or write files block, and raise OSError. `verify` implements the command `audit
verify`.
"""

import errno
import fcntl
import hashlib
import hmac
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

VERSION = "llm-sandbox-proxy audit 1"
LAST_LINE_FIELD = "last"
"""The field that marks the last line of a log."""
Fields = Mapping[str, Any]
INDEX_NAME = "index"
TAIL_BYTES = 65_536
"""Number of bytes that are read from the end of an index: more than the length of a line."""
UNREADABLE_INDEX = "the last line of the day's index cannot be read"
State = Literal["ok", "unfinished", "WRONG"]


class HashChain:
    """Makes the lines of one log. Each line contains the hash of the line before and its own
    hash."""

    def __init__(self, seed: str, key: bytes | None, *, last_entry: Fields | None = None) -> None:
        """`seed` is the name of the log. `last_entry` is the line after which the chain continues,
        if any."""
        self._key = key
        self.head: str = (
            last_entry["hash"] if last_entry else _digest(f"{VERSION}\n{seed}".encode(), key)
        )
        self.line_count: int = last_entry["seq"] + 1 if last_entry else 0

    def next_line(self, time: str, fields: Fields) -> bytes:
        """Return the next line and advance the chain."""
        entry = {**fields, "seq": self.line_count, "time": time, "prev": self.head}
        self.head = _digest(_canonical_json(entry), self._key)
        self.line_count += 1
        return _canonical_json({**entry, "hash": self.head}) + b"\n"


@dataclass(frozen=True, slots=True)
class CheckedLog:
    """The parsed entries of a log, and the first fault that was found in it."""

    entries: tuple[Fields, ...]
    """The entries before the fault."""
    fault: str = ""
    """The fault; empty if there is none."""

    @property
    def is_complete(self) -> bool:
        """True if the log ends with the line that marks its end."""
        return bool(self.entries) and LAST_LINE_FIELD in self.entries[-1]


def read_chain(data: bytes, seed: str, key: bytes | None) -> CheckedLog:
    """Parse a log and check its hash chain. An incomplete last line is no fault if a killed process
    can have left it."""
    *lines, torn = data.split(b"\n")
    chain = HashChain(seed, key)
    entries: list[Fields] = []
    for number, line in enumerate(lines, 1):
        entry = _parse_entry(line)
        if entries and LAST_LINE_FIELD in entries[-1]:
            return CheckedLog(tuple(entries), f"line {number} follows the last line of the log")
        if fault := _line_fault(entry, line, chain):
            return CheckedLog(tuple(entries), f"line {number} {fault}")
        assert entry is not None
        chain = HashChain(seed, key, last_entry=entry)
        entries.append(entry)
    if torn and not _is_torn_line(torn):
        return CheckedLog(tuple(entries), f"line {len(lines) + 1} is not the beginning of a line")
    return CheckedLog(tuple(entries))


def _is_torn_line(tail: bytes) -> bool:
    """Return True if a killed process can have left this text, the beginning of a line."""
    try:
        json.JSONDecoder().raw_decode(tail.decode(errors="replace"))
    except (ValueError, RecursionError):
        return tail.startswith(b"{")
    return False


def _canonical_json(value: Fields) -> bytes:
    """Return these fields as canonical JSON, the only form that a line may have."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _digest(data: bytes, key: bytes | None) -> str:
    """Return the SHA-256 hash of the data, or with a key the HMAC."""
    if key is None:
        return hashlib.sha256(data).hexdigest()
    return hmac.new(key, data, hashlib.sha256).hexdigest()


def _line_fault(entry: Fields | None, line: bytes, chain: HashChain) -> str:
    if entry is None or _canonical_json(entry) != line:
        return "was changed after it was written"
    if entry.get("seq") != chain.line_count:
        return f"has the number {entry.get('seq')} (expected: {chain.line_count})"
    if entry.get("prev") != chain.head:
        return "does not continue the line before it"
    written = {name: value for name, value in entry.items() if name not in ("hash", "time")}
    if chain.next_line(entry.get("time", ""), written) != line + b"\n":
        return "does not match its hash (with this key)"
    return ""


def _parse_entry(line: bytes) -> Fields | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("hash"), str) else None


def day_of(seconds: float) -> str:
    """Return the day of a time, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).date().isoformat()


def time_of(seconds: float) -> str:
    """Return a time as logs write it, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds")


def oldest_kept_day(now: float, keep_days: float) -> str:
    """Return the first day whose logs are not older than `keep_days`."""
    return day_of(max(0.0, now - keep_days * 86_400))


def log_path(directory: Path, run_id: str) -> Path:
    """Return the path of a run's log, or of a day's index."""
    return directory / f"{run_id}.jsonl"


def day_directories(root: Path) -> list[Path]:
    """Return the directories of all days, oldest first."""
    return sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []


class DayIndex:
    """The index of a day, with an entry for the beginning and for the end of each log. Several
    processes may append to one index."""

    def __init__(self, directory: Path, key: bytes | None) -> None:
        self._directory = directory
        self._key = key

    def append(self, time: str, fields: Fields) -> None:
        """Append a line, and sync the index to the disk."""
        with self._open_locked() as file:
            last = _read_last_position(file)
            chain = HashChain(self._directory.name, self._key, last_entry=last)
            first = (
                b""
                if last
                else chain.next_line(time, {"kind": "day", "after": self._link_to_previous_day()})
            )
            _write_all(file, first + chain.next_line(time, fields))
            os.fsync(file)

    def _link_to_previous_day(self) -> Fields | None:
        """Return the previous day with logs and the last hash of its index, or None."""
        earlier = [day for day in day_directories(self._directory.parent) if day < self._directory]
        if not earlier:
            return None
        path = log_path(earlier[-1], INDEX_NAME)
        written = path.read_bytes() if path.exists() else b""
        entries = read_chain(written, earlier[-1].name, self._key).entries
        return {"day": earlier[-1].name, "head": entries[-1]["hash"] if entries else ""}

    @contextmanager
    def _open_locked(self) -> Iterator[int]:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
        file = os.open(log_path(self._directory, INDEX_NAME), flags, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file
        finally:
            os.close(file)


def _read_last_position(file: int) -> Fields | None:
    """Return the `seq` and the `hash` of the last complete line of an index, or None if there is
    none. Remove an incomplete line at the end, which a process leaves if it is killed while it
    writes. Raises OSError if the end of the index is damaged in any other way."""
    size = os.fstat(file).st_size
    tail = os.pread(file, TAIL_BYTES, max(0, size - TAIL_BYTES))
    whole = tail[: tail.rfind(b"\n") + 1]
    torn = tail[len(whole) :]
    if torn and not _is_torn_line(torn):  # removing the text would hide a change
        raise OSError(errno.EIO, UNREADABLE_INDEX)
    last = _chain_position(whole) if whole else None
    if torn:
        os.ftruncate(file, size - len(torn))
    return last


def _chain_position(lines: bytes) -> Fields:
    try:
        entry = json.loads(lines.splitlines()[-1])
        return {"seq": int(entry["seq"]), "hash": str(entry["hash"])}
    except (ValueError, KeyError, TypeError) as error:
        raise OSError(errno.EIO, UNREADABLE_INDEX) from error


def _write_all(file: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]


class AuditLogWriter:
    """Writes the log of one run, and the entries for this log in the day's index."""

    def __init__(
        self, directory: Path, run_id: str, key: bytes | None, now: Callable[[], float]
    ) -> None:
        self._directory = directory
        self.run_id = run_id
        self._now = now
        self._chain = HashChain(run_id, key)
        self._index = DayIndex(directory, key)
        self._file: int | None = None

    def next_line(self, fields: Fields) -> bytes:
        """Return `fields` as the log's next line, and advance the hash chain. The caller must
        append the line."""
        return self._chain.next_line(time_of(self._now()), fields)

    def begin(self) -> None:
        """Create the file, and append an entry for the beginning of the log to the day's index."""
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = log_path(self._directory, self.run_id)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self._index.append(time_of(self._now()), {"kind": "begun", "run": self.run_id})

    def append(self, line: bytes) -> None:
        assert self._file is not None
        _write_all(self._file, line)

    def finish(self) -> None:
        """Sync the log to the disk, and append an entry for its end, with its last hash, to the
        day's index."""
        assert self._file is not None
        os.fsync(self._file)
        directory = os.open(self._directory, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
        summary = {"run": self.run_id, "lines": self._chain.line_count, "head": self._chain.head}
        self._index.append(time_of(self._now()), {"kind": "ended", **summary})

    def close(self) -> None:
        """Close the file, if it was created."""
        if self._file is not None:
            os.close(self._file)


@dataclass(frozen=True, slots=True)
class Finding:
    """The verified state of one log or index."""

    state: State
    name: str
    detail: str

    def __str__(self) -> str:
        return f"{self.state:<10}  {self.name}  {self.detail}"


def verify(
    root: Path, key: bytes | None, names: Sequence[str], keep_days: float
) -> Iterator[Finding]:
    """Yield the findings for all logs, or for the logs in `names`, which are run ids or paths of
    logs. Days older than `keep_days` may be missing."""
    if names:
        for name in names:
            yield from _verify_named_log(root, key, name)
        return
    oldest = oldest_kept_day(time.time(), keep_days)
    hashes_by_day: dict[str, list[str]] = {}
    for directory in day_directories(root):
        index = _DayVerifier(directory, key)
        yield index.verify_index(hashes_by_day, oldest)
        hashes_by_day[directory.name] = [str(entry["hash"]) for entry in index.index_log.entries]
        for run_id in index.run_ids():
            yield index.verify_log(run_id)


def _verify_named_log(root: Path, key: bytes | None, name: str) -> Iterator[Finding]:
    if name.endswith(".jsonl"):
        path = Path(name)
        yield _DayVerifier(path.parent, key).verify_log(path.stem)
        return
    found = [day for day in day_directories(root) if name in _DayVerifier(day, key).run_ids()]
    if not found:
        yield Finding("WRONG", name, "no day has a log of this run")
    for day in found:
        yield _DayVerifier(day, key).verify_log(name)


class _DayVerifier:
    """Verifies the index and the logs of one day."""

    def __init__(self, directory: Path, key: bytes | None) -> None:
        self._directory = directory
        self._key = key
        self._path = log_path(directory, INDEX_NAME)
        data = self._path.read_bytes() if self._path.exists() else b""
        self.index_log: CheckedLog = read_chain(data, directory.resolve().name, key)
        self._begun_runs = set(self._entries_by_run("begun"))
        self._end_entries = self._entries_by_run("ended")

    def _entries_by_run(self, kind: str) -> dict[str, Fields]:
        entries = self.index_log.entries
        return {str(entry.get("run")): entry for entry in entries if entry.get("kind") == kind}

    def run_ids(self) -> list[str]:
        """Return the ids of all runs in the index or the directory."""
        found = {path.stem for path in self._directory.glob("*.jsonl")} - {INDEX_NAME}
        return sorted(found | self._begun_runs)

    def verify_index(self, earlier_hashes: dict[str, list[str]], oldest_day: str) -> Finding:
        """Return the state of the index. `earlier_hashes` contains the hashes in the indexes of
        earlier days, by day. Days before `oldest_day` may be missing."""
        name = f"{self._directory.name}/{INDEX_NAME}"
        entries = self.index_log.entries
        if self.index_log.fault:
            return Finding("WRONG", name, self.index_log.fault)
        if not entries:
            return Finding("WRONG", name, "it is missing, or empty")
        if fault := _link_fault(entries[0].get("after"), earlier_hashes, oldest_day):
            return Finding("WRONG", name, fault)
        return Finding("ok", name, f"{len(entries)} lines, head {entries[-1]['hash']}")

    def verify_log(self, run_id: str) -> Finding:
        """Return the state of a run's log."""
        name = f"{self._directory.name}/{run_id}"
        path = log_path(self._directory, run_id)
        if not path.exists():
            return Finding("WRONG", name, "the log is missing")
        data = path.read_bytes()
        log = read_chain(data, run_id, self._key)
        lines = f"{len(log.entries)} lines"
        if fault := log.fault or self._index_mismatch(run_id, log, data):
            return Finding("WRONG", name, fault)
        if not log.is_complete:
            return Finding("unfinished", name, f"{lines}: the run is at work, or was killed")
        if run_id not in self._end_entries:
            return Finding("unfinished", name, f"{lines}: its end is not in the index")
        return Finding("ok", name, f"{lines}, {_outcome_text(log.entries[-1])}")

    def _index_mismatch(self, run_id: str, log: CheckedLog, data: bytes) -> str:
        if run_id not in self._begun_runs:
            # The file is created first: the process may have been killed before its index entry.
            return "it is not in the index" if data else ""
        ended = self._end_entries.get(run_id)
        if ended is None:
            fault = self.index_log.fault
            return f"its end may be missing in the index, in which {fault}" if fault else ""
        head = log.entries[-1]["hash"] if log.entries else ""
        if (len(log.entries), head) != (ended.get("lines"), ended.get("head")):
            return f"it has changed since it ended with {ended.get('lines')} lines"
        if not data.endswith(b"\n"):
            return "something follows its last line"
        return ""


def _link_fault(
    previous_day: Fields | None, earlier_hashes: dict[str, list[str]], oldest_day: str
) -> str:
    """Return the fault in an index's link to the previous day; empty if there is none."""
    latest = max(earlier_hashes, default=None)
    if previous_day is None:
        return "" if latest is None else f"it does not continue the index of {latest}"
    day, head = str(previous_day.get("day")), previous_day.get("head")
    if day not in earlier_hashes:
        return "" if day < oldest_day else f"the logs of {day} are missing"
    if latest != day:
        return f"it does not continue the index of {latest}"
    if head and head not in earlier_hashes[day]:
        return f"the index of {day} does not have the hash that this index continues"
    return ""


def _outcome_text(last_entry: Fields) -> str:
    if last_entry.get("kind") == "failure":
        return f"failed: {last_entry.get('error')}"
    return ", ".join(str(choice.get("stop_reason")) for choice in last_entry.get("choices", ()))
