"""The guest agent's reports: every field is checked for its type and range before it is used."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from sandbox_runtime.protocol import ProtocolError
from sandbox_runtime.sandbox import StreamName

MAX_NUMBER = 1e18
"""Beyond any count of bytes or seconds; NaN is not below it either."""
MAX_MESSAGE_CHARS = 1000

Report = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an operation was refused or failed."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class OutputReport:
    """The counts of one of a command's output streams."""

    total_bytes: int
    omitted_lines: int
    kept_bytes: int


@dataclass(frozen=True, slots=True)
class CommandReport:
    """The outcome of one reading of a command."""

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
    """The report's error, or None if the operation was done. Raises ProtocolError."""
    if "error" not in report:
        return None
    message = _text(report, "message") if "message" in report else ""
    return Failure(_text(report, "error"), message[:MAX_MESSAGE_CHARS])


def command_report(report: Report) -> CommandReport:
    """The report of a command. Raises ProtocolError."""
    return CommandReport(
        exit_code=_integer(report, "exit_code"),
        duration_s=_seconds(report, "duration_s"),
        cpu_s=_seconds(report, "cpu_s"),
        peak_memory_bytes=_count(report, "peak_memory_bytes"),
        # The agent subtracts two readings of a counter, of which the second may have failed.
        oom_kills=max(0, _integer(report, "oom_kills")),
        pids_refused=max(0, _integer(report, "pids_refused")),
        reading=_count(report, "reading"),
        timed_out=_flag(report, "timed_out"),
        running=_flag(report, "running"),
        waiting=_flag(report, "waiting"),
        outputs={"stdout": _output(report, "stdout"), "stderr": _output(report, "stderr")},
    )


def size_in(report: Report) -> int:
    """The size of the file that was read or written. Raises ProtocolError."""
    return _count(report, "bytes")


def is_truncated(report: Report) -> bool:
    """Whether a listing is not complete. Raises ProtocolError."""
    return _flag(report, "truncated")


def exit_of(report: Report) -> tuple[int, str]:
    """The exit code of a program and the end of what it wrote to standard error.

    Raises ProtocolError.
    """
    return _integer(report, "exit_code"), _text(report, "stderr")[:MAX_MESSAGE_CHARS]


def _output(report: Report, name: Literal["stdout", "stderr"]) -> OutputReport:
    return OutputReport(
        _count(report, f"{name}_bytes"),
        max(0, _integer(report, f"{name}_omitted_lines")),
        _count(report, f"{name}_kept_bytes"),
    )


def _integer(report: Report, key: str) -> int:
    value = report.get(key)
    if type(value) is not int or not abs(value) < MAX_NUMBER:  # True is an int too
        raise _bad(key, value)
    return value


def _count(report: Report, key: str) -> int:
    value = _integer(report, key)
    if value < 0:
        raise _bad(key, value)
    return value


def _seconds(report: Report, key: str) -> float:
    value = report.get(key)
    if (type(value) is not float and type(value) is not int) or not 0 <= value < MAX_NUMBER:
        raise _bad(key, value)
    return float(value)


def _flag(report: Report, key: str) -> bool:
    value = report.get(key, False)
    if not isinstance(value, bool):
        raise _bad(key, value)
    return value


def _text(report: Report, key: str) -> str:
    value = report.get(key)
    if not isinstance(value, str):
        raise _bad(key, value)
    # Half of a surrogate pair has no bytes: whoever encoded the text would fail.
    return value.encode("utf-8", "replace").decode()


def _bad(key: str, value: object) -> ProtocolError:
    # The repr of a list or an object may be nested deeper than the interpreter can recurse.
    shown = repr(value)[:80] if isinstance(value, str | int | float | None) else type(value)
    return ProtocolError(f"it reported {key} as {shown}")
