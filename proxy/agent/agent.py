"""Answers a task: in a run with tools, in one model call without them, or, for several choices
(`n`), in several runs at the same time."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from policies.limits import StopReason
from policies.profile import Profile
from policies.prompts import SandboxContents
from policies.redaction import SecretFinder
from proxy.agent.budget import MeteredModel, RunBudget
from proxy.agent.context_windows import ContextWindows
from proxy.agent.events import (
    AnswerDelta,
    CallAccepted,
    CallFailed,
    ChoiceEvent,
    Emit,
    Event,
    ModelDelta,
    ReasoningDelta,
    Refused,
    RunFinished,
    RunStarted,
    TextDelta,
)
from proxy.agent.guard import EgressWatch
from proxy.agent.history import text_of
from proxy.agent.loop import AgentLoop
from proxy.agent.model import (
    ChatModel,
    Completion,
    Credentials,
    Model,
    StopRetryingError,
    refusal_of,
)
from proxy.agent.redactor import Redactor
from proxy.agent.result import Result, RunStats, Stopwatch, times, token_counts, tokens
from proxy.agent.task import AgentInput, AgentTask, PendingInput, RunClock, out_of_time
from proxy.agent.turn_stream import FirstCall, emit_reasoning
from proxy.errors import BackendError
from proxy.workspaces import Workspaces
from sandbox_runtime.tools.base import Tool

LEAST_S = 0.001
"""What is left of a deadline that the downloads of a request have used up."""


@dataclass(frozen=True, slots=True)
class Agent:
    """A model, the workspaces its runs may use, and the tools it has there."""

    model: Model
    workspaces: Workspaces
    make_tools: Callable[[Profile], Sequence[Tool]]
    equipment: SandboxContents = SandboxContents()
    windows: ContextWindows = field(default_factory=ContextWindows)

    async def window(
        self, model: str, owner: str, credentials: Credentials | None = None
    ) -> int | None:
        """Return the context window of a model in tokens, or None if it is unknown. `credentials`
        are the client's own for the backend."""
        return await self.windows.of_first_asked(self._reached_with(credentials), owner, model)

    async def answer(self, task: AgentTask, emit: Emit) -> Result:
        """Answer a request with all its choices, each in a run and a sandbox of its own, and emit
        the events. The first run that fails ends the others.

        Raises BackendError if the model fails for good, SandboxError if the sandbox does.
        """
        if task.is_single_call:
            return await _redacted(task, emit, partial(_single_call, self.model_of(task)))
        began, deadline_s = time.monotonic(), task.limits.deadline_s
        given = task.input
        if isinstance(given, PendingInput):
            given = await given.load()
            if deadline_s is not None:
                deadline_s = max(LEAST_S, deadline_s - (time.monotonic() - began))
        run = partial(self._run, given, deadline_s)
        if not task.others:
            return await _redacted(task, emit, run)
        try:
            async with asyncio.TaskGroup() as group:
                first = group.create_task(_redacted(task, emit, run))
                others = [
                    group.create_task(_redacted(other, _of_choice(index, emit), run))
                    for index, other in enumerate(task.others, 1)
                ]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return replace(first.result(), others=[other.result() for other in others])

    async def _run(
        self, given: AgentInput, deadline_s: float | None, task: AgentTask, emit: Emit
    ) -> Result:
        """Answer one choice in a run with tools."""
        clock = RunClock(time.monotonic(), deadline_s)
        session, watch = task.session, EgressWatch(task, emit)
        async with self.workspaces.use(
            session.resume_from, task.profile.isolation, watch.decided, watch.asked
        ) as lease:
            if task.profile.computer == "always":
                await lease.ask()
            loop = AgentLoop(
                self.model_of(task),
                self.windows,
                self.make_tools(task.profile),
                self.equipment,
                task,
                given,
                emit,
                lease,
                watch,
                clock,
            )
            try:
                result = await loop.go()
            finally:
                watch.close()
                await loop.budget.close()
            lease.leave_as = session.save_as or (session.suspend_as if result.parked else None)
            return result

    def model_of(self, task: AgentTask) -> Model:
        """Return the model, reached with the client's own key if the task has one."""
        return self._reached_with(task.credentials)

    def _reached_with(self, credentials: Credentials | None) -> Model:
        return self.model.for_client(credentials) if credentials else self.model


