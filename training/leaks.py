"""Finds texts that give an answer away, and tasks that contain the prompt of a benchmark."""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from evaluation.row_sources import read_files

MIN_SUBSTRING_CHARS = 4
"""An ASCII answer with fewer characters is found only as whole words, not inside words."""
NGRAM_WORDS = 13
"""Length of the word sequences that a task may not share with a benchmark's prompt (Brown et al.,
2020, appendix C)."""
_WORD = re.compile(r"\w+")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3})")


def normalise(text: str) -> str:
    """Return the words of a text in lower case, with one space between them. Commas between
    thousands are left out."""
    return " ".join(_WORD.findall(_THOUSANDS.sub("", text).casefold()))


def contains_answer(words: str, answer: str) -> bool:
    """Return True if normalised words contain an answer.

    Numbers and answers of fewer than MIN_SUBSTRING_CHARS ASCII characters are compared as whole
    words, so that 19 is not found in 1912. Other answers are also found inside words, because some
    scripts have no spaces between words. An answer without words is found nowhere.
    """
    gold = normalise(answer)
    if not gold:
        return False
    is_short = len(gold) < MIN_SUBSTRING_CHARS or gold.replace(" ", "").isdecimal()
    if is_short and gold.isascii():
        return f" {gold} " in f" {words} "
    return gold in words


class DecontaminationFilter:
    """The prompts of benchmarks that no task may contain."""

    def __init__(self, prompts: Iterable[str]) -> None:
        self._ngrams: set[str] = set()
        self._short_prompts: set[str] = set()
        for prompt in prompts:
            words = normalise(prompt).split()
            if len(words) < NGRAM_WORDS:
                self._short_prompts.add(" ".join(words))
            self._ngrams.update(_ngrams(words))

    @classmethod
    def read(cls, path: Path) -> "DecontaminationFilter":
        """Return the prompts of a file of rows, such as samples.jsonl of a prepared suite. The
        prompt is in the field prompt, problem, problem_statement or question. Raises SuiteError."""
        names = ("prompt", "problem", "problem_statement", "question")
        return cls(row.text(*names) for row in read_files(path, (("*.jsonl",),)).rows)

    def is_contaminated(self, text: str) -> bool:
        """Return True if a text shares NGRAM_WORDS consecutive words with a prompt. A prompt with
        fewer words must equal the whole text."""
        words = normalise(text).split()
        if " ".join(words) in self._short_prompts:
            return True
        return any(ngram in self._ngrams for ngram in _ngrams(words))


def _ngrams(words: Sequence[str]) -> Iterator[str]:
    starts = range(len(words) - NGRAM_WORDS + 1)
    return (" ".join(words[start : start + NGRAM_WORDS]) for start in starts)
