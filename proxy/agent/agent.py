"""The agent: answers a task in a run with tools, in one model call without tools, or, for several
choices (`n`), in several runs at the same time."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from policies.limits import StopReason
from policies.profile import Profile
from policies.prompts import SandboxContents
from proxy.agent.budget import RunBudget
from proxy.agent.capture import model_of_run
from proxy.agent.context_windows import ContextWindows
from proxy.agent.events import (
    AnswerDelta,
    ChoiceEvent,
    Emit,
    Event,
    ModelCallAccepted,
    ModelCallFailed,
    ModelDelta,
    ModelRefused,
    ReasoningDelta,
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
from proxy.agent.result import Result, RunStats, Stopwatch, run_times, token_counts, usage_count
from proxy.agent.status_hold import FirstCallProgress
from proxy.agent.task import AgentInput, AgentTask, PendingInput, RunClock, out_of_time_error
from proxy.agent.turn_stream import emit_reasoning
from proxy.errors import BackendError, may_be_file_refusal, unreadable_files_error
from proxy.workspaces import RunWorkspace, Workspaces
from sandbox_runtime.sandbox import Sandbox
from sandbox_runtime.tools.base import Tool

MIN_DEADLINE_S = 0.001
"""Minimum deadline of a run, in seconds. Applies if the download of the input files took until the
client's deadline."""


@dataclass(frozen=True, slots=True)
class Agent:
    """Answers tasks with one model. `make_tools` returns the tools of a run with a given
    profile."""

    model: Model
    workspaces: Workspaces
    make_tools: Callable[[Profile], Sequence[Tool]]
    sandbox_contents: SandboxContents = SandboxContents()
    windows: ContextWindows = field(default_factory=ContextWindows)

    async def context_window(
        self, model: str, owner: str, credentials: Credentials | None = None
    ) -> int | None:
        """Return the context window of a model in tokens, or None if the window is unknown.
        `credentials` are the client's own credentials for the backend."""
        return await self.windows.get_without_refresh(self._model_for(credentials), owner, model)

    async def answer(self, task: AgentTask, emit: Emit) -> Result:
        """Return the result of a task and emit the events of its run. Each further choice (`n`) has
        a run and a workspace of its own. The first run that fails cancels the others.

        Raises BackendError, SandboxError, OutOfTimeError, BusyError."""
        if task.is_single_call:
            return await _single_call(self.model_of(task), task, emit)
        began, deadline_s = time.monotonic(), task.limits.deadline_s
        agent_input = task.input
        if isinstance(agent_input, PendingInput):
            agent_input = await agent_input.load()
            if deadline_s is not None:
                deadline_s = max(MIN_DEADLINE_S, deadline_s - (time.monotonic() - began))
        run = partial(self._run, agent_input, deadline_s)
        if not task.others:
            return await run(task, emit)
        # All choices start from the same state. Without this, the first choice could end and save
        # its files before the last choice looks for the newest state.
        resume_from = await self.workspaces.pin(task.session.resume_from)
        first_task, *other_tasks = (
            replace(each, session=replace(each.session, resume_from=resume_from))
            for each in (task, *task.others)
        )
        try:
            async with asyncio.TaskGroup() as group:
                first = group.create_task(run(first_task, emit))
                others = [
                    group.create_task(run(other, _choice_emitter(index, emit)))
                    for index, other in enumerate(other_tasks, 1)
                ]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return replace(first.result(), others=[other.result() for other in others])

    async def _run(
        self, agent_input: AgentInput, deadline_s: float | None, task: AgentTask, emit: Emit
    ) -> Result:
        """Run one choice with tools, and return its result."""
        began = time.monotonic()
        session, watch = task.session, EgressWatch(task, emit)
        async with self.workspaces.use(
            session.resume_from,
            task.profile.isolation,
            watch.on_decision,
            watch.check_target,
            session.owner,
        ) as lease:
            task, adopted = await _adopt_checkpoint_sandbox(task, lease)
            clock = _clock_of(task, began, deadline_s)
            if task.profile.enabled == "always" and not adopted:
                await lease.request_sandbox()
            loop = AgentLoop(
                self.model_of(task),
                self.windows,
                self.make_tools(task.profile),
                self.sandbox_contents,
                task,
                agent_input,
                emit,
                lease,
                watch,
                clock,
            )
            try:
                result = await (loop.run_from_checkpoint(adopted) if adopted else loop.run())
            finally:
                watch.close()
                await loop.budget.close()
            is_suspended = result.suspended_run is not None
            lease.save_as = session.state_to_save(is_suspended=is_suspended)
            return result

    def model_of(self, task: AgentTask) -> Model:
        """Return the model. If the task has credentials or an upstream of its own, the model uses
        them."""
        model = self._model_for(task.credentials)
        return model.with_upstream(task.upstream) if task.upstream else model

    def _model_for(self, credentials: Credentials | None) -> Model:
        return self.model.with_credentials(credentials) if credentials else self.model


