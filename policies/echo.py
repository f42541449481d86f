"""Detects replies in which a model repeats the proxy's own texts as its answer."""

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

RUN_WORDS = 10
"""A run of so many words in the same order counts as a quotation."""
MIN_SENTENCE_WORDS = 5
"""A whole sentence of an instruction counts as a quotation from this length on."""
HELD_WORDS = 3
"""Text is suspect once so many of its last words agree with one of the proxy's texts."""
MAX_WORD_CHARS = 64
MAX_CLIENT_CHARS = 400_000
"""So much of the client's text is searched for what a reply quotes, half of it from each end: a
megabyte takes a third of a second."""
HALF = MAX_CLIENT_CHARS // 2
_IN_WORDS = "_'\u2019"
_WORD_OR_END = re.compile(r"(?P<word>[^\W_]+(?:['\u2019][^\W_]+)?)|[.!?;:](?!\w)|\n")
"""Matches a word (group `word`) or the end of a sentence."""
_SENTENCE = re.compile(r"(?<=[.!?:;])\s+|\n+")

Words = tuple[str, ...]


class OwnTexts:
    """The texts that the proxy sends to the model, indexed for finding quotations of them."""

    def __init__(self, prompts: Iterable[str], instructions: Iterable[str] = ()) -> None:
        """`prompts` are recognised by ten words in a row; of `instructions` (the nudge, the last
        question, the request for a summary) a whole sentence is enough."""
        instructions = list(instructions)
        texts = [words_of(text) for text in (*prompts, *instructions)]
        self._runs = {run for words in texts for run in _runs(words, RUN_WORDS)}
        self._begun = {begun for words in texts for begun in _runs(words, HELD_WORDS)}
        sentences = (words_of(each) for text in instructions for each in _SENTENCE.split(text))
        self._sentences = {each for each in sentences if len(each) >= MIN_SENTENCE_WORDS}
        self._lengths = sorted({RUN_WORDS, *map(len, self._sentences)})

    def run_at_end(self, words: Sequence[str]) -> Words | None:
        """Return the last ten of `words` if they are a quotation, or None."""
        run = tuple(words[-RUN_WORDS:])
        return run if run in self._runs else None

    def sentence_at_end(self, words: Sequence[str]) -> Words | None:
        """Return the sentence of an instruction that `words` end with, where a sentence ends after
        them, or None."""
        ends = (tuple(words[-length:]) for length in self._lengths if length <= len(words))
        return next((end for end in ends if end in self._sentences), None)

    def may_be_quoted(self, words: Sequence[str]) -> bool:
        """Return True if the last of `words` may be the beginning of a quotation."""
        return tuple(words[-HELD_WORDS:]) in self._begun


class EchoCheck:
    """Checks one growing text for quotations of the proxy's own texts."""

    def __init__(self, own: OwnTexts, client_text: Sequence[str]) -> None:
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
            parts = (text,) if len(text) <= MAX_CLIENT_CHARS else (text[:HALF], text[-HALF:])
            self._client_words = "\n".join(f" {' '.join(words_of(part))} " for part in parts)
        return f" {' '.join(run)} " in self._client_words


def words_of(text: str) -> Words:
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
        if len(text) - at > MAX_WORD_CHARS:
            return len(text)
    return at
