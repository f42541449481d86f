"""Sandboxes kept ready, each used once: who asks gets a warm one after one ping, or waits in turn.

A lease asks for its sandbox when it begins and gives it back when it ends; the making before and
the ending after go on beside its block. One that was not used meanwhile is lent again.
"""

import asyncio
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from policies.isolation import Isolation
from policies.pool import (
    Load,
    PoolSettings,
    exact_recipe,
    fits,
    limits_of,
    moving_mean,
    retry_after_s,
    starts_ahead,
)
from sandbox_runtime.backends.base import Backend
from sandbox_runtime.clock import Clock, SystemClock
from sandbox_runtime.egress.decision import OnAsk, OnDecision
from sandbox_runtime.errors import (
    SandboxError,
    SandboxLostError,
    SandboxStartError,
    SandboxUnavailableError,
)
from sandbox_runtime.guest_sandbox import GuestSandbox
from sandbox_runtime.pool.admission import Admission, OnFull
from sandbox_runtime.pool.books import Books, Place, State
from sandbox_runtime.pool.claim import Claim
from sandbox_runtime.pool.endings import Endings
from sandbox_runtime.pool.keeper import Keeper
from sandbox_runtime.pool.lease import Loan, PoolLease
from sandbox_runtime.pool.supply import Supply

logger = logging.getLogger(__name__)

Undo = Callable[[], Awaitable[None]]
OnLend = Callable[[GuestSandbox, Isolation, OnDecision | None, OnAsk | None], Undo]
"""Binds to a sandbox what is decided when it is lent; its undoing is awaited before it ends."""
OnAcquired = Callable[[float, float], None]
"""Told of a lease that got a sandbox: the seconds until one was assigned, and until it answered."""

IDLE_PATIENCE_S = 5.0
"""How long a sandbox that has nothing to do may take to answer."""
GUESSED_LEND_S = 30.0


@dataclass(frozen=True, slots=True)
class PoolStats:
    """A pool at one moment: what there is now, and what has been since its beginning."""

    starting: int
    idle: int
    lent: int
    ending: int
    waiting: int
    """Leases without a sandbox yet."""
    hits: int
    """Leases that found one ready."""
    misses: int
    refused: int
    """Leases that were told to come again."""
    replaced: int
    """Ready ones given up: dead, too old, of an old image, or with limits that cannot change."""
    started: int
    failed: int
    """Starts that failed."""


