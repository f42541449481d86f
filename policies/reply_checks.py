"""Checks of texts from a backend: replies that quote the proxy's own texts, replies that repeat one
passage without end, and errors that quote the request."""

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

# Quotations of the proxy's own texts

_QUOTED_WORDS = 10
"""Number of consecutive words of a proxy text that count as a quotation."""
_MIN_SENTENCE_WORDS = 5
"""A complete sentence of an instruction counts as a quotation if it has at least this many
words."""
_SUSPECT_WORDS = 3
"""A text is suspect while its last `_SUSPECT_WORDS` words also occur in a row in a proxy text."""
_MAX_WORD_CHARS = 64
_MAX_CLIENT_CHARS = 400_000
"""Maximum number of characters of the client's text that are searched for a quotation, one half at
each end. Searching a megabyte takes a third of a second."""
_WORD_SIGNS = "_'\u2019"
_WORD_OR_END = re.compile(r"(?P<word>[^\W_]+(?:['\u2019][^\W_]+)?)|[.!?;:](?!\w)|\n")
"""Matches a word (group `word`) or the end of a sentence."""
_SENTENCE = re.compile(r"(?<=[.!?:;])\s+|\n+")

Words = tuple[str, ...]


class ProxyTexts:
    """The texts that the proxy sends to the model, indexed for finding quotations of them."""

    def __init__(self, prompts: Iterable[str], instructions: Iterable[str] = ()) -> None:
        """Ten consecutive words of `prompts` or `instructions` are a quotation; for `instructions`
        (such as the request for a summary) a complete sentence is enough."""
        instructions = list(instructions)
        texts = [_words_of(text) for text in (*prompts, *instructions)]
        self._word_sequences = {
            run for words in texts for run in _word_sequences(words, _QUOTED_WORDS)
        }
        self._beginnings = {
            run for words in texts for run in _word_sequences(words, _SUSPECT_WORDS)
        }
        sentences = (_words_of(part) for text in instructions for part in _SENTENCE.split(text))
        self._sentences = {words for words in sentences if len(words) >= _MIN_SENTENCE_WORDS}
        self._quotation_lengths = sorted({_QUOTED_WORDS, *map(len, self._sentences)})

    def quotation_at_end(self, words: Sequence[str]) -> Words | None:
        """Return the last ten of `words` if they are a quotation, or None."""
        run = tuple(words[-_QUOTED_WORDS:])
        return run if run in self._word_sequences else None

    def sentence_at_end(self, words: Sequence[str]) -> Words | None:
        """Return the complete sentence of an instruction with which `words` end, or None. Call this
        at the end of a sentence."""
        ends = (
            tuple(words[-length:]) for length in self._quotation_lengths if length <= len(words)
        )
        return next((end for end in ends if end in self._sentences), None)

    def may_be_quoted(self, words: Sequence[str]) -> bool:
        """Return True if `words` may end with the beginning of a quotation."""
        return tuple(words[-_SUSPECT_WORDS:]) in self._beginnings


class EchoCheck:
    """Checks a streamed text for quotations of the proxy's own texts."""

    def __init__(self, proxy_texts: ProxyTexts, client_texts: Sequence[str]) -> None:
        """`client_texts` are the texts of the client's messages, which a model may quote."""
        self._proxy_texts = proxy_texts
        self._client_texts = client_texts
        self._client_words: str | None = None
        self._words: deque[str] = deque(maxlen=64)
        self._unfinished_word = ""
        self.is_suspect = False
        """True while the end of the text may be the beginning of a quotation."""

    def add_and_check(self, piece: str, *, at_end: bool = False) -> bool:
        """Add a piece of the text. Return True if the piece completes a quotation of the proxy's
        own texts, unless the client's messages contain the quoted words too. `at_end` is True for
        the last piece."""
        self._unfinished_word += piece
        end = len(self._unfinished_word) if at_end else _last_word_start(self._unfinished_word)
        complete, self._unfinished_word = self._unfinished_word[:end], self._unfinished_word[end:]
        for quotation in self._quotations(f"{complete}." if at_end else complete):
            if not self._is_from_client(quotation):
                return True
        self.is_suspect = not at_end and self._proxy_texts.may_be_quoted(tuple(self._words))
        return False

    def _quotations(self, text: str) -> Iterator[Words]:
        """Append the words of `text` to the earlier words. Yield each quotation of the proxy's
        texts that ends in `text`."""
        for match in _WORD_OR_END.finditer(text):
            if match["word"] is None:
                quotation = self._proxy_texts.sentence_at_end(tuple(self._words))
            else:
                self._words.append(_normalized_word(match["word"]))
                quotation = self._proxy_texts.quotation_at_end(tuple(self._words))
            if quotation:
                yield quotation

    def _is_from_client(self, quotation: Words) -> bool:
        if self._client_words is None:
            text = "\n\n".join(self._client_texts)
            half = _MAX_CLIENT_CHARS // 2
            parts = (text,) if len(text) <= 2 * half else (text[:half], text[-half:])
            self._client_words = "\n".join(f" {' '.join(_words_of(part))} " for part in parts)
        return f" {' '.join(quotation)} " in self._client_words


