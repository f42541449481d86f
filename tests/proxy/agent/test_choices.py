"""Several choices (`n`) of one request: concurrent, separate, and all or none."""

import asyncio
from collections.abc import Mapping
from typing import Any

import anyio
import pytest

from proxy.agent.agent import Agent
from proxy.agent.events import AnswerDelta, ChoiceEvent, Event, OnDelta, RunFinished
from proxy.agent.model import Completion
from proxy.agent.task import AgentTask
from proxy.api.prepare import fan_out
from proxy.errors import BackendError
from proxy.models.scripted import ScriptedModel, tool_reply
from proxy.workspaces import Workspaces
from sandbox_runtime.tools import make_tools
from tests.fakes.memory_sandbox import MemorySandboxes
from tests.fakes.memory_snapshots import MemorySnapshots
from tests.fakes.tasks import make_task
from tests.proxy.agent.runs import AT_ONCE, SUBMIT, USER, MemoryArtifactStore, bash


def task(count: int, **fields: Any) -> AgentTask:
    artifact_stores = iter([MemoryArtifactStore() for _ in range(count)])
    first = make_task(
        **{
            "run_id": "r1",
            "artifact_store": next(artifact_stores),
            "model": "m",
            "messages": [USER],
            **fields,
        }
    )
    return fan_out(first, count, lambda session: next(artifact_stores))


class ConcurrentModel(ScriptedModel):
    """A model whose calls return once `count` calls are running. One of the calls may fail."""

    def __init__(self, replies: list[dict[str, Any]], count: int, *, failing: int = -1) -> None:
        super().__init__(replies)
        self._barrier = asyncio.Barrier(count)
        self._failing = failing
        self._calls = 0
        self.ended = 0
        self.three_called = asyncio.Event()

    async def complete(self, body: Mapping[str, Any], on_delta: OnDelta | None) -> Completion:
        self._calls += 1
        if self._calls == 3:
            self.three_called.set()
        try:
            if await self._barrier.wait() == self._failing:
                raise BackendError("this one failed", status=500)
            if self._failing >= 0:
                await anyio.sleep_forever()
            return await super().complete(body, on_delta)
        finally:
            self.ended += 1


async def test_result_of_a_single_choice_has_no_further_results() -> None:
    only = task(1)
    assert only.others == ()
    result = await agent(ScriptedModel([SUBMIT]), MemorySandboxes()).answer(only, ignore)
    assert (result.answer, result.others) == ("42", ())


def test_each_choice_has_its_own_run_and_files() -> None:
    three = task(3)
    names = {choice.run_id for choice in (three, *three.others)}
    artifact_stores = {id(choice.artifact_store) for choice in (three, *three.others)}
    assert (len(names), len(artifact_stores)) == (3, 3)
    assert all(name.isalnum() for name in names)


def test_each_further_choice_has_a_seed_of_its_own_and_no_request_id() -> None:
    base = {"seed": 7, "temperature": 1, "request_id": "x"}
    first, *others = (choice.params.base for choice in _all(task(3, base=base)))
    assert first == base
    assert others == [{"seed": 8, "temperature": 1}, {"seed": 9, "temperature": 1}]


async def test_choices_run_concurrently_in_sandboxes_of_their_own() -> None:
    model = ConcurrentModel([tool_reply(bash("echo 1 > output/a")), SUBMIT], 3)
    sandboxes = MemorySandboxes()
    events: list[Event] = []

    async def listen(event: Event) -> None:
        events.append(event)

    three = task(3, stream=True)
    with anyio.fail_after(10):
        result = await agent(model, sandboxes).answer(three, listen)
    assert [choice.answer for choice in (result, *result.others)] == ["42"] * 3
    assert [choice.run_id for choice in (result, *result.others)] == [e.run_id for e in _all(three)]
    assert len({sandbox.id for sandbox in sandboxes.leased}) == 3
    assert [list(_saved(choice)) for choice in _all(three)] == [["/testbed/output/a"]] * 3
    finished_choices = [e.index for e in events if isinstance(e, ChoiceEvent) and _ends(e.event)]
    assert sorted(finished_choices) == [1, 2]
    assert sum(_ends(event) for event in events) == 1
    assert "".join(e.text for e in events if isinstance(e, AnswerDelta)) == "42"


@pytest.mark.parametrize("failing", [0, 1, 2])
async def test_failed_choice_ends_the_other_choices(failing: int) -> None:
    model = ConcurrentModel([SUBMIT], 3, failing=failing)
    sandboxes = MemorySandboxes()
    with anyio.fail_after(10), pytest.raises(BackendError, match="this one failed"):
        await agent(model, sandboxes).answer(task(3, profile=AT_ONCE), ignore)
    assert (model.ended, sandboxes.opened, sandboxes.closed) == (3, 3, 3)


async def test_cancellation_of_the_task_ends_all_choices() -> None:
    model = ConcurrentModel([SUBMIT], 4)  # the fourth call is never made
    sandboxes = MemorySandboxes()
    running = asyncio.create_task(agent(model, sandboxes).answer(task(3, profile=AT_ONCE), ignore))
    with anyio.fail_after(10):
        await model.three_called.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert (model.ended, sandboxes.opened, sandboxes.closed) == (3, 3, 3)


def agent(model: ScriptedModel, sandboxes: MemorySandboxes) -> Agent:
    workspaces = Workspaces(sandboxes, MemorySnapshots(), keep_s=60, max_kept=0)
    return Agent(model, workspaces, make_tools)


async def ignore(event: Event) -> None:
    """Ignore the event."""


def _all(task: AgentTask) -> list[AgentTask]:
    return [task, *task.others]


def _saved(task: AgentTask) -> Mapping[str, bytes]:
    assert isinstance(task.artifact_store, MemoryArtifactStore)
    return task.artifact_store.saved


def _ends(event: Event) -> bool:
    return isinstance(event, RunFinished)
