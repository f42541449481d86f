"""The pool keeps sandboxes ready, leases each sandbox once, and queues leases that must wait.

A lease requests its sandbox when it begins and returns it when it ends; the sandbox then ends in
the background. A sandbox that the lease never took goes to the next lease.

All leases wait in one queue, in which their owners take turns. A sandbox that becomes ready goes to
the first waiter that can use it. A waiter that needs more memory than is free blocks all waiters
behind it, so that none starves.
"""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from policies.isolation import Isolation
from policies.pool import (
    Load,
    PoolKey,
    PoolSettings,
    eviction_count,
    exact_pool_key,
    fits,
    max_background_starts,
    max_replacements,
    max_starts_on_demand,
    moving_mean,
    pool_key,
    resizable_limits,
    retry_after_s,
    with_max_sandboxes,
    without_lease_fields,
)
from sandbox_runtime.backends.base import Backend
from sandbox_runtime.clock import Clock, SystemClock
from sandbox_runtime.egress.decision import CheckTarget, OnDecision
from sandbox_runtime.egress.gateway import EgressGateways
from sandbox_runtime.errors import (
    NoFreeSandboxError,
    SandboxError,
    SandboxLostError,
    SandboxStartError,
)
from sandbox_runtime.guest_sandbox import GuestSandbox
from sandbox_runtime.pool.entries import EntryState, PoolEntry, PoolRegistry, Waiter, WaiterQueue
from sandbox_runtime.pool.lifecycle import SandboxLifecycle
from sandbox_runtime.sandbox import SandboxReference

logger = logging.getLogger(__name__)

OnFull = Callable[[Callable[[], bool]], None]
"""Called when the pool is full and the waiting leases outnumber the sandboxes that are starting for
them or ending. The argument is a function that returns True as long as they do."""

OnAcquired = Callable[[float, float], None]
"""Called when a lease has its sandbox. The arguments are the seconds from the lease's request until
a sandbox was assigned, and until that sandbox had answered a ping and had its limits."""

IDLE_PING_TIMEOUT_S = 5.0
"""Maximum time for an idle sandbox to answer a ping."""
INITIAL_LEASE_S = 30.0


@dataclass(frozen=True, slots=True)
class PoolStats:
    """The current numbers of sandboxes and waiters, and totals since the pool began."""

    starting: int
    """Sandboxes that are being started or adopted."""
    idle: int
    leased: int
    ending: int
    waiting: int
    """Leases that wait for a sandbox."""
    hits: int
    """Leases that found a sandbox ready."""
    misses: int
    refused: int
    """Leases that were refused with a retry time."""
    replaced: int
    """Idle sandboxes that were ended: dead, too old, of an old image, or not resizable."""
    started: int
    failed: int
    """Starts that failed."""


@dataclass(slots=True)
class Allocation:
    """One sandbox of a lease, or the lease's place in the queue."""

    waiter: Waiter
    acquire_task: asyncio.Task[GuestSandbox]
    is_taken: bool = False
    """True once the lease has taken the sandbox; see `Pool.begin_use`."""