def _words_of(text: str) -> Words:
    """Return the words of a text in lower case, without punctuation."""
    return tuple(
        _normalized_word(match["word"]) for match in _WORD_OR_END.finditer(text) if match["word"]
    )


def _normalized_word(word: str) -> str:
    return word.replace("\u2019", "'").lower()


def _word_sequences(words: Words, length: int) -> Iterable[Words]:
    return (words[n : n + length] for n in range(len(words) - length + 1))


def _last_word_start(text: str) -> int:
    """Return the start of the last word of `text`, because the next piece may continue the word.
    Return the end of the text if the word is longer than any word of a proxy text."""
    start = len(text)
    while start > 0 and (text[start - 1].isalnum() or text[start - 1] in _WORD_SIGNS):
        start -= 1
        if len(text) - start > _MAX_WORD_CHARS:
            return len(text)
    return start


# Runaway repetition: a model repeats a passage until its output limit

_MIN_REPEATS = 8
_MIN_CHARS = 4_000
"""Minimum length of runaway repetition. Songs and lists of equal lines are shorter."""
_MIN_DATA_CHARS = 16_000
"""Minimum length of runaway repetition of data: text without two consecutive different letters,
such as zeros and tables of numbers."""
CHECK_EVERY_CHARS = 500
"""Number of new characters after which a text is checked again."""
_PROBE_CHARS = 64
_MAX_CANDIDATES = 4
_WINDOW_CHARS = 2 * _MIN_DATA_CHARS


def repeated_suffix_length(text: str) -> int:
    """Return the length of the end of `text` that repeats one passage; 0 if it is too short for
    runaway repetition."""
    tail = text[-_WINDOW_CHARS:]
    for period in _repeat_distances(tail):
        length = _periodic_length(tail, period)
        needed = _MIN_CHARS if _has_words(tail[-period:]) else _MIN_DATA_CHARS
        if length >= max(needed, _MIN_REPEATS * period):
            return length
    return 0


class RepetitionCheck:
    """Checks a streamed text for runaway repetition."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._chars = 0
        self._next_check = _MIN_CHARS

    def add_and_check(self, piece: str) -> bool:
        """Add a piece of the text; return True if the text ends in runaway repetition."""
        self._pieces.append(piece)
        self._chars += len(piece)
        if self._chars < self._next_check:
            return False
        self._next_check = self._chars + CHECK_EVERY_CHARS
        tail = "".join(self._pieces)[-_WINDOW_CHARS:]
        self._pieces = [tail]
        return repeated_suffix_length(tail) > 0


def _repeat_distances(tail: str) -> list[int]:
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
"""Maximum number of characters of a request's texts that `is_quoted` searches, in about 20 ms. In a
longer request every passage counts as quoted."""


def is_quoted(passage: str, body: Any) -> bool:
    """Return True if the passage occurs in a string of a request's body, ignoring case, or if the
    body is too long to search.

    False does not prove that the backend wrote the passage. An empty passage occurs nowhere.
    """
    lower_passage, pending = passage.lower(), [body] if passage else []
    has_space, chars_left = " " in passage, MAX_SEARCHED_CHARS
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            if has_space and " " not in value:
                continue  # skips base64, in a tenth of the time of a search
            chars_left -= len(value)
            if chars_left < 0 or lower_passage in value.lower():
                return True
        elif isinstance(value, dict):
            pending += [*value, *value.values()]
        elif isinstance(value, list | tuple):
            pending += value
    return False
