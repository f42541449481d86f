"""POST /v1/messages: Anthropic's dialect."""

from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from sse_starlette import ServerSentEvent
from starlette.requests import Request
from starlette.responses import Response

from policies.routing import PLAIN_SUFFIX, Route, route
from policies.steps import suited_to_messages
from proxy.agent.task import Task
from proxy.api.answering import streamed, whole
from proxy.api.claims import claim, deadline_s
from proxy.api.connection import authorize, parsed, read_body, services
from proxy.api.passing import pass_plain
from proxy.api.tasks import task_by
from proxy.errors import ProxyError
from proxy.runs.run import Listener
from proxy.wire.messages_answer import StreamedMessage, WholeMessage, request_id
from proxy.wire.messages_events import Shown
from proxy.wire.messages_request import Asked, read
from proxy.wire.shapes import request_body, text
from proxy.wire.terms import Terms, read_terms, steps_asked

router = APIRouter()

PING = ServerSentEvent('{"type": "ping"}', event="ping", sep="\n")


@router.post("/v1/messages")
async def create_message(request: Request) -> Response:
    authorize(request)
    written = await read_body(request, services(request).inputs.max_body_bytes)
    body = request_body(parsed(written), {"model": text})
    if body["model"].endswith(PLAIN_SUFFIX):
        return await pass_plain(request, written)
    asked = read(body)
    terms = read_terms(asked.chat, request.headers)
    way = route(asked.chat, request.headers)
    shown = _shown(request, body, asked, way)
    named = claim(request, asked.chat, terms, written)

    async def make_task(run_id: str) -> Task:
        by_s = deadline_s(request, terms, named)
        try:
            task = await task_by(way, request, asked.chat, run_id=run_id, deadline_s=by_s)
        except ProxyError as error:
            raise asked.in_own_words(error) from error
        if task.alone or not asked.code_execution:
            return task
        # Who asks for a computer is told its name, and comes back with that.
        first = "required" if asked.tool_first else task.tool_choice
        return replace(task, leaves=task.leaves or task.parks, tool_choice=first)

    listener = await services(request).runs.enter(named, make_task)
    if named.stream:
        response = _streamed(request, listener, shown, terms)
    else:
        response = await whole(request, listener, WholeMessage(listener.run.id, shown), terms)
    response.headers["request-id"] = request_id(listener.run.id)
    return response


def _streamed(request: Request, listener: Listener, shown: Shown, terms: Terms) -> Response:
    response = streamed(request, listener, StreamedMessage(listener.run.id, shown), terms)
    response.ping_message_factory = lambda: PING
    return response


def _shown(request: Request, body: dict[str, Any], asked: Asked, way: Route) -> Shown:
    steps = steps_asked(body, request.headers) or suited_to_messages(
        services(request).steps,
        code_execution=asked.code_execution,
        thinking=asked.thinking,
    )
    has_container = asked.code_execution and way.kind == "sandbox"
    return Shown(
        model=body["model"],
        steps=steps,
        thinking=asked.thinking or steps == "reasoning",
        stop_sequences=asked.stop_sequences,
        container_expires=services(request).files.link_expiry() if has_container else None,
    )