class Pool:
    """Leases out the sandboxes of one backend; see `Sandboxes`. The pool starts no sandbox before
    `start` or the first lease.

    Idle sandboxes are kept for `isolations`; those of other isolations are started on demand.
    `gateways` make the egress gateway of each lease; without them no sandbox has network access.
    """

    def __init__(
        self,
        backend: Backend,
        settings: PoolSettings,
        isolations: Sequence[Isolation],
        *,
        gateways: EgressGateways | None = None,
        clock: Clock | None = None,
        idle_ping_timeout_s: float = IDLE_PING_TIMEOUT_S,
    ) -> None:
        self._configured_settings = settings
        self._backend = backend
        self._pool_key = pool_key if backend.can_resize else exact_pool_key
        self._kept_isolations = {
            self._pool_key(isolation): without_lease_fields(isolation) for isolation in isolations
        }
        self._gateways = gateways
        self._on_full: OnFull | None = None
        self._clock = clock or SystemClock()
        self._idle_ping_timeout_s = idle_ping_timeout_s
        self._queue = WaiterQueue()
        self._mean_lease_s = INITIAL_LEASE_S
        """Moving average of the duration of a lease."""
        self._registry = PoolRegistry()
        self._lifecycle = SandboxLifecycle(
            backend,
            self._registry,
            self._clock,
            self._on_change,
            ttl_s=settings.ttl_s,
            idle_ping_timeout_s=idle_ping_timeout_s,
            max_replacements_at_once=max_replacements(settings),
        )
        self._on_acquired: OnAcquired | None = None

    @property
    def can_adopt(self) -> bool:
        """See `Sandboxes.can_adopt`."""
        return self._backend.can_adopt

    @property
    def _parallel_starts(self) -> int:
        """The number of sandboxes that may start in parallel. The backend's number may change."""
        return self._configured_settings.max_parallel_starts or self._backend.parallel_starts

    @property
    def _settings(self) -> PoolSettings:
        """The configured settings, limited to the number of sandboxes that the backend can have
        now."""
        capacity = self._backend.capacity
        if capacity is None:
            return self._configured_settings
        return with_max_sandboxes(self._configured_settings, capacity)

    def start(self) -> None:
        """Begin to start the idle sandboxes, and to monitor all sandboxes."""
        self._lifecycle.monitor()
        self._schedule()

    def set_full_handler(self, on_full: OnFull) -> None:
        """Call `on_full` when the pool is full and a lease waits. `on_full` may end another lease,
        such as that of an idle session."""
        self._on_full = on_full

    def set_acquired_handler(self, on_acquired: OnAcquired) -> None:
        """Call `on_acquired` for each lease when its sandbox can be used."""
        self._on_acquired = on_acquired

    @asynccontextmanager
    async def lease(
        self,
        isolation: Isolation,
        on_decision: OnDecision | None = None,
        check_target: CheckTarget | None = None,
        owner: str = "",
        adopted: SandboxReference | None = None,
    ) -> AsyncIterator["PoolLease"]:
        """Lease a sandbox for the length of the block.

        Raises NoFreeSandboxError and SandboxStartError; so does `sandbox()` of the lease.
        """
        lease = PoolLease(self, isolation, on_decision, check_target, owner, adopted)
        try:
            yield lease
        finally:
            lease.end()

    def stats(self) -> PoolStats:
        """Return the current numbers of sandboxes and waiters, and the totals."""
        counts, number = self._registry.counts, self._registry.count_in
        return PoolStats(
            starting=number(EntryState.STARTING) + number(EntryState.ADOPTING),
            idle=number(EntryState.IDLE),
            leased=number(EntryState.LEASED),
            ending=number(EntryState.ENDING),
            waiting=len(self._queue),
            hits=counts["hits"],
            misses=counts["misses"],
            refused=counts["refused"],
            replaced=counts["replaced"],
            started=counts["started"],
            failed=counts["failed"],
        )

    async def aclose(self) -> None:
        """Refuse all waiters, end idle sandboxes, and wait until leased ones have ended."""
        for waiter in self._queue.clear():
            waiter.fail(self._refusal_error(waiter, "the pool is closed"))
        await self._lifecycle.aclose()

    # Called by leases

    def allocate(self, isolation: Isolation, owner: str) -> Allocation:
        """Begin to acquire a sandbox. Raises NoFreeSandboxError if the lease may not wait, and
        SandboxStartError if the sandbox alone would exceed the pool's limits."""
        if not fits(self._settings, Load(1, isolation.memory_mib)):
            budget_mib = self._settings.memory_budget_mib
            raise SandboxStartError(
                f"a sandbox of {isolation.memory_mib} MiB is beyond the budget of {budget_mib} MiB"
            )
        waiter = Waiter(isolation, self._pool_key(isolation), owner)
        self._queue.append(waiter)
        self._schedule()
        self._registry.counts["hits" if waiter.entry else "misses"] += 1
        if refusal := self._check_may_wait(waiter):
            raise refusal
        return Allocation(waiter, asyncio.create_task(self._acquire(waiter, self._clock.time())))

    def adopt(self, isolation: Isolation, owner: str, reference: SandboxReference) -> Allocation:
        """Begin to adopt the running sandbox that `reference` names. Its process is dead."""
        waiter = Waiter(isolation, self._pool_key(isolation), owner)
        return Allocation(waiter, asyncio.create_task(self._adopt(waiter, reference)))

    async def _adopt(self, waiter: Waiter, reference: SandboxReference) -> GuestSandbox:
        entry = await self._lifecycle.adopt(waiter.isolation, waiter.pool_key, reference)
        waiter.give(entry)
        return entry.sandbox

    def begin_use(
        self, waiter: Waiter, on_decision: OnDecision | None, check_target: CheckTarget | None
    ) -> None:
        """Mark the waiter's sandbox as used, attach an egress gateway to it, and let the pool start
        another idle sandbox."""
        entry = waiter.entry
        assert entry  # the lease has not released the waiter
        entry.is_unused = False
        if self._gateways:
            gateway = self._gateways.create(waiter.isolation.network, on_decision, check_target)
            entry.sandbox.set_connection_handler(gateway.serve)
            entry.sandbox.traffic = gateway.traffic
            entry.end_callbacks.push_async_callback(gateway.aclose)
            # Runs first at the end: the gateway gets no connection while it closes.
            entry.end_callbacks.callback(entry.sandbox.set_connection_handler, None)
        self._schedule()

    def give_back(self, allocation: Allocation) -> None:
        """Release the allocation in the background, where a cancellation of the lease's request
        does not reach it."""
        self._lifecycle.run_detached(self._give_back(allocation))

    async def _give_back(self, allocation: Allocation) -> None:
        acquire_task = allocation.acquire_task
        acquire_task.cancel()
        await asyncio.wait([acquire_task])
        self._release(allocation.waiter)
        error = None if acquire_task.cancelled() else acquire_task.exception()
        if error and not isinstance(error, SandboxError):
            logger.error("a sandbox could not be leased", exc_info=error)

    def _release(self, waiter: Waiter) -> None:
        entry, waiter.entry = waiter.entry, None
        if entry and entry.is_unused:
            self._lifecycle.make_idle(entry)
        elif entry and entry.leased_since is not None:
            self._mean_lease_s = moving_mean(
                self._mean_lease_s, self._clock.time() - entry.leased_since
            )
            self._lifecycle.end(entry)
        if waiter in self._queue:
            self._queue.remove(waiter)
        self._schedule()

    # Acquiring

    async def _acquire(self, waiter: Waiter, began_at: float) -> GuestSandbox:
        wait_s = self._settings.queue_timeout_s
        is_prepared = False
        try:
            async with asyncio.timeout(wait_s):
                while not is_prepared:
                    entry = await waiter.wait()
                    assigned = self._clock.time()
                    is_prepared = await self._prepare(waiter, entry)
        except TimeoutError:
            self._release(waiter)
            raise self._refusal_error(waiter, f"no sandbox came free in {wait_s:g} s") from None
        if self._on_acquired:
            self._on_acquired(assigned - began_at, self._clock.time() - began_at)
        return entry.sandbox

    async def _prepare(self, waiter: Waiter, entry: PoolEntry) -> bool:
        """Ping the sandbox and give it the limits that the waiter requests. If that fails, replace
        the sandbox, put the waiter first in the queue and return False."""
        try:
            await entry.sandbox.ping(self._idle_ping_timeout_s)
            entry.leased_since = self._clock.time()
            if resizable_limits(entry.isolation) != resizable_limits(waiter.isolation):
                entry.is_unused = False
                await entry.sandbox.resize(waiter.isolation)
                self._registry.change_counted_isolation(entry, waiter.isolation)
            self._schedule()
        except SandboxLostError:
            waiter.reset(waiter.pool_key)
        except SandboxStartError:
            waiter.reset(exact_pool_key(waiter.isolation))
        else:
            return True
        self._lifecycle.replace([entry])
        self._queue.prepend(waiter)
        self._schedule()
        if refusal := self._check_may_wait(waiter):
            waiter.fail(refusal)
        return False

    def _check_may_wait(self, waiter: Waiter) -> NoFreeSandboxError | None:
        """Check whether the waiter may stay in the queue; return None if it may. Otherwise remove
        it and return the error to raise. If a full queue refuses another waiter instead, that
        waiter's `wait` raises the error."""
        if waiter.entry:
            return None
        refused, why = waiter, ""
        if self._lifecycle.is_closed:
            why = "the pool is closed"
        elif self._settings.on_miss == "fail":
            why = "no sandbox is ready"
        elif not waiter.has_pending_start:
            queue = [queued for queued in self._queue if not queued.has_pending_start]
            if len(queue) > self._settings.queue_size:
                why = f"{len(queue) - 1} requests wait for a sandbox already"
                refused = self._waiter_to_refuse(queue, waiter)
        if not why:
            return None
        self._queue.remove(refused)
        error = self._refusal_error(refused, why)
        if refused is waiter:
            return error
        refused.fail(error)
        return None

    @staticmethod
    def _waiter_to_refuse(queue: Sequence[Waiter], newest: Waiter) -> Waiter:
        """Return the newest waiter of the owner that has the most waiters in a full queue, so that
        one owner cannot fill it. If several owners have the most, prefer the owner of `newest`."""
        counts = Counter(waiter.owner for waiter in queue)
        if counts[newest.owner] == max(counts.values()):
            return newest
        owner, _ = counts.most_common(1)[0]
        return [waiter for waiter in queue if waiter.owner == owner][-1]

    def _refusal_error(self, refused: Waiter, why: str) -> NoFreeSandboxError:
        self._registry.counts["refused"] += 1
        needed = Load(1, refused.isolation.memory_mib)
        after_s = retry_after_s(
            has_room=fits(self._settings, self._registry.load + needed),
            waiting_ahead=len(self._queue),
            leased_count=self._registry.count_in(EntryState.LEASED),
            start_s=self._lifecycle.start_s,
            lease_s=self._mean_lease_s,
        )
        return NoFreeSandboxError(why, retry_after_s=after_s)

    # Scheduling

    def _on_change(self) -> None:
        if self._lifecycle.is_closed:
            return
        while self._lifecycle.failed_starts:
            self._report_failure(*self._lifecycle.failed_starts.popleft())
        self._schedule()

    def _report_failure(self, entry: PoolEntry, error: BaseException) -> None:
        """Report a failed start. If more waiters than other starts have the entry's pool key, raise
        the error in the first of these waiters. Otherwise log the error."""
        waiting = [waiter for waiter in self._queue if waiter.pool_key == entry.pool_key]
        if len(waiting) > len(
            list(self._registry.entries_with_key(EntryState.STARTING, entry.pool_key))
        ):
            self._queue.remove(waiting[0])
            waiting[0].fail(error)
        elif isinstance(error, SandboxError):
            logger.warning("no idle sandbox could be started: %s", error)
        else:
            logger.error("no idle sandbox could be started", exc_info=error)

    def _schedule(self) -> None:
        """Do everything that is possible now: assign sandboxes to the waiters in their order, start
        sandboxes for the others, and then start idle ones."""
        if self._lifecycle.is_closed:
            return
        unclaimed = _count_by_key(self._registry.entries(EntryState.STARTING))
        lacks_room = False
        for waiter in tuple(self._queue):
            waiter.has_pending_start = False
            lacks_room = lacks_room or not self._assign(waiter, unclaimed)
        if lacks_room and self._on_full and self._lacks_sandboxes():
            self._on_full(self._lacks_sandboxes)
        self._trim()
        # A start takes CPU time, so sandboxes that are being prepared for a lease go first.
        is_preparing = any(
            entry.leased_since is None for entry in self._registry.entries(EntryState.LEASED)
        )
        if not (lacks_room or is_preparing or self._lifecycle.is_backing_off):
            self._refill(unclaimed)

    def _lacks_sandboxes(self) -> bool:
        """Return True if the waiters for which no sandbox is starting outnumber the ending
        sandboxes."""
        ending = self._registry.count_in(EntryState.ENDING)
        return sum(not waiter.has_pending_start for waiter in self._queue) > ending

    def _assign(self, waiter: Waiter, unclaimed: dict[PoolKey, int]) -> bool:
        """Assign an idle sandbox to the waiter or start one; return False if the pool is full.

        `unclaimed` counts the starting sandboxes, by pool key, that no earlier waiter in the queue
        claims.
        """
        if idle := next(self._registry.entries_with_key(EntryState.IDLE, waiter.pool_key), None):
            return self._lease_out(idle, waiter)
        if not unclaimed[waiter.pool_key]:
            starting = self._registry.count_in(EntryState.STARTING)
            if starting >= max_starts_on_demand(self._settings, self._parallel_starts):
                return True
            if not self._make_room(Load(1, waiter.isolation.memory_mib)):
                return False
            self._lifecycle.start(waiter.isolation, waiter.pool_key)
            unclaimed[waiter.pool_key] += 1
        unclaimed[waiter.pool_key] -= 1
        waiter.has_pending_start = True
        return True

    def _lease_out(self, entry: PoolEntry, waiter: Waiter) -> bool:
        more_mib = waiter.isolation.memory_mib - entry.counted_isolation.memory_mib
        if not self._make_room(Load(0, more_mib), excluded=entry):
            return False
        self._queue.remove_served(waiter)
        self._registry.move(entry, EntryState.LEASED)
        # Memory that the sandbox no longer needs is free only once its limits have changed.
        if more_mib > 0:
            self._registry.change_counted_isolation(entry, waiter.isolation)
        waiter.give(entry)
        return True

    def _make_room(self, needed: Load, excluded: PoolEntry | None = None) -> bool:
        """Return True if the load fits. Otherwise return False and end enough idle sandboxes to
        make room for the load, or none if even all of them would not suffice."""
        if fits(self._settings, self._registry.load + needed):
            return True
        ending = sum((entry.load for entry in self._registry.entries(EntryState.ENDING)), Load())
        idle = [entry for entry in self._registry.entries(EntryState.IDLE) if entry is not excluded]
        number = eviction_count(
            self._settings, self._registry.load - ending + needed, [entry.load for entry in idle]
        )
        for entry in idle[: number or 0]:
            self._lifecycle.end(entry)
        return False

    def _trim(self) -> None:
        """End the idle sandboxes that the pool does not keep ready: those of other isolations, and
        of each kept isolation all but the newest `min_ready`."""
        missing = dict.fromkeys(self._kept_isolations, self._settings.min_ready)
        for entry in reversed(self._registry.entries(EntryState.IDLE)):
            key = entry.pool_key
            if entry.isolation == self._kept_isolations.get(key) and missing[key]:
                missing[key] -= 1
            else:
                self._lifecycle.end(entry)

    def _refill(self, unclaimed: dict[PoolKey, int]) -> None:
        """Start the missing idle sandboxes, few at a time. A leased sandbox that is unused counts
        as idle, because its lease may end without taking it."""
        entries = (
            *self._registry.entries(EntryState.IDLE),
            *self._registry.entries(EntryState.LEASED),
        )
        unused = _count_by_key(entry for entry in entries if entry.is_unused)
        for key, isolation in self._kept_isolations.items():
            load = Load(1, isolation.memory_mib)
            for _ in range(self._settings.min_ready - unused[key] - unclaimed[key]):
                starting = self._registry.count_in(EntryState.STARTING)
                is_allowed = starting < max_background_starts(self._parallel_starts)
                if is_allowed and fits(self._settings, self._registry.load + load):
                    self._lifecycle.start(isolation, key)


