"""POST /v1/chat/completions."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from policies.steps import default_mode
from proxy.api.dependencies import read_model_request
from proxy.api.prepare import RunRequest, start_or_join_run
from proxy.api.routing import resolve_route
from proxy.api.run_response import json_response, stream_response
from proxy.api.upstream_relay import relay_chat
from proxy.schemas.chat_request import check_messages, includes_usage
from proxy.schemas.chat_response import (
    ChatCompletionBuilder,
    CompletionStreamEncoder,
    completion_head,
)
from proxy.schemas.request_options import read_request_options

router = APIRouter()


# Not @router.post: FastAPI's handling of parameters takes longer than the relay of a `:plain`
# request (`bench/relay.py`).
@router.route("/v1/chat/completions", methods=["POST"])
async def chat_completions(http: Request) -> Response:
    request = await read_model_request(http)
    body, headers = request.body, request.headers
    check_messages(body)
    decision = resolve_route(request, body)
    if decision.is_plain:
        return await relay_chat(request, decision)
    options = read_request_options(body, headers)
    steps = options.steps or default_mode(request.services.steps, headers)
    include_usage = includes_usage(body)
    subscriber, stream_hold = await start_or_join_run(
        RunRequest(model_request=request, body=body, decision=decision, options=options)
    )
    run = subscriber.run
    head = completion_head(run.id, run.created, body["model"])
    if stream_hold is None:
        builder = ChatCompletionBuilder(head, run.id, steps)
        return await json_response(request, subscriber, builder, options)
    encoder = CompletionStreamEncoder(head, run.id, steps, include_usage=include_usage)
    return await stream_response(request, subscriber, encoder, options, stream_hold)
