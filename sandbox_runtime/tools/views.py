"""What the model is shown of files and directories."""

from policies.observation import ObservationLimits, printable
from sandbox_runtime.sandbox import Entry, Listing
from sandbox_runtime.tools.base import Mistake
from sandbox_runtime.tools.edits import Edit, lines_of

_CONTEXT_LINES = 4
_MAGIC_BYTES = 16


def view_file(
    path: str, data: bytes, view_range: list[int] | None, limits: ObservationLimits
) -> str:
    """A file's lines with their numbers, or those of `view_range`. Raises Mistake."""
    if b"\0" in data:
        return _view_binary(path, data)
    lines = lines_of(data)
    if not lines:
        return f"{printable(path)} is empty."
    first, last = _bounds(view_range, len(lines))
    text, shown_to = _numbered(lines, first, last, limits)
    notes = _notes(data)
    if shown_to < last:
        notes.append(
            f"[lines {first}-{shown_to} of {len(lines)} shown; go on with view_range"
            f" [{shown_to + 1}, {last}], or search with grep -n]"
        )
    elif view_range is not None:
        notes.append(f"[lines {first}-{last} of {len(lines)}]")
    return "\n".join([text, *notes])


def view_edit(edit: Edit, limits: ObservationLimits) -> str:
    """The edited lines with a few around them."""
    lines = lines_of(edit.data)
    first = max(1, edit.first_line - _CONTEXT_LINES)
    last = min(len(lines), edit.last_line + _CONTEXT_LINES)
    if first > last:
        return "The file is now empty."
    text, shown_to = _numbered(lines, first, last, limits)
    more = f"\n[the snippet goes on to line {last}]" if shown_to < last else ""
    return f"Lines {first}-{shown_to} are now:\n{text}{more}"


def view_directory(path: str, listing: Listing, limits: ObservationLimits) -> str:
    """The names in a directory, hidden ones left out."""
    entries = [entry for entry in listing.entries if not _is_hidden(entry)]
    entries.sort(key=lambda entry: entry.path.split("/"))
    shown, chars = [], 0
    for entry in entries[: limits.max_entries]:
        line = _described(entry)
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


def _is_hidden(entry: Entry) -> bool:
    return any(part.startswith(".") for part in entry.path.split("/"))


def _described(entry: Entry) -> str:
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


def _bounds(view_range: list[int] | None, count: int) -> tuple[int, int]:
    if view_range is None:
        return 1, count
    if len(view_range) != 2:
        raise Mistake(f"view_range must be two integers, [first, last], not {view_range[:8]}.")
    first, last = view_range
    if not 1 <= first <= count:
        raise Mistake(f"view_range begins at line {first}, but the file has lines 1 to {count}.")
    if last == -1:
        return first, count
    if last < first:
        raise Mistake(f"view_range ends at line {last}, before it begins ({first}).")
    return first, min(last, count)


def _numbered(
    lines: list[bytes], first: int, last: int, limits: ObservationLimits
) -> tuple[str, int]:
    """Lines `first` to `last` as far as the limits go, at least one, and the last one shown."""
    shown: list[str] = []
    chars = 0
    for number in range(first, min(last, first + limits.max_lines - 1) + 1):
        line = f"{number:6}\t{_line(lines[number - 1], limits)}"
        chars += len(line) + 1
        if shown and chars > limits.max_chars:
            break
        shown.append(line)
    return "\n".join(shown), first + len(shown) - 1


def _line(line: bytes, limits: ObservationLimits) -> str:
    text = printable(line.removesuffix(b"\r").decode(errors="replace"))
    left_out = len(text) - limits.max_line_chars
    if left_out <= 0:
        return text
    return f"{text[: limits.max_line_chars]} [... {left_out} characters of this line left out]"


def _notes(data: bytes) -> list[str]:
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
