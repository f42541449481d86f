"""How a long text is divided into the documents that it shows."""

from collections.abc import Sequence
from dataclasses import dataclass

from policies.document_marks import LARGE_CHARS, SECTIONS, WAYS, Span, Way

MAX_DOCUMENTS = 200
"""Into how many one text is divided; beyond that, neighbours are put together."""
_LEAST_CHARS = 2000
"""So large they are on the average, and what is put together at least."""
_MAX_CHARS = 1 << 24
"""A longer text is not looked through."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a text: one document, or what stands outside of them."""

    text: str
    title: str = ""
    is_document: bool = False
    is_open: bool = False
    """Whether what follows the document may be in it."""
    parts: int = 1
    """How many documents were put together in it."""


def divided(text: str) -> list[Piece]:
    """The text in pieces that put together are the text; one piece where it shows no documents."""
    pieces: list[Piece] = []
    at = 0
    for span in _spans(text):
        if at < span.start:
            pieces.append(Piece(text[at : span.start]))
        body = text[span.start : span.end]
        pieces.append(Piece(body, span.title, True, span.is_open, span.parts))
        at = span.end
    if at < len(text):
        pieces.append(Piece(text[at:]))
    return pieces


def _spans(text: str) -> list[Span]:
    """The documents, found in the first way by which they are half the text or more."""
    if len(text) > _MAX_CHARS:
        return []
    most = min(MAX_DOCUMENTS, max(1, len(text) // _LEAST_CHARS))
    for way in WAYS:
        if found := _most_of(text, way):
            return _few(found) if len(found) > most else found
    for way in SECTIONS:
        if len(found := _most_of(text, way)) > 1:
            return _few(found, LARGE_CHARS)
    return []


def _most_of(text: str, way: Way) -> list[Span]:
    found = [span for span in way(text) if span.start < span.end]
    return found if 2 * sum(span.end - span.start for span in found) >= len(text) else []


def _few(found: Sequence[Span], least: int = _LEAST_CHARS) -> list[Span]:
    """The same, neighbours put together with what stands between them."""
    least = max(least, -(-(found[-1].end - found[0].start) // MAX_DOCUMENTS))
    few: list[Span] = []
    for span in found:
        if few and few[-1].end - few[-1].start < least:
            few[-1] = _joined(few[-1], span)
        else:
            few.append(span)
    if len(few) > 1 and few[-1].end - few[-1].start < least:
        few[-2:] = [_joined(few[-2], few[-1])]
    return few


def _joined(one: Span, next: Span) -> Span:
    return Span(one.start, next.end, one.title, next.is_open, one.parts + next.parts)
