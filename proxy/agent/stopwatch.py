"""How long one thing was waited for, without what was done meanwhile."""

import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


class Stopwatch:
    """Adds up times."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.spent_s = 0.0
        self._now = now
        self._began = 0.0

    def __enter__(self) -> None:
        """It runs inside."""
        self._began = self._now()

    def __exit__(self, *_: object) -> None:
        self.spent_s += self._now() - self._began

    def standing(self, work: Callable[[T], Awaitable[None]]) -> Callable[[T], Awaitable[None]]:
        """The same work, during which it stands still where it ran."""

        async def done_meanwhile(piece: T) -> None:
            began = self._now()
            try:
                await work(piece)
            finally:
                self.spent_s -= self._now() - began

        return done_meanwhile
