"""Pure functions behind the editor: edits of a file's bytes, and views of files and directories.

An edit never decodes the file, so only the edited bytes change.
"""

import itertools
import re
from dataclasses import dataclass

from policies.observation import ObservationLimits, printable
from sandbox_runtime.sandbox import DirectoryEntry, Listing
from sandbox_runtime.tools.base import ToolInputError

_MAX_LISTED_LINES = 20
_MAX_COMPARED_BYTES = 20_000
_CONTEXT_LINES = 4
_MAGIC_BYTES = 16
_NUMBERED_LINE = re.compile(rb"\s*\d+\t")


@dataclass(frozen=True, slots=True)
class EditedFile:
    """The content of a file after an edit, and the line numbers of the inserted text."""

    data: bytes
    first_line: int
    """The number of the first inserted line, counted from 1."""
    last_line: int


def lines_of(data: bytes) -> list[bytes]:
    """Return the lines without their newlines; the last line need not end in a newline."""
    lines = data.split(b"\n")
    return lines[:-1] if lines[-1] == b"" else lines


def replace_once(data: bytes, old: bytes, new: bytes) -> EditedFile:
    """Replace the one occurrence of `old`. Raises ToolInputError if `old` is empty, is the same as
    `new` or does not occur exactly once."""
    if not old:
        raise ToolInputError(
            "Nothing was changed: old_str is empty. Use insert to add text, create for a new file."
        )
    if old == new:
        raise ToolInputError("Nothing was changed: old_str and new_str are the same.")
    start = data.find(old)
    if start < 0:
        raise ToolInputError(
            f"Nothing was changed: old_str is not in the file. {_not_found_hint(data, old)}"
        )
    if data.find(old, start + 1) >= 0:
        raise ToolInputError(
            "Nothing was changed: old_str occurs more than once, at lines"
            f" {_occurrence_lines(data, old)}. Take in enough of the lines around it to make it"
            " unique."
        )
    first = _line_number_at(data, start)
    edited = data[:start] + new + data[start + len(old) :]
    return EditedFile(edited, first, first + new.count(b"\n"))


def insert_after_line(data: bytes, line: int, text: bytes) -> EditedFile:
    """Insert `text` as lines of its own after line `line` (0: at the start). Raises ToolInputError
    if the file has no such line, or if `text` is empty.

    A newline is added only where two lines would otherwise run together: after `text` if a line
    follows, and before it if the file's last line has none. The newline is CRLF if the file's first
    line ends in CRLF. No newline is added at the end of the file.
    """
    lines = lines_of(data)
    if not 0 <= line <= len(lines):
        raise ToolInputError(
            f"Nothing was changed: insert_line is {line}, but the file has {len(lines)} lines:"
            f" give 0 (at the start) to {len(lines)} (at the end)."
        )
    if not text:
        raise ToolInputError("Nothing was changed: new_str is empty.")
    offset = min(len(data), sum(len(before) + 1 for before in lines[:line]))
    before, after = data[:offset], data[offset:]
    newline = b"\r\n" if lines and lines[0].endswith(b"\r") else b"\n"
    if before and not before.endswith(b"\n"):
        before += newline
    if after and not text.endswith(b"\n"):
        text += newline
    return EditedFile(before + text + after, line + 1, line + len(lines_of(text)))


def _line_number_at(data: bytes, offset: int) -> int:
    return data.count(b"\n", 0, offset) + 1


def _occurrence_lines(data: bytes, old: bytes) -> str:
    places: list[int] = []
    start = data.find(old)
    while start >= 0 and len(places) < _MAX_LISTED_LINES:
        places.append(_line_number_at(data, start))
        start = data.find(old, start + 1)
    return ", ".join(map(str, places)) + (" and more" if start >= 0 else "")


def _not_found_hint(data: bytes, old: bytes) -> str:
    """Return a sentence with the likely reason why `old` was not found."""
    for hint in (_line_endings_hint, _numbering_hint, _whitespace_hint, _first_line_hint):
        if words := hint(data, old):
            return words
    return "View the file and copy the text exactly."


def _line_endings_hint(data: bytes, old: bytes) -> str | None:
    as_lf = old.replace(b"\r\n", b"\n")
    if as_lf.replace(b"\n", b"\r\n") in data:
        return "The file's lines end in CRLF: write \\r\\n in old_str and new_str."
    if as_lf in data:
        return "The file's lines end in LF alone: write \\n, not \\r\\n."
    return None


def _numbering_hint(data: bytes, old: bytes) -> str | None:
    lines = lines_of(old)
    bare = b"\n".join(_NUMBERED_LINE.sub(b"", line, count=1) for line in lines)
    if all(_NUMBERED_LINE.match(line) for line in lines) and bare in data:
        return "Leave out the line numbers that view shows: they are not in the file."
    return None


def _whitespace_hint(data: bytes, old: bytes) -> str | None:
    words = old.split()
    if not words or len(old) > _MAX_COMPARED_BYTES:
        return None
    # By words, not by a pattern: the time must not grow as the product of both lengths.
    before, found, _ = b" ".join([b"", *data.split(), b""]).partition(b" ".join([b"", *words, b""]))
    if not found:
        return None
    word = next(itertools.islice(re.finditer(rb"\S+", data), before.count(b" "), None))
    return (
        "It differs only in whitespace from the text at line"
        f" {_line_number_at(data, word.start())}: compare spaces, tabs and line breaks."
    )


