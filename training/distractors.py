"""Distractors: documents of other contexts, added to the files of a task.

BM25 is computed here: the package rank-bm25 has had no release since 2022, needs numpy, and gives
negative weights to words that are in more than half of the documents.
"""

import heapq
import math
import random
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from training.leaks import contains_answer, normalise

DistractorMode = Literal["random", "same-domain", "bm25"]
MODES: tuple[DistractorMode, ...] = ("random", "same-domain", "bm25")
K1, B = 1.2, 0.75
"""The parameters of BM25: saturation of a word's count, and normalisation by length."""
CANDIDATES_PER_DISTRACTOR = 20
"""Number of documents that are tried for each distractor. If too few fit, the task has fewer
distractors."""
MAX_POSTINGS = 20_000
"""Maximum number of pairs of a word and a document that one query adds up. In a large corpus, the
most frequent words of a query, which weigh least, are ignored."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A document that may be a distractor."""

    topic: str
    title: str
    text: str
    normalised_text: str
    """The result of `normalise` for the text: its words in lower case."""


class DistractorPool:
    """The documents of a split, from which the distractors of its tasks are drawn."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self._candidates = candidates
        self._topics: dict[str, list[int]] = defaultdict(list)
        for number, each in enumerate(candidates):
            self._topics[each.topic].append(number)

    def draw(
        self,
        mode: DistractorMode,
        count: int,
        rng: random.Random,
        *,
        topic: str,
        own_documents: Collection[str],
        question: str,
        answers: Sequence[str],
    ) -> list[Candidate]:
        """Return at most `count` documents of other contexts.

        Documents are left out if they are in `own_documents`, which are the normalised documents of
        the context, or if they contain one of the answers. Only the mode same-domain uses `topic`,
        and only bm25 uses `question`. At most CANDIDATES_PER_DISTRACTOR * (count + 1) documents are
        tried.
        """
        found: dict[str, Candidate] = {}
        limit = CANDIDATES_PER_DISTRACTOR * (count + 1)
        for number in self._candidate_numbers(mode, limit, rng, topic, question):
            each = self._candidates[number]
            if len(found) == count:
                break
            if each.normalised_text in own_documents or each.normalised_text in found:
                continue
            if not any(contains_answer(each.normalised_text, answer) for answer in answers):
                found[each.normalised_text] = each
        return list(found.values())

    def _candidate_numbers(
        self, mode: DistractorMode, limit: int, rng: random.Random, topic: str, question: str
    ) -> Sequence[int]:
        if mode == "bm25":
            return self._bm25_index.best_documents(normalise(question).split(), limit)
        pool = self._topics[topic] if mode == "same-domain" else range(len(self._candidates))
        return rng.sample(pool, min(limit, len(pool)))

    @cached_property
    def _bm25_index(self) -> "Bm25":
        return Bm25([each.normalised_text.split() for each in self._candidates])


class Bm25:
    """An index of documents that ranks them by Okapi BM25 (Robertson and Zaragoza, 2009), with the
    inverse document frequency of Lucene, which is never negative."""

    def __init__(self, documents: Sequence[Sequence[str]]) -> None:
        self._postings: dict[str, list[tuple[int, float]]] = defaultdict(list)
        self._count = len(documents)
        mean = sum(map(len, documents)) / max(1, self._count) or 1.0
        for number, words in enumerate(documents):
            length = K1 * (1 - B + B * len(words) / mean)
            for word, times in Counter(words).items():
                self._postings[word].append((number, times * (K1 + 1) / (times + length)))

    def best_documents(self, query: Sequence[str], count: int) -> list[int]:
        """Return the numbers of at most `count` documents that have a word of the query, the best
        first. Documents with equal scores are in the order of their numbers."""
        scores: dict[int, float] = defaultdict(float)
        left = MAX_POSTINGS
        for word in sorted(set(query), key=lambda word: (len(self._postings.get(word, ())), word)):
            found = self._postings.get(word, [])
            left -= len(found)
            if left < 0 and scores:
                break
            weight = math.log(1 + (self._count - len(found) + 0.5) / (len(found) + 0.5))
            for number, share in found:
                scores[number] += weight * share
        best = heapq.nsmallest(count, ((-score, number) for number, score in scores.items()))
        return [number for _, number in best]
