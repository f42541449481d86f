"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API."""

import json
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from sse_starlette import ServerSentEvent
from starlette.requests import Request
from starlette.responses import Response

from policies.routing import PLAIN_SUFFIX
from policies.steps import suited_to_messages
from proxy.agent.model import UpstreamPaths, UpstreamRequest
from proxy.api.dependencies import (
    JSONResponse,
    get_model,
    get_services,
    read_model_request,
    while_connected,
)
from proxy.api.prepare import RunRequest, deadline_s, identify, start_or_join, status_hold
from proxy.api.routing import RoutingDecision, resolve_route
from proxy.api.run_response import json_response, stream_response
from proxy.api.upstream_relay import forward_json
from proxy.errors import NotFoundError, request_id
from proxy.models.openai_http import MAX_TOKENIZED_BYTES, NOT_THERE, TOKENIZE_PATH, count_in
from proxy.models.relay import read_at_most
from proxy.schemas.messages_request import MessagesAsChat, as_chat, as_chat_to_count, to_be_counted
from proxy.schemas.messages_response import Shown, StreamedMessage, WholeMessage
from proxy.schemas.request_options import read_terms, steps_asked

router = APIRouter()

COUNT_PATH = "/v1/messages/count_tokens"
_BODY_HEADERS = ("accept-encoding", "content-encoding", "content-length")
"""Headers that belong to one body, and are not passed on with another."""
_PROMPT_PARTS = ("text", "image_url")
"""The parts of a message that go to the model itself."""
PING = ServerSentEvent('{"type": "ping"}', event="ping", sep="\n")


@router.route("/v1/messages", methods=["POST"])  # see proxy.api.chat
async def create_message(request: Request) -> Response:
    written, body = await read_model_request(request)
    if body["model"].endswith(PLAIN_SUFFIX):
        decision = resolve_route(request, body)
        return await forward_json(request, body, decision.profile.per_day.of_model_calls)
    return await _run(request, written, body, as_chat(body))


async def _run(
    request: Request, written: bytes, body: Mapping[str, Any], asked: MessagesAsChat
) -> Response:
    """Answer by the loop: by a run of the request's own, or one that it repeats."""
    terms = read_terms(asked.chat, request.headers)
    decision = resolve_route(request, asked.chat)
    shown = _message_options(request, body, asked, decision)
    identity = identify(request, asked.chat, terms, written)
    hold = status_hold(request, terms, identity)
    preparation = RunRequest(
        body=asked.chat,
        decision=decision,
        deadline_s=deadline_s(request, terms, identity),
        hold=hold,
        is_translated=True,
        forces_tool=asked.code_execution and asked.tool_first,
        # A client that asks for a sandbox is told its id, and names it in its next request.
        is_kept=asked.code_execution,
        translate_error=asked.translate_error,
    )
    subscriber = await start_or_join(request, identity, preparation)
    if hold is None:
        response = await json_response(
            request, subscriber, WholeMessage(subscriber.run.id, shown), terms
        )
    else:
        frames = StreamedMessage(subscriber.run.id, shown)
        response = await stream_response(request, subscriber, frames, terms, hold, alive=PING)
    response.headers.update({"request-id": request_id(subscriber.run.id), **decision.headers})
    return response


def _message_options(
    request: Request, body: Mapping[str, Any], asked: MessagesAsChat, decision: RoutingDecision
) -> Shown:
    steps = steps_asked(body, request.headers) or suited_to_messages(
        get_services(request).steps,
        code_execution=asked.code_execution,
        thinking=asked.thinking,
    )
    has_container = asked.code_execution and not decision.is_passthrough
    return Shown(
        model=body["model"],
        steps=steps,
        thinking=asked.thinking or steps == "reasoning",
        stop_sequences=asked.stop_sequences,
        container_expires=get_services(request).files.link_expiry() if has_container else None,
    )


@router.route(COUNT_PATH, methods=["POST"])  # see proxy.api.chat
async def count_tokens(request: Request) -> Response:
    """Have the backend count the tokens of a request, which alone knows how."""
    _, body = await read_model_request(request)
    if body["model"].endswith(PLAIN_SUFFIX):
        return await forward_json(request, body)
    asked = as_chat_to_count(body)
    passage = get_model(request).passage
    if passage is None:
        raise _not_countable()
    return await while_connected(request, _count(passage, request, body, asked))


async def _count(
    passage: UpstreamPaths, request: Request, body: Mapping[str, Any], asked: MessagesAsChat
) -> Response:
    counted = await _post(passage, request, COUNT_PATH, to_be_counted(body, asked))
    if counted.status_code not in NOT_THERE:
        return counted
    words = {name: asked.chat[name] for name in ("model", "tools") if name in asked.chat}
    words["messages"] = [_without_files(message) for message in asked.chat["messages"]]
    tokenized = await _post(passage, request, TOKENIZE_PATH, words)
    count = count_in(bytes(tokenized.body)) if tokenized.status_code == 200 else None
    if count is None:
        raise _not_countable()
    return JSONResponse({"input_tokens": count})


async def _post(
    passage: UpstreamPaths, request: Request, path: str, body: Mapping[str, Any]
) -> Response:
    kept = {name: value for name, value in request.headers.items() if name not in _BODY_HEADERS}
    headers = {**kept, "content-type": "application/json"}
    passing = UpstreamRequest("POST", path, headers, json.dumps(body).encode())
    answer = await passage.pass_on(passing)
    read = await read_at_most(answer.body, MAX_TOKENIZED_BYTES)
    if read is None:
        raise _not_countable()
    return Response(read, answer.status, answer.headers)


def _without_files(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the message as no tokenizer refuses it: files are in the sandbox."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [part for part in content if part["type"] in _PROMPT_PARTS]}


def _not_countable() -> NotFoundError:
    return NotFoundError(
        "Tokens cannot be counted: the backend has neither /v1/messages/count_tokens nor a"
        " /tokenize that takes these messages."
    )
