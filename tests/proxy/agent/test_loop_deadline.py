"""A deadline ends the turns early enough for an answer."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
import pytest

from policies.isolation import Isolation
from policies.limits import Limits, StopReason
from policies.prompts import final_answer_request
from policies.sessions import ResumePoint, Session
from proxy.errors import OutOfTimeError
from proxy.models.scripted import ScriptedModel, text_reply, tool_reply
from sandbox_runtime.egress.decision import CheckTarget, OnDecision
from sandbox_runtime.sandbox import Lease, Sandbox, SandboxReference
from tests.fakes.memory_snapshots import MemorySnapshots
from tests.proxy.agent.runs import SUBMIT, Run, bash
from tests.proxy.agent.stuck_model import StuckModel

DEADLINE = StopReason.DEADLINE
SLOW_S = 0.1


@pytest.mark.parametrize("stream", [False, True])
async def test_slow_model_gets_a_final_answer_request_before_the_deadline(stream: bool) -> None:
    model = StuckModel([tool_reply(bash("ls")), text_reply("About 42.")], turns=1)
    with anyio.fail_after(20):
        result = await Run(model).go(deadline_s=2, stream=stream)
    assert (result.answer, result.stop_reason) == ("About 42.", DEADLINE)
    assert model.requests[-1]["messages"][-1]["content"] == final_answer_request(DEADLINE)


async def test_run_whose_time_limit_precedes_the_deadline_has_the_stop_reason_wall_time() -> None:
    stuck = StuckModel([tool_reply(bash("ls")), text_reply("About 42.")], turns=1)
    run = Run(stuck, limits=Limits(max_run_seconds=0.2))
    with anyio.fail_after(20):
        result = await run.go(deadline_s=60)
    assert result.stop_reason is StopReason.WALL_TIME


async def test_command_gets_no_more_time_than_the_deadline_leaves() -> None:
    model = ScriptedModel([tool_reply(bash("echo a; sleep 100")), SUBMIT])
    run = Run(model)
    with anyio.fail_after(20):
        await run.go(deadline_s=100)
    assert "(timed out)" in run.events.observations[0]


async def test_final_answer_call_ends_at_the_deadline() -> None:
    stuck = StuckModel([], is_stuck_in_final_call=True)
    with anyio.fail_after(20), pytest.raises(OutOfTimeError) as caught:
        await Run(stuck).go(deadline_s=0.1)
    assert (caught.value.status, caught.value.headers["x-should-retry"]) == (504, "false")


async def test_answer_file_is_returned_if_the_final_answer_call_times_out() -> None:
    found = tool_reply(bash("echo 42 > output/answer.txt"))
    stuck = StuckModel([found], turns=1, is_stuck_in_final_call=True)
    with anyio.fail_after(20):
        result = await Run(stuck).go(deadline_s=2)
    assert (result.answer, result.stop_reason) == ("42", DEADLINE)


class SlowSnapshots(MemorySnapshots):
    """Snapshots that take a while to be found."""

    async def stored_names(self, session: Session, names: Sequence[str]) -> set[str]:
        await anyio.sleep(SLOW_S)
        return await super().stored_names(session, names)


async def test_wall_time_of_a_run_includes_the_lookup_of_its_session_files() -> None:
    run = Run(ScriptedModel([SUBMIT]), snapshots=SlowSnapshots())
    result = await run.go(resume_from=ResumePoint(Session("somebody", "chat"), ("1",)))
    assert result.stats.wall_ms >= SLOW_S * 1000


class NoSandboxes:
    """Sandboxes that never become available."""

    command_id, can_adopt = None, False

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
        await anyio.sleep_forever()
        raise AssertionError


async def test_wait_for_a_sandbox_ends_at_the_deadline() -> None:
    model = ScriptedModel([tool_reply(bash("ls")), text_reply("About 42.")])
    run = Run(model, sandboxes=NoSandboxes())
    with anyio.fail_after(20):
        result = await run.go(deadline_s=2)
    assert run.events.observations == ["Given up: the time is up."]
    assert (result.answer, result.stop_reason) == ("About 42.", DEADLINE)
