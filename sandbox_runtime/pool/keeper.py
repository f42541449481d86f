"""Sees to living sandboxes: pings, so that agents know that we live, and replaces what is no good.

An agent that hears nothing for 30 s takes us for dead and ends.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence

from sandbox_runtime.clock import Clock
from sandbox_runtime.errors import SandboxLostError
from sandbox_runtime.pool.books import Books, Place, State
from sandbox_runtime.pool.supply import Supply

BEAT_S = 10.0
LENT_PATIENCE_S = 60.0
"""How long one at work may take to answer: commands may leave its agent little of the processor,
and whoever uses it has patience of his own."""


class Keeper:
    """Looks every few seconds. `replace` is called with idle ones that must go."""

    def __init__(
        self,
        books: Books,
        supply: Supply,
        clock: Clock,
        replace: Callable[[Sequence[Place]], None],
        *,
        ttl_s: float,
        idle_patience_s: float,
        replaced_at_once: int,
    ) -> None:
        self._books = books
        self._supply = supply
        self._clock = clock
        self._replace = replace
        self._ttl_s = ttl_s
        self._idle_patience_s = idle_patience_s
        self._replaced_at_once = replaced_at_once
        self._keeping: asyncio.Task[None] | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._pings: dict[Place, asyncio.Task[None]] = {}

    def start(self) -> None:
        """Begin to look."""
        self._keeping = self._keeping or asyncio.create_task(self._keep())

    async def _keep(self) -> None:
        # Nothing here waits for a sandbox or an engine: the others must be pinged in time.
        while True:
            await self._clock.sleep(BEAT_S)
            self._ping(self._books.all(State.IDLE), self._idle_patience_s)
            self._ping(self._books.all(State.LENT), LENT_PATIENCE_S)
            self._replace(self._too_old())
            if self._renewing is None or self._renewing.done():
                self._renewing = asyncio.create_task(self._renew())

    def _ping(self, places: Iterable[Place], patience_s: float) -> None:
        for place in places:
            if place not in self._pings:
                self._pings[place] = asyncio.create_task(self._hear(place, patience_s))

    async def _hear(self, place: Place, patience_s: float) -> None:
        try:
            await place.sandbox.ping(patience_s)
        except SandboxLostError:
            if self._books.state(place) is State.IDLE:  # whoever has it hears of it himself
                self._replace([place])
        finally:
            del self._pings[place]

    def _too_old(self) -> Sequence[Place]:
        """As few at a time as are started again, so that others are left."""
        limit = self._clock.time() - self._ttl_s
        old = [place for place in self._books.all(State.IDLE) if place.ready_at < limit]
        return old[: self._replaced_at_once]

    async def _renew(self) -> None:
        """Replace what is made from something else than what would be made now."""
        now = await self._supply.look()
        self._replace([each for each in self._books.all(State.IDLE) if each.fingerprint != now])

    async def aclose(self) -> None:
        """Look no more."""
        tasks = [each for each in (self._keeping, self._renewing, *self._pings.values()) if each]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
