"""Contexts with questions: their types, and a generator of contexts from a seed."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from evaluation.synthetic import BIRDS, FIRST_NAMES, OBJECTS, SUBJECTS, VERBS
from training.rows import QaType

LICENCE = "Apache-2.0"
DOCUMENTS_PER_CONTEXT = 3
STATIONS_PER_CONTEXT = 6
FILLER_SENTENCES = 10
"""Number of sentences in each document that answer no question."""


@dataclass(frozen=True, slots=True)
class Document:
    """A text with its title. The title may be empty."""

    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a context."""

    text: str
    answers: tuple[str, ...]
    """The accepted answers, or the letters of the right choices; empty if the question has no
    answer."""
    choices: tuple[str, ...] = ()
    qa_type: QaType | None = None
    """The type that the source states; None if the type follows from the answer."""


@dataclass(frozen=True, slots=True)
class Context:
    """Documents and the questions that they answer."""

    domain: str
    topic: str
    """The subject of the context, such as an article of SQuAD. The distractor mode `same-domain`
    draws from the contexts of the same topic."""
    documents: tuple[Document, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True)
class _Station:
    name: str
    keeper: str
    sector: int
    town: str


def generate_contexts(seed: int, count: int) -> list[Context]:
    """Return contexts about stations with keepers, sectors and towns. Names are made of random
    syllables, so that the documents of other contexts do not contain an answer."""
    return [_context(random.Random(f"{seed}/facts/{number}")) for number in range(count)]


def _context(rng: random.Random) -> Context:
    towns = [_random_name(rng) for _ in range(3)]
    stations = [
        _Station(
            f"{bird}-{rng.randrange(1000, 10_000)}",
            f"{rng.choice(FIRST_NAMES)} {_random_name(rng)}",
            rng.randrange(10**5, 10**6),
            towns[number % len(towns)],
        )
        for number, bird in enumerate(rng.sample(BIRDS, STATIONS_PER_CONTEXT))
    ]
    texts = [
        [
            f"{rng.choice(SUBJECTS)} {rng.choice(VERBS)} {rng.choice(OBJECTS)}."
            for _ in range(FILLER_SENTENCES)
        ]
        for _ in range(DOCUMENTS_PER_CONTEXT)
    ]
    for station in stations:
        for sentence in (
            f"{station.keeper} looks after the station {station.name}.",
            f"The station {station.name} stands in sector {station.sector}.",
            f"The next town to the station {station.name} is {station.town}.",
        ):
            sentences = rng.choice(texts)
            sentences.insert(rng.randrange(len(sentences) + 1), sentence)
    documents = tuple(
        Document(f"report {number}", "\n".join([*sentences, ""]))
        for number, sentences in enumerate(texts, 1)
    )
    questions = list(_questions(rng, stations, towns))
    rng.shuffle(questions)
    return Context("synthetic", "stations", documents, tuple(questions))


def _questions(
    rng: random.Random, stations: list[_Station], towns: list[str]
) -> Iterator[Question]:
    letters = "ABCDEF"
    for station in stations:
        yield Question(f"Who looks after the station {station.name}?", (station.keeper,))
        yield Question(f"In which sector is the station {station.name}?", (str(station.sector),))
    for station in rng.sample(stations, 2):
        choices = rng.sample(towns, len(towns))
        right = letters[choices.index(station.town)]
        question = f"Which town is next to the station {station.name}?"
        yield Question(question, (right,), tuple(choices))
    town = rng.choice(towns)
    shown = rng.sample(stations, len(stations))
    near = tuple(letter for letter, each in zip(letters, shown, strict=True) if each.town == town)
    names = tuple(station.name for station in shown)
    yield Question(f"Which stations have {town} as their next town?", near, names)


def _random_name(rng: random.Random) -> str:
    syllables = [rng.choice("bdfgklmnprstv") + rng.choice("aeiou") for _ in range(4)]
    return "".join(syllables).capitalize()
