"""Answers a task: in a run with tools, in one model call without them, or, for several choices
(`n`), in several runs at the same time."""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from policies.limits import StopReason
from policies.profile import Profile
from policies.prompts import Equipment
from policies.redaction import Secrets
from proxy.agent.budget import Budget, Paying
from proxy.agent.context_windows import Windows
from proxy.agent.events import (
    AnswerDelta,
    CallAccepted,
    CallFailed,
    Emit,
    Event,
    ModelDelta,
    OfChoice,
    ReasoningDelta,
    Refused,
    RunFinished,
    RunStarted,
    TextDelta,
)
from proxy.agent.guard import EgressWatch
from proxy.agent.history import text_of
from proxy.agent.loop import AgentLoop
from proxy.agent.model import Answering, Model, NoMoreAttempts, Reply, refusal_of
from proxy.agent.redactor import Redactor
from proxy.agent.result import Result, Stopwatch, Tally, times, token_counts, tokens
from proxy.agent.task import Task, out_of_time
from proxy.agent.turn_stream import FirstCall, emit_reasoning
from proxy.errors import BackendError
from proxy.workspaces import Workspaces
from sandbox_runtime.tools.base import Tool

REQUEST_IDS = frozenset({"request_id", "rid"})
"""vLLM's and SGLang's names of one request: two that run at once may not share it."""


@dataclass(frozen=True, slots=True)
class Agent:
    """A model, the workspaces its runs may use, and the tools it has there."""

    model: Model
    workspaces: Workspaces
    make_tools: Callable[[Profile], Sequence[Tool]]
    equipment: Equipment = Equipment()
    windows: Windows = field(default_factory=Windows)

    async def window(self, task: Task) -> int | None:
        """Return the context window of the task's model in tokens, or None if it is unknown."""
        return await self.windows.of_first_asked(self.door(task), task.owner, task.model)

    def door(self, task: Task) -> Model:
        """Return the model, reached with the client's own key if the task has one."""
        return self.model.for_client(task.credentials) if task.credentials else self.model

    async def run(self, task: Task, emit: Emit) -> Result:
        """Answer one request in a run with tools, and emit its events.

        Raises BackendError if the model fails for good, SandboxError if the sandbox does.
        """
        began = time.monotonic()
        watch = EgressWatch(task, emit)
        async with self.workspaces.use(
            task.goes_on, task.profile.isolation, watch.decided, watch.asked
        ) as seat:
            if task.profile.computer == "always":
                await seat.ask()
            run = AgentLoop(
                self.door(task),
                self.windows,
                self.make_tools(task.profile),
                self.equipment,
                task,
                emit,
                seat,
                watch,
                began,
            )
            try:
                result = await run.go()
            finally:
                watch.close()
                await run.budget.close()
            seat.leave_as = task.leaves or (task.parks if result.parked else None)
            return result


def several(task: Task, count: int, own: Callable[[Task], Task]) -> Task:
    """Return the task with further choices (`n`), `count` in all; `own` gives each choice what it
    shares with no other."""
    others = []
    for index in range(1, count):
        run_id = uuid.uuid4().hex
        every_turn = {
            key: value for key, value in task.every_turn.items() if key not in REQUEST_IDS
        }
        if isinstance(seed := every_turn.get("seed"), int):
            every_turn["seed"] = seed + index  # else all would say the same, as vLLM knows too
        others.append(own(replace(task, run_id=run_id, every_turn=every_turn)))
    return replace(task, others=tuple(others)) if others else task


async def run(agent: Agent, task: Task, emit: Emit) -> Result:
    """Answer a request with all its choices, each in a run and a sandbox of its own. The first run
    that fails ends the others.

    Raises what Agent.run raises.
    """
    if task.alone:
        return await _redacted(task, emit, partial(_single_call, agent.door(task)))
    task = await _arrived(task)
    if not task.others:
        return await _redacted(task, emit, agent.run)
    try:
        async with asyncio.TaskGroup() as group:
            first = group.create_task(_redacted(task, emit, agent.run))
            others = [
                group.create_task(_redacted(other, _of_choice(index, emit), agent.run))
                for index, other in enumerate(task.others, 1)
            ]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return replace(first.result(), others=[other.result() for other in others])


async def _redacted(
    task: Task, emit: Emit, work: Callable[[Task, Emit], Awaitable[Result]]
) -> Result:
    """Do the work with the profile's secrets taken out of its events and its result."""
    secrets = Secrets(task.profile.redact)
    if not secrets:
        return await work(task, emit)
    redactor = Redactor(secrets, emit)
    return redactor.result(await work(task, redactor.emit))


