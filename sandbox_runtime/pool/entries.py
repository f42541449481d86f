"""The pool's records: a registry of its sandboxes, and the queue of the waiters that request one.

These classes only keep state. The `lifecycle` module starts and ends sandboxes, and the `pool`
module decides which waiter gets which sandbox.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack
from enum import StrEnum, auto
from itertools import chain, zip_longest

from policies.isolation import Isolation
from policies.pool import Load, PoolKey
from sandbox_runtime.guest_sandbox import GuestSandbox


class EntryState(StrEnum):
    """The state of a sandbox in the pool."""

    STARTING = auto()
    ADOPTING = auto()
    """A lease adopts the sandbox from another process. No other lease can get it."""
    IDLE = auto()
    LEASED = auto()
    ENDING = auto()


class PoolEntry:
    """One sandbox of the pool, from just before its start or adoption until it has been removed."""

    def __init__(self, isolation: Isolation, pool_key: PoolKey) -> None:
        self.isolation = isolation
        """The isolation that the sandbox is started with."""
        self.pool_key = pool_key
        self.fingerprint: str | None = None
        """The backend's fingerprint of the image that the sandbox is started from."""
        self.ready_at = 0.0
        """Time on the pool's clock when the start succeeded."""
        self.counted_isolation = isolation
        """The isolation whose memory limit counts towards the pool's budget. During a lease it is
        the lease's isolation."""
        self.leased_since: float | None = None
        """Time on the pool's clock when the lease's sandbox answered a ping; None before that."""
        self.is_unused = True
        """True until a lease takes the sandbox or changes its limits. Only an unused sandbox may go
        to another lease."""
        self.end_callbacks = AsyncExitStack()
        """Callbacks that end the sandbox and its gateway, run in reverse order."""
        self._sandbox: GuestSandbox | None = None

    @property
    def sandbox(self) -> GuestSandbox:
        """The sandbox, which must have started."""
        assert self._sandbox is not None
        return self._sandbox

    def attach(self, sandbox: GuestSandbox, ready_at: float) -> None:
        """Record the started sandbox, which is closed when the entry ends."""
        self._sandbox, self.ready_at = sandbox, ready_at
        self.end_callbacks.push_async_callback(sandbox.close)

    @property
    def load(self) -> Load:
        """The entry's share of the pool's limits."""
        return Load(1, self.counted_isolation.memory_mib)


class PoolRegistry:
    """All entries by state; within a state, in the order in which they reached it."""

    def __init__(self) -> None:
        self.load = Load()
        """The load of all entries together, those that are ending included."""
        self.counts = Counter[str]()
        """Totals since the pool began, by field of `PoolStats`."""
        self._entries: dict[EntryState, dict[PoolEntry, None]] = {state: {} for state in EntryState}
        self._states: dict[PoolEntry, EntryState] = {}
        self._empty_event = asyncio.Event()
        self._empty_event.set()

    def add(self, entry: PoolEntry, state: EntryState) -> None:
        """Add an entry in its first state."""
        self._states[entry] = state
        self._entries[state][entry] = None
        self.load += entry.load
        self._empty_event.clear()

    def move(self, entry: PoolEntry, state: EntryState) -> None:
        """Record that the entry has reached `state`."""
        del self._entries[self._states[entry]][entry]
        self._states[entry] = state
        self._entries[state][entry] = None

    def change_counted_isolation(self, entry: PoolEntry, isolation: Isolation) -> None:
        """Count the memory limit of `isolation` for the entry from now on."""
        self.load -= entry.load
        entry.counted_isolation = isolation
        self.load += entry.load

    def remove(self, entry: PoolEntry) -> None:
        """Remove an entry whose sandbox has been removed, or could not be started or adopted."""
        del self._entries[self._states.pop(entry)][entry]
        self.load -= entry.load
        if not self._states:
            self._empty_event.set()

    def state_of(self, entry: PoolEntry) -> EntryState | None:
        """Return the entry's state, or None after it was removed."""
        return self._states.get(entry)

    def entries(self, state: EntryState) -> list[PoolEntry]:
        """Return the entries in `state`, in the order in which they reached it."""
        return list(self._entries[state])

    def entries_with_key(self, state: EntryState, pool_key: PoolKey) -> Iterator[PoolEntry]:
        """Iterate over the entries in `state` that have this pool key."""
        return (entry for entry in self._entries[state] if entry.pool_key == pool_key)

    def count_in(self, state: EntryState) -> int:
        """Return how many entries are in `state`."""
        return len(self._entries[state])

    async def wait_empty(self) -> None:
        """Return once the registry has no entry."""
        await self._empty_event.wait()


