"""POST /v1/responses: a response by a run, kept from its beginning on if it is to be."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from policies.profile import Profile
from policies.routing import PLAIN_SUFFIX
from policies.sessions import Session, State
from policies.steps import Steps, suited_to_responses
from proxy.agent.task import Task
from proxy.api.answering import streamed, whole
from proxy.api.claims import claim, deadline_s, status_hold
from proxy.api.dependencies import owner, read_model_request, services
from proxy.api.passthrough import forward_response
from proxy.api.response_recorder import KeptResponse
from proxy.api.routing import RoutingDecision, resolve_route
from proxy.api.stored_responses import (
    PreviousContext,
    in_background,
    is_reference,
    previous_context,
    resolve_references,
)
from proxy.api.tasks import task_of
from proxy.errors import BadRequestError, ProxyError
from proxy.runs.run import Claim
from proxy.runs.runs import give_back
from proxy.store.records import StoredResponse
from proxy.wire.responses_request import AsChat, as_chat, input_items
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
    asked: AsChat,
    before: PreviousContext,
    decision: RoutingDecision,
) -> Response:
    """Answer by the loop: by a run of the request's own, or one that it repeats."""
    terms = read_terms(body, request.headers)
    steps = _steps(request, body, asked)
    is_kept = _is_kept(body)
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
                is_kept=is_kept,
            )
        except ProxyError as error:
            raise asked.in_own_words(error) from error
        first = "required" if asked.tool_first else task.tool_choice
        task = replace(task, tool_choice=first, max_tool_calls=body.get("max_tool_calls"))
        if not is_kept:
            return task
        kept = Asked(body, run_id, task.created, task.outbox.container_id, steps, asked.tools)
        return await _begin_recording(request, task, kept, before)

    listener = await services(request).runs.enter(claimed, make_task)
    if body.get("background"):
        return await in_background(request, listener, stream=claimed.stream)
    run = listener.run
    told = Asked(body, run.id, run.created, run.container_id, steps, asked.tools)
    if hold is None:
        return await whole(request, listener, WholeResponse(told), terms)
    return await streamed(request, listener, StreamedResponse(told), terms, hold)


def _claim(request: Request, body: Mapping[str, Any], terms: Terms, written: bytes) -> Claim:
    """Return the request's identity; a run in the background goes on without its client."""
    claimed = claim(request, body, terms, written)
    return replace(claimed, detach=claimed.detach or bool(body.get("background")))


def _steps(request: Request, body: Mapping[str, Any], asked: AsChat) -> Steps:
    """Return how steps are shown to the client."""
    setting, shows = services(request).steps, asked.tools.shows is not None
    return steps_asked(body, request.headers) or suited_to_responses(setting, shows_items=shows)


def _check_network(profile: Profile, asked: AsChat) -> None:
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
    request: Request, task: Task, asked: Asked, before: PreviousContext
) -> Task:
    """Return the task with a recorder of its response, which is kept as in progress."""
    store, whose = services(request).store, owner(request)
    witness = KeptResponse(store.responses, whose, asked)
    leaves = task.leaves or _unchanged_files(task, whose, before)
    stored = StoredResponse(
        id=witness.begun["id"],
        session=leaves.session.name,
        state=leaves.name,
        record=witness.begun,
        previous_id=before.previous_id,
        conversation_id=before.conversation_id,
        seen_seq=before.seen_seq,
        worker=store.worker.id,
    )
    inputs = [i for i in input_items(asked.body["input"], task.run_id) if not is_reference(i)]
    task = replace(task, witness=witness)
    try:
        await store.responses.begin(whose, stored, inputs, before.chain)
    except BaseException:
        await give_back(task)
        raise
    return task


def _unchanged_files(task: Task, owner: str, before: PreviousContext) -> State:
    """Return the saved state of a run that leaves no files: no state has this name, so a request
    that continues the response finds the state before it."""
    session = Session(owner, task.outbox.container_id)
    return State(before.follows.session if before.follows else session, task.run_id)
