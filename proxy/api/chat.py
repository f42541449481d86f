"""POST /v1/chat/completions."""

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from policies.steps import default_mode
from proxy.api.answering import streamed, whole
from proxy.api.dependencies import read_model_request, services
from proxy.api.prepare import Preparation, deadline_s, identify, start_or_join, status_hold
from proxy.api.routing import RoutingDecision, resolve_route
from proxy.api.upstream_relay import refuse_private_urls, relay_chat, strip_plain_suffix
from proxy.schemas.chat_request import check_messages, includes_usage
from proxy.schemas.chat_response import CompletionBuilder, CompletionStreamEncoder, completion_head
from proxy.schemas.request_options import read_request_options, requested_steps

router = APIRouter()


# Not @router.post: FastAPI's own handling of parameters, of which there are none, takes longer
# than relaying a plain request.
@router.route("/v1/chat/completions", methods=["POST"])
async def chat_completions(request: Request) -> Response:
    written, body = await read_model_request(request)
    check_messages(body)
    decision = resolve_route(request, body)
    if decision.is_passthrough:
        day = decision.profile.budgets.daily.for_model_calls
        await refuse_private_urls(request, body)
        return await relay_chat(
            request, strip_plain_suffix(body, decision.route.model), decision.headers, day
        )
    return await _run(request, written, body, decision)


async def _run(
    request: Request, written: bytes, body: Mapping[str, Any], decision: RoutingDecision
) -> Response:
    """Answer by the loop: by a run of the request's own, or one that it repeats."""
    terms = read_request_options(body, request.headers)
    asked_steps = requested_steps(body, request.headers)
    steps = asked_steps or default_mode(services(request).steps, request.headers)
    usage = includes_usage(body)
    identity = identify(request, body, terms, written)
    hold = status_hold(request, terms, identity)
    asked = Preparation(
        body=body,
        decision=decision,
        deadline_s=deadline_s(request, terms, identity),
        hold=hold,
    )
    subscriber = await start_or_join(request, identity, asked)
    names = completion_head(subscriber.run.id, subscriber.run.created, body["model"])
    if hold is None:
        return await whole(
            request, subscriber, CompletionBuilder(names, subscriber.run.id, steps), terms
        )
    frames = CompletionStreamEncoder(names, subscriber.run.id, steps, include_usage=usage)
    return await streamed(request, subscriber, frames, terms, hold)
