"""Workspaces that outlive a request. Each state of a workspace is a snapshot and, for a while, an
idle sandbox too.

A run starts from one state and saves another; the earlier state does not change. Two requests that
start from the same state, as in a conversation that branches, each get a workspace of their own:
one gets the idle sandbox, the others a new sandbox with the same files.
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
from sandbox_runtime.egress.decision import CheckTarget, Decision, OnDecision
from sandbox_runtime.errors import SandboxError, SandboxFileError, SandboxLostError
from sandbox_runtime.sandbox import Lease, Sandbox, Sandboxes, SandboxReference, Sink

logger = logging.getLogger(__name__)

Origin = Literal["new", "kept", "restored"]
"""Origin of the files in a workspace. new: none, the workspace is empty; kept: an idle sandbox;
restored: a snapshot."""
SNAPSHOT_S = 60.0
"""Timeout of saving a snapshot, in seconds. After the timeout, the workspace is lost."""
ADOPTION_TIMEOUT_S = 30.0
"""Maximum time to adopt the sandbox of another server, in seconds."""
MAX_SNAPSHOT_MIB = 1024
"""Maximum size of a snapshot. Larger workspaces last only as long as their idle sandbox."""


class SnapshotStore(Protocol):
    """Stores the snapshots of workspace states."""

    async def save(self, state: SessionState, write: Callable[[Sink], Awaitable[int]]) -> None:
        """Store the bytes that `write` sends, all or none of them. Raises the errors of `write`."""

    async def alias(self, state: SessionState, target: SessionState) -> None:
        """Make `state` an alias of the state `target`, if `target` is stored."""

    async def newest_state_name(self, session: Session) -> str | None:
        """Return the name of the state that was saved last, or None."""

    async def stored_names(self, session: Session, names: Sequence[str]) -> set[str]:
        """Return those of `names` whose states are stored."""

    def read(self, state: SessionState) -> AsyncIterable[bytes]:
        """Return the bytes of a snapshot. Raises SandboxFileError if it is no longer stored."""

    async def discard(self, session: Session) -> None:
        """Delete every state of a session. Safe to call twice."""


class RunWorkspace:
    """The workspace that one run uses. It leases the run's sandboxes. If the run resumes from a
    state, they start with the files of that state."""

    command_id = None

    def __init__(self, sandboxes: Sandboxes, isolation: Isolation, owner: str) -> None:
        self.isolation = isolation
        self.origin: Origin = "new"
        self.on_decision: OnDecision | None = None
        """Callback that receives each decision about a network connection of the sandbox; None
        while no run uses the workspace."""
        self.check_target: CheckTarget | None = None
        """Callback that allows or denies a connection. After the end of a run, the callback of that
        run stays in use."""
        self.restore: Callable[[Sandbox], Awaitable[None]] | None = None
        """Copies the files of the state that the run resumes from into a new sandbox."""
        self.save_as: SessionState | None = None
        """The state under which the workspace is saved at the end of the run; None if it is not
        saved."""
        self.current_sandbox: Sandbox | None = None
        """The sandbox that was leased last, or None."""
        self.is_used = False
        """True once the current run has used the sandbox."""
        self._sandboxes = sandboxes
        self._owner = owner
        self._lease: Lease | None = None
        self._exit_stack = AsyncExitStack()
        self._preparation_lock = asyncio.Lock()

    @property
    def has_earlier_files(self) -> bool:
        """True if the workspace has files of earlier runs."""
        return self.origin != "new" or self.restore is not None

    async def sandbox(self) -> Sandbox:
        """Return the run's sandbox, with the files of the workspace. Raises the errors of
        `request_sandbox` and of `Lease.sandbox`."""
        async with self._preparation_lock:
            lease = await self.request_sandbox()
            sandbox = await lease.sandbox()
            if sandbox is not self.current_sandbox:
                await self._restore_files(sandbox)
                self.current_sandbox = sandbox
            self.is_used = True
            return sandbox

    async def request_sandbox(self) -> Lease:
        """Request a sandbox without waiting for it. Raises NoFreeSandboxError,
        SandboxStartError."""
        if self._lease is None:
            lease = self._sandboxes.lease(
                self.isolation, self._report, self._check_target, self._owner
            )
            self._lease = await self._exit_stack.enter_async_context(lease)
        return self._lease

    async def adopt(self, reference: SandboxReference) -> Sandbox | None:
        """Adopt the run's sandbox from another server, with its files. Return None if that is not
        possible: the run then begins anew, as if there were no other server."""
        async with AsyncExitStack() as exit_stack:
            try:
                lease = await exit_stack.enter_async_context(
                    self._sandboxes.lease(
                        self.isolation, self._report, self._check_target, self._owner, reference
                    )
                )
                async with asyncio.timeout(ADOPTION_TIMEOUT_S):
                    sandbox = await lease.sandbox()
            except (SandboxError, TimeoutError) as error:
                logger.warning("a sandbox cannot be taken over: %s", error)
                return None
            # Release an idle sandbox that the workspace holds: its files are older.
            await self._exit_stack.aclose()
            self._exit_stack, self._lease = exit_stack.pop_all(), lease
        self.current_sandbox, self.is_used = sandbox, True
        return sandbox

    async def _restore_files(self, sandbox: Sandbox) -> None:
        if self.restore is None:
            return
        try:
            await self.restore(sandbox)
        except SandboxFileError as error:  # an empty workspace is better than a session that fails
            logger.warning("the workspace is lost; the run starts with an empty one: %s", error)
            self.origin = "new"
        else:
            self.origin = "restored"

    async def release(self) -> None:
        """Release the sandbox."""
        await self._exit_stack.aclose()

    def _report(self, decision: Decision) -> Awaitable[None] | None:
        return self.on_decision(decision) if self.on_decision else None

    async def _check_target(self, target: Target) -> str | None:
        return await self.check_target(target) if self.check_target else None


@dataclass(slots=True)
class _IdleWorkspace:
    """A workspace that no run uses, with its sandbox."""

    workspace: RunWorkspace
    expiration: asyncio.Task[None]


class Workspaces:
    """Opens workspaces for runs, saves their states, and keeps idle sandboxes for a while."""

    def __init__(
        self,
        sandboxes: Sandboxes,
        snapshots: SnapshotStore,
        *,
        keep_s: float,
        max_kept: int,
        clock: Clock | None = None,
    ) -> None:
        """Keep at most `max_kept` idle sandboxes, each for `keep_s` seconds."""
        self._sandboxes = sandboxes
        self._snapshots = snapshots
        self._keep_s = keep_s
        self._max_kept = max_kept
        self._clock = clock or SystemClock()
        self._idle_workspaces: dict[SessionState, _IdleWorkspace] = {}
        self._used_workspaces: set[RunWorkspace] = set()
        """The workspaces that a run uses."""
        self._save_tasks: dict[SessionState, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._eviction: asyncio.Task[None] | None = None
        self._is_wanted: Callable[[], bool] | None = None
        """The callback of an eviction that found no sandbox to end, or None without such an
        eviction. The callback returns True while the waiting request is queued."""

    @property
    def can_adopt(self) -> bool:
        """See `Sandboxes.can_adopt`."""
        return self._sandboxes.can_adopt

    @asynccontextmanager
    async def use(
        self,
        resume_from: ResumePoint | None,
        isolation: Isolation,
        on_decision: OnDecision | None = None,
        check_target: CheckTarget | None = None,
        owner: str = "",
    ) -> AsyncIterator[RunWorkspace]:
        """Open a workspace for the duration of the block. If the block sets `save_as` and does not
        fail, the workspace is then saved in the background. Owners take turns if requests must wait
        for sandboxes."""
        parent = await self._find_start_state(resume_from) if resume_from else None
        workspace = self._take_idle(parent, isolation) or RunWorkspace(
            self._sandboxes, isolation, owner
        )
        self._used_workspaces.add(workspace)
        try:
            workspace.check_target = check_target
            await self._reset(workspace, parent)
            workspace.on_decision = on_decision
            yield workspace
        except BaseException:
            await workspace.release()
            raise
        finally:
            self._used_workspaces.discard(workspace)
            workspace.on_decision = None
        if workspace.save_as:
            self._save_in_background(parent, workspace.save_as, workspace)
        else:
            await workspace.release()

    def abandon_sandboxes(self) -> None:
        """Leave the sandboxes of all runs to the processes that adopt them; see
        `Sandbox.abandon`."""
        for workspace in self._used_workspaces:
            if workspace.current_sandbox:
                workspace.current_sandbox.abandon()

    async def pin(self, resume_from: ResumePoint | None) -> ResumePoint | None:
        """Return a resume point that names only the state from which a run would start now. Runs
        that start from this resume point get the same files, even if the session has a newer state
        by then."""
        if resume_from is None:
            return None
        state = await self._find_start_state(resume_from)
        return ResumePoint(resume_from.session, [state.name] if state else [], starts_empty=True)

    async def has_state(self, session: Session) -> bool:
        """Return True if a session has a state. A state that is still being saved counts."""
        if any(state.session == session for state in (*self._save_tasks, *self._idle_workspaces)):
            return True
        return await self._snapshots.newest_state_name(session) is not None

    async def discard(self, session: Session) -> bool:
        """Delete the idle sandboxes and all states of a session. Return True if there were any."""
        await self._wait_until_saved(session)
        known = await self._snapshots.newest_state_name(session) is not None
        for state in [state for state in self._idle_workspaces if state.session == session]:
            known = True
            await self._end_idle(state)
        await self._snapshots.discard(session)
        return known

    def evict_idle(self, is_wanted: Callable[[], bool]) -> None:
        """End the oldest idle sandbox that has a snapshot, because a request waits for a sandbox.

        If there is none, try again when the next sandbox becomes idle. Nothing is ended once
        `is_wanted()` returns False.
        """
        if self._eviction is None:
            self._eviction = asyncio.create_task(self._evict_one(is_wanted))
            self._tasks.add(self._eviction)
            self._eviction.add_done_callback(self._on_eviction_done)

    async def aclose(self) -> None:
        """Wait until all states are saved, then end all idle sandboxes."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        for state in list(self._idle_workspaces):
            await self._end_idle(state)

    async def _find_start_state(self, resume_from: ResumePoint) -> SessionState | None:
        """Return the state to start from: the first known parent, else the newest state. Return
        None if there is no such state, or if the resume point has `starts_empty` and no known
        parent."""
        session = resume_from.session
        states = [SessionState(session, name) for name in resume_from.parents]
        for state in states:
            if saving := self._save_tasks.get(state):
                await asyncio.wait([saving])
        known = await self._snapshots.stored_names(session, resume_from.parents)
        available = (
            state for state in states if state.name in known or state in self._idle_workspaces
        )
        if found := next(available, None):
            return found
        if resume_from.starts_empty:
            return None
        await self._wait_until_saved(session)
        return await self._newest_state(session)

    async def _newest_state(self, session: Session) -> SessionState | None:
        """Return the state that the last run of a session has saved, or None. If its workspace is
        too large for a snapshot, the state has only an idle sandbox."""
        newest = await self._snapshots.newest_state_name(session)
        idle = [state for state in self._idle_workspaces if state.session == session]
        if idle and idle[-1].name != newest:
            stored = await self._snapshots.stored_names(session, [idle[-1].name])
            if not stored and idle[-1] in self._idle_workspaces:
                return idle[-1]
        return SessionState(session, newest) if newest else None

    async def _wait_until_saved(self, session: Session) -> None:
        if saving := self._save_tasks_of(session):
            await asyncio.wait(saving)

    def _save_tasks_of(self, session: Session) -> list[asyncio.Task[None]]:
        return [task for state, task in self._save_tasks.items() if state.session == session]

    def _take_idle(self, state: SessionState | None, isolation: Isolation) -> RunWorkspace | None:
        idle = self._idle_workspaces.get(state) if state else None
        if state is None or idle is None or idle.workspace.isolation != isolation:
            return None
        return self._take(state)

    async def _reset(self, workspace: RunWorkspace, parent: SessionState | None) -> None:
        workspace.save_as, workspace.is_used = None, False
        if workspace.current_sandbox:
            workspace.origin = "kept"
        workspace.restore = None
        if parent and await self._snapshots.stored_names(parent.session, [parent.name]):
            # Also for an idle sandbox: if it is lost, the next sandbox gets the files.
            workspace.restore = lambda sandbox: sandbox.restore(self._snapshots.read(parent))

    def _take(self, state: SessionState) -> RunWorkspace:
        idle = self._idle_workspaces.pop(state)
        idle.expiration.cancel()
        return idle.workspace

    async def _end_idle(self, state: SessionState) -> None:
        """End an idle sandbox, unless it was taken or ended meanwhile."""
        if state in self._idle_workspaces:
            await self._take(state).release()

    def _save_in_background(
        self, parent: SessionState | None, state: SessionState, workspace: RunWorkspace
    ) -> None:
        earlier_saves = self._save_tasks_of(state.session)
        saving = asyncio.create_task(self._save(parent, state, workspace, earlier_saves))
        self._save_tasks[state] = saving
        self._tasks.add(saving)
        saving.add_done_callback(self._tasks.discard)
        saving.add_done_callback(partial(self._forget_save_task, state))

    def _forget_save_task(self, state: SessionState, task: "asyncio.Task[None]") -> None:
        if self._save_tasks.get(state) is task:  # another run may save the same state meanwhile
            del self._save_tasks[state]

    async def _save(
        self,
        parent: SessionState | None,
        state: SessionState,
        workspace: RunWorkspace,
        earlier_saves: Collection[asyncio.Task[None]],
    ) -> None:
        """Save the state of a workspace, then keep its sandbox idle for a while."""
        if earlier_saves:  # in order, so that the newest state is that of the last run
            await asyncio.wait(earlier_saves)
        is_lost = False
        try:
            if workspace.is_used:
                is_lost = not await self._save_snapshot(state, workspace)
            if parent and (is_lost or not workspace.is_used):
                await self._snapshots.alias(state, parent)
        except Exception:
            logger.exception("the workspace of %s cannot be saved", state.session.name)
        if workspace.current_sandbox and not is_lost:
            await self._keep_idle(state, workspace)
        else:
            await workspace.release()

    async def _save_snapshot(self, state: SessionState, workspace: RunWorkspace) -> bool:
        """Save a snapshot. Return False if the workspace is lost: its sandbox is lost, or the
        snapshot takes too long. After another failure, which is logged, the sandbox can be kept."""
        assert workspace.current_sandbox
        try:
            async with asyncio.timeout(SNAPSHOT_S):
                await self._snapshots.save(state, _snapshot_writer(workspace.current_sandbox))
        except (SandboxLostError, TimeoutError) as error:
            logger.warning("the workspace of %s was lost: %s", state.session.name, error)
            return False
        except SandboxError as error:
            logger.warning("the workspace of %s cannot be saved: %s", state.session.name, error)
        return True

    async def _keep_idle(self, state: SessionState, workspace: RunWorkspace) -> None:
        while (
            state in self._idle_workspaces
        ):  # a loop, for another run may save the same state meanwhile
            await self._end_idle(state)
        self._idle_workspaces[state] = _IdleWorkspace(
            workspace, asyncio.create_task(self._expire(state))
        )
        while len(self._idle_workspaces) > self._max_kept:
            await self._end_idle(next(iter(self._idle_workspaces)))
        is_wanted, self._is_wanted = self._is_wanted, None
        if is_wanted and is_wanted():
            self.evict_idle(is_wanted)

    async def _evict_one(self, is_wanted: Callable[[], bool]) -> None:
        for state in list(self._idle_workspaces):
            # A sandbox without a snapshot has the only copy of its files, so it is not evicted.
            known = await self._snapshots.stored_names(state.session, [state.name])
            if not is_wanted():
                return
            if known and state in self._idle_workspaces:
                await self._end_idle(state)
                return
        self._is_wanted = is_wanted

    def _on_eviction_done(self, eviction: "asyncio.Task[None]") -> None:
        self._eviction = None
        self._tasks.discard(eviction)

    async def _expire(self, state: SessionState) -> None:
        await self._clock.sleep(self._keep_s)
        await self._idle_workspaces.pop(state).workspace.release()


def _snapshot_writer(sandbox: Sandbox) -> Callable[[Sink], Awaitable[int]]:
    async def write(sink: Sink) -> int:
        return await sandbox.snapshot(sink, max_bytes=MAX_SNAPSHOT_MIB << 20)

    return write
