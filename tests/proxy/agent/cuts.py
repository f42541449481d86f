"""A text cut into pieces at random places, always the same for the same seed."""

import random
from collections.abc import Iterator


def cuts(text: str, seed: int, longest: int = 9) -> Iterator[str]:
    rng = random.Random(seed)
    position = 0
    while position < len(text):
        size = rng.randint(1, longest)
        yield text[position : position + size]
        position += size
