"""The observations of the default style: the texts in which the model gets a tool's output."""

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
    """Limits on the size of one observation. Longer output is truncated, with a marker."""

    max_chars: int = 30_000
    """Maximum length of one output stream, or of one view of a file or a directory, in
    characters."""
    max_lines: int = 2_000
    """Maximum number of lines of one output stream or of one view of a file."""
    max_line_chars: int = 2_000
    """Maximum length of one line in a view of a file, in characters."""
    max_entries: int = 500
    """Maximum number of names in a view of a directory."""


DEFAULT_LIMITS = ObservationLimits()
STUB_CHARS = 400
"""Maximum number of characters of an observation that its stub keeps. Stubs replace observations
during compaction. A stub has a truncation marker as well."""


@dataclass(frozen=True, slots=True)
class StreamCap:
    """The maximum size of the part of one output stream that leaves the sandbox."""

    max_bytes: int
    max_lines: int


def output_cap(limits: ObservationLimits) -> StreamCap:
    """Return a cap that leaves room within `limits` for the sandbox's truncation marker. Output
    that the sandbox has truncated is thus not truncated again.

    A character has at least one byte, so output within the cap is within the limits.
    """
    return StreamCap(
        max_bytes=max(limits.max_chars - _MARKER_CHARS, limits.max_chars // 2),
        max_lines=max(limits.max_lines - _MARKER_LINES, limits.max_lines // 2),
    )


@dataclass(frozen=True, slots=True)
class CommandOutcome:
    """The outcome of a command, or the state of a command that still runs."""

    exit_code: int
    stdout: str
    stderr: str
    timeout_s: float
    """The command's timeout."""
    duration_s: float = 0.0
    timed_out: bool = False
    oom_kills: int = 0
    pids_refused: int = 0
    job_id: str = ""
    """The id of the background job that the command has become; empty if it has ended."""
    waiting: bool = False
    """True if the job is waiting for input."""


def bash_observation(outcome: CommandOutcome, limits: ObservationLimits = DEFAULT_LIMITS) -> str:
    """Return the observation of a command: its exit code or job, its output, and notes on limits
    that it reached."""
    parts = [_status_line(outcome)]
    for name, output in (("stdout", outcome.stdout), ("stderr", outcome.stderr)):
        shown = truncate_middle(terminal_text(output).removesuffix("\n"), limits)
        if shown.strip():
            parts += [f"[{name}]", shown]
    if len(parts) == 1:
        parts.append("(no output)")
    return "\n".join([*parts, *_outcome_notes(outcome)])


def _status_line(outcome: CommandOutcome) -> str:
    if outcome.job_id:
        doing = "Waiting for input" if outcome.waiting else "Still running"
        return f"{doing} after {outcome.duration_s:.0f} s, as job {outcome.job_id}"
    if outcome.timed_out:
        return f"Exit code: {outcome.exit_code} (timed out)"
    if outcome.exit_code == _SIGKILL_EXIT_CODE and not outcome.oom_kills:
        return f"Exit code: {outcome.exit_code} (killed; often for want of memory)"
    return f"Exit code: {outcome.exit_code}"


def _outcome_notes(outcome: CommandOutcome) -> Iterator[str]:
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
    """Return the text for the model after its sandbox has ended unexpectedly."""
    return (
        f"{why}\nEverything in the sandbox is lost: files, variables, running processes. The next"
        " command starts in a new one, which has nothing but the files the user gave."
    )


def file_not_written_text(path: str, why: str) -> str:
    """Return the text for the model about an input file that could not be written."""
    return f"[the given file {path} is not in the sandbox: {why}]"


def terminal_text(output: str) -> str:
    """Return the text that a terminal would finally show: without escape sequences, and with the
    last state of each progress line."""
    text = _ESCAPE_SEQUENCE.sub("", output).replace("\r\n", "\n")
    if "\r" in text:
        text = "\n".join(_visible_line(line) for line in text.split("\n"))
    return printable(text)


def _visible_line(line: str) -> str:
    states = [state for state in line.split("\r") if state]
    return states[-1] if states else ""


def printable(text: str) -> str:
    """Return the text with U+FFFD in place of characters that JSON, tokenizers or terminals may
    reject."""
    return _UNPRINTABLE.sub(_REPLACEMENT, text)


def truncate_middle(text: str, limits: ObservationLimits) -> str:
    """Return the text, or, if it is too long, its head, a truncation marker and its tail."""
    lines = text.split("\n")
    if len(text) <= limits.max_chars and len(lines) <= limits.max_lines:
        return text
    half_lines, half_chars = max(1, limits.max_lines // 2), max(1, limits.max_chars // 2)
    head = "\n".join(lines[:half_lines])[:half_chars]
    tail = "\n".join(lines[-half_lines:])[-half_chars:]
    left_out = len(text) - len(head) - len(tail)
    return f"{head}\n[... {left_out} characters left out ...]\n{tail}"


def is_stub_shorter(text: str) -> bool:
    """Return True if a stub is much shorter than the text."""
    return len(text) > 2 * STUB_CHARS


def stub(text: str, path: str | None) -> str:
    """Return a stub for an observation: its first and last lines, and the path of a file with the
    complete text, if there is one."""
    head = _cut_at_line_end(text[: STUB_CHARS // 2])
    tail = _cut_at_line_end(text[: -STUB_CHARS // 2 - 1 : -1])[::-1]
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


def _cut_at_line_end(text: str) -> str:
    """Return the text without its incomplete last line, if more than half of it remains."""
    end = text.rfind("\n")
    return text[:end] if end > len(text) // 2 else text
