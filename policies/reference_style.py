"""The paper's style: the observations and file edits of the reference implementation, byte for
byte. Its prompts are in policies/paper_prompts.py."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from policies.observation import CommandOutcome, ObservationLimits

FINISHED = "<<< Finished >>>"
NO_COMMAND = "Error: No command provided."
_TIMEOUT_EXIT_CODE = 124
"""The exit code of a command that reached its timeout. As in the reference, any command with this
exit code counts as timed out."""
_HIDDEN_SEQUENCE = re.compile(r"\x1b\[[0-9;]*m|\r")
_RULE = "-" * 50
_TRUNCATION_MARKER = f"{_RULE}\n<Observation truncated in middle for saving context>\n{_RULE}"


def command_observation(outcome: CommandOutcome, limits: ObservationLimits) -> str:
    """Return the observation of a command: its exit code and its output."""
    if outcome.timed_out or outcome.exit_code == _TIMEOUT_EXIT_CODE:
        message = f"The command took too long to execute (>{outcome.timeout_s:g}s)"
        return _bash_observation("-1", message, "")
    status = f"Error: Exit code {outcome.exit_code}" if outcome.exit_code else "0"
    shown = (
        _truncate_lines(_without_colours(text), limits) for text in (outcome.stdout, outcome.stderr)
    )
    return _bash_observation(status, *shown)


def _bash_observation(status: str, stdout: str, stderr: str) -> str:
    output = f"\\[STDOUT]\n{stdout if stdout.strip() else ''}"
    if stderr.strip():
        output = f"{output}\n\\[STDERR]\n{stderr}"
    return f"Exit code: {status}\n{tool_observation('execute_bash', output)}"


def invalid_arguments_observation() -> str:
    """Return the observation of a bash call whose arguments are not a JSON object."""
    return f"Exit code: 0\n{tool_observation('execute_bash', '')}"


def tool_observation(name: str, text: str) -> str:
    """Return a tool's observation. The backslash is from the reference, which escapes brackets for
    its console."""
    return f"Execution output of \\[{name}]:\n{text}"


def unknown_tool_observation(name: str) -> str:
    """Return the observation of a call of an unknown tool."""
    return f"Unknown action: {name}"


def steps_remaining_line(steps_left: int) -> str:
    """Return the line that is appended to the last message before each model call."""
    return f"\nSteps Remaining: {steps_left}"


def _without_colours(text: str) -> str:
    """Return the text without colours and carriage returns."""
    return _HIDDEN_SEQUENCE.sub("", text)


def _truncate_lines(text: str, limits: ObservationLimits) -> str:
    """Return the text, or its first and last lines if it has too many lines. A long line is not
    cut."""
    lines, half = text.splitlines(), max(1, limits.max_lines // 2)
    if len(lines) <= 2 * half:
        return text
    return "\n".join([*lines[:half], _TRUNCATION_MARKER, *lines[-half:]])


# Views and edits. As in the reference, files are read in the form that a terminal shows, so an edit
# turns tabs into spaces, and every write appends a newline. Bytes that are not UTF-8 are surrogate
# escapes here and stay unchanged.

_CLIP_CHARS = 10_000
_CLIP_NOTE = (
    "<response clipped><NOTE>To save on context only part of this file has been shown to you. You"
    " should retry this tool after you have searched inside the file with `grep -n` in order to"
    " find the line numbers of what you are looking for.</NOTE>"
)
_CONTEXT_LINES = 4
"""Number of lines shown before and after an edit."""
NEEDS_COMMAND_AND_PATH = "Error: command and path are required."


@dataclass(frozen=True, slots=True)
class EditResult:
    """A file's text after an edit, and the observation for the model."""

    text: str
    observation: str


def file_observation(path: str, content: str, view_range: Sequence[int] | None) -> str:
    """Return the observation of a view of a file: its numbered lines, or the lines in `view_range`
    (first and last line, -1 for the end), clipped to _CLIP_CHARS. Return a note for an empty file,
    and an error message for an invalid range."""
    if not content:
        return f"(empty file: {path})"
    lines = _expand_tabs(content).split("\n")
    first, last = 1, len(lines)
    if view_range and len(view_range) == 2:
        first, last = view_range
        shown = list(view_range)
        if not 1 <= first <= len(lines):
            return f"Error: Invalid view_range {shown}: start line must be in [1, {len(lines)}]"
        if last != -1 and not first <= last <= len(lines):
            return (
                f"Error: Invalid view_range {shown}: end must be >= start and <= {len(lines)}, or"
                " -1 to view until end."
            )
        last = len(lines) if last == -1 else last
    return _clip(_numbered_lines(path, lines[first - 1 : last], first))


