"""Edits of a file's bytes; nothing is read as text, so nothing but the edit changes."""

import itertools
import re
from dataclasses import dataclass

from sandbox_runtime.tools.base import Mistake

_MAX_LISTED = 20
_MAX_COMPARED_BYTES = 20_000
_NUMBERED_LINE = re.compile(rb"\s*\d+\t")


@dataclass(frozen=True, slots=True)
class Edit:
    """A file after an edit, and the lines of it that are new."""

    data: bytes
    first_line: int
    """Counted from 1."""
    last_line: int


def lines_of(data: bytes) -> list[bytes]:
    """The lines without their newlines; a last line need not have one."""
    lines = data.split(b"\n")
    return lines[:-1] if lines[-1] == b"" else lines


def replace_once(data: bytes, old: bytes, new: bytes) -> Edit:
    """Replace the one occurrence of `old`. Raises Mistake."""
    if not old:
        raise Mistake(
            "Nothing was changed: old_str is empty. Use insert to add text, create for a new file."
        )
    if old == new:
        raise Mistake("Nothing was changed: old_str and new_str are the same.")
    start = data.find(old)
    if start < 0:
        raise Mistake(f"Nothing was changed: old_str is not in the file. {_hint(data, old)}")
    if data.find(old, start + 1) >= 0:
        raise Mistake(
            f"Nothing was changed: old_str occurs more than once, at lines {_places(data, old)}."
            " Take in enough of the lines around it to make it unique."
        )
    first = _line_at(data, start)
    edited = data[:start] + new + data[start + len(old) :]
    return Edit(edited, first, first + new.count(b"\n"))


def insert_after(data: bytes, line: int, text: bytes) -> Edit:
    """Insert `text` as lines of its own after line `line` (0: at the start). Raises Mistake.

    A newline is put only where two lines would else run together: after `text` if it ends in none
    and a line follows, and before it if the last line ends in none. It is CRLF where the file's
    first line ends so. At the end of the file none is added.
    """
    lines = lines_of(data)
    if not 0 <= line <= len(lines):
        raise Mistake(
            f"Nothing was changed: insert_line is {line}, but the file has {len(lines)} lines:"
            f" give 0 (at the start) to {len(lines)} (at the end)."
        )
    if not text:
        raise Mistake("Nothing was changed: new_str is empty.")
    offset = min(len(data), sum(len(before) + 1 for before in lines[:line]))
    before, after = data[:offset], data[offset:]
    newline = b"\r\n" if lines and lines[0].endswith(b"\r") else b"\n"
    if before and not before.endswith(b"\n"):
        before += newline
    if after and not text.endswith(b"\n"):
        text += newline
    return Edit(before + text + after, line + 1, line + len(lines_of(text)))


def _line_at(data: bytes, offset: int) -> int:
    return data.count(b"\n", 0, offset) + 1


def _places(data: bytes, old: bytes) -> str:
    places: list[int] = []
    start = data.find(old)
    while start >= 0 and len(places) < _MAX_LISTED:
        places.append(_line_at(data, start))
        start = data.find(old, start + 1)
    return ", ".join(map(str, places)) + (" and more" if start >= 0 else "")


def _hint(data: bytes, old: bytes) -> str:
    """Why `old` may not have been found, where that can be told."""
    hints = (_line_endings_hint, _numbering_hint, _whitespace_hint, _first_line_hint)
    for hint in hints:
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
        f"It differs only in whitespace from the text at line {_line_at(data, word.start())}:"
        " compare spaces, tabs and line breaks."
    )


def _first_line_hint(data: bytes, old: bytes) -> str | None:
    first = old.strip().split(b"\n")[0].strip()
    start = data.find(first) if first else -1
    if start < 0 or b"\n" not in old.strip():
        return None
    return f"Its first line is at line {_line_at(data, start)}, but what follows there differs."
