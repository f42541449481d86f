"""POST /v1/responses."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from policies.profile import Profile
from policies.routing import PLAIN_SUFFIX
from policies.steps import suited_to_responses
from proxy.agent.task import Task
from proxy.api.answering import streamed, whole
from proxy.api.claims import claim, deadline_s
from proxy.api.connection import model_request, services
from proxy.api.kept_response import is_kept, keep
from proxy.api.passing import pass_plain
from proxy.api.said_before import Before, resolved, said_before
from proxy.api.tasks import task_of
from proxy.api.told_again import in_background
from proxy.api.ways import way_of
from proxy.errors import ProxyError
from proxy.wire.responses_answer import Asked, StreamedResponse, WholeResponse
from proxy.wire.responses_request import AsChat, as_chat
from proxy.wire.shapes import unsupported
from proxy.wire.terms import read_terms, steps_asked

router = APIRouter()


@router.route("/v1/responses", methods=["POST"])  # see proxy.api.chat
async def create_response(request: Request) -> Response:
    written, body = await model_request(request)
    if body["model"].endswith(PLAIN_SUFFIX):
        way = way_of(request, body)
        return await pass_plain(request, written, way.profile.per_day.of_model_calls)
    before = await said_before(request, body)
    if isinstance(given := body.get("input"), list):
        body = {**body, "input": await resolved(request, given)}
    asked = as_chat(body, before.items)
    return await _run(request, written, body, asked, before)


async def _run(
    request: Request, written: bytes, body: Mapping[str, Any], asked: AsChat, before: Before
) -> Response:
    """Answer by the loop: by a run of the request's own, or one that it repeats."""
    terms = read_terms(body, request.headers)
    setting, shows = services(request).steps, asked.tools.shows is not None
    steps = steps_asked(body, request.headers) or suited_to_responses(setting, shows_items=shows)
    stays = is_kept(body)
    claimed = claim(request, body, terms, written)
    claimed = replace(claimed, detach=claimed.detach or bool(body.get("background")))
    by_s = deadline_s(request, terms, claimed)
    way = way_of(request, asked.chat)
    _check_network(way.profile, asked)

    async def make_task(run_id: str) -> Task:
        try:
            task = await task_of(
                *(request, asked.chat, way),
                run_id=run_id,
                deadline_s=by_s,
                follows=before.follows,
                is_kept=stays,
            )
        except ProxyError as error:
            raise asked.in_own_words(error) from error
        first = "required" if asked.tool_first else task.tool_choice
        task = replace(task, tool_choice=first, max_tool_calls=body.get("max_tool_calls"))
        if not stays:
            return task
        kept = Asked(body, run_id, task.created, task.outbox.container_id, steps, asked.tools)
        return await keep(request, task, kept, before)

    listener = await services(request).runs.enter(claimed, make_task)
    if body.get("background"):
        return await in_background(request, listener, stream=claimed.stream)
    run = listener.run
    told = Asked(body, run.id, run.created, run.container_id, steps, asked.tools)
    if not claimed.stream:
        return await whole(request, listener, WholeResponse(told), terms)
    return streamed(request, listener, StreamedResponse(told), terms)


def _check_network(profile: Profile, asked: AsChat) -> None:
    """What a sandbox reaches is the operator's to say; who wants less than that is not lied to."""
    mode = profile.isolation.egress.mode
    for param, wanted in asked.tools.networks:
        if (wanted == "disabled") != (mode == "none"):
            raise unsupported(param, f"The way out of sandboxes is set here to {mode!r}.")