async def _arrived(task: Task) -> Task:
    """Return the task with all its files; the time that they took is taken off its deadline."""
    if task.arriving is None:
        return task
    began = time.monotonic()
    whole = await task.arriving(task)
    if whole.deadline_s is not None:
        waited_s = min(time.monotonic() - began, whole.deadline_s - 0.001)
        whole = replace(whole, deadline_s=whole.deadline_s - waited_s, waited_s=waited_s)
    others = [
        replace(
            other,
            messages=whole.messages,
            inputs=whole.inputs,
            documents_tokens=whole.documents_tokens,
            deadline_s=whole.deadline_s,
            waited_s=whole.waited_s,
            arriving=None,
        )
        for other in task.others
    ]
    return replace(whole, others=others)


def _of_choice(index: int, emit: Emit) -> Emit:
    async def emit_of_choice(event: Event) -> None:
        await emit(OfChoice(index, event))

    return emit_of_choice


async def _single_call(model: Model, task: Task, emit: Emit) -> Result:
    """Have the model answer by itself, in one call without tools. Raises BackendError."""
    budget, waited = Budget(task, task.profile.limits, time.monotonic()), Stopwatch()
    await emit(RunStarted(task.run_id))
    try:
        async with asyncio.timeout(task.deadline_s):
            reply = await _asked(Paying(model, budget), task, emit, waited)
    except TimeoutError as error:
        raise out_of_time(task) from error
    refusal = refusal_of(reply.message)
    if refusal:
        await emit(Refused(refusal))
    stop = StopReason.REFUSED if refusal else StopReason.ANSWERED
    await emit(RunFinished(stop, reply.usage))
    return Result(
        run_id=task.run_id,
        container_id=task.outbox.container_id,
        model=task.model,
        answer="" if refusal else _text(reply),
        stop_reason=stop,
        finish_reason=reply.finish_reason,
        tool_calls=(),
        usage=reply.usage,
        usages=[reply.usage],
        segments=1,
        tally=_single_call_tally(reply, budget, waited.spent_s),
        artifacts=(),
        left_out=(),
        choice=reply.choice,
        route=task.route,
        response=reply.response,
        refusal=refusal,
    )


def _single_call_tally(reply: Reply, budget: Budget, model_s: float) -> Tally:
    prompt = tokens(reply.usage, "prompt_tokens")
    said = prompt + tokens(reply.usage, "completion_tokens")
    return Tally(
        llm_calls=1,
        turns=1,
        context_tokens=prompt,
        trajectory_tokens=said,
        cost_usd=budget.cost_usd,
        **token_counts(reply.usage),
        **times(wall_s=budget.wall_time_s, model_s=model_s, sandbox_s=0),
    )


class _SingleCallHandler:
    """Passes the reply of a single call on as it comes."""

    def __init__(self, task: Task, emit: Emit) -> None:
        self._first_call = FirstCall(task.status_hold, emit)
        self._emit = emit
        self._has_shown = False

    async def hear(self, delta: ModelDelta) -> None:
        """Take one piece in. Raises NoMoreAttempts if the client would see another attempt."""
        match delta:
            case ReasoningDelta():
                self._has_shown = True
                await self._emit(delta)
            case TextDelta(text, logprobs):
                self._has_shown = True
                await self._emit(AnswerDelta(text, logprobs))
            case CallFailed() if self._has_shown:
                raise NoMoreAttempts
            case CallAccepted() | CallFailed():
                await self._first_call.hear(delta)


async def _asked(model: Answering, task: Task, emit: Emit, waited: Stopwatch) -> Reply:
    body = {
        "model": task.model,
        "messages": list(task.messages),
        **task.every_turn,
        **task.final_only,
        **task.final_budget,
    }
    hear = waited.standing(_SingleCallHandler(task, emit).hear) if task.stream else None
    try:
        with waited:
            reply = await model.complete(body, hear)
    except BackendError as error:
        error.renumber(lambda _: None)  # the client wrote them in another API
        raise
    if not task.stream:
        await emit_reasoning(reply, emit)
        if text := _text(reply):
            await emit(AnswerDelta(text))
    return reply


def _text(reply: Reply) -> str:
    return text_of(reply.message).encode(errors="replace").decode()  # half a surrogate is no text
