"""Workspaces that outlive a request: each state is a snapshot, and for a while a computer too.

A run goes on from a state and ends in another; what was before stays as it was. So two requests
that go on from the same state, or a conversation that branches, each have a workspace of their own:
one of them has the computer that is still warm, the others a new one with the same files.
"""

import asyncio
import logging
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Sequence,
)
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

from policies.hosts import Target
from policies.isolation import Isolation
from policies.sessions import ResumePoint, Session, SessionState
from sandbox_runtime.clock import Clock, SystemClock
from sandbox_runtime.egress.decision import ConfirmTarget, Decision, OnDecision
from sandbox_runtime.errors import SandboxError, SandboxFileError, SandboxLostError
from sandbox_runtime.sandbox import Lease, Sandbox, Sandboxes, Sink

logger = logging.getLogger(__name__)

Origin = Literal["new", "kept", "restored"]
SNAPSHOT_S = 60.0
"""How long keeping the files may take; beyond that they are lost."""
MAX_SNAPSHOT_MIB = 1024
"""Larger workspaces last only as long as their computer is kept."""


class SnapshotStore(Protocol):
    """Where the states of workspaces lie."""

    async def save(self, state: SessionState, write: Callable[[Sink], Awaitable[int]]) -> None:
        """Keep what `write` sends as that state, in full or not at all. Raises what it raises."""

    async def alias(self, state: SessionState, of: SessionState) -> None:
        """The one is the same as the other, if that is kept."""

    async def newest(self, session: Session) -> str | None:
        """The name of the state that was kept last, if any."""

    async def known(self, session: Session, names: Sequence[str]) -> set[str]:
        """Those of the states that are kept."""

    def read(self, state: SessionState) -> AsyncIterable[bytes]:
        """What was saved. Raises SandboxFileError where it is kept no more."""

    async def discard(self, session: Session) -> None:
        """Forget every state of it. Safe to call twice."""


class WorkspaceLease:
    """A workspace as one run has it: a lease whose computers have the files of a state."""

    def __init__(self, sandboxes: Sandboxes, isolation: Isolation) -> None:
        self.isolation = isolation
        self.origin: Origin = "new"
        self.listener: OnDecision | None = None
        """Who hears what programs inside reach: of the present run."""
        self.judge: ConfirmTarget | None = None
        """Who is asked what they may reach: still the last run's, when that has ended."""
        self.restore: Callable[[Sandbox], Awaitable[None]] | None = None
        """What gives a new computer the files of the state that the run goes on from."""
        self.leave_as: SessionState | None = None
        """The state that the run leaves, once it is known that it shall be kept."""
        self.computer: Sandbox | None = None
        """The last computer that was taken, once one was."""
        self.is_used = False
        """Whether the present run has taken it."""
        self._sandboxes = sandboxes
        self._lease: Lease | None = None
        self._ends = AsyncExitStack()
        self._preparing = asyncio.Lock()

    @property
    def goes_on(self) -> bool:
        """Whether there are files of earlier runs in it."""
        return self.origin != "new" or self.restore is not None

    async def sandbox(self) -> Sandbox:
        """See `Lease`."""
        async with self._preparing:
            lease = await self.ask()
            computer = await lease.sandbox()
            if computer is not self.computer:
                await self._prepare(computer)
                self.computer = computer
            self.is_used = True
            return computer

    async def ask(self) -> Lease:
        """Claim a computer, which is not waited for. Raises SandboxUnavailableError."""
        if self._lease is None:
            lease = self._sandboxes.lease(self.isolation, self._decided, self._asked)
            self._lease = await self._ends.enter_async_context(lease)
        return self._lease

    async def _prepare(self, computer: Sandbox) -> None:
        if self.restore is None:
            return
        try:
            await self.restore(computer)
        except SandboxFileError as error:  # nobody is helped by a conversation that cannot go on
            logger.warning("a workspace is lost, and begins anew: %s", error)
            self.origin = "new"
        else:
            self.origin = "restored"

    async def end(self) -> None:
        """Give the computer back."""
        await self._ends.aclose()

    def _decided(self, decision: Decision) -> Awaitable[None] | None:
        return self.listener(decision) if self.listener else None

    async def _asked(self, target: Target) -> str | None:
        return await self.judge(target) if self.judge else None


