"""Sandboxes end beside everything else: nobody waits for it, and nobody's cancellation stops it."""

import asyncio
from collections.abc import Callable, Coroutine

from sandbox_runtime.pool.books import Books, Place, State


class Endings:
    """What is being ended. `on_ended` is called whenever one is gone."""

    def __init__(self, books: Books, on_ended: Callable[[], None]) -> None:
        self._books = books
        self._on_ended = on_ended
        self._tasks = set[asyncio.Task[None]]()

    def begin(self, place: Place) -> None:
        """End it and all in it; it stays in the books until it is gone."""
        self._books.move(place, State.ENDING)
        self.see_through(self._end(place))

    def see_through(self, work: Coroutine[None, None, None]) -> None:
        """Do it to its end, whoever has begun it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end(self, place: Place) -> None:
        try:
            await place.at_end.aclose()
        finally:
            self._books.strike(place)
            self._on_ended()

    async def wait(self) -> None:
        """Until all that was begun is done."""
        while self._tasks:
            await asyncio.wait(self._tasks)
