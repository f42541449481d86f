"""One lease's turn to get a sandbox."""

import asyncio

from policies.isolation import Isolation
from policies.pool import Recipe, recipe
from sandbox_runtime.pool.books import Place


class Claim:
    """Somebody wants a sandbox."""

    def __init__(self, isolation: Isolation) -> None:
        self.isolation = isolation
        self.recipe = recipe(isolation)
        self.place: Place | None = None
        """What it has been given."""
        self.is_coming = False
        """Whether one that it can use is being started."""
        self._error: BaseException | None = None
        self._settled = asyncio.Event()

    def give(self, place: Place) -> None:
        """Its turn has come."""
        self.place = place
        self._settled.set()

    def fail(self, error: BaseException) -> None:
        """It gets none."""
        self._error = error
        self._settled.set()

    async def turn(self) -> Place:
        """What it is given, once it is. Raises what it failed with."""
        await self._settled.wait()
        if self._error:
            raise self._error
        assert self.place
        return self.place

    def renew(self, recipe: Recipe) -> None:
        """What it was given was of no use: it wants another."""
        self.place, self.recipe = None, recipe
        self._settled.clear()
