"""Failures of the context, the backend, the sandbox and the client."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from policies.isolation import Isolation
from policies.limits import StopReason
from policies.prompts import final_answer_request
from proxy.agent.events import Event, OnDelta, ToolCallFinished, ToolCallStarted, ToolOutput
from proxy.agent.model import Completion
from proxy.agent.tools import MAX_LOSSES
from proxy.errors import BackendError, ContextOverflowError
from proxy.models.scripted import ScriptedModel, call, text_reply, tool_reply
from sandbox_runtime.egress.decision import CheckTarget, OnDecision
from sandbox_runtime.errors import SandboxLostError, SandboxStartError
from sandbox_runtime.sandbox import Sandbox, SandboxReference
from tests.fakes.memory_sandbox import MemorySandboxes
from tests.proxy.agent.runs import (
    AT_ONCE,
    FAILURE,
    OVERFLOW,
    SUBMIT,
    USER,
    Events,
    Run,
    SequentialModel,
    bash,
    valid,
)

LONG = bash("seq 100001 101900")
SHORT = bash("echo short")


# The context is full


async def test_overflow_replaces_the_largest_observation_by_a_stub_and_the_run_continues() -> None:
    model = ScriptedModel([tool_reply(SHORT), tool_reply(LONG), OVERFLOW, SUBMIT])
    run = Run(model)
    result = await run.go()
    assert (result.answer, result.stop_reason) == ("42", StopReason.SUBMITTED)
    assert result.segments == 2
    refused, accepted = model.requests[2]["messages"], model.requests[3]["messages"]
    assert accepted[:-1] == refused[:-1]
    assert (accepted[-1]["tool_call_id"], accepted[-1]["role"]) == ("call_1_0", "tool")
    assert len(refused[-1]["content"]) > 10_000
    assert "characters of this result were left out" in accepted[-1]["content"]
    assert len(accepted[-1]["content"]) < 700


async def test_later_prompts_extend_the_compacted_history() -> None:
    model = ScriptedModel([tool_reply(LONG), OVERFLOW, tool_reply(SHORT), SUBMIT])
    await Run(model).go()
    shortened, after = model.requests[2]["messages"], model.requests[3]["messages"]
    assert after[: len(shortened)] == shortened


async def test_client_messages_are_never_shortened() -> None:
    client = [
        {"role": "user", "content": "x" * 50_000},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "tool", "tool_call_id": "theirs", "content": "y" * 50_000},
        USER,
    ]

    class Positioned(ScriptedModel):
        """A model that selects its reply only by the assistant messages of this run."""

        async def complete(self, body: Mapping[str, Any], on_delta: OnDelta | None) -> Completion:
            self.seen.append(body["messages"])
            run_messages = [body["messages"][0], *body["messages"][5:]]
            return await super().complete({**body, "messages": run_messages}, on_delta)

        seen: list[Any]

    model = Positioned([tool_reply(LONG), OVERFLOW, SUBMIT])
    model.seen = []
    result = await Run(model).go(messages=client)
    assert result.answer == "42"
    assert all(messages[1:5] == client for messages in model.seen)


async def test_repeated_overflows_shorten_one_observation_after_the_other() -> None:
    model = ScriptedModel([tool_reply(LONG), tool_reply(LONG), OVERFLOW, OVERFLOW, SUBMIT])
    await Run(model).go()
    lengths = [
        [len(m["content"]) for m in request["messages"] if m["role"] == "tool"]
        for request in model.requests[2:]
    ]
    assert [[n > 10_000 for n in row] for row in lengths] == [
        [True, True],
        [False, True],
        [False, False],
    ]


async def test_client_request_that_overflows_the_window_is_an_error_for_the_client() -> None:
    sandboxes = MemorySandboxes()
    with pytest.raises(ContextOverflowError):
        await Run(ScriptedModel([OVERFLOW, OVERFLOW, SUBMIT]), sandboxes, profile=AT_ONCE).go()
    assert (sandboxes.opened, sandboxes.closed) == (1, 1)


async def test_overflow_with_nothing_to_shorten_ends_in_a_final_answer() -> None:
    model = ScriptedModel([tool_reply(SHORT), OVERFLOW, text_reply("About 42.")])
    result = await Run(model).go()
    assert (result.answer, result.stop_reason) == ("About 42.", StopReason.CONTEXT_WINDOW)
    last = model.requests[-1]
    assert last["messages"][-1]["content"] == final_answer_request(StopReason.CONTEXT_WINDOW)
    assert "tools" not in last


async def test_answer_file_is_returned_if_the_context_is_full() -> None:
    steps = tool_reply(bash("echo 42 > output/answer.txt"))
    result = await Run(ScriptedModel([steps, OVERFLOW, OVERFLOW, text_reply("")])).go()
    assert (result.answer, result.stop_reason) == ("42", StopReason.CONTEXT_WINDOW)


async def test_context_that_is_too_full_for_any_answer_is_an_error() -> None:
    with pytest.raises(ContextOverflowError):
        await Run(ScriptedModel([tool_reply(SHORT), OVERFLOW, OVERFLOW, text_reply("")])).go()


# The backend fails


@pytest.mark.parametrize("stream", [False, True])
async def test_backend_failure_is_never_an_answer(stream: bool) -> None:
    sandboxes = MemorySandboxes()
    steps = tool_reply(bash("echo 42 > output/answer.txt"), content="There are 42.")
    run = Run(ScriptedModel([steps, FAILURE, SUBMIT]), sandboxes)
    with pytest.raises(BackendError, match="on fire") as raised:
        await run.go(stream=stream)
    assert raised.value.status == 500
    assert (sandboxes.opened, sandboxes.closed) == (1, 1)
    assert run.events.answer == ""


async def test_failure_of_the_final_answer_call_is_an_error_if_there_is_no_earlier_answer() -> None:
    with pytest.raises(BackendError, match="on fire"):
        await Run(ScriptedModel([tool_reply(call("submit")), FAILURE, SUBMIT])).go()


class BreakingModel(ScriptedModel):
    """A model that fails within the final answer, after a part was streamed."""

    async def complete(self, body: Mapping[str, Any], on_delta: OnDelta | None) -> Completion:
        reply = await super().complete(body, on_delta)
        if "tools" not in body:
            raise BackendError("the connection broke")
        return reply


async def test_backend_failure_after_a_part_of_the_final_answer_was_streamed_fails_the_run() -> (
    None
):
    steps = tool_reply(bash("echo 41 > output/answer.txt"))
    prose = "Forty-one, forty-two, forty-three; " * 6
    run = Run(BreakingModel([steps, SUBMIT, text_reply(prose)]))
    with pytest.raises(BackendError, match="broke"):
        await run.go(stream=True, final={"logit_bias": {"1": 1}})
    assert len(run.events.answer) > 160


# The sandbox fails


async def test_run_with_commands_fails_if_the_sandbox_cannot_start() -> None:
    sandboxes = MemorySandboxes(SandboxStartError("no room"))
    with pytest.raises(SandboxStartError, match="no room"):
        await Run(ScriptedModel([tool_reply(SHORT), SUBMIT]), sandboxes).go()


@pytest.mark.parametrize("reply", [SUBMIT, text_reply("42"), text_reply("")])
async def test_run_without_commands_ignores_a_sandbox_that_cannot_start(
    reply: dict[str, Any],
) -> None:
    sandboxes = MemorySandboxes(SandboxStartError("no room"))
    model = SequentialModel([reply, text_reply("42")])
    assert (await Run(model, sandboxes).go()).answer == "42"


class NeverReady:
    """Sandboxes that never finish starting."""

    command_id, can_adopt = None, False

    def __init__(self) -> None:
        self.ended = False

    async def sandbox(self) -> Sandbox:
        await anyio.Event().wait()
        raise AssertionError

    @asynccontextmanager
    async def lease(
        self,
        isolation: Isolation,
        on_decision: OnDecision | None = None,
        check_target: CheckTarget | None = None,
        owner: str = "",
        adopted: SandboxReference | None = None,
    ) -> AsyncIterator["NeverReady"]:
        try:
            yield self
        finally:
            self.ended = True


@pytest.mark.parametrize("reply", [SUBMIT, text_reply("42"), tool_reply(call("nonsense"))])
@pytest.mark.parametrize("stream", [False, True])
async def test_run_without_commands_waits_for_no_sandbox(
    reply: dict[str, Any], stream: bool
) -> None:
    sandboxes = NeverReady()
    with anyio.fail_after(5):
        run = Run(ScriptedModel([reply, SUBMIT]), sandboxes, profile=AT_ONCE)
        result = await run.go(stream=stream)
    assert (result.answer, sandboxes.ended) == ("42", True)


@pytest.mark.parametrize("reply", [SUBMIT, text_reply("42"), tool_reply(call("nonsense"))])
async def test_no_sandbox_is_started_before_a_tool_needs_it(reply: dict[str, Any]) -> None:
    sandboxes = MemorySandboxes()
    await Run(ScriptedModel([reply, SUBMIT]), sandboxes).go()
    assert sandboxes.opened == 0


async def test_lost_sandbox_is_reported_to_the_model_and_replaced() -> None:
    sandboxes = MemorySandboxes()

    async def lose(event: Event) -> None:
        if isinstance(event, ToolCallStarted) and event.step == 2:
            await sandboxes.leased[0].close()

    calls = [call("execute_bash", command=command) for command in ("x=1", "y=2", "echo $x.")]
    model = ScriptedModel([*(tool_reply(each) for each in calls), SUBMIT])
    events = Events(lose)
    result = await Run(model, sandboxes, events=events).go()
    observations = [event.observation for event in events if isinstance(event, ToolCallFinished)]
    assert "Everything in the sandbox is lost" in observations[1]
    assert observations[2] == "Exit code: 0\n[stdout]\n."
    assert (result.answer, sandboxes.opened, sandboxes.closed) == ("42", 2, 2)


async def test_run_fails_if_it_loses_one_sandbox_after_another() -> None:
    sandboxes = MemorySandboxes()

    async def lose(event: Event) -> None:
        if isinstance(event, ToolOutput):
            await sandboxes.leased[-1].close()

    model = ScriptedModel([tool_reply(call("execute_bash", command="echo; sleep 1"))] * 9)
    with pytest.raises(SandboxLostError):
        await Run(model, sandboxes, events=Events(lose)).go()
    assert (sandboxes.opened, sandboxes.closed) == (MAX_LOSSES, MAX_LOSSES)


# The client disconnects


async def test_sandbox_is_closed_when_the_run_succeeds() -> None:
    sandboxes = MemorySandboxes()
    await Run(ScriptedModel([tool_reply(SHORT), SUBMIT]), sandboxes).go()
    assert (sandboxes.opened, sandboxes.closed) == (1, 1)


async def test_sandbox_is_closed_when_the_run_is_cancelled() -> None:
    sandboxes = MemorySandboxes()
    started = anyio.Event()

    async def on_event(event: Event) -> None:
        if isinstance(event, ToolCallStarted):
            started.set()

    model = ScriptedModel([tool_reply(bash("mkfifo pipe; cat pipe")), SUBMIT])
    run = Run(model, sandboxes, events=Events(on_event))
    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(run.go)
            await started.wait()
            assert (sandboxes.opened, sandboxes.closed) == (1, 0)
            group.cancel_scope.cancel()
    assert (sandboxes.opened, sandboxes.closed) == (1, 1)
    assert len(model.requests) == 1


async def test_failing_event_callback_ends_the_run() -> None:
    sandboxes = MemorySandboxes()

    async def fail(event: Event) -> None:
        if isinstance(event, ToolCallStarted):
            raise ConnectionResetError

    model = ScriptedModel([tool_reply(SHORT), SUBMIT])
    with pytest.raises(ConnectionResetError):
        await Run(model, sandboxes, profile=AT_ONCE, events=Events(fail)).go()
    assert (sandboxes.closed, len(model.requests)) == (1, 1)


async def test_every_model_request_of_a_run_stays_valid_after_context_overflows() -> None:
    turn = tool_reply(LONG, SHORT, LONG)
    model = ScriptedModel([turn, OVERFLOW, turn, OVERFLOW, OVERFLOW, SUBMIT])
    await Run(model).go()
    assert all(valid(request) for request in model.requests)
