"""The model's own answer: one call, no tools, no computer."""

import asyncio
import time

from policies.limits import StopReason
from proxy.agent.budget import Budget, Paying
from proxy.agent.efficiency import times, token_counts
from proxy.agent.events import (
    AnswerDelta,
    CallAccepted,
    CallFailed,
    Emit,
    ModelDelta,
    ReasoningDelta,
    Refused,
    RunFinished,
    RunStarted,
    TextDelta,
)
from proxy.agent.first_call import FirstCall
from proxy.agent.history import text_of
from proxy.agent.listener import think_aloud
from proxy.agent.model import Answering, Model, NoMoreAttempts, Reply, refusal_of
from proxy.agent.stopwatch import Stopwatch
from proxy.agent.task import Result, Tally, Task, out_of_time
from proxy.agent.usage import tokens
from proxy.errors import BackendError


async def answer(model: Model, task: Task, emit: Emit) -> Result:
    """Have the request answered as it is. Raises BackendError."""
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
        tally=_tally(reply, budget, waited.spent_s),
        artifacts=(),
        left_out=(),
        choice=reply.choice,
        route=task.route,
        response=reply.response,
        refusal=refusal,
    )


def _tally(reply: Reply, budget: Budget, model_s: float) -> Tally:
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


class _Listener:
    """Passes a reply on as it comes."""

    def __init__(self, task: Task, emit: Emit) -> None:
        self._first_call = FirstCall(task.status_hold, emit)
        self._emit = emit
        self._has_shown = False

    async def hear(self, delta: ModelDelta) -> None:
        """Take one piece in. Raises NoMoreAttempts where another attempt would show."""
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
    hear = waited.standing(_Listener(task, emit).hear) if task.stream else None
    try:
        with waited:
            reply = await model.complete(body, hear)
    except BackendError as error:
        error.renumber(lambda _: None)  # the client wrote them in another API
        raise
    if not task.stream:
        await think_aloud(reply, emit)
        if text := _text(reply):
            await emit(AnswerDelta(text))
    return reply


def _text(reply: Reply) -> str:
    return text_of(reply.message).encode(errors="replace").decode()  # half a surrogate is no text
