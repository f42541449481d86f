"""From a checked request to the agent's task, with what was before it and the files it brings."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from starlette.requests import Request

from policies.history import without_steps
from proxy.agent.parking import Parked, run_ids
from proxy.agent.task import Task
from proxy.api.connection import base_url, owner, services
from proxy.wire.chat_request import to_task
from proxy.wire.conversations import thread


async def task_of(request: Request, body: Mapping[str, Any], *, model: str, run_id: str) -> Task:
    """The task of a chat-completions request. Raises BadRequestError."""
    whose = owner(request)
    asked = {**body, "messages": without_steps(body["messages"])}
    waiting = await _waiting(request, whose, asked)
    place = thread(whose, run_id, request.headers, asked, waiting)
    outbox = services(request).files.outbox(place.container_id, base_url(request), whose)
    task = to_task(asked, model=model, run_id=run_id, outbox=outbox)
    task = replace(
        task,
        goes_on=place.goes_on,
        leaves=place.leaves,
        parks=place.parks,
        resumes=place.resumes,
    )
    return await services(request).inputs.receive(task, whose, asked)


async def _waiting(request: Request, whose: str, body: Mapping[str, Any]) -> Parked | None:
    """The run that these messages answer, if they do and it still waits."""
    for run_id in run_ids(body["messages"]):
        if waiting := await services(request).store.parked.find(whose, run_id):
            return waiting
    return None
