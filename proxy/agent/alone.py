"""The model's own answer: one call, no tools, no computer."""

import asyncio
import time

from policies.limits import StopReason
from proxy.agent.budget import Budget, Paying
from proxy.agent.efficiency import times, token_counts
from proxy.agent.events import (
    AnswerDelta,
    Emit,
    ModelDelta,
    ReasoningDelta,
    Refused,
    RunFinished,
    RunStarted,
    TextDelta,
)
from proxy.agent.final import refusal_of
from proxy.agent.history import text_of
from proxy.agent.listener import think_aloud
from proxy.agent.model import Answering, Model, Reply
from proxy.agent.stopwatch import Stopwatch
from proxy.agent.task import Result, Tally, Task
from proxy.agent.usage import tokens
from proxy.errors import OutOfTimeError


async def answer(model: Model, task: Task, emit: Emit) -> Result:
    """Have the request answered as it is. Raises BackendError."""
    budget, waited = Budget(task, task.profile.limits, time.monotonic()), Stopwatch()
    await emit(RunStarted(task.run_id))
    try:
        async with asyncio.timeout(task.deadline_s):
            reply = await _asked(Paying(model, budget), task, emit, waited)
    except TimeoutError as error:
        raise OutOfTimeError("the model did not answer in time") from error
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


async def _asked(model: Answering, task: Task, emit: Emit, waited: Stopwatch) -> Reply:
    async def hear(delta: ModelDelta) -> None:
        match delta:
            case ReasoningDelta():
                await emit(delta)
            case TextDelta(text, logprobs):
                await emit(AnswerDelta(text, logprobs))

    body = {
        "model": task.model,
        "messages": list(task.messages),
        **task.every_turn,
        **task.final_only,
        **task.final_budget,
    }
    with waited:
        reply = await model.complete(body, waited.standing(hear) if task.stream else None)
    if not task.stream:
        await think_aloud(reply, emit)
        if text := _text(reply):
            await emit(AnswerDelta(text))
    return reply


def _text(reply: Reply) -> str:
    return text_of(reply.message).encode(errors="replace").decode()  # half a surrogate is no text
