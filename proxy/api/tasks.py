"""From a checked request to the agent's task, with what was before it and the files it brings."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from starlette.requests import Request

from policies.history import without_steps
from policies.routing import Route
from policies.sessions import GoesOn, Session, State, container_id
from proxy.agent.choices import several
from proxy.agent.parking import Parked, names
from proxy.agent.task import InputFile, Outbox, Task
from proxy.api.connection import base_url, owner, services
from proxy.wire.chat_request import choice_count, to_task
from proxy.wire.content_parts import read
from proxy.wire.conversations import thread
from proxy.wire.legacy_functions import with_ids


async def task_of(
    request: Request,
    body: Mapping[str, Any],
    *,
    model: str,
    run_id: str,
    deadline_s: float | None,
    follows: GoesOn | None = None,
    is_kept: bool = False,
) -> Task:
    """The task of a chat-completions request, with its further choices; `follows` and `is_kept` as
    `thread` has them. Raises BadRequestError."""
    whose = owner(request)
    asked = {**body, "messages": without_steps(body["messages"])}
    waiting = await _waiting(request, whose, asked)
    place = thread(
        *(whose, run_id, request.headers, asked, waiting), follows=follows, is_kept=is_kept
    )
    put_in: list[InputFile] = []
    if place.goes_on:
        await services(request).files.remember(place.container_id, whose)
        put_in = await services(request).files.put_in(place.container_id, whose)
    task = to_task(
        asked, model=model, run_id=run_id, outbox=_outbox(request, whose, place.container_id)
    )
    task = replace(
        task,
        goes_on=place.goes_on,
        leaves=place.leaves,
        parks=place.parks,
        resumes=place.resumes,
        deadline_s=deadline_s,
        inputs=put_in,
    )
    task = await services(request).inputs.receive(task, whose, asked)
    count = choice_count(body, services(request).runs.agent.limits.max_choices)
    return several(task, count, lambda other: _own(request, whose, other))


async def task_by(
    way: Route,
    request: Request,
    body: Mapping[str, Any],
    *,
    run_id: str,
    deadline_s: float | None,
    follows: GoesOn | None = None,
    is_kept: bool = False,
) -> Task:
    """The task of another dialect's request, put as a chat completion: for the model alone where
    the sandbox is not wanted. Raises BadRequestError."""
    if way.kind == "plain":
        return _plain_task(request, body, model=way.model, run_id=run_id, deadline_s=deadline_s)
    return await task_of(
        *(request, body),
        model=way.model,
        run_id=run_id,
        deadline_s=deadline_s,
        follows=follows,
        is_kept=is_kept,
    )


def _plain_task(
    request: Request,
    body: Mapping[str, Any],
    *,
    model: str,
    run_id: str,
    deadline_s: float | None,
) -> Task:
    """The task of a request that the model answers by itself. Raises BadRequestError."""
    messages, _ = read(body["messages"])
    asked = {**body, "messages": messages, "tools": None, "tool_choice": None}
    whose = owner(request)
    outbox = _outbox(request, whose, container_id(whose, run_id))
    task = to_task(asked, model=model, run_id=run_id, outbox=outbox)
    return replace(task, alone=True, deadline_s=deadline_s)


def _own(request: Request, whose: str, choice: Task) -> Task:
    """A further choice in a workspace of its own, which begins as the first one's does."""
    container = container_id(whose, choice.run_id)
    return replace(
        choice,
        outbox=_outbox(request, whose, container),
        leaves=None,
        parks=State(Session(whose, container), choice.run_id),
    )


def _outbox(request: Request, whose: str, container: str) -> Outbox:
    return services(request).files.outbox(container, base_url(request), whose)


async def _waiting(request: Request, whose: str, body: Mapping[str, Any]) -> Parked | None:
    """The run that these messages answer, if they do and it still waits."""
    messages = with_ids(body["messages"]) if body.get("functions") else body["messages"]
    for name in names(messages):
        if waiting := await services(request).store.parked.find(whose, name):
            return waiting
    return None
