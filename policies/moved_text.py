"""What stands in the prompt for a long text that lies in files."""

from collections.abc import Callable
from dataclasses import dataclass

from policies.document_marks import LARGE_CHARS
from policies.documents import Piece, divided

KEPT_CHARS = 1000
"""How much of a moved text stays in the prompt, from its start and from its end: people put what
they want done there."""
_SHORT_CHARS = 400
"""A document that takes hardly more than what would stand for it."""
_HEAD_CHARS = 160
_HEADS_CHARS = 6000
"""The heads of all documents together."""
_KEPT_PART = 4
"""Of a text that is divided, at most one part in so many stays; else all of it is one file."""

Place = Callable[[str, str], str]
"""Gives a text its file, by a name that may be empty; returns the path."""


def stand_in(text: str, place: Place) -> str:
    """The documents of a text, or, where it shows none, the whole become files. What is said of
    each stands where it stood; what stands outside stays, as far as it is short."""
    parts = [_part(piece) for piece in divided(text)]
    kept = sum(part.kept_chars for part in parts)
    if len(parts) == 1 or kept * _KEPT_PART > len(text):
        return start_and_end(text, place)
    files = [part for part in parts if not isinstance(part, _Kept)]
    head_chars = min(_HEAD_CHARS, _HEADS_CHARS // len(files))
    moved = sum(len(part.text) for part in files)
    intro = (
        f"[Of this message {moved:,} characters are in files ({len(files)}), each named below where"
        " it stood: search them (grep -n) and read them there.]\n"
    )
    return intro + "".join(part.words(place, head_chars) for part in parts)


def start_and_end(text: str, place: Place) -> str:
    """All of a text becomes one file."""
    return _Middle(text).words(place, 0)


@dataclass(frozen=True, slots=True)
class _Kept:
    """What stays as it is."""

    text: str

    @property
    def kept_chars(self) -> int:
        return len(self.text)

    def words(self, place: Place, head_chars: int) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class _Middle:
    """A text without documents: its start and its end stay."""

    text: str

    @property
    def kept_chars(self) -> int:
        return 2 * KEPT_CHARS

    def words(self, place: Place, head_chars: int) -> str:
        path, head, tail = place(self.text, ""), _head(self.text), _tail(self.text)
        left_out = len(self.text) - len(head) - len(tail)
        return (
            f"{head}\n[... {left_out:,} characters are left out here. The whole text,"
            f" {_size(self.text)}, is the file {path}: search and read it there. Its end"
            f" follows ...]\n{tail}"
        )


@dataclass(frozen=True, slots=True)
class _Document:
    """One document, or neighbours put together; of one that is open the end is shown too."""

    piece: Piece

    @property
    def text(self) -> str:
        return self.piece.text

    @property
    def kept_chars(self) -> int:
        return KEPT_CHARS if self.piece.is_open else 0

    def words(self, place: Place, head_chars: int) -> str:
        path = place(self.text, self.piece.title or "document")
        head = " ".join(self.text[: 2 * head_chars].split())[:head_chars]
        told = f"{path}: {_size(self.text)}"
        if self.piece.parts > 1:
            told += f"; {self.piece.parts} parts of the message"
        told = f"[{told}. It begins: {_without_brackets(head)} ...]\n"
        return f"{told}[It ends:]\n{_tail(self.text)}" if self.piece.is_open else told


_Part = _Kept | _Middle | _Document


def _part(piece: Piece) -> _Part:
    size = len(piece.text)
    if not piece.is_document:
        return _Middle(piece.text) if size > LARGE_CHARS else _Kept(piece.text)
    is_short = size <= (2 * KEPT_CHARS if piece.is_open else _SHORT_CHARS)
    return _Kept(piece.text) if is_short else _Document(piece)


def _size(text: str) -> str:
    lines = text.count("\n") + (not text.endswith("\n"))
    return f"{lines:,} lines, {len(text):,} characters"


def _without_brackets(text: str) -> str:
    """Nothing that would end the note."""
    return text.replace("[", "(").replace("]", ")")


def _head(text: str) -> str:
    """The first lines."""
    head = text[:KEPT_CHARS]
    end = head.rfind("\n")
    return head[:end] if end > KEPT_CHARS // 2 else head


def _tail(text: str) -> str:
    """The last lines."""
    tail = text[-KEPT_CHARS:]
    start = tail.find("\n") + 1
    return tail[start:] if 0 < start < KEPT_CHARS // 2 else tail
