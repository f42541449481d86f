"""POST /v1/chat/completions."""

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from policies.steps import suited
from proxy.api.dependencies import get_services, read_model_request
from proxy.api.prepare import RunRequest, deadline_s, identify, start_or_join, status_hold
from proxy.api.routing import RoutingDecision, resolve_route
from proxy.api.run_response import json_response, stream_response
from proxy.api.upstream_relay import refuse_private_urls, relay_chat, strip_plain_suffix
from proxy.schemas.chat_request import check_messages, wants_usage
from proxy.schemas.chat_response import StreamedCompletion, WholeCompletion, head
from proxy.schemas.request_options import read_terms, steps_asked

router = APIRouter()


# Not @router.post: FastAPI's own handling of parameters, of which there are none, takes longer
# than relaying a plain request.
@router.route("/v1/chat/completions", methods=["POST"])
async def chat_completions(request: Request) -> Response:
    written, body = await read_model_request(request)
    check_messages(body)
    decision = resolve_route(request, body)
    if decision.is_passthrough:
        day = decision.profile.per_day.of_model_calls
        await refuse_private_urls(request, body)
        return await relay_chat(
            request, strip_plain_suffix(body, decision.route.model), decision.headers, day
        )
    return await _run(request, written, body, decision)


async def _run(
    request: Request, written: bytes, body: Mapping[str, Any], decision: RoutingDecision
) -> Response:
    """Answer by the loop: by a run of the request's own, or one that it repeats."""
    terms = read_terms(body, request.headers)
    asked_steps = steps_asked(body, request.headers)
    steps = asked_steps or suited(get_services(request).steps, request.headers)
    usage = wants_usage(body)
    identity = identify(request, body, terms, written)
    hold = status_hold(request, terms, identity)
    asked = RunRequest(
        body=body,
        decision=decision,
        deadline_s=deadline_s(request, terms, identity),
        hold=hold,
    )
    subscriber = await start_or_join(request, identity, asked)
    names = head(subscriber.run.id, subscriber.run.created, body["model"])
    if hold is None:
        return await json_response(
            request, subscriber, WholeCompletion(names, subscriber.run.id, steps), terms
        )
    frames = StreamedCompletion(names, subscriber.run.id, steps, wants_usage=usage)
    return await stream_response(request, subscriber, frames, terms, hold)
