"""POST /v1/responses."""

from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from policies.routing import PLAIN_SUFFIX, route
from policies.steps import Steps
from proxy.agent.task import Task
from proxy.api.answering import streamed, whole
from proxy.api.claims import claim, deadline_s
from proxy.api.connection import authorize, parsed, read_body, services
from proxy.api.kept_response import is_kept, keep
from proxy.api.passing import pass_plain
from proxy.api.said_before import Before, resolved, said_before
from proxy.api.tasks import task_by
from proxy.api.told_again import in_background
from proxy.errors import ProxyError
from proxy.wire.responses_answer import Asked, StreamedResponse, WholeResponse
from proxy.wire.responses_request import AsChat, as_chat
from proxy.wire.responses_shapes import unsupported
from proxy.wire.shapes import request_body, text
from proxy.wire.terms import read_terms, steps_asked

router = APIRouter()


async def create_response(request: Request) -> Response:
    authorize(request)
    written = await read_body(request, services(request).inputs.max_body_bytes)
    body = request_body(parsed(written), {"model": text})
    if body["model"].endswith(PLAIN_SUFFIX):
        return await pass_plain(request, written)
    before = await said_before(request, body)
    if isinstance(given := body.get("input"), list):
        body = {**body, "input": await resolved(request, given)}
    chat = as_chat(body, before.items)
    _check_network(request, chat)
    return await _run(request, body, written, chat, before)


# Not @router.post: see proxy.api.chat.
router.add_route("/v1/responses", create_response, methods=["POST"])


async def _run(
    request: Request, body: dict[str, Any], written: bytes, chat: AsChat, before: Before
) -> Response:
    """Answer by the loop: by a run of the request's own, or one that it repeats."""
    terms = read_terms(body, request.headers)
    steps = steps_asked(body, request.headers) or _suited(request, chat)
    stays = is_kept(body)
    asked = claim(request, body, terms, written)
    asked = replace(asked, detach=asked.detach or bool(body.get("background")))
    way = route(chat.body, request.headers)

    async def make_task(run_id: str) -> Task:
        by_s = deadline_s(request, terms, asked)
        try:
            task = await task_by(
                *(way, request, chat.body),
                run_id=run_id,
                deadline_s=by_s,
                follows=before.follows,
                is_kept=stays,
            )
        except ProxyError as error:
            raise chat.in_own_words(error) from error
        first = "required" if chat.tool_first else task.tool_choice
        task = replace(task, tool_choice=first, max_tool_calls=body.get("max_tool_calls"))
        return await keep(request, task, body, steps, before) if stays else task

    listener = await services(request).runs.enter(asked, make_task)
    if body.get("background"):
        return await in_background(request, listener, stream=asked.stream)
    run = listener.run
    told = Asked(body, run.id, run.created, run.container_id, steps)
    if not asked.stream:
        return await whole(request, listener, WholeResponse(told), terms)
    return streamed(request, listener, StreamedResponse(told), terms)


def _suited(request: Request, chat: AsChat) -> Steps:
    """What is shown to a client that did not say: items only to who asked for a tool that makes
    them, for others take such an item for a call of a tool of theirs."""
    setting = services(request).steps
    if setting in ("off", "reasoning", "events"):
        return setting
    return "items" if chat.tools.shows else "reasoning"


def _check_network(request: Request, chat: AsChat) -> None:
    """What a sandbox reaches is the operator's to say; who wants less than that is not lied to."""
    mode = services(request).runs.agent.isolation.egress.mode
    for param, wanted in chat.tools.networks:
        if (wanted == "disabled") != (mode == "none"):
            raise unsupported(param, f"The way out of sandboxes is set here to {mode!r}.")
