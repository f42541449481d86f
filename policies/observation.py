"""What the model sees of a tool's output."""

import re
from dataclasses import dataclass

_ESCAPE_SEQUENCE = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]"  # colours, cursor moves
    r"|\][^\x07\x1b\n]*(?:\x07|\x1b\\)?"  # window titles, hyperlinks
    r"|[ -/]+[0-~]"  # character sets
    r"|[0-~])"
)
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0d-\x1f\x7f\ud800-\udfff]")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MARKER_CHARS = 200
_MARKER_LINES = 2
_SIGKILL_EXIT_CODE = 128 + 9


@dataclass(frozen=True, slots=True)
class ObservationLimits:
    """How much of a tool's output reaches the model."""

    max_chars: int = 30_000
    """Characters of one output stream, or of one view of a file or directory."""
    max_lines: int = 2_000
    """Lines of one output stream, or of one view of a file."""
    max_line_chars: int = 2_000
    """Characters of one line in a view of a file."""
    max_entries: int = 500
    """Names in a view of a directory."""


DEFAULT_LIMITS = ObservationLimits()


@dataclass(frozen=True, slots=True)
class StreamCap:
    """How much of one output stream need leave the sandbox."""

    max_bytes: int
    max_lines: int


def output_cap(limits: ObservationLimits) -> StreamCap:
    """A cap that leaves room for the sandbox's own "left out" line, so that nothing is cut twice.

    A character is at least one byte, so what passes the cap fits the limits.
    """
    return StreamCap(
        max_bytes=max(limits.max_chars - _MARKER_CHARS, limits.max_chars // 2),
        max_lines=max(limits.max_lines - _MARKER_LINES, limits.max_lines // 2),
    )


def bash_observation(
    *,
    exit_code: int,
    stdout: str,
    stderr: str,
    timed_out: bool,
    timeout_s: float,
    limits: ObservationLimits = DEFAULT_LIMITS,
) -> str:
    """How a command ended and what it printed, in words for the model."""
    parts = [_exit_line(exit_code, timed_out)]
    for name, output in (("stdout", stdout), ("stderr", stderr)):
        shown = clip(readable(output).removesuffix("\n"), limits)
        if shown.strip():
            parts += [f"[{name}]", shown]
    if len(parts) == 1:
        parts.append("(no output)")
    if timed_out:
        parts.append(
            f"[timed out after {timeout_s:g} s: the command was stopped; partial output above."
            " Run long work in the background, its output in a file: command > log 2>&1 &]"
        )
    return "\n".join(parts)


def _exit_line(exit_code: int, timed_out: bool) -> str:
    if timed_out:
        return f"Exit code: {exit_code} (timed out)"
    if exit_code == _SIGKILL_EXIT_CODE:
        return f"Exit code: {exit_code} (killed; often for want of memory)"
    return f"Exit code: {exit_code}"


def readable(output: str) -> str:
    """What a terminal would be left with: no escape sequences, no overwritten progress lines."""
    text = _ESCAPE_SEQUENCE.sub("", output).replace("\r\n", "\n")
    if "\r" in text:
        text = "\n".join(_last_state(line) for line in text.split("\n"))
    return printable(text)


def _last_state(line: str) -> str:
    states = [state for state in line.split("\r") if state]
    return states[-1] if states else ""


def printable(text: str) -> str:
    """The text with U+FFFD for what JSON, a tokenizer or a terminal may choke on."""
    return _UNPRINTABLE.sub(_REPLACEMENT, text)


def clip(text: str, limits: ObservationLimits) -> str:
    """The text, or its head and tail with a line between them that says how much is left out."""
    lines = text.split("\n")
    if len(text) <= limits.max_chars and len(lines) <= limits.max_lines:
        return text
    half_lines, half_chars = max(1, limits.max_lines // 2), max(1, limits.max_chars // 2)
    head = "\n".join(lines[:half_lines])[:half_chars]
    tail = "\n".join(lines[-half_lines:])[-half_chars:]
    left_out = len(text) - len(head) - len(tail)
    return f"{head}\n[... {left_out} characters left out ...]\n{tail}"
