"""POST /v1/messages: Anthropic's dialect."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from sse_starlette import ServerSentEvent
from starlette.requests import Request
from starlette.responses import Response

from policies.routing import PLAIN_SUFFIX
from policies.steps import suited_to_messages
from proxy.agent.task import Task
from proxy.api.answering import streamed, whole
from proxy.api.claims import claim, deadline_s, status_hold
from proxy.api.connection import model_request, services
from proxy.api.passing import pass_plain
from proxy.api.tasks import task_of
from proxy.api.ways import Way, way_of
from proxy.errors import ProxyError, request_id
from proxy.wire.messages_request import AsChat, as_chat
from proxy.wire.messages_response import Shown, StreamedMessage, WholeMessage
from proxy.wire.terms import read_terms, steps_asked

router = APIRouter()

PING = ServerSentEvent('{"type": "ping"}', event="ping", sep="\n")


@router.route("/v1/messages", methods=["POST"])  # see proxy.api.chat
async def create_message(request: Request) -> Response:
    written, body = await model_request(request)
    if body["model"].endswith(PLAIN_SUFFIX):
        way = way_of(request, body)
        return await pass_plain(request, body, way.profile.per_day.of_model_calls)
    return await _run(request, written, body, as_chat(body))


async def _run(
    request: Request, written: bytes, body: Mapping[str, Any], asked: AsChat
) -> Response:
    """Answer by the loop: by a run of the request's own, or one that it repeats."""
    terms = read_terms(asked.chat, request.headers)
    way = way_of(request, asked.chat)
    shown = _shown(request, body, asked, way)
    claimed = claim(request, asked.chat, terms, written)
    by_s, hold = deadline_s(request, terms, claimed), status_hold(request, terms, claimed)

    async def make_task(run_id: str) -> Task:
        try:
            task = await task_of(
                request, asked.chat, way, run_id=run_id, deadline_s=by_s, hold=hold
            )
        except ProxyError as error:
            raise asked.in_own_words(error) from error
        if task.alone or not asked.code_execution:
            return task
        first = "required" if asked.tool_first else task.tool_choice
        # Who asks for a computer is told its name, and comes back with that.
        return replace(task, tool_choice=first, leaves=task.leaves or task.parks)

    listener = await services(request).runs.enter(claimed, make_task)
    if hold is None:
        response = await whole(request, listener, WholeMessage(listener.run.id, shown), terms)
    else:
        frames = StreamedMessage(listener.run.id, shown)
        response = await streamed(request, listener, frames, terms, hold, alive=PING)
    response.headers.update({"request-id": request_id(listener.run.id), **way.headers})
    return response


def _shown(request: Request, body: Mapping[str, Any], asked: AsChat, way: Way) -> Shown:
    steps = steps_asked(body, request.headers) or suited_to_messages(
        services(request).steps,
        code_execution=asked.code_execution,
        thinking=asked.thinking,
    )
    has_container = asked.code_execution and not way.is_plain
    return Shown(
        model=body["model"],
        steps=steps,
        thinking=asked.thinking or steps == "reasoning",
        stop_sequences=asked.stop_sequences,
        container_expires=services(request).files.link_expiry() if has_container else None,
    )
