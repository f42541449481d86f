"""Makes sandboxes for the books, and rests where none can be made."""

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial

from policies.isolation import Isolation
from policies.pool import Recipe, moving_mean, rest_s, unbound
from sandbox_runtime.backends.base import Backend
from sandbox_runtime.clock import Clock
from sandbox_runtime.errors import SandboxStartError
from sandbox_runtime.guest_sandbox import GuestSandbox
from sandbox_runtime.lending import start_sandbox
from sandbox_runtime.pool.books import Books, Place, State

OnReady = Callable[[Place], None]
OnFailure = Callable[[Place, BaseException], None]
GUESSED_START_S = 1.0


class Supply:
    """Where new sandboxes come from.

    Every start ends in one of two calls: `on_ready`, or `on_failure` with the place out of the
    books again. `on_rested` is called when there may be made some in advance again.
    """

    def __init__(
        self,
        backend: Backend,
        books: Books,
        clock: Clock,
        on_ready: OnReady,
        on_failure: OnFailure,
        on_rested: Callable[[], None],
    ) -> None:
        self._backend = backend
        self._books = books
        self._clock = clock
        self._on_ready = on_ready
        self._on_failure = on_failure
        self._on_rested = on_rested
        self._starts: dict[Place, asyncio.Task[GuestSandbox]] = {}
        self._resting: asyncio.Task[None] | None = None
        self._failures = 0
        self.fingerprint: str | None = None
        """What sandboxes are made from, as far as is known."""
        self.start_s = GUESSED_START_S
        """How long a start takes of late."""

    @property
    def is_resting(self) -> bool:
        """Whether nothing should be made in advance just now: a start has failed, or ended while
        commands may run that want the processor too."""
        return self._resting is not None

    def start(self, isolation: Isolation, recipe: Recipe) -> None:
        """Begin to make one; it is in the books before the backend hears of it."""
        place = Place(unbound(isolation), recipe)
        self._books.enter(place)
        starting = self._starts[place] = asyncio.create_task(self._make(place))
        starting.add_done_callback(partial(self._made, place, self._clock.time()))

    async def _make(self, place: Place) -> GuestSandbox:
        if self.fingerprint is None:
            self.fingerprint = await self._backend.fingerprint()
        place.fingerprint = self.fingerprint
        return await start_sandbox(self._backend, place.made)

    def _made(self, place: Place, began: float, starting: asyncio.Task[GuestSandbox]) -> None:
        del self._starts[place]
        given_up = SandboxStartError("its start was given up")
        if error := given_up if starting.cancelled() else starting.exception():
            self._books.strike(place)
            if self._resting is None:
                self._failures += 1
                self._rest(rest_s(self._failures))
            self._on_failure(place, error)
            return
        place.sandbox, place.ready_at = starting.result(), self._clock.time()
        took_s = place.ready_at - began
        self.start_s = moving_mean(self.start_s, took_s)
        self._recover()
        if took_s and self._books.number(State.LENT):
            self._rest(took_s)
        self._on_ready(place)

    def _rest(self, seconds: float) -> None:
        self._resting = asyncio.create_task(self._sleep(seconds))

    async def _sleep(self, seconds: float) -> None:
        await self._clock.sleep(seconds)
        self._resting = None
        self._on_rested()

    def _recover(self) -> None:
        self._failures = 0
        if self._resting:
            self._resting.cancel()
            self._resting = None

    async def look(self) -> str | None:
        """Look what sandboxes are made from now."""
        # Where the backend cannot say, the next start fails, and that is told.
        with contextlib.suppress(SandboxStartError):
            self.fingerprint = await self._backend.fingerprint()
        return self.fingerprint

    async def aclose(self) -> None:
        """Give all starts up, and return when nothing is left of them."""
        starts = list(self._starts.values())
        for starting in starts:
            starting.cancel()
        if starts:
            await asyncio.wait(starts)
        if self._resting:
            self._resting.cancel()
            await asyncio.wait([self._resting])
