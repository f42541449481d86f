"""A harness for Workspaces with sandboxes in memory."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from policies.isolation import Isolation
from policies.sessions import ResumePoint, Session, SessionState
from proxy.workspaces import Origin, RunWorkspace, SnapshotStore, Workspaces
from tests.fakes.manual_clock import ManualClock
from tests.fakes.memory_sandbox import MemorySandboxes

CHAT = Session("somebody", "chat")
ISOLATION = Isolation()
KEEP_S = 60.0


class Harness:
    """Workspaces with sandboxes in memory and a manual clock."""

    def __init__(
        self,
        snapshots: SnapshotStore,
        max_kept: int = 2,
        sandboxes: MemorySandboxes | None = None,
    ) -> None:
        self.sandboxes = sandboxes or MemorySandboxes()
        self.snapshots = snapshots
        self.clock = ManualClock()
        self.workspaces = Workspaces(
            self.sandboxes, self.snapshots, keep_s=KEEP_S, max_kept=max_kept, clock=self.clock
        )

    async def run(
        self, command: str, state: str, *parents: str, session: Session = CHAT
    ) -> tuple[str, Origin]:
        """Run a command in one run. Return its output and the origin of the workspace."""
        async with self.use(state, *parents, session=session) as lease:
            result = await (await lease.sandbox()).exec(command, timeout_s=5)
        return result.stdout, lease.origin

    @asynccontextmanager
    async def use(
        self, state: str, *parents: str, session: Session = CHAT
    ) -> AsyncIterator[RunWorkspace]:
        """Lease a workspace and save it as `state`."""
        async with self.workspaces.use(ResumePoint(session, parents), ISOLATION) as lease:
            yield lease
            lease.save_as = SessionState(session, state)

    @property
    def alive(self) -> int:
        return self.sandboxes.opened - self.sandboxes.closed
