"""Parsers of the guest agent's reports: the outcome of a command or file operation, and the entries
of a listing. The type and range of every field are checked before it is used."""

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from policies.json_bounds import decode_json
from sandbox_runtime.protocol import ProtocolError
from sandbox_runtime.sandbox import DirectoryEntry, StreamName

MAX_NUMBER = 1e18
"""Larger than any real count of bytes or seconds. `value < MAX_NUMBER` also rejects NaN."""
MAX_MESSAGE_CHARS = 1000
MAX_LISTING_BYTES = 4 << 20
"""The agent's limit on the bytes of a listing, without hashes. The parsed paths may take four times
as much memory, because one wide character makes all characters of a string wide."""
HASH_BYTES = 68
"""Number of bytes that a hash adds to an entry."""
ENTRIES_PER_BATCH = 200
"""Number of entries that are parsed before other tasks run: about 2 ms."""
MAX_PATH_BYTES = 4096
"""Linux's limit on paths, with the final NUL; the agent leaves out longer ones."""
MAX_LINE_BYTES = 6 * MAX_PATH_BYTES + 1024
"""Maximum length of a line of a listing: a path with every byte escaped, and the other fields."""
SHA256 = re.compile("[0-9a-f]{64}|")

Report = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why an operation was refused or failed."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class OutputReport:
    """The size of a command's stdout or stderr in one reading (see `protocol`)."""

    total_bytes: int
    omitted_lines: int
    kept_bytes: int
    """Number of bytes in the file inside the sandbox that keeps this output; 0 if none does."""


@dataclass(frozen=True, slots=True)
class CommandReport:
    """The agent's report at the end of one reading of a command's output; see `protocol`."""

    exit_code: int
    duration_s: float
    cpu_s: float
    peak_memory_bytes: int
    oom_kills: int
    pids_refused: int
    reading: int
    timed_out: bool
    running: bool
    waiting: bool
    outputs: Mapping[StreamName, OutputReport]


def failure_in(report: Report) -> Failure | None:
    """Return the failure that a report has, or None. Raises ProtocolError."""
    if "error" not in report:
        return None
    message = _text(report, "message") if "message" in report else ""
    return Failure(_text(report, "error"), message[:MAX_MESSAGE_CHARS])


def command_report(report: Report) -> CommandReport:
    """Return the report of a command. Raises ProtocolError."""
    return CommandReport(
        exit_code=_integer(report, "exit_code"),
        duration_s=_seconds(report, "duration_s"),
        cpu_s=_seconds(report, "cpu_s"),
        peak_memory_bytes=_count(report, "peak_memory_bytes"),
        # Negative if the agent could not read a counter the second time.
        oom_kills=max(0, _integer(report, "oom_kills")),
        pids_refused=max(0, _integer(report, "pids_refused")),
        reading=_count(report, "reading"),
        timed_out=_flag(report, "timed_out"),
        running=_flag(report, "running"),
        waiting=_flag(report, "waiting"),
        outputs={
            "stdout": _output_report(report, "stdout"),
            "stderr": _output_report(report, "stderr"),
        },
    )


def size_in(report: Report) -> int:
    """Return the size of the file that was read or written. Raises ProtocolError."""
    return _count(report, "bytes")


def is_truncated(report: Report) -> bool:
    """Return True if a listing is incomplete. Raises ProtocolError."""
    return _flag(report, "truncated")


def exit_code_and_stderr(report: Report) -> tuple[int, str]:
    """Return the exit code of a program and the tail of its standard error.

    Raises ProtocolError.
    """
    return _integer(report, "exit_code"), _text(report, "stderr")[:MAX_MESSAGE_CHARS]


def _output_report(report: Report, name: Literal["stdout", "stderr"]) -> OutputReport:
    return OutputReport(
        _count(report, f"{name}_bytes"),
        max(0, _integer(report, f"{name}_omitted_lines")),
        _count(report, f"{name}_kept_bytes"),
    )


