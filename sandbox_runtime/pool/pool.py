"""The pool: sandboxes kept ready, each lent to one lease, and the queue of those that wait.

A lease asks for its sandbox when it begins and gives it back when it ends. Starting the sandbox
before and ending it after take no time of the lease's block. One that the lease never took is lent
to the next lease.

All leases wait in one queue. A sandbox that becomes ready goes to the first waiter that can use
it. A waiter that needs more room than there is holds up all behind it, so that none is overtaken
for ever.
"""

import asyncio
import logging
import os
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from policies.isolation import Isolation
from policies.pool import (
    Load,
    PoolSettings,
    Recipe,
    exact_recipe,
    fits,
    how_many_to_end,
    limits_of,
    moving_mean,
    recipe,
    retry_after_s,
    starts_ahead,
    starts_at_once,
    unbound,
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
from sandbox_runtime.pool.entries import PoolEntry, PoolRegistry, State, Waiter
from sandbox_runtime.pool.lifecycle import SandboxLifecycle

logger = logging.getLogger(__name__)

Undo = Callable[[], Awaitable[None]]
OnLend = Callable[[GuestSandbox, Isolation, OnDecision | None, OnAsk | None], Undo]
"""Binds what a lease decides to the sandbox that it takes. The result is awaited before the
sandbox ends."""

OnFull = Callable[[Callable[[], bool]], None]
"""Called when a lease waits for room and no sandbox is ending for it; its argument tells whether
that is still so."""

OnAcquired = Callable[[float, float], None]
"""Called when a lease has got its sandbox, with the seconds until one was assigned to it and the
seconds until that one answered."""

IDLE_PATIENCE_S = 5.0
"""How long a sandbox without a command may take to answer a ping."""
GUESSED_LEND_S = 30.0


@dataclass(frozen=True, slots=True)
class PoolStats:
    """How many sandboxes and waiters there are now, and totals since the pool began."""

    starting: int
    idle: int
    lent: int
    ending: int
    waiting: int
    """Leases without a sandbox yet."""
    hits: int
    """Leases that found a sandbox ready."""
    misses: int
    refused: int
    """Leases that were told to come again."""
    replaced: int
    """Ready ones given up: dead, too old, of an old image, or with limits that cannot change."""
    started: int
    failed: int
    """Starts that failed."""


@dataclass(slots=True)
class Allocation:
    """One sandbox of a lease, or its place in the queue."""

    waiter: Waiter
    acquiring: asyncio.Task[GuestSandbox]
    is_taken: bool = False
    """True once the lease has asked for the sandbox."""


class Pool:
    """Lends sandboxes of one backend; see `Sandboxes`. It begins at the first lease or `start`.

    Idle sandboxes are kept for `isolations`; those of other isolations are started on demand.
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
        self._kept = {recipe(isolation): unbound(isolation) for isolation in isolations}
        self._on_lend = on_lend
        self._on_full: OnFull | None = None
        self._clock = clock or SystemClock()
        self._idle_patience_s = idle_patience_s
        self._cores = cores or len(os.sched_getaffinity(0))
        self._queue = deque[Waiter]()
        self._lend_s = GUESSED_LEND_S
        """Moving mean of the time that a sandbox is lent for."""
        self._registry = PoolRegistry()
        self._lifecycle = SandboxLifecycle(
            backend,
            self._registry,
            self._clock,
            self._on_change,
            ttl_s=settings.ttl_s,
            idle_patience_s=idle_patience_s,
            replaced_at_once=starts_ahead(self._cores),
        )
        self._on_acquired: OnAcquired | None = None

    def start(self) -> None:
        """Begin to start the sandboxes that are kept ready, and to monitor all."""
        self._lifecycle.monitor()
        self._schedule()

    def when_full(self, give_back: OnFull) -> None:
        """Have `give_back` called when a lease waits for room, to end a sandbox kept in use."""
        self._on_full = give_back

    def when_acquired(self, observe: OnAcquired) -> None:
        """Call `observe` for each lease as soon as its sandbox can be used."""
        self._on_acquired = observe

    @asynccontextmanager
    async def lease(
        self,
        isolation: Isolation,
        on_decision: OnDecision | None = None,
        on_ask: OnAsk | None = None,
    ) -> AsyncIterator["PoolLease"]:
        """Lend a sandbox for the length of the block.

        Raises SandboxUnavailableError and SandboxStartError, which `sandbox()` of the lease raises
        too if they turn out later.
        """
        lease = PoolLease(self, isolation, on_decision, on_ask)
        try:
            yield lease
        finally:
            lease.end()

    def stats(self) -> PoolStats:
        """Return the current numbers."""
        counts, number = self._registry.counts, self._registry.number
        return PoolStats(
            starting=number(State.STARTING),
            idle=number(State.IDLE),
            lent=number(State.LENT),
            ending=number(State.ENDING),
            waiting=len(self._queue),
            hits=counts["hits"],
            misses=counts["misses"],
            refused=counts["refused"],
            replaced=counts["replaced"],
            started=counts["started"],
            failed=counts["failed"],
        )

    async def aclose(self) -> None:
        """Refuse all waiters, end idle sandboxes, and wait until lent ones are back and ended."""
        waiters, self._queue = self._queue, deque()
        for waiter in waiters:
            waiter.fail(self._refusal("the pool is closed"))
        await self._lifecycle.aclose()

    # What a lease does

    def allocate(self, isolation: Isolation) -> Allocation:
        """Begin to acquire a sandbox. Raises SandboxUnavailableError and SandboxStartError."""
        if not fits(self._settings, Load(1, isolation.memory_mib)):
            budget_mib = self._settings.memory_budget_mib
            raise SandboxStartError(
                f"a sandbox of {isolation.memory_mib} MiB is beyond the budget of {budget_mib} MiB"
            )
        waiter = Waiter(isolation)
        self._queue.append(waiter)
        self._schedule()
        self._registry.counts["hits" if waiter.entry else "misses"] += 1
        if refusal := self._refused(waiter):
            raise refusal
        return Allocation(waiter, asyncio.create_task(self._acquire(waiter, self._clock.time())))

    def take(self, waiter: Waiter, on_decision: OnDecision | None, on_ask: OnAsk | None) -> None:
        """Bind egress to the waiter's sandbox, which is used from now on, and replace it as one
        that is kept ready."""
        entry = waiter.entry
        assert entry  # until the waiter is released, after which its lease takes nothing
        entry.is_unused = False
        if self._on_lend:
            undo = self._on_lend(entry.sandbox, waiter.isolation, on_decision, on_ask)
            entry.at_end.push_async_callback(undo)
        self._schedule()

    def give_back(self, allocation: Allocation) -> None:
        """Release the allocation in a task of its own: the lease's request does not wait for it,
        and the request's cancellation does not reach it."""
        self._lifecycle.run_detached(self._give_back(allocation))

    async def _give_back(self, allocation: Allocation) -> None:
        acquiring = allocation.acquiring
        acquiring.cancel()
        await asyncio.wait([acquiring])
        self._release(allocation.waiter)
        error = None if acquiring.cancelled() else acquiring.exception()
        if error and not isinstance(error, SandboxError):
            logger.error("a sandbox could not be lent", exc_info=error)

    def _release(self, waiter: Waiter) -> None:
        entry, waiter.entry = waiter.entry, None
        if entry and entry.is_unused:
            self._lifecycle.make_idle(entry)
        elif entry and entry.lent_since is not None:
            self._lend_s = moving_mean(self._lend_s, self._clock.time() - entry.lent_since)
            self._lifecycle.end(entry)
        if waiter in self._queue:
            self._queue.remove(waiter)
        self._schedule()

    # Acquiring

    async def _acquire(self, waiter: Waiter, began: float) -> GuestSandbox:
        wait_s = self._settings.wait_s
        is_prepared = False
        try:
            async with asyncio.timeout(wait_s):
                while not is_prepared:
                    entry = await waiter.wait()
                    assigned = self._clock.time()
                    is_prepared = await self._prepare(waiter, entry)
        except TimeoutError:
            self._release(waiter)
            raise self._refusal(f"no sandbox came free in {wait_s:g} s") from None
        if self._on_acquired:
            self._on_acquired(assigned - began, self._clock.time() - began)
        return entry.sandbox

    async def _prepare(self, waiter: Waiter, entry: PoolEntry) -> bool:
        """Check that the sandbox answers and give it the waiter's limits; where that cannot be,
        replace it, put the waiter first in the queue and return False."""
        try:
            await entry.sandbox.ping(self._idle_patience_s)
            entry.lent_since = self._clock.time()
            if limits_of(entry.isolation) != limits_of(waiter.isolation):
                entry.is_unused = False
                await entry.sandbox.limit(waiter.isolation)
                self._registry.recount(entry, waiter.isolation)
            self._schedule()
        except SandboxLostError:
            waiter.reset(waiter.recipe)
        except SandboxStartError:
            waiter.reset(exact_recipe(waiter.isolation))
        else:
            return True
        self._lifecycle.replace([entry])
        self._queue.appendleft(waiter)
        self._schedule()
        if refusal := self._refused(waiter):
            waiter.fail(refusal)
        return False

    def _refused(self, waiter: Waiter) -> SandboxUnavailableError | None:
        """Take the waiter out of the queue if it may not wait there, and return the error."""
        why = None if waiter.entry else self._why_not_wait(waiter)
        if why is None:
            return None
        self._queue.remove(waiter)
        return self._refusal(why)

    def _why_not_wait(self, waiter: Waiter) -> str | None:
        if self._lifecycle.is_closed:
            return "the pool is closed"
        if self._settings.on_miss == "fail":
            return "no sandbox is ready"
        queue = [each for each in self._queue if not each.is_coming]
        if waiter in queue and len(queue) > self._settings.max_waiting:
            return f"{len(queue) - 1} requests wait for a sandbox already"
        return None

    def _refusal(self, why: str) -> SandboxUnavailableError:
        self._registry.counts["refused"] += 1
        after_s = retry_after_s(
            has_room=fits(self._settings, self._registry.load + Load(1)),
            ahead=len(self._queue),
            lent=self._registry.number(State.LENT),
            start_s=self._lifecycle.start_s,
            lend_s=self._lend_s,
        )
        return SandboxUnavailableError(why, retry_after_s=after_s)

    # Scheduling

    def _on_change(self) -> None:
        if self._lifecycle.is_closed:
            return
        while self._lifecycle.failed_starts:
            self._report_failure(*self._lifecycle.failed_starts.popleft())
        self._schedule()

    def _report_failure(self, entry: PoolEntry, error: BaseException) -> None:
        """Fail the first waiter that counted on the start; log the error if none did."""
        counting = [waiter for waiter in self._queue if waiter.recipe == entry.recipe]
        if len(counting) > len(list(self._registry.matching(State.STARTING, entry.recipe))):
            self._queue.remove(counting[0])
            counting[0].fail(error)
        elif isinstance(error, SandboxError):
            logger.warning("no sandbox could be made ready: %s", error)
        else:
            logger.error("no sandbox could be made ready", exc_info=error)

    def _schedule(self) -> None:
        """Do all that can be done now: lend sandboxes to the waiters in their order, start
        sandboxes for them, and then start those that are kept ready."""
        if self._lifecycle.is_closed:
            return
        unclaimed = Counter(entry.recipe for entry in self._registry.entries(State.STARTING))
        lacks_room = False
        for waiter in tuple(self._queue):
            waiter.is_coming = False
            lacks_room = lacks_room or not self._assign(waiter, unclaimed)
        if lacks_room and self._on_full and self._is_short():
            self._on_full(self._is_short)
        self._trim()
        # A start takes the processor for a moment: sandboxes being lent are made usable first.
        is_lending = any(entry.lent_since is None for entry in self._registry.entries(State.LENT))
        if not (lacks_room or is_lending or self._lifecycle.is_resting):
            self._refill(unclaimed)

    def _is_short(self) -> bool:
        """Return True if more waiters lack a sandbox than sandboxes are ending."""
        ending = self._registry.number(State.ENDING)
        return sum(not waiter.is_coming for waiter in self._queue) > ending

    def _assign(self, waiter: Waiter, unclaimed: Counter[Recipe]) -> bool:
        """Lend the waiter an idle sandbox or have one started; return False if room is lacking.

        `unclaimed` are the starts by recipe that no waiter before this one counts on.
        """
        if idle := next(self._registry.matching(State.IDLE, waiter.recipe), None):
            return self._lend(idle, waiter)
        if not unclaimed[waiter.recipe]:
            starting = self._registry.number(State.STARTING)
            if starting >= starts_at_once(self._settings, self._cores):
                return True
            if not self._make_room(Load(1, waiter.isolation.memory_mib)):
                return False
            self._lifecycle.start(waiter.isolation, waiter.recipe)
            unclaimed[waiter.recipe] += 1
        unclaimed[waiter.recipe] -= 1
        waiter.is_coming = True
        return True

    def _lend(self, entry: PoolEntry, waiter: Waiter) -> bool:
        more_mib = waiter.isolation.memory_mib - entry.counted_as.memory_mib
        if not self._make_room(Load(0, more_mib), besides=entry):
            return False
        self._queue.remove(waiter)
        self._registry.move(entry, State.LENT)
        # Memory that the sandbox does not need is free for others once its limits have changed.
        if more_mib > 0:
            self._registry.recount(entry, waiter.isolation)
        waiter.give(entry)
        return True

    def _make_room(self, needed: Load, besides: PoolEntry | None = None) -> bool:
        """Return True if there is room; else end as many idle sandboxes as will make it."""
        if fits(self._settings, self._registry.load + needed):
            return True
        ending = sum((entry.load for entry in self._registry.entries(State.ENDING)), Load())
        idle = [entry for entry in self._registry.entries(State.IDLE) if entry is not besides]
        number = how_many_to_end(
            self._settings, self._registry.load - ending + needed, [entry.load for entry in idle]
        )
        for entry in idle[: number or 0]:
            self._lifecycle.end(entry)
        return False

    def _trim(self) -> None:
        """End idle sandboxes that are not among those kept, and the oldest of too many."""
        missing = Counter(dict.fromkeys(self._kept, self._settings.idle))
        for entry in reversed(self._registry.entries(State.IDLE)):
            if entry.isolation == self._kept.get(entry.recipe) and missing[entry.recipe]:
                missing[entry.recipe] -= 1
            else:
                self._lifecycle.end(entry)

    def _refill(self, unclaimed: Counter[Recipe]) -> None:
        """Start what is missing of the idle sandboxes, few at a time. A lent sandbox that is unused
        counts as idle, because its lease may end without having taken it."""
        entries = (*self._registry.entries(State.IDLE), *self._registry.entries(State.LENT))
        unused = Counter(entry.recipe for entry in entries if entry.is_unused)
        for each, isolation in self._kept.items():
            load = Load(1, isolation.memory_mib)
            for _ in range(self._settings.idle - unused[each] - unclaimed[each]):
                few = self._registry.number(State.STARTING) < starts_ahead(self._cores)
                if few and fits(self._settings, self._registry.load + load):
                    self._lifecycle.start(isolation, each)


class PoolLease:
    """A claim to one sandbox, which may still be starting; see `Lease`."""

    def __init__(
        self,
        pool: Pool,
        isolation: Isolation,
        on_decision: OnDecision | None,
        on_ask: OnAsk | None,
    ) -> None:
        self._pool = pool
        self._isolation = isolation
        self._on_decision = on_decision
        self._on_ask = on_ask
        self._allocation = pool.allocate(isolation)
        self._is_over = False

    async def sandbox(self) -> GuestSandbox:
        allocation = self._allocation
        sandbox = await self._taken(allocation)
        if sandbox.lost is None or self._is_over:
            return sandbox
        if allocation is self._allocation:  # no concurrent call has replaced it
            self._pool.give_back(allocation)
            self._allocation = self._pool.allocate(self._isolation)
        return await self._taken(self._allocation)

    async def _taken(self, allocation: Allocation) -> GuestSandbox:
        # Shielded: a caller that gives up leaves the sandbox to the other callers of the lease.
        sandbox = await asyncio.shield(allocation.acquiring)
        if not allocation.is_taken:
            if self._is_over:
                raise SandboxLostError("the lease is over")
            self._pool.take(allocation.waiter, self._on_decision, self._on_ask)
            allocation.is_taken = True
        return sandbox

    def end(self) -> None:
        """Give the sandbox back."""
        self._is_over = True
        self._pool.give_back(self._allocation)