async def _adopt_checkpoint_sandbox(
    task: AgentTask, workspace: RunWorkspace
) -> tuple[AgentTask, Sandbox | None]:
    """Adopt the sandbox of the task's checkpoint. Return the task and the sandbox. If there is none
    to adopt, return the task without the checkpoint, and None."""
    if task.checkpoint is None:
        return task, None
    sandbox = await workspace.adopt(task.checkpoint.sandbox)
    return (task, sandbox) if sandbox else (replace(task, checkpoint=None), None)


def _clock_of(task: AgentTask, began: float, deadline_s: float | None) -> RunClock:
    """Return the clock of a run that began on this server at `began`. The time that the run spent
    on earlier servers counts as run time, but not towards the client's deadline: the client's
    retry has a new deadline."""
    earlier_s = task.checkpoint.wall_time_s if task.checkpoint else 0.0
    if deadline_s is not None:
        deadline_s += earlier_s
    return RunClock(began - earlier_s, deadline_s)


def _choice_emitter(index: int, emit: Emit) -> Emit:
    async def emit_of_choice(event: Event) -> None:
        await emit(ChoiceEvent(index, event))

    return emit_of_choice


async def _single_call(model: Model, task: AgentTask, emit: Emit) -> Result:
    """Return the result of one model call without tools. Raises BackendError, OutOfTimeError, and
    BadRequestError for files that the backend refuses."""
    budget, model_time = RunBudget(task, task.profile.limits, time.monotonic()), Stopwatch()
    await emit(RunStarted(task.run_id))
    try:
        async with asyncio.timeout(task.limits.deadline_s):
            metered = model_of_run(model, budget, task, emit)
            completion = await _complete(metered, task, emit, model_time)
    except TimeoutError as error:
        raise out_of_time_error(task) from error
    refusal = refusal_of(completion.message)
    if refusal:
        await emit(ModelRefused(refusal))
    stop = StopReason.REFUSED if refusal else StopReason.ANSWERED
    await emit(RunFinished(stop, completion.usage))
    return Result(
        run_id=task.run_id,
        container_id=task.artifact_store.container_id,
        model=task.model,
        answer="" if refusal else _answer_text(completion),
        stop_reason=stop,
        finish_reason=completion.finish_reason,
        client_calls=(),
        usage=completion.usage,
        usages=[completion.usage],
        segments=1,
        stats=_single_call_stats(completion, budget, model_time.spent_s),
        artifacts=(),
        skipped_files=(),
        choice=completion.choice,
        route=task.route,
        response=completion.response,
        refusal=refusal,
    )


def _single_call_stats(completion: Completion, budget: RunBudget, model_s: float) -> RunStats:
    prompt = usage_count(completion.usage, "prompt_tokens")
    tokens = prompt + usage_count(completion.usage, "completion_tokens")
    return RunStats(
        llm_calls=1,
        turns=1,
        context_tokens=prompt,
        trajectory_tokens=tokens,
        cost_usd=budget.cost_usd,
        **token_counts(completion.usage),
        **run_times(wall_s=budget.wall_time_s, model_s=model_s, sandbox_s=0),
    )


class _SingleCallHandler:
    """Emits the pieces of a single call's completion as they arrive."""

    def __init__(self, task: AgentTask, emit: Emit) -> None:
        self._first_call_progress = FirstCallProgress(task.delivery.status_hold, emit)
        self._emit = emit
        self._has_emitted = False

    async def on_delta(self, delta: ModelDelta) -> None:
        """Emit a delta. If the delta is a failed attempt, raises StopRetryingError to prevent a
        retry: if the client has already seen a part of the reply, or if a retry would come too late
        to decide the HTTP status of the response."""
        match delta:
            case ReasoningDelta():
                self._has_emitted = True
                await self._emit(delta)
            case TextDelta(text, logprobs):
                self._has_emitted = True
                await self._emit(AnswerDelta(text, logprobs))
            case ModelCallFailed() if self._has_emitted:
                raise StopRetryingError
            case ModelCallAccepted() | ModelCallFailed():
                await self._first_call_progress.on_progress(delta)


async def _complete(
    model: ChatModel, task: AgentTask, emit: Emit, model_time: Stopwatch
) -> Completion:
    body = {
        "model": task.model,
        "messages": list(task.input.messages),
        **task.params.base,
        **task.params.final,
        **task.params.token_limits,
    }
    on_delta = (
        model_time.pause_during(_SingleCallHandler(task, emit).on_delta)
        if task.request.stream
        else None
    )
    try:
        with model_time:
            completion = await model.complete(body, on_delta)
    except BackendError as error:
        error.renumber_messages(
            lambda _: None
        )  # the message indexes are not those of the client's request
        if task.files_verdict.reason and may_be_file_refusal(error):
            raise unreadable_files_error(task.files_verdict, refusal=error.message) from error
        raise
    if not task.request.stream:
        await emit_reasoning(completion, emit)
        if text := _answer_text(completion):
            await emit(AnswerDelta(text))
    return completion


def _answer_text(completion: Completion) -> str:
    return (
        text_of(completion.message).encode(errors="replace").decode()
    )  # UTF-8 cannot encode a lone surrogate
