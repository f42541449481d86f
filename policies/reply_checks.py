"""Checks on texts that come from a backend: replies that repeat the proxy's own texts, replies that
repeat themselves, and passages of an error that quote the request."""

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

# Quotations of the proxy's own texts

_RUN_WORDS = 10
"""A run of so many words in the same order counts as a quotation."""
_MIN_SENTENCE_WORDS = 5
"""A whole sentence of an instruction counts as a quotation from this length on."""
_HELD_WORDS = 3
"""Text is suspect once so many of its last words agree with one of the proxy's texts."""
_MAX_WORD_CHARS = 64
_MAX_CLIENT_CHARS = 400_000
"""So much of the client's text is searched for what a reply quotes, half of it from each end: a
megabyte takes a third of a second."""
_IN_WORDS = "_'\u2019"
_WORD_OR_END = re.compile(r"(?P<word>[^\W_]+(?:['\u2019][^\W_]+)?)|[.!?;:](?!\w)|\n")
"""Matches a word (group `word`) or the end of a sentence."""
_SENTENCE = re.compile(r"(?<=[.!?:;])\s+|\n+")

Words = tuple[str, ...]


class ProxyTexts:
    """The texts that the proxy sends to the model, indexed for finding quotations of them."""

    def __init__(self, prompts: Iterable[str], instructions: Iterable[str] = ()) -> None:
        """`prompts` are recognised by ten words in a row; of `instructions` (the nudge, the last
        question, the request for a summary) a whole sentence is enough."""
        instructions = list(instructions)
        texts = [_words_of(text) for text in (*prompts, *instructions)]
        self._runs = {run for words in texts for run in _runs(words, _RUN_WORDS)}
        self._begun = {begun for words in texts for begun in _runs(words, _HELD_WORDS)}
        sentences = (_words_of(each) for text in instructions for each in _SENTENCE.split(text))
        self._sentences = {each for each in sentences if len(each) >= _MIN_SENTENCE_WORDS}
        self._lengths = sorted({_RUN_WORDS, *map(len, self._sentences)})

    def run_at_end(self, words: Sequence[str]) -> Words | None:
        """Return the last ten of `words` if they are a quotation, or None."""
        run = tuple(words[-_RUN_WORDS:])
        return run if run in self._runs else None

    def sentence_at_end(self, words: Sequence[str]) -> Words | None:
        """Return the sentence of an instruction that `words` end with, where a sentence ends after
        them, or None."""
        ends = (tuple(words[-length:]) for length in self._lengths if length <= len(words))
        return next((end for end in ends if end in self._sentences), None)

    def may_be_quoted(self, words: Sequence[str]) -> bool:
        """Return True if the last of `words` may be the beginning of a quotation."""
        return tuple(words[-_HELD_WORDS:]) in self._begun


class EchoCheck:
    """Checks one growing text for quotations of the proxy's own texts."""

    def __init__(self, own: ProxyTexts, client_text: Sequence[str]) -> None:
        """`client_text` are the texts of the client's messages; quoting those is allowed."""
        self._own = own
        self._client_text = client_text
        self._client_words: str | None = None
        self._words: deque[str] = deque(maxlen=64)
        self._unfinished = ""
        self.is_suspect = False
        """True while the text so far may be the beginning of a quotation."""

    def is_echo(self, piece: str, *, at_end: bool = False) -> bool:
        """Add a piece of the text; return True once it quotes the proxy. `at_end` says that
        nothing follows."""
        self._unfinished += piece
        end = len(self._unfinished) if at_end else _last_boundary(self._unfinished)
        whole, self._unfinished = self._unfinished[:end], self._unfinished[end:]
        for found in self._quotations(f"{whole}." if at_end else whole):
            if not self._is_the_clients(found):
                return True
        self.is_suspect = not at_end and self._own.may_be_quoted(tuple(self._words))
        return False

    def _quotations(self, text: str) -> Iterator[Words]:
        """Yield the quotations that the words of `text` complete."""
        for match in _WORD_OR_END.finditer(text):
            if match["word"] is None:
                found = self._own.sentence_at_end(tuple(self._words))
            else:
                self._words.append(_plain(match["word"]))
                found = self._own.run_at_end(tuple(self._words))
            if found:
                yield found

    def _is_the_clients(self, run: Words) -> bool:
        if self._client_words is None:
            text = "\n\n".join(self._client_text)
            half = _MAX_CLIENT_CHARS // 2
            parts = (text,) if len(text) <= 2 * half else (text[:half], text[-half:])
            self._client_words = "\n".join(f" {' '.join(_words_of(part))} " for part in parts)
        return f" {' '.join(run)} " in self._client_words


def _words_of(text: str) -> Words:
    """Return the words of a text in lower case, without punctuation."""
    return tuple(_plain(match["word"]) for match in _WORD_OR_END.finditer(text) if match["word"])


def _plain(word: str) -> str:
    return word.replace("\u2019", "'").lower()


def _runs(words: Words, length: int) -> Iterable[Words]:
    return (words[n : n + length] for n in range(len(words) - length + 1))


def _last_boundary(text: str) -> int:
    """Return where the last word of `text` begins, which the next piece may continue; the end
    where that word is longer than any of the proxy's."""
    at = len(text)
    while at > 0 and (text[at - 1].isalnum() or text[at - 1] in _IN_WORDS):
        at -= 1
        if len(text) - at > _MAX_WORD_CHARS:
            return len(text)
    return at


# Runaway repetition: a model writes the same passage until something stops it

_MIN_REPEATS = 8
_MIN_CHARS = 4_000
"""A runaway repeats at least so much text. Songs and lists of equal lines stay below it."""
_MIN_DATA_CHARS = 16_000
"""The same bound for data, which has no two different letters in a row: zeros, tables of
numbers, hex."""
CHECK_EVERY_CHARS = 500
"""The text is checked after every so many characters."""
_PROBE_CHARS = 64
_MAX_CANDIDATES = 4
_WINDOW_CHARS = 2 * _MIN_DATA_CHARS


def repeated_suffix(text: str) -> int:
    """Return the length of the end of `text` that repeats one passage, 0 where it is too short to
    be a runaway."""
    tail = text[-_WINDOW_CHARS:]
    for period in _periods(tail):
        length = _periodic_length(tail, period)
        needed = _MIN_CHARS if _has_words(tail[-period:]) else _MIN_DATA_CHARS
        if length >= max(needed, _MIN_REPEATS * period):
            return length
    return 0


class RepetitionCheck:
    """Checks one growing text for runaway repetition."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._chars = 0
        self._next_check = _MIN_CHARS

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


# Quotations of the request in an error

MAX_SEARCHED_CHARS = 16 << 20
"""So much prose of a request is searched, which takes about 20 ms. In a longer request every
passage counts as quoted."""


def is_quoted(words: str, body: Any) -> bool:
    """Return True if the whole passage occurs in a string of a request's body, in capitals or not.
    False does not prove that the backend wrote it. An empty passage occurs nowhere."""
    wanted, left = words.lower(), [body] if words else []
    has_blank, chars_left = " " in words, MAX_SEARCHED_CHARS
    while left:
        value = left.pop()
        if isinstance(value, str):
            if has_blank and " " not in value:
                continue  # as in base64: this is seen in a tenth of the time
            chars_left -= len(value)
            if chars_left < 0 or wanted in value.lower():
                return True
        elif isinstance(value, dict):
            left += [*value, *value.values()]
        elif isinstance(value, list | tuple):
            left += value
    return False
