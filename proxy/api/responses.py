"""POST /v1/responses."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from policies.profile import Profile
from policies.routing import PLAIN_SUFFIX
from policies.steps import Steps, suited_to_responses
from proxy.agent.task import StatusHold, Task
from proxy.api.answering import streamed, whole
from proxy.api.claims import claim, deadline_s, status_hold
from proxy.api.dependencies import read_model_request, services
from proxy.api.kept_response import is_kept, keep
from proxy.api.passthrough import forward_response
from proxy.api.routing import RoutingDecision, resolve_route
from proxy.api.said_before import Before, resolved, said_before
from proxy.api.tasks import task_of
from proxy.api.told_again import in_background
from proxy.errors import ProxyError
from proxy.runs.claim import Claim
from proxy.runs.run import Listener
from proxy.wire.responses_request import AsChat, as_chat
from proxy.wire.responses_response import Asked, StreamedResponse, WholeResponse
from proxy.wire.terms import Terms, read_terms, steps_asked
from proxy.wire.validation import unsupported

router = APIRouter()


@router.route("/v1/responses", methods=["POST"])  # see proxy.api.chat
async def create_response(request: Request) -> Response:
    written, body = await read_model_request(request)
    if body["model"].endswith(PLAIN_SUFFIX):
        decision = resolve_route(request, body)
        return await forward_response(request, body, decision.profile.per_day.of_model_calls)
    before = await said_before(request, body)
    if isinstance(given := body.get("input"), list):
        body = {**body, "input": await resolved(request, given)}
    asked = as_chat(body, before.items)
    decision = resolve_route(request, asked.chat)
    _check_network(decision.profile, asked)
    response = await _run(request, written, body, asked, before, decision)
    response.headers.update(decision.headers)
    return response


async def _run(
    request: Request,
    written: bytes,
    body: Mapping[str, Any],
    asked: AsChat,
    before: Before,
    decision: RoutingDecision,
) -> Response:
    """Answer by the loop: by a run of the request's own, or one that it repeats."""
    terms = read_terms(body, request.headers)
    steps = _steps(request, body, asked)
    stays = is_kept(body)
    claimed = _claim(request, body, terms, written)
    hold = None if body.get("background") else status_hold(request, terms, claimed)

    async def make_task(run_id: str) -> Task:
        try:
            task = await task_of(
                *(request, asked.chat, decision),
                run_id=run_id,
                deadline_s=deadline_s(request, terms, claimed),
                hold=hold,
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
    return await _answer(request, listener, told, terms, hold)


async def _answer(
    request: Request, listener: Listener, told: Asked, terms: Terms, hold: StatusHold | None
) -> Response:
    if hold is None:
        return await whole(request, listener, WholeResponse(told), terms)
    return await streamed(request, listener, StreamedResponse(told), terms, hold)


def _claim(request: Request, body: Mapping[str, Any], terms: Terms, written: bytes) -> Claim:
    """The request's; a run in the background goes on without its client."""
    claimed = claim(request, body, terms, written)
    return replace(claimed, detach=claimed.detach or bool(body.get("background")))


def _steps(request: Request, body: Mapping[str, Any], asked: AsChat) -> Steps:
    """How the client is shown steps."""
    setting, shows = services(request).steps, asked.tools.shows is not None
    return steps_asked(body, request.headers) or suited_to_responses(setting, shows_items=shows)


def _check_network(profile: Profile, asked: AsChat) -> None:
    """What a sandbox reaches is the operator's to say; who wants less than that is not lied to."""
    mode = profile.isolation.egress.mode
    for param, wanted in asked.tools.networks:
        if (wanted == "disabled") != (mode == "none"):
            raise unsupported(param, f"The way out of sandboxes is set here to {mode!r}.")
