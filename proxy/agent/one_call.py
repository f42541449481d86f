"""A request that wants no computer, in a dialect that its backend may not speak: the model is asked
once, and what it says is the answer."""

import asyncio
import time

from policies.deadline import time_plan
from policies.limits import StopReason
from proxy.agent.events import (
    AnswerDelta,
    Emit,
    ModelDelta,
    ReasoningDelta,
    Refused,
    RunFinished,
    RunStarted,
    TextDelta,
    TurnStarted,
)
from proxy.agent.final import refusal_of
from proxy.agent.history import text_of
from proxy.agent.listener import think_aloud
from proxy.agent.model import Model, Reply
from proxy.agent.task import Result, Tally, Task
from proxy.agent.usage import tokens
from proxy.errors import OutOfTimeError


async def ask_once(model: Model, task: Task, wall_time_s: float, emit: Emit) -> Result:
    """Answer a request by one call. Raises BackendError."""
    began = time.monotonic()
    plan = time_plan(wall_time_s, task.deadline_s)
    await emit(RunStarted(task.run_id))
    await emit(TurnStarted(1))
    try:
        async with asyncio.timeout(min(wall_time_s, plan.answer_s)):
            reply = await _reply(model, task, emit)
    except TimeoutError as error:
        raise OutOfTimeError("the model did not answer in time") from error
    stop = StopReason.CLIENT_TOOL_CALLS if reply.message.get("tool_calls") else StopReason.ANSWERED
    if refusal := refusal_of(reply.message):
        stop = StopReason.REFUSED
        await emit(Refused(refusal))
    await emit(RunFinished(stop, reply.usage))
    return Result(
        run_id=task.run_id,
        container_id=task.outbox.container_id,
        model=task.model,
        answer="" if refusal else text_of(reply.message),
        stop_reason=stop,
        finish_reason=reply.finish_reason,
        tool_calls=reply.message.get("tool_calls") or [],
        usage=reply.usage,
        segments=1,
        tally=Tally(
            llm_calls=1,
            context_tokens=tokens(reply.usage, "prompt_tokens"),
            wall_ms=int((time.monotonic() - began) * 1000),
        ),
        artifacts=[],
        left_out=[],
        choice=reply.choice,
        response=reply.response,
        refusal=refusal,
    )


async def _reply(model: Model, task: Task, emit: Emit) -> Reply:
    body = {
        "model": task.model,
        "messages": list(task.messages),
        **task.every_turn,
        **task.final_only,
        **task.final_budget,
    }
    if task.client_tools:
        choice = "required" if task.must_call else task.tool_choice
        body |= {"tools": task.client_tools, "tool_choice": choice or "auto"}
    if task.parallel_tool_calls is not None:
        body["parallel_tool_calls"] = task.parallel_tool_calls

    async def hear(delta: ModelDelta) -> None:
        if isinstance(delta, ReasoningDelta):
            await emit(delta)
        elif isinstance(delta, TextDelta):
            await emit(AnswerDelta(delta.text, delta.logprobs))

    if task.stream:
        return await model.complete(body, hear)
    reply = await model.complete(body, None)
    await think_aloud(reply, emit)
    if text := text_of(reply.message):
        await emit(AnswerDelta(text))
    return reply
