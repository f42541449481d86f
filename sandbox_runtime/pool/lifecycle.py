"""The life of the pool's sandboxes: how each is started, kept alive and ended.

Open this module for failed starts and the backoff after them, pings, replacement by age or image,
and the order of a shutdown. The `pool` module decides which sandboxes are started and which lease
gets them.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial

from policies.isolation import Isolation
from policies.pool import PoolKey, moving_mean, start_backoff_s, without_lease_fields
from sandbox_runtime.backends.base import Backend
from sandbox_runtime.clock import Clock
from sandbox_runtime.errors import SandboxLostError, SandboxStartError
from sandbox_runtime.guest_sandbox import (
    BUSY_PING_TIMEOUT_S,
    PING_INTERVAL_S,
    GuestSandbox,
    adopt_sandbox,
    start_sandbox,
)
from sandbox_runtime.pool.entries import EntryState, PoolEntry, PoolRegistry
from sandbox_runtime.sandbox import SandboxReference

INITIAL_START_S = 1.0


class SandboxLifecycle:
    """Starts, monitors and ends sandboxes, and records their states in the registry.

    `on_change` is called whenever the pool may be able to start or lease a sandbox: after a start
    has succeeded or failed, a sandbox has ended, a backoff has ended or sandboxes were replaced,
    and in each round of pings.
    """

    def __init__(
        self,
        backend: Backend,
        registry: PoolRegistry,
        clock: Clock,
        on_change: Callable[[], None],
        *,
        ttl_s: float,
        idle_ping_timeout_s: float,
        max_replacements_at_once: int,
    ) -> None:
        self._backend = backend
        self._registry = registry
        self._clock = clock
        self._on_change = on_change
        self._ttl_s = ttl_s
        self._idle_ping_timeout_s = idle_ping_timeout_s
        self._max_replacements_at_once = max_replacements_at_once
        self._fingerprint: str | None = None
        """The backend's newest known fingerprint."""
        self._start_tasks: dict[PoolEntry, asyncio.Task[GuestSandbox]] = {}
        self._failure_count = 0
        """Failed starts since the last one that succeeded."""
        self._backoff_task: asyncio.Task[None] | None = None
        self._monitor_task: asyncio.Task[None] | None = None
        self._refresh_task: asyncio.Task[None] | None = None
        self._ping_tasks: dict[PoolEntry, asyncio.Task[None]] = {}
        self._detached_tasks = set[asyncio.Task[None]]()
        self.is_closed = False
        self.start_s = INITIAL_START_S
        """Moving average of the duration of a start."""
        self.failed_starts = deque[tuple[PoolEntry, BaseException]]()
        """Failed starts that the pool has not reported yet: to a waiter, or in the log."""

    # Starting

    @property
    def is_backing_off(self) -> bool:
        """True while no sandbox should be started in advance: after a failed start, and after a
        start that took CPU time from running commands."""
        return self._backoff_task is not None

    def start(self, isolation: Isolation, pool_key: PoolKey) -> None:
        """Begin to start a sandbox. Its entry is in the registry before the backend is called."""
        entry = PoolEntry(without_lease_fields(isolation), pool_key)
        self._registry.add(entry, EntryState.STARTING)
        self.monitor()
        starting = self._start_tasks[entry] = asyncio.create_task(self._start(entry))
        starting.add_done_callback(partial(self._on_start_done, entry, self._clock.time()))

    async def adopt(
        self, isolation: Isolation, pool_key: PoolKey, reference: SandboxReference
    ) -> PoolEntry:
        """Adopt a sandbox of another process and return its entry, which is leased. Raises
        SandboxStartError."""
        if self.is_closed:
            raise SandboxStartError("the pool is closed")
        entry = PoolEntry(without_lease_fields(isolation), pool_key)
        entry.is_unused = False
        self._registry.add(entry, EntryState.ADOPTING)
        try:
            sandbox = await adopt_sandbox(self._backend, reference)
        except BaseException:
            self._registry.remove(entry)
            self._on_change()
            raise
        entry.attach(sandbox, self._clock.time())
        entry.leased_since = entry.ready_at
        self._registry.move(entry, EntryState.LEASED)
        self.monitor()
        return entry

    async def _start(self, entry: PoolEntry) -> GuestSandbox:
        if self._fingerprint is None:
            self._fingerprint = await self._backend.fingerprint()
        entry.fingerprint = self._fingerprint
        return await start_sandbox(self._backend, entry.isolation)

    def _on_start_done(
        self, entry: PoolEntry, began_at: float, start_task: asyncio.Task[GuestSandbox]
    ) -> None:
        del self._start_tasks[entry]
        cancelled = SandboxStartError("its start was cancelled")
        if error := cancelled if start_task.cancelled() else start_task.exception():
            self._on_start_failed(entry, error)
        else:
            entry.attach(start_task.result(), self._clock.time())
            self._registry.counts["started"] += 1
            self._on_start_succeeded(entry.ready_at - began_at)
            self.make_idle(entry)
        self._on_change()

    def _on_start_failed(self, entry: PoolEntry, error: BaseException) -> None:
        self._registry.remove(entry)
        self._registry.counts["failed"] += 1
        self.failed_starts.append((entry, error))
        if self._backoff_task is None:
            self._failure_count += 1
            self._backoff_task = asyncio.create_task(
                self._back_off(start_backoff_s(self._failure_count))
            )

    def _on_start_succeeded(self, duration_s: float) -> None:
        """Update the average duration of a start, and end the backoff after failures. If a sandbox
        is leased, back off for as long as the start took, so that starts take CPU time from running
        commands at most half of the time."""
        self.start_s = moving_mean(self.start_s, duration_s)
        self._failure_count = 0
        if self._backoff_task:
            self._backoff_task.cancel()
            self._backoff_task = None
        if duration_s and self._registry.count_in(EntryState.LEASED):
            self._backoff_task = asyncio.create_task(self._back_off(duration_s))

    async def _back_off(self, seconds: float) -> None:
        await self._clock.sleep(seconds)
        self._backoff_task = None
        self._on_change()

    def make_idle(self, entry: PoolEntry) -> None:
        """Make an unused sandbox idle, or end it if its image is outdated or the pool is closed."""
        if entry.fingerprint == self._fingerprint and not self.is_closed:
            entry.leased_since = None
            self._registry.change_counted_isolation(entry, entry.isolation)
            self._registry.move(entry, EntryState.IDLE)
        else:
            self.end(entry)

    # Monitoring

    def monitor(self) -> None:
        """Start the monitor unless it runs already."""
        self._monitor_task = self._monitor_task or asyncio.create_task(self._monitor())

    async def _monitor(self) -> None:
        # The loop never waits for a sandbox or the backend, so that every ping is sent in time.
        while True:
            await self._clock.sleep(PING_INTERVAL_S)
            self._ping_all(EntryState.IDLE, self._idle_ping_timeout_s)
            self._ping_all(EntryState.LEASED, BUSY_PING_TIMEOUT_S)
            self.replace(self._expired_entries())
            if self._refresh_task is None or self._refresh_task.done():
                self._refresh_task = asyncio.create_task(self._replace_outdated())

    def _ping_all(self, state: EntryState, timeout_s: float) -> None:
        for entry in self._registry.entries(state):
            if entry not in self._ping_tasks:
                self._ping_tasks[entry] = asyncio.create_task(self._ping(entry, timeout_s))

    async def _ping(self, entry: PoolEntry, timeout_s: float) -> None:
        try:
            await entry.sandbox.ping(timeout_s)
        except SandboxLostError:
            # A lease notices the loss of its sandbox by itself.
            if self._registry.state_of(entry) is EntryState.IDLE:
                self.replace([entry])
        finally:
            del self._ping_tasks[entry]

    def _expired_entries(self) -> Sequence[PoolEntry]:
        """Return idle entries that are older than the TTL, at most as many as may be replaced at
        once."""
        limit = self._clock.time() - self._ttl_s
        old = [entry for entry in self._registry.entries(EntryState.IDLE) if entry.ready_at < limit]
        return old[: self._max_replacements_at_once]

    async def _replace_outdated(self) -> None:
        """Replace idle sandboxes that were started from an older image."""
        # A backend that raises here fails the next start too, which is reported.
        with contextlib.suppress(SandboxStartError):
            self._fingerprint = await self._backend.fingerprint()
        now, idle = self._fingerprint, self._registry.entries(EntryState.IDLE)
        self.replace([entry for entry in idle if entry.fingerprint != now])

    def replace(self, entries: Sequence[PoolEntry]) -> None:
        """End sandboxes and count them as replaced; `on_change` may start others in their place."""
        self._registry.counts["replaced"] += len(entries)
        for entry in entries:
            self.end(entry)
        self._on_change()

    # Ending

    def end(self, entry: PoolEntry) -> None:
        """Begin to end a sandbox. It counts towards the limits until it has ended."""
        self._registry.move(entry, EntryState.ENDING)
        self.run_detached(self._end(entry))

    async def _end(self, entry: PoolEntry) -> None:
        try:
            await entry.end_callbacks.aclose()
        finally:
            self._registry.remove(entry)
            self._on_change()

    def run_detached(self, coroutine: Coroutine[None, None, None]) -> None:
        """Run a coroutine in its own task, which no caller can cancel; `aclose` waits for it."""
        task = asyncio.create_task(coroutine)
        self._detached_tasks.add(task)
        task.add_done_callback(self._detached_tasks.discard)

    async def aclose(self) -> None:
        """End idle sandboxes, cancel all starts, and wait until leased sandboxes have ended."""
        self.is_closed = True
        for entry in self._registry.entries(EntryState.IDLE):
            self.end(entry)
        starts = list(self._start_tasks.values())
        for starting in starts:
            starting.cancel()
        if starts:
            await asyncio.wait(starts)
        if self._backoff_task:
            self._backoff_task.cancel()
            await asyncio.wait([self._backoff_task])
        await self._registry.wait_empty()
        while self._detached_tasks:
            await asyncio.wait(self._detached_tasks)
        # Last, because the guest agents of leased sandboxes need pings until then.
        monitoring = (self._monitor_task, self._refresh_task, *self._ping_tasks.values())
        tasks = [task for task in monitoring if task]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
