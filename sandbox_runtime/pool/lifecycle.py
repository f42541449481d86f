"""The life of the pool's sandboxes: how each is started, kept alive and ended.

Open it for failed starts and the rest after them, pings, replacement by age or image, and for the
order of a shutdown. Which sandboxes are started and who gets them is decided in `pool`.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial

from policies.isolation import Isolation
from policies.pool import Recipe, moving_mean, rest_s, unbound
from sandbox_runtime.backends.base import Backend
from sandbox_runtime.clock import Clock
from sandbox_runtime.errors import SandboxLostError, SandboxStartError
from sandbox_runtime.guest_sandbox import GuestSandbox, start_sandbox
from sandbox_runtime.pool.entries import PoolEntry, PoolRegistry, State

BEAT_S = 10.0
"""Interval of the pings. A guest agent that hears nothing for 30 s ends."""
LENT_PATIENCE_S = 60.0
"""How long a lent sandbox may take to answer a ping: its commands may leave the guest agent little
of the processor, and the lease has timeouts of its own."""
GUESSED_START_S = 1.0


class SandboxLifecycle:
    """Starts, monitors and ends sandboxes, and records their states in the registry.

    `on_change` is called after every change that may allow another step: a start that succeeded
    or failed, the end of a sandbox or of a rest, replaced sandboxes, and every round of pings.
    """

    def __init__(
        self,
        backend: Backend,
        registry: PoolRegistry,
        clock: Clock,
        on_change: Callable[[], None],
        *,
        ttl_s: float,
        idle_patience_s: float,
        replaced_at_once: int,
    ) -> None:
        self._backend = backend
        self._registry = registry
        self._clock = clock
        self._on_change = on_change
        self._ttl_s = ttl_s
        self._idle_patience_s = idle_patience_s
        self._replaced_at_once = replaced_at_once
        self._fingerprint: str | None = None
        """The backend's current fingerprint, as far as it is known."""
        self._starts: dict[PoolEntry, asyncio.Task[GuestSandbox]] = {}
        self._failures = 0
        """Failed starts since the last one that succeeded."""
        self._resting: asyncio.Task[None] | None = None
        self._monitoring: asyncio.Task[None] | None = None
        self._refreshing: asyncio.Task[None] | None = None
        self._pings: dict[PoolEntry, asyncio.Task[None]] = {}
        self._detached = set[asyncio.Task[None]]()
        self.is_closed = False
        self.start_s = GUESSED_START_S
        """Moving mean of the time that a start takes."""
        self.failed_starts = deque[tuple[PoolEntry, BaseException]]()
        """Starts that failed and that no waiter has been told of yet."""

    # Starting

    @property
    def is_resting(self) -> bool:
        """True while nothing should be started in advance: after a failed start, and after a start
        that took processor time from running commands."""
        return self._resting is not None

    def start(self, isolation: Isolation, recipe: Recipe) -> None:
        """Begin to start a sandbox. It is in the registry before the backend hears of it."""
        entry = PoolEntry(unbound(isolation), recipe)
        self._registry.add(entry)
        self.monitor()
        starting = self._starts[entry] = asyncio.create_task(self._start(entry))
        starting.add_done_callback(partial(self._on_start_done, entry, self._clock.time()))

    async def _start(self, entry: PoolEntry) -> GuestSandbox:
        if self._fingerprint is None:
            self._fingerprint = await self._backend.fingerprint()
        entry.fingerprint = self._fingerprint
        return await start_sandbox(self._backend, entry.isolation)

    def _on_start_done(
        self, entry: PoolEntry, began: float, starting: asyncio.Task[GuestSandbox]
    ) -> None:
        del self._starts[entry]
        given_up = SandboxStartError("its start was given up")
        if error := given_up if starting.cancelled() else starting.exception():
            self._on_start_failed(entry, error)
        else:
            entry.attach(starting.result(), self._clock.time())
            self._registry.counts["started"] += 1
            self._pace(entry.ready_at - began)
            self.make_idle(entry)
        self._on_change()

    def _on_start_failed(self, entry: PoolEntry, error: BaseException) -> None:
        self._registry.remove(entry)
        self._registry.counts["failed"] += 1
        self.failed_starts.append((entry, error))
        if self._resting is None:
            self._failures += 1
            self._resting = asyncio.create_task(self._rest(rest_s(self._failures)))

    def _pace(self, took_s: float) -> None:
        """End the rest after failures; rest as long as the start took if commands may be running,
        so that they have half of the time to themselves."""
        self.start_s = moving_mean(self.start_s, took_s)
        self._failures = 0
        if self._resting:
            self._resting.cancel()
            self._resting = None
        if took_s and self._registry.number(State.LENT):
            self._resting = asyncio.create_task(self._rest(took_s))

    async def _rest(self, seconds: float) -> None:
        await self._clock.sleep(seconds)
        self._resting = None
        self._on_change()

    def make_idle(self, entry: PoolEntry) -> None:
        """Have an unused sandbox wait for a lease, or end it if its image is outdated."""
        if entry.fingerprint == self._fingerprint and not self.is_closed:
            entry.lent_since = None
            self._registry.recount(entry, entry.isolation)
            self._registry.move(entry, State.IDLE)
        else:
            self.end(entry)

    # Monitoring

    def monitor(self) -> None:
        """Begin to monitor the sandboxes, if that has not begun."""
        self._monitoring = self._monitoring or asyncio.create_task(self._monitor())

    async def _monitor(self) -> None:
        # The loop never waits for a sandbox or the backend, so that every ping is sent in time.
        while True:
            await self._clock.sleep(BEAT_S)
            self._ping_all(State.IDLE, self._idle_patience_s)
            self._ping_all(State.LENT, LENT_PATIENCE_S)
            self.replace(self._too_old())
            if self._refreshing is None or self._refreshing.done():
                self._refreshing = asyncio.create_task(self._replace_outdated())

    def _ping_all(self, state: State, patience_s: float) -> None:
        for entry in self._registry.entries(state):
            if entry not in self._pings:
                self._pings[entry] = asyncio.create_task(self._ping(entry, patience_s))

    async def _ping(self, entry: PoolEntry, patience_s: float) -> None:
        try:
            await entry.sandbox.ping(patience_s)
        except SandboxLostError:
            # The lease that has a lent sandbox finds out by itself.
            if self._registry.state_of(entry) is State.IDLE:
                self.replace([entry])
        finally:
            del self._pings[entry]

    def _too_old(self) -> Sequence[PoolEntry]:
        """Return idle entries past their age, no more than may start at once in their place."""
        limit = self._clock.time() - self._ttl_s
        old = [entry for entry in self._registry.entries(State.IDLE) if entry.ready_at < limit]
        return old[: self._replaced_at_once]

    async def _replace_outdated(self) -> None:
        """Replace idle sandboxes of another image than a new one would have."""
        # A backend that cannot say it fails the next start too, and that is reported.
        with contextlib.suppress(SandboxStartError):
            self._fingerprint = await self._backend.fingerprint()
        now, idle = self._fingerprint, self._registry.entries(State.IDLE)
        self.replace([entry for entry in idle if entry.fingerprint != now])

    def replace(self, entries: Sequence[PoolEntry]) -> None:
        """End sandboxes that are of no use; `on_change` may start others for them."""
        self._registry.counts["replaced"] += len(entries)
        for entry in entries:
            self.end(entry)
        self._on_change()

    # Ending

    def end(self, entry: PoolEntry) -> None:
        """Begin to end a sandbox. It counts until nothing is left of it."""
        self._registry.move(entry, State.ENDING)
        self.run_detached(self._end(entry))

    async def _end(self, entry: PoolEntry) -> None:
        try:
            await entry.at_end.aclose()
        finally:
            self._registry.remove(entry)
            self._on_change()

    def run_detached(self, work: Coroutine[None, None, None]) -> None:
        """Run `work` in a task that no caller's cancellation reaches; `aclose` waits for it."""
        task = asyncio.create_task(work)
        self._detached.add(task)
        task.add_done_callback(self._detached.discard)

    async def aclose(self) -> None:
        """End idle sandboxes, cancel all starts, and return when lent sandboxes have ended too."""
        self.is_closed = True
        for entry in self._registry.entries(State.IDLE):
            self.end(entry)
        starts = list(self._starts.values())
        for starting in starts:
            starting.cancel()
        if starts:
            await asyncio.wait(starts)
        if self._resting:
            self._resting.cancel()
            await asyncio.wait([self._resting])
        await self._registry.wait_empty()
        while self._detached:
            await asyncio.wait(self._detached)
        # Last, because the guest agents of lent sandboxes need pings until then.
        monitoring = (self._monitoring, self._refreshing, *self._pings.values())
        tasks = [task for task in monitoring if task]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
