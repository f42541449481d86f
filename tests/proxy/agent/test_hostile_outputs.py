"""Output directories that are too large: the run still answers and lists the skipped files."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from policies.artifacts import ArtifactLimits
from policies.isolation import Isolation
from policies.limits import Limits, StopReason
from policies.profile import Profile
from policies.sessions import ResumePoint, Session, SessionState
from proxy.agent.agent import Agent
from proxy.agent.artifacts import FILES_NOT_LISTED
from proxy.agent.result import Result
from proxy.models.scripted import ScriptedModel, tool_reply
from proxy.workspaces import Workspaces
from sandbox_runtime.egress.decision import CheckTarget, OnDecision
from sandbox_runtime.errors import SandboxError
from sandbox_runtime.sandbox import Lease, Sandbox, SandboxReference
from sandbox_runtime.tools import make_tools
from tests.fakes.memory_snapshots import MemorySnapshots
from tests.fakes.tasks import make_task
from tests.proxy.agent.runs import SUBMIT, USER, Events, MemoryArtifactStore, bash
from tests.sandbox_runtime.conformance.backends import open_backend

SESSION = Session("somebody", "run:r1")
SPARSE = "cd output; seq 9999 | xargs truncate -s 1500M"
"""15 TB of sparse files."""
ENDLESS = "cd output; seq 9999 | xargs truncate -s 250M"
"""2.5 TB of sparse files, each small enough to become an artifact."""


class OneSandbox:
    """A Sandboxes with one sandbox, and its Lease."""

    command_id, can_adopt = None, False

    def __init__(self, sandbox: Sandbox | SandboxError) -> None:
        self._sandbox = sandbox

    @asynccontextmanager
    async def lease(
        self,
        isolation: Isolation,
        on_decision: OnDecision | None = None,
        check_target: CheckTarget | None = None,
        owner: str = "",
        adopted: SandboxReference | None = None,
    ) -> AsyncIterator[Lease]:
        yield self

    async def sandbox(self) -> Sandbox:
        if isinstance(self._sandbox, SandboxError):
            raise self._sandbox
        return self._sandbox


class SandboxSession:
    """A session whose runs use the same sandbox."""

    def __init__(self, sandbox: Sandbox) -> None:
        sandboxes, snapshots = OneSandbox(sandbox), MemorySnapshots()
        self._workspaces = Workspaces(sandboxes, snapshots, keep_s=600, max_kept=1)
        self._saved_states: list[str] = []

    async def turn(self, *commands: str, **limits: Any) -> Result:
        replies: Sequence[dict[str, Any]] = [tool_reply(bash(each)) for each in commands]
        save_as = SessionState(SESSION, f"s{len(self._saved_states)}")
        task = make_task(
            run_id=f"r{len(self._saved_states)}",
            artifact_store=MemoryArtifactStore(),
            model="m",
            messages=[USER],
            profile=Profile(limits=Limits(**limits), artifacts=ArtifactLimits(max_total_mib=1)),
            resume_from=ResumePoint(SESSION, tuple(self._saved_states))
            if self._saved_states
            else None,
            save_as=save_as,
        )
        agent = Agent(ScriptedModel([*replies, SUBMIT]), self._workspaces, make_tools)
        result = await agent.answer(task, Events())
        self._saved_states.insert(0, save_as.name)
        return result


@pytest.fixture
async def session(tmp_path: Path) -> AsyncIterator[SandboxSession]:
    async with open_backend("bubblewrap", tmp_path) as sandbox:
        yield SandboxSession(sandbox)


def reasons(result: Result) -> set[str]:
    return {each.why for each in result.skipped_files}


async def test_files_too_large_for_artifacts_are_not_hashed(session: SandboxSession) -> None:
    first = await session.turn(SPARSE)
    assert (reasons(first), len(first.skipped_files)) == ({"too_large"}, 9999)
    with anyio.fail_after(60):
        second = await session.turn("echo x > new.txt; truncate -s 1501M 1")
    assert second.stop_reason is StopReason.SUBMITTED
    assert [each.path for each in second.artifacts] == ["/testbed/output/new.txt"]
    assert [(each.path, each.why) for each in second.skipped_files] == [
        ("/testbed/output/1", "too_large")
    ]


async def test_files_that_are_not_hashed_in_time_are_reported_as_skipped(
    session: SandboxSession,
) -> None:
    await session.turn(ENDLESS)
    with anyio.fail_after(60):
        second = await session.turn("echo x > new.txt", max_run_seconds=20)
    assert second.stop_reason is StopReason.SUBMITTED
    assert [each.path for each in second.artifacts] == ["/testbed/output/new.txt"]
    assert reasons(second) == {"no_time"}
    assert len(second.skipped_files) > 9000


async def test_output_directory_with_more_files_than_the_listing_limit_adds_a_warning(
    session: SandboxSession,
) -> None:
    with anyio.fail_after(60):
        full = await session.turn("cd output; seq 10000 | xargs touch")
        overfull = await session.turn("touch one-more")
    assert (list(full.warnings), list(overfull.warnings)) == ([], [FILES_NOT_LISTED])
    assert overfull.stop_reason is StopReason.SUBMITTED


@pytest.mark.parametrize(("command", "why"), [(SPARSE, "too_large"), (ENDLESS, "no_room")])
async def test_large_or_many_files_of_a_later_run_do_not_delay_its_answer(
    session: SandboxSession, command: str, why: str
) -> None:
    await session.turn("echo x > output/old.txt")
    with anyio.fail_after(60):
        second = await session.turn(command, max_run_seconds=20)
    assert second.stop_reason is StopReason.SUBMITTED
    # The old file is skipped too if hashing the new files has left no time for it.
    new = [each.why for each in second.skipped_files if each.path != "/testbed/output/old.txt"]
    assert new == [why] * 9999
