"""Regular expressions that an operator writes: none takes longer than its text is long."""

from functools import lru_cache
from typing import Any

import re2

Span = tuple[int, int]


class Pattern:
    """One, in RE2's syntax: without look-around and back references."""

    def __init__(self, written: str) -> None:
        """Raises ValueError."""
        options = re2.Options()
        options.log_errors = False
        try:
            self._compiled: Any = re2.compile(written, options=options)
        except re2.error as error:
            raise ValueError(f"{written!r} is no pattern: {_words(error)}") from error
        if self._compiled.search("") is not None:
            raise ValueError(f"{written!r} is no pattern: it is found in any text")

    def is_in(self, text: str) -> bool:
        """Whether it is found anywhere in the text."""
        return self._compiled.search(_encodable(text)) is not None

    def spans(self, text: str) -> list[tuple[Span, Span]]:
        """Where it is found; and what is meant there: its first group, where it has one."""
        found = self._compiled.finditer(_encodable(text))
        return [(match.span(), _meant(match)) for match in found]


@lru_cache(maxsize=1024)
def pattern(written: str) -> Pattern:
    """The pattern, made once. Raises ValueError."""
    return Pattern(written)


def _meant(match: Any) -> Span:
    span: Span = match.span(1) if match.re.groups else match.span()
    return match.span() if span == (-1, -1) else span


def _encodable(text: str) -> str:
    """As long as before; half a surrogate pair is no text."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def _words(error: Exception) -> str:
    (told,) = error.args
    return told.decode(errors="replace") if isinstance(told, bytes) else str(told)
