"""The observations of our own manner: what the model sees of a tool's output."""

import re
from collections.abc import Iterator
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
STUB_CHARS = 400
"""So much is left of an observation that does not fit into the context."""


@dataclass(frozen=True, slots=True)
class StreamCap:
    """How much of one output stream leaves the sandbox at most."""

    max_bytes: int
    max_lines: int


def output_cap(limits: ObservationLimits) -> StreamCap:
    """Return a cap with room for the sandbox's own "left out" line, so that nothing is cut twice.

    A character is at least one byte, so that output within the cap is within the limits.
    """
    return StreamCap(
        max_bytes=max(limits.max_chars - _MARKER_CHARS, limits.max_chars // 2),
        max_lines=max(limits.max_lines - _MARKER_LINES, limits.max_lines // 2),
    )


@dataclass(frozen=True, slots=True)
class CommandOutcome:
    """The outcome of a command, or its state so far."""

    exit_code: int
    stdout: str
    stderr: str
    timeout_s: float
    """How long it may take."""
    duration_s: float = 0.0
    timed_out: bool = False
    oom_kills: int = 0
    pids_refused: int = 0
    job_id: str = ""
    """Set while the command goes on as a job."""
    waiting: bool = False
    """True if the job waits for input."""


def bash_observation(outcome: CommandOutcome, limits: ObservationLimits = DEFAULT_LIMITS) -> str:
    """Return the observation of a command: how it ended or that it goes on, and its output."""
    parts = [_first_line(outcome)]
    for name, output in (("stdout", outcome.stdout), ("stderr", outcome.stderr)):
        shown = truncate_middle(terminal_text(output).removesuffix("\n"), limits)
        if shown.strip():
            parts += [f"[{name}]", shown]
    if len(parts) == 1:
        parts.append("(no output)")
    return "\n".join([*parts, *_notes(outcome)])


def _first_line(outcome: CommandOutcome) -> str:
    if outcome.job_id:
        doing = "Waiting for input" if outcome.waiting else "Still running"
        return f"{doing} after {outcome.duration_s:.0f} s, as job {outcome.job_id}"
    if outcome.timed_out:
        return f"Exit code: {outcome.exit_code} (timed out)"
    if outcome.exit_code == _SIGKILL_EXIT_CODE and not outcome.oom_kills:
        return f"Exit code: {outcome.exit_code} (killed; often for want of memory)"
    return f"Exit code: {outcome.exit_code}"


def _notes(outcome: CommandOutcome) -> Iterator[str]:
    if outcome.oom_kills:
        processes = "a process was" if outcome.oom_kills == 1 else "several processes were"
        yield f"[out of memory: {processes} killed; use less at a time]"
    if outcome.pids_refused:
        yield "[too many processes: some could not be started; run fewer at a time]"
    if outcome.timed_out:
        yield (
            f"[timed out after {outcome.timeout_s:g} s: the command was stopped; partial output"
            " above. Give it more with timeout_s, or run it in the background, its output in a"
            " file: command > log 2>&1 &]"
        )
    if outcome.waiting:
        yield (
            f"[it waits for somebody to type: call execute_bash with job_id {outcome.job_id!r} and"
            " the text as command, C-d for the end of input, or C-c to stop it]"
        )
    elif outcome.job_id:
        yield (
            f"[it goes on: call execute_bash with job_id {outcome.job_id!r} and an empty command"
            " to read on, or C-c to stop it; other commands can run meanwhile]"
        )


def sandbox_lost_text(why: str) -> str:
    """Return what the model is told when its sandbox has ended unexpectedly."""
    return (
        f"{why}\nEverything in the sandbox is lost: files, variables, running processes. The next"
        " command starts in a new one, which has nothing but the files the user gave."
    )


def file_not_written_text(path: str, why: str) -> str:
    """Return what the model is told when a given file could not be put into the sandbox."""
    return f"[the given file {path} is not in the sandbox: {why}]"


def terminal_text(output: str) -> str:
    """Return what a terminal would show in the end: no escape sequences, and of progress lines that
    overwrite each other the last."""
    text = _ESCAPE_SEQUENCE.sub("", output).replace("\r\n", "\n")
    if "\r" in text:
        text = "\n".join(_last_state(line) for line in text.split("\n"))
    return printable(text)


def _last_state(line: str) -> str:
    states = [state for state in line.split("\r") if state]
    return states[-1] if states else ""


def printable(text: str) -> str:
    """Return the text with U+FFFD for characters that JSON, tokenizers or terminals may refuse."""
    return _UNPRINTABLE.sub(_REPLACEMENT, text)


def truncate_middle(text: str, limits: ObservationLimits) -> str:
    """Return the text, or, if it is too long, its head and tail and how much is left out."""
    lines = text.split("\n")
    if len(text) <= limits.max_chars and len(lines) <= limits.max_lines:
        return text
    half_lines, half_chars = max(1, limits.max_lines // 2), max(1, limits.max_chars // 2)
    head = "\n".join(lines[:half_lines])[:half_chars]
    tail = "\n".join(lines[-half_lines:])[-half_chars:]
    left_out = len(text) - len(head) - len(tail)
    return f"{head}\n[... {left_out} characters left out ...]\n{tail}"


def is_stub_shorter(text: str) -> bool:
    """Return True if a stub takes notably less room than the text."""
    return len(text) > 2 * STUB_CHARS


def stub(text: str, path: str | None) -> str:
    """Return the first and last lines of an observation, and where the whole is, if anywhere."""
    head = _up_to_line_end(text[: STUB_CHARS // 2])
    tail = _up_to_line_end(text[: -STUB_CHARS // 2 - 1 : -1])[::-1]
    left_out = len(text) - len(head) - len(tail)
    lines = text.count("\n") + 1
    where = (
        f"all {lines} lines are in {path}: search it, or read the part you need"
        if path
        else "run the command again if you need them"
    )
    return (
        f"{head}\n[... {left_out} of the {len(text)} characters of this result were left out to fit"
        f" the context window; {where} ...]\n{tail}"
    )


def _up_to_line_end(text: str) -> str:
    """Return the text without an incomplete last line, if complete lines make up most of it."""
    end = text.rfind("\n")
    return text[:end] if end > len(text) // 2 else text
