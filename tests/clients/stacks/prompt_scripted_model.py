"""A model that reads its replies from the prompt and reports the requests that it received.

The answer to 'Script a1b2: [{"content": "Hello."}]' is "Hello."; GET /requests/a1b2 returns all
requests with this script.
"""

import asyncio
import base64
import json
import re
import struct
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from proxy.models.scripted import encode_sse
from tests.fakes.backend import Held, Item, Raw, Refusal

JSON = {"content-type": "application/json"}
SCRIPT = re.compile(r"Script (\w+): ")


class PromptScriptedModel:
    """A model for many independent scripts, each identified by its name."""

    def __init__(self) -> None:
        self._requests: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
        self._arrived: dict[tuple[str, int], asyncio.Event] = defaultdict(asyncio.Event)
        self._released: dict[str, asyncio.Event] = defaultdict(asyncio.Event)

    def answer(self, body: Mapping[str, Any]) -> Item:
        """Return the next reply of the last script in the messages.

        The reply in `{"held": ...}` is held until it is released, if the request has tools.
        `{"whole": ...}` is the complete body of the backend's answer.
        """
        messages = body["messages"]
        scripts = [
            (at, found) for at, message in enumerate(messages) if (found := _script(message))
        ]
        at, (name, replies) = scripts[-1]
        self._requests[name].append(body)
        self._arrived[name, len(self._requests[name])].set()
        reply_count = sum(message["role"] == "assistant" for message in messages[at:])
        if reply_count >= len(replies):
            return Refusal(500, "the script has no more replies")
        reply = replies[reply_count]
        if "held" in reply:
            return Held(reply["held"], self._released[name]) if "tools" in body else reply["held"]
        if "whole" in reply:
            return Raw(200, json.dumps(reply["whole"]).encode(), JSON)
        return reply

    async def elsewhere(self, request: web.Request) -> web.Response:
        """Serve the other paths: reports, releases, embeddings, completions and moderations."""
        match request.path.split("/")[1:]:
            case ["requests", name, count]:
                await self._arrived[name, int(count)].wait()
                return web.json_response(self._requests[name])
            case ["requests", name]:
                return web.json_response(self._requests[name])
            case ["release", name]:
                self._released[name].set()
                return web.json_response({})
            case ["v1", "embeddings"]:
                return web.json_response(_embedded(await request.json()))
            case ["v1", "moderations"]:
                return web.json_response(_moderated(await request.json()))
            case ["v1", "completions"]:
                return _completed(await request.json())
        raise web.HTTPNotFound


def _script(message: Mapping[str, Any]) -> tuple[str, list[dict[str, Any]]] | None:
    """Return the name and the replies of the script in a message, or None."""
    if message["role"] != "user":
        return None
    for text in _texts(message["content"]):
        if match := SCRIPT.search(text):
            replies, _ = json.JSONDecoder().raw_decode(text, match.end())
            return match[1], replies
    return None


def _texts(content: str | Sequence[Mapping[str, Any]]) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content if part["type"] == "text"]


def _embedded(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the length of each text as its embedding, base64-encoded if requested."""
    vectors = [struct.pack("<f", len(text)) for text in body["input"]]
    in_bytes = body.get("encoding_format") == "base64"
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": base64.b64encode(vector).decode()
            if in_bytes
            else list(struct.unpack("<f", vector)),
        }
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": 2, "total_tokens": 2}
    return {"object": "list", "model": body["model"], "data": data, "usage": usage}


def _moderated(body: Mapping[str, Any]) -> dict[str, Any]:
    flagged = "harm" in body["input"]
    result = {"flagged": flagged, "categories": {"violence": flagged}, "category_scores": {}}
    return {"id": "modr-1", "model": body["model"], "results": [result]}


def _completed(body: Mapping[str, Any]) -> web.Response:
    """Return each word of the prompt once more."""
    pieces = [f"{word} " for word in body["prompt"].split()]
    if not body.get("stream"):
        return web.json_response(_completion(body, "".join(pieces), "stop"))
    chunks = [_completion(body, piece, None) for piece in pieces]
    event_stream = b"".join(encode_sse(iter([*chunks, _completion(body, "", "stop")])))
    return web.Response(body=event_stream, content_type="text/event-stream")


def _completion(body: Mapping[str, Any], text: str, finish_reason: str | None) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "finish_reason": finish_reason, "logprobs": None}
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 0,
        "model": body["model"],
        "choices": [choice],
    }