def _count_by_key(entries: Iterable[PoolEntry]) -> dict[PoolKey, int]:
    """Return how many of the entries have each pool key; 0 for keys that none has."""
    # A Counter takes several times as long for the few entries that there are.
    numbers: dict[PoolKey, int] = defaultdict(int)
    for entry in entries:
        numbers[entry.pool_key] += 1
    return numbers


class PoolLease:
    """The lease of one sandbox, which may still be starting; see `Lease`."""

    command_id = None

    def __init__(
        self,
        pool: Pool,
        isolation: Isolation,
        on_decision: OnDecision | None,
        check_target: CheckTarget | None,
        owner: str,
        adopted: SandboxReference | None,
    ) -> None:
        self._pool = pool
        self._isolation = isolation
        self._owner = owner
        self._on_decision = on_decision
        self._check_target = check_target
        self._allocation = (
            pool.adopt(isolation, owner, adopted) if adopted else pool.allocate(isolation, owner)
        )
        self._is_over = False

    async def sandbox(self) -> GuestSandbox:
        allocation = self._allocation
        sandbox = await self._take_when_ready(allocation)
        if sandbox.lost is None or self._is_over:
            return sandbox
        if allocation is self._allocation:  # no concurrent call has replaced it
            self._pool.give_back(allocation)
            self._allocation = self._pool.allocate(self._isolation, self._owner)
        return await self._take_when_ready(self._allocation)

    async def _take_when_ready(self, allocation: Allocation) -> GuestSandbox:
        # Shielded: if one caller is cancelled, other callers of the lease still get the sandbox.
        sandbox = await asyncio.shield(allocation.acquire_task)
        if not allocation.is_taken:
            if self._is_over:
                raise SandboxLostError("the lease is over")
            self._pool.begin_use(allocation.waiter, self._on_decision, self._check_target)
            allocation.is_taken = True
        return sandbox

    def end(self) -> None:
        """Return the sandbox to the pool."""
        self._is_over = True
        self._pool.give_back(self._allocation)
