"""The pool's records: the sandboxes it has, in a registry, and the requests that wait for one.

These classes only keep state. The `lifecycle` module starts and ends sandboxes, the `pool` module
decides which waiter gets which of them.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack
from enum import StrEnum, auto

from policies.isolation import Isolation
from policies.pool import Load, PoolKey, pool_key
from sandbox_runtime.guest_sandbox import GuestSandbox


class EntryState(StrEnum):
    """The state of a sandbox in the pool."""

    STARTING = auto()
    IDLE = auto()
    LEASED = auto()
    ENDING = auto()


class PoolEntry:
    """One sandbox, from before the backend is asked to start it until nothing is left of it."""

    def __init__(self, isolation: Isolation, pool_key: PoolKey) -> None:
        self.isolation = isolation
        """The isolation that the sandbox is started with."""
        self.pool_key = pool_key
        self.fingerprint: str | None = None
        """The backend's fingerprint of the image that the sandbox is started from."""
        self.ready_at = 0.0
        """Time on the pool's clock when the start succeeded."""
        self.counted_as = isolation
        """The isolation whose memory limit counts: during a lease, that of the lease."""
        self.leased_since: float | None = None
        """Time when the lease could begin to use the sandbox; None while it cannot."""
        self.is_unused = True
        """True until a lease takes the sandbox or changes its limits: then no other may have it."""
        self.at_end = AsyncExitStack()
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
        self.at_end.push_async_callback(sandbox.close)

    @property
    def load(self) -> Load:
        """The entry's share of the pool's limits."""
        return Load(1, self.counted_as.memory_mib)


class PoolRegistry:
    """All entries by state; within a state, in the order in which they reached it."""

    def __init__(self) -> None:
        self.load = Load()
        """The load of all entries together, those that are ending included."""
        self.counts = Counter[str]()
        """Totals since the pool began, by the names of `PoolStats`."""
        self._entries: dict[EntryState, dict[PoolEntry, None]] = {state: {} for state in EntryState}
        self._states: dict[PoolEntry, EntryState] = {}
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def add(self, entry: PoolEntry) -> None:
        """Add an entry as starting."""
        self._states[entry] = EntryState.STARTING
        self._entries[EntryState.STARTING][entry] = None
        self.load += entry.load
        self._is_empty.clear()

    def move(self, entry: PoolEntry, state: EntryState) -> None:
        """Record that the entry has reached `state`."""
        del self._entries[self._states[entry]][entry]
        self._states[entry] = state
        self._entries[state][entry] = None

    def recount(self, entry: PoolEntry, isolation: Isolation) -> None:
        """Count the memory limit of `isolation` for the entry from now on."""
        self.load -= entry.load
        entry.counted_as = isolation
        self.load += entry.load

    def remove(self, entry: PoolEntry) -> None:
        """Forget an entry that nothing is left of."""
        del self._entries[self._states.pop(entry)][entry]
        self.load -= entry.load
        if not self._states:
            self._is_empty.set()

    def state_of(self, entry: PoolEntry) -> EntryState | None:
        """Return the entry's state, or None after it was removed."""
        return self._states.get(entry)

    def entries(self, state: EntryState) -> list[PoolEntry]:
        """Return the entries in `state`, the oldest there first."""
        return list(self._entries[state])

    def matching(self, state: EntryState, pool_key: PoolKey) -> Iterator[PoolEntry]:
        """Iterate over the entries in `state` that have this pool_key."""
        return (entry for entry in self._entries[state] if entry.pool_key == pool_key)

    def number(self, state: EntryState) -> int:
        """Return how many entries are in `state`."""
        return len(self._entries[state])

    async def wait_empty(self) -> None:
        """Return once the registry has no entry."""
        await self._is_empty.wait()


class Waiter:
    """A lease's request for a sandbox. It is in the pool's queue until `give` or `fail`."""

    def __init__(self, isolation: Isolation) -> None:
        self.isolation = isolation
        self.pool_key = pool_key(isolation)
        self.entry: PoolEntry | None = None
        """The entry that the waiter was given."""
        self.has_start = False
        """True if a sandbox that the waiter can use is being started."""
        self._error: BaseException | None = None
        self._is_settled = asyncio.Event()

    def give(self, entry: PoolEntry) -> None:
        """Give the waiter an entry."""
        self.entry = entry
        self._is_settled.set()

    def fail(self, error: BaseException) -> None:
        """Have `wait` raise the error."""
        self._error = error
        self._is_settled.set()

    async def wait(self) -> PoolEntry:
        """Return the entry that the waiter is given. Raises the error that it failed with."""
        await self._is_settled.wait()
        if self._error:
            raise self._error
        assert self.entry
        return self.entry

    def reset(self, pool_key: PoolKey) -> None:
        """Discard the entry, which was of no use, and ask for one with this pool_key."""
        self.entry, self.pool_key = None, pool_key
        self._is_settled.clear()
