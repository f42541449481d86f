"""Several answers to one request (`n`): a run each, at the same time, in sandboxes of their own."""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

from policies.redaction import Secrets
from proxy.agent import alone
from proxy.agent.agent import Agent
from proxy.agent.events import Emit, Event, OfChoice
from proxy.agent.redactor import Redactor
from proxy.agent.task import Result, Task

REQUEST_IDS = frozenset({"request_id", "rid"})
"""vLLM's and SGLang's names of one request: two that run at once may not share it."""


def several(task: Task, count: int, own: Callable[[Task], Task]) -> Task:
    """The task with further choices, `count` in all; `own` gives each what it shares with none."""
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
    """Answer a request with all its choices. The first run that fails ends the others.

    Raises what Agent.run raises.
    """
    if task.alone:
        return await _redacted(task, emit, partial(alone.answer, agent.door(task)))
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
    """The run, of which nobody hears its secrets."""
    secrets = Secrets(task.profile.redact)
    if not secrets:
        return await work(task, emit)
    redactor = Redactor(secrets, emit)
    return redactor.result(await work(task, redactor.emit))


async def _arrived(task: Task) -> Task:
    """The task with all its files, and with so much less time as they took."""
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