def _integer(report: Report, key: str, minimum: int = 1 - int(MAX_NUMBER)) -> int:
    value = report.get(key)
    if type(value) is not int or not minimum <= value < MAX_NUMBER:  # True is an int too
        raise _invalid_value_error(key, value)
    return value


def _count(report: Report, key: str) -> int:
    return _integer(report, key, minimum=0)


def _seconds(report: Report, key: str) -> float:
    value = report.get(key)
    if (type(value) is not float and type(value) is not int) or not 0 <= value < MAX_NUMBER:
        raise _invalid_value_error(key, value)
    return float(value)


def _flag(report: Report, key: str) -> bool:
    value = report.get(key, False)
    if not isinstance(value, bool):
        raise _invalid_value_error(key, value)
    return value


def _text(report: Report, key: str) -> str:
    value = report.get(key)
    if not isinstance(value, str):
        raise _invalid_value_error(key, value)
    # A lone surrogate cannot be encoded, so it would make later code fail.
    return value.encode("utf-8", "replace").decode()


def _invalid_value_error(key: str, value: object) -> ProtocolError:
    # repr() of a deeply nested list or object could exceed the recursion limit.
    shown = repr(value)[:80] if isinstance(value, str | int | float | None) else type(value)
    return ProtocolError(f"the agent reported {key} as {shown}")


class ListingReader:
    """Parses one listing, a line of JSON for each entry, as it arrives. The numbers of entries and
    bytes are checked before a line is parsed."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._bytes_left = MAX_LISTING_BYTES + HASH_BYTES * max_entries
        self._line = b""
        """The last line, which is not complete yet."""
        self._entries: list[DirectoryEntry] = []

    async def feed(self, data: bytes) -> None:
        """Parse the lines that `data` completes, a few in each turn of the event loop. Raises
        ProtocolError."""
        self._bytes_left -= len(data)
        if self._bytes_left < 0:
            raise ProtocolError("the agent sent an endless listing")
        if len(self._entries) + data.count(b"\n") > self._max_entries:
            raise self._too_many_entries_error()
        *lines, self._line = (self._line + data).split(b"\n")
        if len(self._line) > MAX_LINE_BYTES:
            raise ProtocolError("the agent sent a malformed listing: a line has no end")
        for start in range(0, len(lines), ENTRIES_PER_BATCH):
            self._entries += map(_entry, lines[start : start + ENTRIES_PER_BATCH])
            await asyncio.sleep(0)

    def finish(self) -> tuple[DirectoryEntry, ...]:
        """Return all entries, sorted by path. Raises ProtocolError."""
        if self._line:
            self._entries.append(_entry(self._line))
        if len(self._entries) > self._max_entries:
            raise self._too_many_entries_error()
        return tuple(sorted(self._entries, key=lambda entry: entry.path))

    def _too_many_entries_error(self) -> ProtocolError:
        return ProtocolError(
            f"the agent sent a malformed listing: more than {self._max_entries} entries"
        )


def _entry(line: bytes) -> DirectoryEntry:
    """Parse one line of a listing. Raises ProtocolError."""
    if len(line) <= MAX_LINE_BYTES:
        try:
            value = decode_json(line)
        except (ValueError, RecursionError):
            value = None
        match value:
            case [str(path), "file" | "directory" | "other" as kind, size, *rest] if (
                type(size) is int and 0 <= size < MAX_NUMBER and _is_valid_path(path)
            ):
                match rest:
                    case []:
                        return DirectoryEntry(path, kind, size)
                    case [str(digest)] if kind == "file" and SHA256.fullmatch(digest):
                        return DirectoryEntry(path, kind, size, digest)
    raise ProtocolError(f"the agent sent a malformed listing: {line[:80]!r}")


def _is_valid_path(path: str) -> bool:
    """Return True if a path is relative, has no empty, `.` or `..` component and no NUL, and is at
    most MAX_PATH_BYTES long."""
    try:
        size = len(path.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError:
        return False
    parts = path.split("/")
    return size <= MAX_PATH_BYTES and "\0" not in path and not {"", ".", ".."} & set(parts)