async def _redacted(
    task: AgentTask, emit: Emit, work: Callable[[AgentTask, Emit], Awaitable[Result]]
) -> Result:
    """Do the work with the profile's secrets taken out of its events and its result."""
    secrets = SecretFinder(task.profile.redact)
    if not secrets:
        return await work(task, emit)
    redactor = Redactor(secrets, emit)
    return redactor.result(await work(task, redactor.emit))


def _of_choice(index: int, emit: Emit) -> Emit:
    async def emit_of_choice(event: Event) -> None:
        await emit(ChoiceEvent(index, event))

    return emit_of_choice


async def _single_call(model: Model, task: AgentTask, emit: Emit) -> Result:
    """Have the model answer by itself, in one call without tools. Raises BackendError."""
    budget, waited = RunBudget(task, task.profile.limits, time.monotonic()), Stopwatch()
    await emit(RunStarted(task.run_id))
    try:
        async with asyncio.timeout(task.limits.deadline_s):
            reply = await _asked(MeteredModel(model, budget), task, emit, waited)
    except TimeoutError as error:
        raise out_of_time(task) from error
    refusal = refusal_of(reply.message)
    if refusal:
        await emit(Refused(refusal))
    stop = StopReason.REFUSED if refusal else StopReason.ANSWERED
    await emit(RunFinished(stop, reply.usage))
    return Result(
        run_id=task.run_id,
        container_id=task.artifact_store.container_id,
        model=task.model,
        answer="" if refusal else _text(reply),
        stop_reason=stop,
        finish_reason=reply.finish_reason,
        tool_calls=(),
        usage=reply.usage,
        usages=[reply.usage],
        segments=1,
        stats=_single_call_stats(reply, budget, waited.spent_s),
        artifacts=(),
        skipped_files=(),
        choice=reply.choice,
        route=task.route,
        response=reply.response,
        refusal=refusal,
    )


def _single_call_stats(reply: Completion, budget: RunBudget, model_s: float) -> RunStats:
    prompt = tokens(reply.usage, "prompt_tokens")
    said = prompt + tokens(reply.usage, "completion_tokens")
    return RunStats(
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

    def __init__(self, task: AgentTask, emit: Emit) -> None:
        self._first_call = FirstCall(task.delivery.status_hold, emit)
        self._emit = emit
        self._has_shown = False

    async def hear(self, delta: ModelDelta) -> None:
        """Take one piece in. Raises StopRetryingError if the client would see another attempt."""
        match delta:
            case ReasoningDelta():
                self._has_shown = True
                await self._emit(delta)
            case TextDelta(text, logprobs):
                self._has_shown = True
                await self._emit(AnswerDelta(text, logprobs))
            case CallFailed() if self._has_shown:
                raise StopRetryingError
            case CallAccepted() | CallFailed():
                await self._first_call.hear(delta)


async def _asked(model: ChatModel, task: AgentTask, emit: Emit, waited: Stopwatch) -> Completion:
    body = {
        "model": task.model,
        "messages": list(task.input.messages),
        **task.params.base,
        **task.params.final,
        **task.params.token_limits,
    }
    hear = waited.standing(_SingleCallHandler(task, emit).hear) if task.request.stream else None
    try:
        with waited:
            reply = await model.complete(body, hear)
    except BackendError as error:
        error.renumber(lambda _: None)  # the client wrote them in another API
        raise
    if not task.request.stream:
        await emit_reasoning(reply, emit)
        if text := _text(reply):
            await emit(AnswerDelta(text))
    return reply


def _text(reply: Completion) -> str:
    return text_of(reply.message).encode(errors="replace").decode()  # half a surrogate is no text