def directory_observation(path: str, names: str) -> str:
    """Return the observation of a view of a directory."""
    if not names:
        return f"(empty directory: {path})"
    heading = f"Here's the files and directories up to 2 levels deep in {path}, excluding hidden"
    return f"{heading}:\n{names}"


def not_viewable_observation(path: str) -> str:
    """Return the observation of a view of a file that is neither .py nor .rst."""
    return (
        "ERROR: Viewing non-Python files is disallowed for saving context. File"
        f" '{path}' is not a .py or .rst file."
    )


def not_found_observation(path: str) -> str:
    """Return the observation for a path that does not exist."""
    return f"Error: Path not found: {path}"


def file_creation_result(path: str, text: str) -> EditResult:
    """Return the result of creating or overwriting a file with `text`."""
    return EditResult(
        f"{text}\n",
        f"File created at {path}. {_snippet(path, text, 1)}"
        "Review the file and make sure that it is as expected. Edit the file if necessary.",
    )


def replace_text(path: str, content: str | None, old: str, new: str) -> EditResult | str:
    """Return the file with its only occurrence of `old` replaced by `new`, or an error message.

    `content` is None if the file does not exist.
    """
    if not old:
        return "Error: old_str is required for str_replace."
    if content == "":
        return f"Error: Could not read file {path}"
    old, new = old.expandtabs(), new.expandtabs()
    before, *after = _expand_tabs(content or "").split(old)
    if not after:
        return f"Error: No occurrences of old_str found in {path} for replacement."
    if len(after) > 1:
        return (
            f"Error: Multiple occurrences ({len(after)}) of old_str found in {path}. Please ensure"
            " it is unique before using str_replace."
        )
    text = before + new + after[0]
    line = before.count("\n")
    first = max(0, line - _CONTEXT_LINES)
    shown = "\n".join(text.split("\n")[first : line + _CONTEXT_LINES + new.count("\n") + 1])
    return EditResult(
        f"{text}\n",
        f"The file {path} has been edited. {_snippet(f'a snippet of {path}', shown, first + 1)}"
        "Review the changes and make sure they are as expected. Edit the file again if necessary.",
    )


def insert_text(path: str, content: str | None, line: int, new: str) -> EditResult | str:
    """Return the file with `new` inserted after the line, or an error message.

    `content` is None if the file does not exist.
    """
    if not new:
        return "Error: new_str is required for insert."
    if content is None:
        return f"Error: Could not read file {path}"
    lines = _expand_tabs(content).split("\n") if content else []
    if not 0 <= line <= len(lines):
        return f"Error: Invalid insert_line {line}. Must be in [0, {len(lines)}]."
    added = new.expandtabs().split("\n")
    before, after = lines[:line], lines[line:]
    shown = "\n".join([*before[-_CONTEXT_LINES:], *added, *after[:_CONTEXT_LINES]])
    first = max(1, line - _CONTEXT_LINES + 1)
    return EditResult(
        "\n".join([*before, *added, *after, ""]),
        f"The file {path} has been edited. {_snippet('a snippet of the edited file', shown, first)}"
        "Review the changes and make sure they are as expected (correct indentation, no duplicate"
        " lines, etc). Edit the file again if necessary.",
    )


def _expand_tabs(content: str) -> str:
    return _without_colours(content).expandtabs()


def _snippet(subject: str, text: str, first_line: int) -> str:
    return _numbered_lines(subject, _clip(text).expandtabs().split("\n"), first_line) + "\n"


def _numbered_lines(subject: str, lines: Sequence[str], first_line: int) -> str:
    shown = "\n".join(f"{number:6}\t{line}" for number, line in enumerate(lines, first_line))
    return f"Here's the result of running `cat -n` on {subject}:\n{shown}"


def _clip(text: str) -> str:
    return text if len(text) <= _CLIP_CHARS else text[:_CLIP_CHARS] + _CLIP_NOTE