class Pool:
    """Lends sandboxes of one backend; see `Sandboxes`. It begins at the first lease or `start`.

    `isolations` are those that warm ones are kept for. Others are made when they are asked for.
    """

    def __init__(
        self,
        backend: Backend,
        settings: PoolSettings,
        isolations: Sequence[Isolation],
        *,
        on_lend: OnLend | None = None,
        clock: Clock | None = None,
        idle_patience_s: float = IDLE_PATIENCE_S,
        cores: int | None = None,
    ) -> None:
        self._settings = settings
        self._on_lend = on_lend
        self._clock = clock or SystemClock()
        self._idle_patience_s = idle_patience_s
        cores = cores or len(os.sched_getaffinity(0))
        self._books = Books()
        self._endings = Endings(self._books, self._ended)
        self._supply = Supply(
            backend, self._books, self._clock, self._started, self._failed, self.start
        )
        self._admission = Admission(
            settings, isolations, self._books, self._supply, self._endings, cores=cores
        )
        self._keeper = Keeper(
            self._books,
            self._supply,
            self._clock,
            self._replace,
            ttl_s=settings.ttl_s,
            idle_patience_s=idle_patience_s,
            replaced_at_once=starts_ahead(cores),
        )
        self._gone = asyncio.Event()
        self._counts = Counter[str]()
        self._lend_s = GUESSED_LEND_S
        self._on_acquired: OnAcquired | None = None

    def start(self) -> None:
        """Begin to make sandboxes ready."""
        self._keeper.start()
        self._admission.serve()

    def when_full(self, give_back: OnFull) -> None:
        """Have somebody told whenever a lease waits for room, so that he gives back what he can."""
        self._admission.on_full = give_back

    def when_acquired(self, observe: OnAcquired) -> None:
        """Have each lease observed as soon as its sandbox can be used."""
        self._on_acquired = observe

    @asynccontextmanager
    async def lease(
        self,
        isolation: Isolation,
        on_decision: OnDecision | None = None,
        on_ask: OnAsk | None = None,
    ) -> AsyncIterator[PoolLease]:
        """A sandbox for the length of the block. Raises SandboxUnavailableError, SandboxStartError.

        `sandbox()` of the lease raises them too, for what turns out only later. One that is never
        asked for by it is there for the next lease.
        """

        def borrow() -> Loan:
            claim = self._claim(isolation)
            return Loan(claim, asyncio.create_task(self._acquire(claim, self._clock.time())))

        def take(claim: Claim) -> None:
            if claim.place:
                self._take(claim.place, isolation, on_decision, on_ask)

        def give_back(loan: Loan) -> None:
            # The request does not wait, and its cancellation cannot reach this.
            self._endings.see_through(self._give_back(loan))

        lease = PoolLease(borrow, take, give_back)
        try:
            yield lease
        finally:
            lease.end()

    # Lending

    def _claim(self, isolation: Isolation) -> Claim:
        if not fits(self._settings, Load(1, isolation.memory_mib)):
            budget_mib = self._settings.memory_budget_mib
            raise SandboxStartError(
                f"a sandbox of {isolation.memory_mib} MiB is beyond the budget of {budget_mib} MiB"
            )
        claim = Claim(isolation)
        why = self._admission.enter(claim)
        self._counts["hits" if claim.place else "misses"] += 1
        if why:
            raise self._refusal(why)
        self._keeper.start()
        return claim

    async def _acquire(self, claim: Claim, began: float) -> GuestSandbox:
        wait_s = self._settings.wait_s
        is_adopted = False
        try:
            async with asyncio.timeout(wait_s):
                while not is_adopted:
                    place = await claim.turn()
                    assigned = self._clock.time()
                    is_adopted = await self._adopt(claim, place)
        except TimeoutError:
            self._drop(claim)
            raise self._refusal(f"no sandbox came free in {wait_s:g} s") from None
        if self._on_acquired:
            self._on_acquired(assigned - began, self._clock.time() - began)
        return place.sandbox

    def _take(
        self,
        place: Place,
        isolation: Isolation,
        on_decision: OnDecision | None,
        on_ask: OnAsk | None,
    ) -> None:
        """Somebody begins to use it: another is to be ready for the next."""
        place.is_unused = False
        if self._on_lend:
            undo = self._on_lend(place.sandbox, isolation, on_decision, on_ask)
            place.at_end.push_async_callback(undo)
        self._admission.serve()

    async def _adopt(self, claim: Claim, place: Place) -> bool:
        """Make it the claim's own; where that cannot be, the claim is first in the queue again."""
        try:
            await place.sandbox.ping(self._idle_patience_s)
            place.lent_since = self._clock.time()
            if limits_of(place.made) != limits_of(claim.isolation):
                place.is_unused = False
                await place.sandbox.limit(claim.isolation)
                self._books.count(place, claim.isolation)
            self._admission.serve()
        except SandboxLostError:
            claim.renew(claim.recipe)
        except SandboxStartError:
            claim.renew(exact_recipe(claim.isolation))
        else:
            return True
        self._replace([place])
        if why := self._admission.enter_first(claim):
            claim.fail(self._refusal(why))
        return False

    async def _give_back(self, loan: Loan) -> None:
        loan.acquiring.cancel()
        await asyncio.wait([loan.acquiring])
        self._drop(loan.claim)
        error = None if loan.acquiring.cancelled() else loan.acquiring.exception()
        if error and not isinstance(error, SandboxError):
            logger.error("a sandbox could not be lent", exc_info=error)

    def _drop(self, claim: Claim) -> None:
        """The claim wants nothing any more."""
        place, claim.place = claim.place, None
        if place and place.is_unused:
            self._admission.shelve(place)
        elif place and place.lent_since is not None:
            self._lend_s = moving_mean(self._lend_s, self._clock.time() - place.lent_since)
            self._endings.begin(place)
        self._admission.leave(claim)

    def _refusal(self, why: str) -> SandboxUnavailableError:
        self._counts["refused"] += 1
        after_s = retry_after_s(
            has_room=fits(self._settings, self._books.load + Load(1)),
            ahead=len(self._admission.waiting),
            lent=self._books.number(State.LENT),
            start_s=self._supply.start_s,
            lend_s=self._lend_s,
        )
        return SandboxUnavailableError(why, retry_after_s=after_s)

    # What becomes of sandboxes

    def _started(self, place: Place) -> None:
        self._counts["started"] += 1
        self._admission.shelve(place)

    def _failed(self, place: Place, error: BaseException) -> None:
        self._counts["failed"] += 1
        self._admission.tell(place, error)
        self._gone.set()

    def _replace(self, places: Sequence[Place]) -> None:
        self._counts["replaced"] += len(places)
        for place in places:
            self._endings.begin(place)
        self._admission.serve()

    def _ended(self) -> None:
        self._gone.set()
        self._admission.serve()

    async def aclose(self) -> None:
        """End those that nobody has, and wait until the others have been given back and ended."""
        for claim in self._admission.close():
            claim.fail(self._refusal("the pool is closed"))
        await self._supply.aclose()
        while self._books:
            self._gone.clear()
            await self._gone.wait()
        await self._endings.wait()
        await self._keeper.aclose()

    def stats(self) -> PoolStats:
        """How it stands now."""
        counts = ("hits", "misses", "refused", "replaced", "started", "failed")
        return PoolStats(
            **{state.name.lower(): self._books.number(state) for state in State},
            **{name: self._counts[name] for name in counts},
            waiting=len(self._admission.waiting),
        )
