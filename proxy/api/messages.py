"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API."""

import json
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from sse_starlette import ServerSentEvent
from starlette.requests import Request
from starlette.responses import Response

from policies.headers import ResponseHeader
from policies.routing import PLAIN_SUFFIX
from policies.steps import default_mode_for_messages
from proxy.agent.model import Upstream, UpstreamRequest
from proxy.api.dependencies import (
    JSONResponse,
    ModelRequest,
    read_model_request,
    run_while_connected,
)
from proxy.api.prepare import RunRequest, start_or_join_run
from proxy.api.routing import RoutingDecision, resolve_route
from proxy.api.run_response import json_response, stream_response
from proxy.api.upstream_relay import forward_json
from proxy.errors import NotFoundError, request_id
from proxy.models.openai_http import (
    MAX_TOKENIZED_BYTES,
    NO_ENDPOINT_STATUSES,
    TOKENIZE_PATH,
    parse_token_count,
)
from proxy.models.relay import read_if_at_most
from proxy.schemas.messages_request import (
    MessagesAsChat,
    as_chat,
    as_chat_for_token_count,
    token_count_request,
)
from proxy.schemas.messages_response import MessageBuilder, MessageContext, MessageStreamEncoder
from proxy.schemas.request_options import RequestOptions, read_request_options

router = APIRouter()

COUNT_PATH = "/v1/messages/count_tokens"
_BODY_HEADERS = ("accept-encoding", "content-encoding", "content-length")
"""Headers that are not sent to the backend, because the proxy sends another body and must be able
to read the response."""
_PROMPT_PART_TYPES = ("text", "image_url")
"""Types of content parts that are in the model's prompt."""
PING = ServerSentEvent('{"type": "ping"}', event="ping", sep="\n")
"""The keep-alive of a streamed message. It is sent as often as the comment that other streams send
as a keep-alive. Anthropic's SDKs ignore a ping."""


@router.route("/v1/messages", methods=["POST"])  # see proxy.api.chat
async def create_message(http: Request) -> Response:
    request = await read_model_request(http)
    body = request.body
    if body["model"].endswith(PLAIN_SUFFIX):
        decision = resolve_route(request, body)
        return await forward_json(request, body, decision.profile.budgets.daily.for_model_calls)
    translation = as_chat(body)
    options = read_request_options(translation.chat, request.headers)
    decision = resolve_route(request, translation.chat)
    context = _message_context(request, translation, decision, options)
    subscriber, stream_hold = await start_or_join_run(
        RunRequest(
            model_request=request,
            body=translation.chat,
            decision=decision,
            options=options,
            is_translated=True,
            forces_tool=translation.has_code_execution and translation.starts_with_tool,
            # A client with code execution receives the container's id, and names it later.
            is_stored=translation.has_code_execution,
            translate_error=translation.restore_param,
        ),
    )
    run_id = subscriber.run.id
    if stream_hold is None:
        builder = MessageBuilder(run_id, context)
        response = await json_response(request, subscriber, builder, options)
    else:
        encoder = MessageStreamEncoder(run_id, context)
        response = await stream_response(
            request, subscriber, encoder, options, stream_hold, keep_alive=PING
        )
    response.headers.update(
        {ResponseHeader.MESSAGES_REQUEST_ID: request_id(run_id), **decision.headers}
    )
    return response


def _message_context(
    request: ModelRequest,
    translation: MessagesAsChat,
    decision: RoutingDecision,
    options: RequestOptions,
) -> MessageContext:
    """Return the options of the request that the encoders of the message need."""
    steps = options.steps or default_mode_for_messages(
        request.services.steps,
        has_code_execution=translation.has_code_execution,
        wants_thinking=translation.wants_thinking,
    )
    has_container = translation.has_code_execution and not decision.is_plain
    return MessageContext(
        model=request.body["model"],
        steps=steps,
        has_thinking=translation.wants_thinking or steps == "reasoning",
        stop_sequences=translation.stop_sequences,
        container_expires=request.services.files.link_expiry() if has_container else None,
    )


@router.route(COUNT_PATH, methods=["POST"])  # see proxy.api.chat
async def count_tokens(http: Request) -> Response:
    """Return the token count of a request, as counted by the backend."""
    request = await read_model_request(http)
    body = request.body
    if body["model"].endswith(PLAIN_SUFFIX):
        return await forward_json(request, body)
    translation = as_chat_for_token_count(body)
    upstream = request.model.upstream
    if upstream is None:
        raise _no_token_count_error()
    return await run_while_connected(http, _count_response(upstream, http, body, translation))


async def _count_response(
    upstream: Upstream,
    request: Request,
    body: Mapping[str, Any],
    translation: MessagesAsChat,
) -> Response:
    """Return the response of the backend's /v1/messages/count_tokens, or a count by /tokenize if
    the backend lacks that path. Raises NotFoundError, BackendError."""
    counted = await _post_json(
        upstream, request, COUNT_PATH, token_count_request(body, translation)
    )
    if counted.status_code not in NO_ENDPOINT_STATUSES:
        return counted
    fields = {
        name: translation.chat[name] for name in ("model", "tools") if name in translation.chat
    }
    fields["messages"] = [_without_files(message) for message in translation.chat["messages"]]
    tokenized = await _post_json(upstream, request, TOKENIZE_PATH, fields)
    count = parse_token_count(bytes(tokenized.body)) if tokenized.status_code == 200 else None
    if count is None:
        raise _no_token_count_error()
    return JSONResponse({"input_tokens": count})


async def _post_json(
    upstream: Upstream, request: Request, path: str, body: Mapping[str, Any]
) -> Response:
    headers = {name: value for name, value in request.headers.items() if name not in _BODY_HEADERS}
    headers["content-type"] = "application/json"
    sent = UpstreamRequest("POST", path, headers, json.dumps(body).encode())
    received = await upstream.send(sent)
    content = await read_if_at_most(received.body, MAX_TOKENIZED_BYTES)
    if content is None:
        raise _no_token_count_error()
    return Response(content, received.status, received.headers)


def _without_files(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the message without its files, which are in the sandbox and not in the prompt."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [part for part in content if part["type"] in _PROMPT_PART_TYPES]}


def _no_token_count_error() -> NotFoundError:
    return NotFoundError(
        "Tokens cannot be counted: the backend has neither /v1/messages/count_tokens nor a"
        " /tokenize that accepts these messages."
    )
