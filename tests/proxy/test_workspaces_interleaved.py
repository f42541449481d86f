"""Runs of one session, expiry and eviction of its sandbox, and its deletion, in every order of
their steps. No file is lost or shared with another state, and no sandbox remains."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import anyio.lowlevel
import pytest

from policies.isolation import Isolation
from policies.sessions import ResumePoint, SessionState
from proxy.workspaces import RunWorkspace
from sandbox_runtime.egress.decision import CheckTarget, OnDecision
from sandbox_runtime.sandbox import SandboxReference, Sink
from tests.fakes.interleavings import (
    TURNS,
    Step,
    interleavings,
    run_in_order,
    step_index,
)
from tests.fakes.memory_sandbox import MemoryLease, MemorySandboxes
from tests.fakes.memory_snapshots import MemorySnapshots
from tests.proxy.workspace_fixture import CHAT, ISOLATION, KEEP_S, Harness

ENTER, _WORK, LEAVE, _SAVED = range(1, 5)


class HeldSnapshots(MemorySnapshots):
    """Snapshots whose saving can be delayed."""

    def __init__(self) -> None:
        super().__init__()
        self.may_save: dict[str, asyncio.Event] = defaultdict(set_event)

    async def save(self, state: SessionState, write: Callable[[Sink], Awaitable[int]]) -> None:
        await self.may_save[state.name].wait()
        await super().save(state, write)


class LingeringSandboxes(MemorySandboxes):
    """Sandboxes whose release takes a while."""

    @asynccontextmanager
    async def lease(
        self,
        isolation: Isolation,
        on_decision: OnDecision | None = None,
        check_target: CheckTarget | None = None,
        owner: str = "",
        adopted: SandboxReference | None = None,
    ) -> AsyncIterator[MemoryLease]:
        async with super().lease(isolation, on_decision, check_target, owner) as lease:
            try:
                yield lease
            finally:
                for _ in range(TURNS):
                    await anyio.lowlevel.cancel_shielded_checkpoint()


def set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


class SteppedRun:
    """A run in four steps: lease, use, answer, save."""

    def __init__(
        self, harness: Harness, snapshots: HeldSnapshots, state: str, *parents: str
    ) -> None:
        self.seen = ""
        self._harness = harness
        self._state = state
        self._parents = parents
        self._lease: RunWorkspace | None = None
        self._stack = AsyncExitStack()
        self._may_save = snapshots.may_save[state] = asyncio.Event()

    @property
    def steps(self) -> Sequence[Step]:
        return self._enter, self._work, self._leave, self._saved

    async def _enter(self) -> None:
        use = self._harness.workspaces.use(ResumePoint(CHAT, self._parents), ISOLATION)
        self._lease = await self._stack.enter_async_context(use)

    async def _work(self) -> None:
        assert self._lease
        sandbox = await self._lease.sandbox()
        self.seen = (await sandbox.exec("cat file", timeout_s=5)).stdout
        await sandbox.exec(f"echo {self._state} >> file", timeout_s=5)

    async def _leave(self) -> None:
        assert self._lease
        self._lease.save_as = SessionState(CHAT, self._state)
        await self._stack.aclose()

    async def _saved(self) -> None:
        self._may_save.set()


class Stage:
    """A session with one earlier run, which saved the state "1"."""

    def __init__(self) -> None:
        self.snapshots = HeldSnapshots()
        self.harness = Harness(self.snapshots, sandboxes=LingeringSandboxes())

    async def begin(self) -> None:
        await self.harness.run("echo 1 > file", "1")

    def run(self, state: str, *parents: str) -> SteppedRun:
        return SteppedRun(self.harness, self.snapshots, state, *parents)

    async def expire(self) -> None:
        self.harness.clock.advance(KEEP_S)

    async def evict_idle(self) -> None:
        self.harness.workspaces.evict_idle(lambda: True)

    async def discard(self) -> None:
        await self.harness.workspaces.discard(CHAT)

    async def files(self, *parents: str) -> str:
        """Return the content of the file of a state."""
        printed, _ = await self.harness.run("cat file", f"look {parents}", *parents)
        return printed

    async def end(self) -> None:
        await self.harness.workspaces.aclose()
        assert self.harness.alive == 0


@pytest.mark.parametrize("disturbance", ["expire", "evict_idle"])
async def test_runs_from_the_same_state_have_a_copy_of_the_files_each(disturbance: str) -> None:
    for order in interleavings(a=4, b=4, x=1):
        if order.index("b") < order.index("a"):
            continue  # the same as with the runs exchanged
        stage = Stage()
        await stage.begin()
        a, b = stage.run("a", "1"), stage.run("b", "1")
        disturb: Step = getattr(stage, disturbance)
        with anyio.fail_after(10):
            await run_in_order(order, {"a": a.steps, "b": b.steps, "x": [disturb]})
            assert (a.seen, b.seen) == ("1\n", "1\n"), order
            found = [await stage.files(name) for name in ("1", "a", "b")]
            assert found == ["1\n", "1\na\n", "1\nb\n"], order
            await stage.end()


@pytest.mark.parametrize("disturbance", ["expire", "evict_idle"])
async def test_next_run_finds_the_state_of_the_previous_run(disturbance: str) -> None:
    for order in interleavings(a=4, b=4, x=1):
        if step_index(order, "b", ENTER) < step_index(order, "a", LEAVE):
            continue  # the second run starts after the answer of the first
        stage = Stage()
        await stage.begin()
        a, b = stage.run("a", "1"), stage.run("b", "a", "1")
        disturb: Step = getattr(stage, disturbance)
        with anyio.fail_after(10):
            await run_in_order(order, {"a": a.steps, "b": b.steps, "x": [disturb]})
            assert b.seen == "1\na\n", order
            found = [await stage.files(name) for name in ("1", "a", "b")]
            assert found == ["1\n", "1\na\n", "1\na\nb\n"], order
            await stage.end()


async def test_newest_state_is_that_of_the_last_run_however_long_saving_takes() -> None:
    for order in interleavings(a=4, b=4, x=1):
        if order.index("b") < order.index("a"):
            continue  # the same as with the runs exchanged
        stage = Stage()
        await stage.begin()
        a, b = stage.run("a", "1"), stage.run("b", "1")
        with anyio.fail_after(10):
            await run_in_order(order, {"a": a.steps, "b": b.steps, "x": [stage.expire]})
            last = max("ab", key=lambda name: step_index(order, name, LEAVE))
            assert await stage.files() == f"1\n{last}\n", order
            await stage.end()


async def test_concurrent_runs_that_save_the_same_state_leave_one_complete_state() -> None:
    for order in interleavings(a=4, b=4, x=1):
        if order.index("b") < order.index("a"):
            continue
        stage = Stage()
        await stage.begin()
        await stage.harness.run("true", "2", "1")  # the state is already saved once
        a, b = stage.run("2", "1"), stage.run("2", "1")
        with anyio.fail_after(10):
            await run_in_order(order, {"a": a.steps, "b": b.steps, "x": [stage.expire]})
            assert (a.seen, b.seen) == ("1\n", "1\n"), order
            assert await stage.files("2") == "1\n2\n", order
            await stage.end()


async def test_run_that_starts_after_its_session_was_discarded_starts_empty() -> None:
    for order in interleavings(a=4, x=2):
        at = [step_index(order, "x", number) for number in (1, 2)]
        if any(step_index(order, "a", ENTER) < each < step_index(order, "a", LEAVE) for each in at):
            continue  # a running run is ended before its session is discarded
        stage = Stage()
        await stage.begin()
        a = stage.run("a", "1")
        with anyio.fail_after(10):
            await run_in_order(order, {"a": a.steps, "x": [stage.discard, stage.evict_idle]})
            saw_the_state = step_index(order, "a", ENTER) < at[0]
            assert a.seen == ("1\n" if saw_the_state else ""), order
            assert await stage.files("a", "1") == ("" if saw_the_state else "a\n"), order
            await stage.end()
