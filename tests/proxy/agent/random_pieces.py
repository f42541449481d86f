"""Reproducible random splitting of texts into pieces."""

import random
from collections.abc import Iterator


def random_pieces(text: str, seed: int, max_chars: int = 9) -> Iterator[str]:
    """Yield the pieces of a text. The same seed gives the same pieces."""
    rng = random.Random(seed)
    position = 0
    while position < len(text):
        size = rng.randint(1, max_chars)
        yield text[position : position + size]
        position += size
