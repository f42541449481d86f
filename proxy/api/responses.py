"""POST /v1/responses. A response is stored from the start of its run, unless `store` is false."""

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from policies.profile import Profile
from policies.routing import PLAIN_SUFFIX
from policies.sessions import SessionState
from policies.steps import default_mode_for_responses
from proxy.agent.task import RunObserver, SessionPlan
from proxy.api.dependencies import ModelRequest, read_model_request
from proxy.api.passthrough import forward_response_request
from proxy.api.prepare import RunRequest, start_or_join_run
from proxy.api.response_recorder import ResponseRecorder
from proxy.api.routing import RoutingDecision, resolve_route
from proxy.api.run_response import json_response, stream_response
from proxy.api.stored_responses import (
    PreviousContext,
    background_response,
    is_reference,
    previous_context,
    resolve_references,
)
from proxy.errors import BadRequestError, RunCancelledError
from proxy.schemas.request_options import read_request_options
from proxy.schemas.responses_request import ResponsesAsChat, as_chat, input_items
from proxy.schemas.responses_response import (
    ResponseBodyBuilder,
    ResponseContext,
    ResponseStreamEncoder,
)
from proxy.schemas.validation import unsupported_error
from proxy.store.records import StoredResponse

router = APIRouter()


@router.route("/v1/responses", methods=["POST"])  # see proxy.api.chat
async def create_response(http: Request) -> Response:
    request = await read_model_request(http)
    body = request.body
    if body["model"].endswith(PLAIN_SUFFIX):
        decision = resolve_route(request, body)
        return await forward_response_request(
            request, decision.profile.budgets.daily.for_model_calls
        )
    previous = await previous_context(http, body)
    if isinstance(items := body.get("input"), list):
        body = {**body, "input": await resolve_references(http, items)}
    translation = as_chat(body, previous.items)
    decision = resolve_route(request, translation.chat)
    _check_network(decision.profile, translation)
    response = await _run_response(request, body, translation, previous, decision)
    response.headers.update(decision.headers)
    return response


async def _run_response(
    request: ModelRequest,
    body: Mapping[str, Any],
    translation: ResponsesAsChat,
    previous: PreviousContext,
    decision: RoutingDecision,
) -> Response:
    """Return the response of a new run, or of the run that the request repeats. `body` is the
    request's body with its item references resolved."""
    options = read_request_options(body, request.headers)
    steps = options.steps or default_mode_for_responses(
        request.services.steps, shows_items=translation.tools.step_item_tool is not None
    )
    is_stored = _should_store(body)
    is_background = bool(body.get("background"))

    async def start_recording(run_id: str, created: int, session: SessionPlan) -> RunObserver:
        context = ResponseContext(
            body, run_id, created, session.container_id, steps, translation.tools
        )
        return await _start_recording(request, context, session, previous)

    subscriber, stream_hold = await start_or_join_run(
        RunRequest(
            model_request=request,
            body=translation.chat,
            decision=decision,
            options=options,
            is_translated=True,
            forces_tool=translation.starts_with_tool,
            max_tool_calls=body.get("max_tool_calls"),
            resume_point=previous.resume_point,
            is_stored=is_stored,
            is_background=is_background,
            start_recording=start_recording if is_stored else None,
            translate_error=translation.restore_param,
        ),
    )
    if is_background:
        return await background_response(request.http, subscriber, stream=bool(body.get("stream")))
    run = subscriber.run
    context = ResponseContext(body, run.id, run.created, run.container_id, steps, translation.tools)
    if stream_hold is None:
        return await json_response(request, subscriber, ResponseBodyBuilder(context), options)
    return await stream_response(
        request, subscriber, ResponseStreamEncoder(context), options, stream_hold
    )


def _check_network(profile: Profile, translation: ResponsesAsChat) -> None:
    """Raise BadRequestError if a tool names another network policy than the profile has."""
    mode = profile.isolation.network.mode
    for param, wanted in translation.tools.network_policies:
        if (wanted == "disabled") != (mode == "none"):
            raise unsupported_error(
                param, f"This server sets the network mode of sandboxes to {mode!r}."
            )


def _should_store(body: Mapping[str, Any]) -> bool:
    """Return True if the response is to be stored. Raises BadRequestError."""
    is_stored = body.get("store") is not False
    if body.get("background") and not is_stored:
        raise BadRequestError(
            "Background responses require 'store' to be true.",
            param="background",
            code="invalid_value",
        )
    return is_stored


async def _start_recording(
    request: ModelRequest, context: ResponseContext, session: SessionPlan, previous: PreviousContext
) -> ResponseRecorder:
    """Store a response as in progress, and return its recorder."""
    store, owner = request.services.store, request.owner
    recorder = ResponseRecorder(store.responses, owner, context)
    save_as = session.save_as
    if save_as is None:
        # A run without a sandbox saves no workspace state. The state named below is never stored,
        # so a request that continues the response resumes from the previous state.
        resume_point = previous.resume_point
        save_as = SessionState(
            resume_point.session if resume_point else session.session, context.run_id
        )
    stored = StoredResponse(
        id=recorder.initial_response["id"],
        session=save_as.session.name,
        state=save_as.name,
        record=recorder.initial_response,
        previous_id=previous.previous_id,
        conversation_id=previous.conversation_id,
        seen_seq=previous.seen_seq,
        worker=store.process.id,
    )
    items = input_items(context.body["input"], context.run_id)
    items = [item for item in items if not is_reference(item)]
    try:
        await store.responses.begin(owner, stored, items, previous.chain)
    except BaseException:
        await recorder.on_error(RunCancelledError())
        raise
    return recorder