def _first_line_hint(data: bytes, old: bytes) -> str | None:
    first = old.strip().split(b"\n")[0].strip()
    start = data.find(first) if first else -1
    if start < 0 or b"\n" not in old.strip():
        return None
    return (
        f"Its first line is at line {_line_number_at(data, start)}, but what follows there differs."
    )


def view_file(
    path: str, data: bytes, view_range: list[int] | None, limits: ObservationLimits
) -> str:
    """Return the numbered lines of a file, only those of `view_range` if it is given. For a binary
    file, return a description. Raises ToolInputError for an invalid range."""
    if b"\0" in data:
        return _view_binary(path, data)
    lines = lines_of(data)
    if not lines:
        return f"{printable(path)} is empty."
    first, last = _line_range(view_range, len(lines))
    text, shown_to = _numbered_lines_and_last(lines, first, last, limits)
    notes = _encoding_notes(data)
    if shown_to < last:
        notes.append(
            f"[lines {first}-{shown_to} of {len(lines)} shown; go on with view_range"
            f" [{shown_to + 1}, {last}], or search with grep -n]"
        )
    elif view_range is not None:
        notes.append(f"[lines {first}-{last} of {len(lines)}]")
    return "\n".join([text, *notes])


def view_edit(edit: EditedFile, limits: ObservationLimits) -> str:
    """Return the edited lines and a few lines around them, with their numbers."""
    lines = lines_of(edit.data)
    first = max(1, edit.first_line - _CONTEXT_LINES)
    last = min(len(lines), edit.last_line + _CONTEXT_LINES)
    if first > last:
        return "The file is now empty."
    text, shown_to = _numbered_lines_and_last(lines, first, last, limits)
    more = f"\n[the snippet goes on to line {last}]" if shown_to < last else ""
    return f"Lines {first}-{shown_to} are now:\n{text}{more}"


def view_directory(path: str, listing: Listing, limits: ObservationLimits) -> str:
    """Return the names in a directory as text, without hidden names and within the limits."""
    entries = [entry for entry in listing.entries if not _is_hidden(entry)]
    entries.sort(key=lambda entry: entry.path.split("/"))
    shown, chars = [], 0
    for entry in entries[: limits.max_entries]:
        line = _describe(entry)
        chars += len(line) + 1
        if chars > limits.max_chars:
            break
        shown.append(line)
    head = f"{printable(path)}, two levels deep, hidden entries left out:"
    if not shown:
        shown.append("(nothing)")
    if listing.truncated or len(shown) < len(entries):
        shown.append("[there is more; view a subdirectory or use find]")
    return "\n".join([head, *shown])


def _is_hidden(entry: DirectoryEntry) -> bool:
    return any(part.startswith(".") for part in entry.path.split("/"))


def _describe(entry: DirectoryEntry) -> str:
    name = printable(entry.path).replace("\n", "\\n")
    if entry.kind == "directory":
        return name + "/"
    if entry.kind == "file":
        return f"{name} ({entry.bytes} bytes)"
    return f"{name} (link or special file)"


def _view_binary(path: str, data: bytes) -> str:
    start = data[:_MAGIC_BYTES]
    letters = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in start)
    return (
        f"{printable(path)} is a binary file of {len(data)} bytes. It begins {start.hex(' ')}"
        f" ({letters}). Examine it with bash, for instance with file, xxd or a Python library."
    )


def _line_range(view_range: list[int] | None, count: int) -> tuple[int, int]:
    if view_range is None:
        return 1, count
    if len(view_range) != 2:
        raise ToolInputError(
            f"view_range must be two integers, [first, last], not {view_range[:8]}."
        )
    first, last = view_range
    if not 1 <= first <= count:
        raise ToolInputError(
            f"view_range begins at line {first}, but the file has lines 1 to {count}."
        )
    if last == -1:
        return first, count
    if last < first:
        raise ToolInputError(f"view_range ends at line {last}, before it begins ({first}).")
    return first, min(last, count)


def _numbered_lines_and_last(
    lines: list[bytes], first: int, last: int, limits: ObservationLimits
) -> tuple[str, int]:
    """Return the numbered lines `first` to `last`, at least one and no more than the limits allow,
    and the number of the last line that is returned."""
    shown: list[str] = []
    chars = 0
    for number in range(first, min(last, first + limits.max_lines - 1) + 1):
        line = f"{number:6}\t{_shown_line(lines[number - 1], limits)}"
        chars += len(line) + 1
        if shown and chars > limits.max_chars:
            break
        shown.append(line)
    return "\n".join(shown), first + len(shown) - 1


def _shown_line(line: bytes, limits: ObservationLimits) -> str:
    text = printable(line.removesuffix(b"\r").decode(errors="replace"))
    left_out = len(text) - limits.max_line_chars
    if left_out <= 0:
        return text
    return f"{text[: limits.max_line_chars]} [... {left_out} characters of this line left out]"


def _encoding_notes(data: bytes) -> list[str]:
    notes = []
    crlf = data.count(b"\r\n")
    if crlf:
        which = "lines" if crlf == data.count(b"\n") else "some lines"
        notes.append(f"[{which} end in CRLF]")
    try:
        data.decode()
    except UnicodeDecodeError:
        notes.append("[not UTF-8: \N{REPLACEMENT CHARACTER} stands for other bytes]")
    return notes
