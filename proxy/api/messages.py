"""POST /v1/messages: Anthropic's dialect."""

from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter
from sse_starlette import ServerSentEvent
from starlette.requests import Request
from starlette.responses import Response

from policies.routing import PLAIN_SUFFIX, Route, route
from policies.sessions import container_id
from policies.steps import suited_to_messages
from proxy.agent.task import Task
from proxy.api.answering import streamed, whole
from proxy.api.claims import claim, deadline_s
from proxy.api.connection import authorize, base_url, left, owner, parsed, read_body, services
from proxy.api.passing import pass_on, passage_of
from proxy.api.tasks import task_of
from proxy.errors import ProxyError
from proxy.wire.chat_request import to_task
from proxy.wire.messages_answer import StreamedMessage, WholeMessage, request_id
from proxy.wire.messages_events import Shown
from proxy.wire.messages_request import Asked, check, read
from proxy.wire.plain import as_the_backend_knows_it
from proxy.wire.terms import read_terms, steps_asked

router = APIRouter()

PING = ServerSentEvent('{"type": "ping"}', event="ping", sep="\n")


@router.post("/v1/messages")
async def create_message(request: Request) -> Response:
    authorize(request)
    written = await read_body(request, services(request).inputs.max_body_bytes)
    body = check(parsed(written))
    if body["model"].endswith(PLAIN_SUFFIX):
        plain = as_the_backend_knows_it(written)
        return await pass_on(request, passage_of(request), plain, partial(left, request))
    asked = read(body)
    shown = _shown(request, body, asked)
    terms = read_terms(asked.chat, request.headers)
    way = route(asked.chat, request.headers)
    named = claim(request, asked.chat, terms, written)

    async def make_task(run_id: str) -> Task:
        by_s = deadline_s(request, terms, named)
        if way.kind == "plain":
            return _one_call(request, asked, way, run_id, by_s)
        try:
            task = await task_of(
                request, asked.chat, model=way.model, run_id=run_id, deadline_s=by_s
            )
        except ProxyError as error:
            raise asked.in_own_words(error) from error
        # Who asks for a computer is told its name, and comes back with that.
        return replace(task, leaves=task.leaves or task.parks) if asked.code_execution else task

    listener = await services(request).runs.enter(named, make_task)
    run_id = listener.run.id
    if named.stream:
        frames = StreamedMessage(run_id, shown)
        response = streamed(request, listener, frames, terms, alive=PING)
    else:
        response = await whole(request, listener, WholeMessage(run_id, shown), terms)
    response.headers["request-id"] = request_id(run_id)
    return response


def _shown(request: Request, body: dict[str, Any], asked: Asked) -> Shown:
    steps = steps_asked(body, request.headers) or suited_to_messages(
        services(request).steps,
        code_execution=asked.code_execution,
        thinking=asked.thinking,
    )
    return Shown(
        model=body["model"],
        steps=steps,
        thinking=asked.thinking or steps == "reasoning",
        stop_sequences=asked.stop_sequences,
        container_expires=services(request).files.link_expiry() if asked.code_execution else None,
    )


def _one_call(request: Request, asked: Asked, way: Route, run_id: str, by_s: float | None) -> Task:
    """What a chat completion would have relayed; the backend need not speak this dialect."""
    whose = owner(request)
    place = container_id(whose, run_id)
    outbox = services(request).files.outbox(place, base_url(request), whose)
    task = to_task(asked.chat, model=way.model, run_id=run_id, outbox=outbox)
    return replace(task, one_call=True, deadline_s=by_s)