@dataclass(slots=True)
class _Kept:
    """A computer that nobody uses now, in the state it was left in."""

    lease: WorkspaceLease
    expiring: asyncio.Task[None]


class Workspaces:
    """Lends workspaces to runs, and keeps what they leave."""

    def __init__(
        self,
        sandboxes: Sandboxes,
        snapshots: SnapshotStore,
        *,
        keep_s: float,
        max_kept: int,
        clock: Clock | None = None,
    ) -> None:
        """`keep_s`, `max_kept`: how long, and how many, computers are kept that nobody uses."""
        self._sandboxes = sandboxes
        self._snapshots = snapshots
        self._keep_s = keep_s
        self._max_kept = max_kept
        self._clock = clock or SystemClock()
        self._kept: dict[SessionState, _Kept] = {}
        self._settling: dict[SessionState, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._giving_back: asyncio.Task[None] | None = None
        self._is_wanted: Callable[[], bool] | None = None
        """Where somebody could not be given one that is kept: whether he still waits."""

    @asynccontextmanager
    async def use(
        self,
        goes_on: ResumePoint | None,
        isolation: Isolation,
        on_decision: OnDecision | None = None,
        confirm_target: ConfirmTarget | None = None,
    ) -> AsyncIterator[WorkspaceLease]:
        """A workspace for the length of the block; it is kept if its `leave_as` is set by then.

        A block that fails leaves nothing.
        """
        parent = await self._parent(goes_on) if goes_on else None
        lease = self._kept_seat(parent, isolation) or WorkspaceLease(self._sandboxes, isolation)
        try:
            lease.judge = confirm_target
            await self._make_ready(lease, parent)
            lease.listener = on_decision
            yield lease
        except BaseException:
            await lease.end()
            raise
        finally:
            lease.listener = None
        if lease.leave_as:
            self._leave(parent, lease.leave_as, lease)
        else:
            await lease.end()

    async def discard(self, session: Session) -> bool:
        """End a session: its computers and all its states; whether there were any."""
        await self._settled_all(session)
        known = await self._snapshots.newest(session) is not None
        for state in [state for state in self._kept if state.session == session]:
            known = True
            await self._end(state)
        await self._snapshots.discard(session)
        return known

    def give_back(self, is_wanted: Callable[[], bool]) -> None:
        """Somebody waits for a computer: end the one that has been kept longest, or the next one
        that is to be kept, if it is still wanted then."""
        if self._giving_back is None:
            self._giving_back = asyncio.create_task(self._give_one_back(is_wanted))
            self._tasks.add(self._giving_back)
            self._giving_back.add_done_callback(self._given_back)

    async def aclose(self) -> None:
        """Keep what is being kept, and give all computers back."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        for state in list(self._kept):
            await self._end(state)

    # Taking

    async def _parent(self, goes_on: ResumePoint) -> SessionState | None:
        session = goes_on.session
        states = [SessionState(session, name) for name in goes_on.parents]
        for state in states:
            if settling := self._settling.get(state):
                await asyncio.wait([settling])  # it is this state only from then on
        known = await self._snapshots.known(session, goes_on.parents)
        there = (state for state in states if state.name in known or state in self._kept)
        if found := next(there, None):
            return found
        if goes_on.starts_empty:
            return None
        await self._settled_all(session)
        newest = await self._snapshots.newest(session)
        return SessionState(session, newest) if newest else None

    async def _settled_all(self, session: Session) -> None:
        if settling := self._settling_of(session):
            await asyncio.wait(settling)

    def _settling_of(self, session: Session) -> list[asyncio.Task[None]]:
        return [task for state, task in self._settling.items() if state.session == session]

    def _kept_seat(self, state: SessionState | None, isolation: Isolation) -> WorkspaceLease | None:
        kept = self._kept.get(state) if state else None
        if state is None or kept is None or kept.lease.isolation != isolation:
            return None
        return self._take(state)

    async def _make_ready(self, lease: WorkspaceLease, parent: SessionState | None) -> None:
        lease.leave_as, lease.is_used = None, False
        if lease.computer:
            lease.origin = "kept"
        lease.restore = None
        if parent and await self._snapshots.known(parent.session, [parent.name]):
            # Also where the computer is warm: should it be lost, the next one has the files.
            lease.restore = lambda computer: computer.restore(self._snapshots.read(parent))

    def _take(self, state: SessionState) -> WorkspaceLease:
        kept = self._kept.pop(state)
        kept.expiring.cancel()
        return kept.lease

    async def _end(self, state: SessionState) -> None:
        """End a kept computer, unless somebody was faster."""
        if state in self._kept:
            await self._take(state).end()

    # Leaving

    def _leave(
        self, parent: SessionState | None, state: SessionState, lease: WorkspaceLease
    ) -> None:
        before = self._settling_of(state.session)
        work = self._settle(parent, state, lease, before)
        settling = self._settling[state] = asyncio.create_task(work)
        self._tasks.add(settling)
        settling.add_done_callback(self._tasks.discard)
        settling.add_done_callback(partial(self._settled, state))

    def _settled(self, state: SessionState, settling: "asyncio.Task[None]") -> None:
        if self._settling.get(state) is settling:  # no other run has left the same state meanwhile
            del self._settling[state]

    async def _settle(
        self,
        parent: SessionState | None,
        state: SessionState,
        lease: WorkspaceLease,
        before: Collection[asyncio.Task[None]],
    ) -> None:
        """Keep the state that a run has left, and its computer for a while."""
        if before:  # the newest is what was left last, however long it takes to keep
            await asyncio.wait(before)
        is_lost = False
        try:
            if lease.is_used:
                is_lost = not await self._saved(state, lease)
            if parent and (is_lost or not lease.is_used):
                await self._snapshots.alias(state, parent)
        except Exception:
            logger.exception("the workspace of %s cannot be kept", state.session.name)
        if lease.computer and not is_lost:
            await self._keep(state, lease)
        else:
            await lease.end()

    async def _saved(self, state: SessionState, lease: WorkspaceLease) -> bool:
        """Make a snapshot; False: there is no use in the computer any more."""
        assert lease.computer
        try:
            async with asyncio.timeout(SNAPSHOT_S):
                await self._snapshots.save(state, _snapshot_of(lease.computer))
        except (SandboxLostError, TimeoutError) as error:
            logger.warning("the workspace of %s was lost: %s", state.session.name, error)
            return False
        except SandboxError as error:
            logger.warning("the workspace of %s cannot be kept: %s", state.session.name, error)
        return True

    async def _keep(self, state: SessionState, lease: WorkspaceLease) -> None:
        while state in self._kept:  # again, should another run have left the same meanwhile
            await self._end(state)
        self._kept[state] = _Kept(lease, asyncio.create_task(self._expire(state)))
        while len(self._kept) > self._max_kept:
            await self._end(next(iter(self._kept)))
        is_wanted, self._is_wanted = self._is_wanted, None
        if is_wanted and is_wanted():
            self.give_back(is_wanted)

    async def _give_one_back(self, is_wanted: Callable[[], bool]) -> None:
        for state in list(self._kept):
            # Files that were too large to be kept otherwise stay with their computer.
            known = await self._snapshots.known(state.session, [state.name])
            if not is_wanted():
                return
            if known and state in self._kept:
                await self._end(state)
                return
        self._is_wanted = is_wanted

    def _given_back(self, giving_back: "asyncio.Task[None]") -> None:
        self._giving_back = None
        self._tasks.discard(giving_back)

    async def _expire(self, state: SessionState) -> None:
        await self._clock.sleep(self._keep_s)
        await self._kept.pop(state).lease.end()


def _snapshot_of(computer: Sandbox) -> Callable[[Sink], Awaitable[int]]:
    async def write(sink: Sink) -> int:
        return await computer.snapshot(sink, max_bytes=MAX_SNAPSHOT_MIB << 20)

    return write
