"""Views and edits of files in the paper's manner: the reference's texts, byte for byte.

A file is read as a terminal shows it, so that an edit turns its tabs into spaces, and each write
ends in one more newline. Bytes that are not UTF-8 (surrogate escapes here) pass through unchanged.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from policies.paper_observation import as_terminal

CLIP_CHARS = 10_000
_CLIPPED = (
    "<response clipped><NOTE>To save on context only part of this file has been shown to you. You"
    " should retry this tool after you have searched inside the file with `grep -n` in order to"
    " find the line numbers of what you are looking for.</NOTE>"
)
_AROUND = 4
"""Lines shown before and after an edit."""
NEEDS_COMMAND_AND_PATH = "Error: command and path are required."


@dataclass(frozen=True, slots=True)
class Edited:
    """What is written, and what the model is told of it."""

    text: str
    words: str


def viewed(path: str, content: str, view_range: Sequence[int] | None) -> str:
    """A file's lines with their numbers, or those of the range."""
    if not content:
        return f"(empty file: {path})"
    lines = _tabless(content).split("\n")
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
    return _clipped(_numbered(path, lines[first - 1 : last], first))


def listed(path: str, names: str) -> str:
    """What lies in a directory."""
    if not names:
        return f"(empty directory: {path})"
    heading = f"Here's the files and directories up to 2 levels deep in {path}, excluding hidden"
    return f"{heading}:\n{names}"


def not_viewed(path: str) -> str:
    """What is said to a view of other than Python and reStructuredText."""
    return (
        "ERROR: Viewing non-Python files is disallowed for saving context. File"
        f" '{path}' is not a .py or .rst file."
    )


def not_found(path: str) -> str:
    """What is said to a view of nothing."""
    return f"Error: Path not found: {path}"


def created(path: str, text: str) -> Edited:
    """A new file, or one in the place of another."""
    return Edited(
        f"{text}\n",
        f"File created at {path}. {_snippet(path, text, 1)}"
        "Review the file and make sure that it is as expected. Edit the file if necessary.",
    )


def replaced(path: str, content: str | None, old: str, new: str) -> Edited | str:
    """The one place of `old` with `new` in it, or why not; no content: there is no such file."""
    if not old:
        return "Error: old_str is required for str_replace."
    if content == "":
        return f"Error: Could not read file {path}"
    old, new = old.expandtabs(), new.expandtabs()
    before, *after = _tabless(content or "").split(old)
    if not after:
        return f"Error: No occurrences of old_str found in {path} for replacement."
    if len(after) > 1:
        return (
            f"Error: Multiple occurrences ({len(after)}) of old_str found in {path}. Please ensure"
            " it is unique before using str_replace."
        )
    text = before + new + after[0]
    line = before.count("\n")
    first = max(0, line - _AROUND)
    shown = "\n".join(text.split("\n")[first : line + _AROUND + new.count("\n") + 1])
    return Edited(
        f"{text}\n",
        f"The file {path} has been edited. {_snippet(f'a snippet of {path}', shown, first + 1)}"
        "Review the changes and make sure they are as expected. Edit the file again if necessary.",
    )


def inserted(path: str, content: str | None, line: int, new: str) -> Edited | str:
    """`new` after that line, or why not; no content: there is no such file."""
    if not new:
        return "Error: new_str is required for insert."
    if content is None:
        return f"Error: Could not read file {path}"
    lines = _tabless(content).split("\n") if content else []
    if not 0 <= line <= len(lines):
        return f"Error: Invalid insert_line {line}. Must be in [0, {len(lines)}]."
    put_in = new.expandtabs().split("\n")
    before, after = lines[:line], lines[line:]
    shown = "\n".join([*before[-_AROUND:], *put_in, *after[:_AROUND]])
    first = max(1, line - _AROUND + 1)
    return Edited(
        "\n".join([*before, *put_in, *after, ""]),
        f"The file {path} has been edited. {_snippet('a snippet of the edited file', shown, first)}"
        "Review the changes and make sure they are as expected (correct indentation, no duplicate"
        " lines, etc). Edit the file again if necessary.",
    )


def _tabless(content: str) -> str:
    return as_terminal(content).expandtabs()


def _snippet(what: str, text: str, first: int) -> str:
    return _numbered(what, _clipped(text).expandtabs().split("\n"), first) + "\n"


def _numbered(what: str, lines: Sequence[str], first: int) -> str:
    shown = "\n".join(f"{number:6}\t{line}" for number, line in enumerate(lines, first))
    return f"Here's the result of running `cat -n` on {what}:\n{shown}"


def _clipped(text: str) -> str:
    return text if len(text) <= CLIP_CHARS else text[:CLIP_CHARS] + _CLIPPED
