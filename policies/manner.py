"""How the loop deals with a model: in our own way, or as the paper's reference does."""

from dataclasses import dataclass
from typing import Literal

from policies.paper_words import PaperWords


@dataclass(frozen=True, slots=True)
class Manner:
    """The way, and what goes with it."""

    kind: Literal["own", "paper"] = "own"
    """paper: what a model observes is the reference's, byte for byte."""
    words: PaperWords = PaperWords()
    """What a model is told in the paper's manner."""
