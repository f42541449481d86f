"""POST /v1/messages/count_tokens: counted by the backend, which alone knows how."""

import json
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from policies.routing import PLAIN_SUFFIX
from proxy.agent.model import Passage, Passing
from proxy.api.connection import model, model_request, while_connected
from proxy.api.json_response import JSON
from proxy.api.passing import pass_plain
from proxy.errors import NotFoundError
from proxy.models.openai_http import MAX_TOKENIZED_BYTES, NOT_THERE, count_in
from proxy.models.openai_http import TOKENIZE_PATH as PATH
from proxy.models.relay import read_at_most
from proxy.wire.messages_request import AsChat, as_chat_to_count, to_be_counted

router = APIRouter()

_OF_THE_BODY = ("accept-encoding", "content-encoding", "content-length")
_SEEN = ("text", "image_url")
"""What of a message goes to the model itself."""


@router.route("/v1/messages/count_tokens", methods=["POST"])  # see proxy.api.chat
async def count_tokens(request: Request) -> Response:
    _, body = await model_request(request)
    if body["model"].endswith(PLAIN_SUFFIX):
        return await pass_plain(request, body)
    asked = as_chat_to_count(body)
    passage = model(request).passage
    if passage is None:
        raise _uncounted()
    return await while_connected(request, _counted(passage, request, body, asked))


async def _counted(
    passage: Passage, request: Request, body: Mapping[str, Any], asked: AsChat
) -> Response:
    counted = await _post(passage, request, "/v1/messages/count_tokens", to_be_counted(body, asked))
    if counted.status_code not in NOT_THERE:
        return counted
    words = {name: asked.chat[name] for name in ("model", "tools") if name in asked.chat}
    words["messages"] = [_without_files(message) for message in asked.chat["messages"]]
    tokenized = await _post(passage, request, PATH, words)
    count = count_in(bytes(tokenized.body)) if tokenized.status_code == 200 else None
    if count is None:
        raise _uncounted()
    return JSON({"input_tokens": count})


async def _post(passage: Passage, request: Request, path: str, body: Mapping[str, Any]) -> Response:
    kept = {name: value for name, value in request.headers.items() if name not in _OF_THE_BODY}
    headers = {**kept, "content-type": "application/json"}
    passing = Passing("POST", path, headers, json.dumps(body).encode())
    answer = await passage.pass_on(passing)
    told = await read_at_most(answer.body, MAX_TOKENIZED_BYTES)
    if told is None:
        raise _uncounted()
    return Response(told, answer.status, answer.headers)


def _without_files(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message as no tokenizer refuses it: files lie in the sandbox."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [part for part in content if part["type"] in _SEEN]}


def _uncounted() -> NotFoundError:
    return NotFoundError(
        "Tokens cannot be counted: the backend has neither /v1/messages/count_tokens nor a"
        " /tokenize that takes these messages."
    )