class Waiter:
    """A lease's request for a sandbox. It is in the pool's queue until `give` or `fail`."""

    def __init__(self, isolation: Isolation, pool_key: PoolKey, owner: str) -> None:
        self.isolation = isolation
        self.pool_key = pool_key
        self.owner = owner
        """The client of the lease; `WaiterQueue` keeps the waiters of each owner in order."""
        self.entry: PoolEntry | None = None
        """The entry that the waiter was given."""
        self.has_pending_start = False
        """True if a sandbox that the waiter can use is being started."""
        self._error: BaseException | None = None
        self._settled_event = asyncio.Event()

    def give(self, entry: PoolEntry) -> None:
        """Have `wait` return the entry."""
        self.entry = entry
        self._settled_event.set()

    def fail(self, error: BaseException) -> None:
        """Have `wait` raise the error."""
        self._error = error
        self._settled_event.set()

    async def wait(self) -> PoolEntry:
        """Wait for `give` or `fail`; return the entry or raise the error."""
        await self._settled_event.wait()
        if self._error:
            raise self._error
        assert self.entry
        return self.entry

    def reset(self, pool_key: PoolKey) -> None:
        """Discard an unusable entry, and request another one with this pool key."""
        self.entry, self.pool_key = None, pool_key
        self._settled_event.clear()


class WaiterQueue:
    """The waiters that have no sandbox yet. Their owners take turns: iteration yields the first
    waiter of each owner, then the second of each, and so on. An owner whose waiter was served goes
    behind the other owners."""

    def __init__(self) -> None:
        # The inner mappings are ordered sets.
        self._waiters_by_owner: dict[str, dict[Waiter, None]] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __contains__(self, waiter: Waiter) -> bool:
        return waiter in self._waiters_by_owner.get(waiter.owner, ())

    def __iter__(self) -> Iterator[Waiter]:
        turns = zip_longest(*self._waiters_by_owner.values())
        return filter(None, chain.from_iterable(turns))

    def append(self, waiter: Waiter) -> None:
        """Add a waiter behind those of its owner. An owner that had no waiter gets the last
        turn."""
        self._waiters_by_owner.setdefault(waiter.owner, {})[waiter] = None
        self._length += 1

    def prepend(self, waiter: Waiter) -> None:
        """Add a waiter before all others."""
        line = {waiter: None, **self._waiters_by_owner.pop(waiter.owner, {})}
        self._waiters_by_owner = {waiter.owner: line, **self._waiters_by_owner}
        self._length += 1

    def remove(self, waiter: Waiter) -> None:
        """Remove a waiter; the order of the owners stays."""
        line = self._waiters_by_owner[waiter.owner]
        del line[waiter]
        self._length -= 1
        if not line:
            del self._waiters_by_owner[waiter.owner]

    def remove_served(self, waiter: Waiter) -> None:
        """Remove a waiter that gets a sandbox, and move its owner to the end of the rotation."""
        self.remove(waiter)
        if line := self._waiters_by_owner.pop(waiter.owner, None):
            self._waiters_by_owner[waiter.owner] = line

    def clear(self) -> list[Waiter]:
        """Remove and return all waiters."""
        waiters = list(self)
        self._waiters_by_owner, self._length = {}, 0
        return waiters
