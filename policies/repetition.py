"""Detects runaway repetition: a model that writes the same passage until something stops it."""

from itertools import pairwise

MIN_REPEATS = 8
MIN_CHARS = 4_000
"""A runaway repeats at least so much text. Songs and lists of equal lines stay below it."""
MIN_DATA_CHARS = 16_000
"""The same bound for data, which has no two different letters in a row: zeros, tables of
numbers, hex."""
CHECK_EVERY_CHARS = 500
"""The text is checked after every so many characters."""
_PROBE_CHARS = 64
_MAX_CANDIDATES = 4
_WINDOW_CHARS = 2 * MIN_DATA_CHARS


def repeated_suffix(text: str) -> int:
    """Return the length of the end of `text` that repeats one passage, 0 where it is too short to
    be a runaway."""
    tail = text[-_WINDOW_CHARS:]
    for period in _periods(tail):
        length = _periodic_length(tail, period)
        needed = MIN_CHARS if _has_words(tail[-period:]) else MIN_DATA_CHARS
        if length >= max(needed, MIN_REPEATS * period):
            return length
    return 0


class RepetitionCheck:
    """Checks one growing text for runaway repetition."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._chars = 0
        self._next_check = MIN_CHARS

    def is_runaway(self, piece: str) -> bool:
        """Add a piece of the text; return True once the text has run away."""
        self._pieces.append(piece)
        self._chars += len(piece)
        if self._chars < self._next_check:
            return False
        self._next_check = self._chars + CHECK_EVERY_CHARS
        tail = "".join(self._pieces)[-_WINDOW_CHARS:]
        self._pieces = [tail]
        return repeated_suffix(tail) > 0


def _periods(tail: str) -> list[int]:
    """Return the distances between the last characters of `tail` and their earlier occurrences,
    the shortest first."""
    probe = tail[-_PROBE_CHARS:]
    periods = []
    start = len(tail) - len(probe)
    at = start
    for _ in range(_MAX_CANDIDATES):
        at = tail.rfind(probe, 0, at + len(probe) - 1)
        if at < 0:
            break
        periods.append(start - at)
    return periods


def _periodic_length(tail: str, period: int) -> int:
    """Return the length of the end of `tail` that repeats itself every `period` characters."""
    low, high = 0, len(tail) - period
    while low < high:
        middle = (low + high + 1) // 2
        if tail[len(tail) - middle :] == tail[len(tail) - middle - period : len(tail) - period]:
            low = middle
        else:
            high = middle - 1
    return low + period if low else 0


def _has_words(passage: str) -> bool:
    doubled = passage * 2 if len(passage) < 2 else passage
    return any(a.isalpha() and b.isalpha() and a != b for a, b in pairwise(doubled))
