"""POST /v1/responses: a response by a run, kept from its beginning on if it is to be."""

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from policies.profile import Profile
from policies.routing import PLAIN_SUFFIX
from policies.sessions import State
from policies.steps import Steps, suited_to_responses
from proxy.agent.task import RunObserver, SessionPlan
from proxy.api.dependencies import get_owner, get_services, read_model_request
from proxy.api.passthrough import forward_response
from proxy.api.prepare import RunRequest, deadline_s, identify, start_or_join, status_hold
from proxy.api.response_recorder import ResponseRecorder
from proxy.api.routing import RoutingDecision, resolve_route
from proxy.api.run_response import json_response, stream_response
from proxy.api.stored_responses import (
    PreviousContext,
    in_background,
    is_reference,
    previous_context,
    resolve_references,
)
from proxy.errors import BadRequestError, RunCancelledError
from proxy.schemas.request_options import read_terms, steps_asked
from proxy.schemas.responses_request import ResponsesAsChat, as_chat, input_items
from proxy.schemas.responses_response import ResponseContext, StreamedResponse, WholeResponse
from proxy.schemas.validation import unsupported
from proxy.store.records import StoredResponse

router = APIRouter()


@router.route("/v1/responses", methods=["POST"])  # see proxy.api.chat
async def create_response(request: Request) -> Response:
    written, body = await read_model_request(request)
    if body["model"].endswith(PLAIN_SUFFIX):
        decision = resolve_route(request, body)
        return await forward_response(request, body, decision.profile.per_day.of_model_calls)
    before = await previous_context(request, body)
    if isinstance(given := body.get("input"), list):
        body = {**body, "input": await resolve_references(request, given)}
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
    asked: ResponsesAsChat,
    before: PreviousContext,
    decision: RoutingDecision,
) -> Response:
    """Answer by the loop: by a run of the request's own, or one that it repeats."""
    terms = read_terms(body, request.headers)
    steps = _steps(request, body, asked)
    is_kept = _is_kept(body)
    is_background = bool(body.get("background"))
    identity = identify(request, body, terms, written, detach=is_background)
    hold = None if is_background else status_hold(request, terms, identity)

    async def record(run_id: str, created: int, session: SessionPlan) -> RunObserver:
        told = ResponseContext(body, run_id, created, session.container_id, steps, asked.tools)
        return await _begin_recording(request, told, session, before)

    preparation = RunRequest(
        body=asked.chat,
        decision=decision,
        deadline_s=deadline_s(request, terms, identity),
        hold=hold,
        is_translated=True,
        forces_tool=asked.tool_first,
        max_tool_calls=body.get("max_tool_calls"),
        follows=before.follows,
        is_kept=is_kept,
        record=record if is_kept else None,
        translate_error=asked.translate_error,
    )
    subscriber = await start_or_join(request, identity, preparation)
    if is_background:
        return await in_background(request, subscriber, stream=identity.stream)
    run = subscriber.run
    told = ResponseContext(body, run.id, run.created, run.container_id, steps, asked.tools)
    if hold is None:
        return await json_response(request, subscriber, WholeResponse(told), terms)
    return await stream_response(request, subscriber, StreamedResponse(told), terms, hold)


def _steps(request: Request, body: Mapping[str, Any], asked: ResponsesAsChat) -> Steps:
    """Return how steps are shown to the client."""
    setting, shows = get_services(request).steps, asked.tools.shows is not None
    return steps_asked(body, request.headers) or suited_to_responses(setting, shows_items=shows)


def _check_network(profile: Profile, asked: ResponsesAsChat) -> None:
    """Refuse a network policy other than the operator's. Raises BadRequestError."""
    mode = profile.isolation.egress.mode
    for param, wanted in asked.tools.networks:
        if (wanted == "disabled") != (mode == "none"):
            raise unsupported(param, f"The way out of sandboxes is set here to {mode!r}.")


def _is_kept(body: Mapping[str, Any]) -> bool:
    """Return True if the response to a request is to be kept. Raises BadRequestError."""
    asked = body.get("store") is not False
    if body.get("background") and not asked:
        raise BadRequestError(
            "Background responses require 'store' to be true.",
            param="background",
            code="invalid_value",
        )
    return asked


async def _begin_recording(
    request: Request, asked: ResponseContext, session: SessionPlan, before: PreviousContext
) -> ResponseRecorder:
    """Store a response as in progress, and return its recorder."""
    store, whose = get_services(request).store, get_owner(request)
    recorder = ResponseRecorder(store.responses, whose, asked)
    save_as = session.save_as or _unchanged_files(asked.run_id, session, before)
    stored = StoredResponse(
        id=recorder.begun["id"],
        session=save_as.session.name,
        state=save_as.name,
        record=recorder.begun,
        previous_id=before.previous_id,
        conversation_id=before.conversation_id,
        seen_seq=before.seen_seq,
        worker=store.worker.id,
    )
    inputs = [i for i in input_items(asked.body["input"], asked.run_id) if not is_reference(i)]
    try:
        await store.responses.begin(whose, stored, inputs, before.chain)
    except BaseException:
        await recorder.failed(RunCancelledError())
        raise
    return recorder


def _unchanged_files(run_id: str, session: SessionPlan, before: PreviousContext) -> State:
    """Return the saved state of a run that leaves no files: no state has this name, so a request
    that continues the response finds the state before it."""
    return State(before.follows.session if before.follows else session.session, run_id)
