"""A model whose replies stand in the words it is asked in, and which tells what it was asked.

'Dictation a1b2: [{"content": "Hello."}]' is answered by "Hello."; all requests in which those words
came are then at /asked/a1b2.
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
WORDS = re.compile(r"Dictation (\w+): ")


class DictatedModel:
    """Each dictation has a name, and nothing to do with the others."""

    def __init__(self) -> None:
        self._asked: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
        self._arrived: dict[tuple[str, int], asyncio.Event] = defaultdict(asyncio.Event)
        self._released: dict[str, asyncio.Event] = defaultdict(asyncio.Event)

    def answer(self, body: Mapping[str, Any]) -> Item:
        """The next reply of the last dictation. `{"held": …}` waits until it is let go, where there
        are tools; `{"whole": …}` is what the backend's answer is, word for word."""
        messages = body["messages"]
        dictated = [(at, found) for at, said in enumerate(messages) if (found := _dictation(said))]
        at, (name, replies) = dictated[-1]
        self._asked[name].append(body)
        self._arrived[name, len(self._asked[name])].set()
        spoken = sum(said["role"] == "assistant" for said in messages[at:])
        if spoken >= len(replies):
            return Refusal(500, "the dictation has no more")
        reply = replies[spoken]
        if "held" in reply:
            return Held(reply["held"], self._released[name]) if "tools" in body else reply["held"]
        if "whole" in reply:
            return Raw(200, json.dumps(reply["whole"]).encode(), JSON)
        return reply

    async def elsewhere(self, request: web.Request) -> web.Response:
        """What it does but chat: tell of itself, embed, go on with a text, judge one."""
        match request.path.split("/")[1:]:
            case ["asked", name, count]:
                await self._arrived[name, int(count)].wait()
                return web.json_response(self._asked[name])
            case ["asked", name]:
                return web.json_response(self._asked[name])
            case ["release", name]:
                self._released[name].set()
                return web.json_response({})
            case ["v1", "embeddings"]:
                return web.json_response(_embedded(await request.json()))
            case ["v1", "moderations"]:
                return web.json_response(_judged(await request.json()))
            case ["v1", "completions"]:
                return _went_on(await request.json())
        raise web.HTTPNotFound


def _dictation(said: Mapping[str, Any]) -> tuple[str, list[dict[str, Any]]] | None:
    """Its name and its replies, where this message is one."""
    if said["role"] != "user":
        return None
    for text in _texts(said["content"]):
        if begun := WORDS.search(text):
            replies, _ = json.JSONDecoder().raw_decode(text, begun.end())
            return begun[1], replies
    return None


def _texts(content: str | Sequence[Mapping[str, Any]]) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content if part["type"] == "text"]


def _embedded(body: Mapping[str, Any]) -> dict[str, Any]:
    """Of each text its length, as bytes where those were asked for."""
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


def _judged(body: Mapping[str, Any]) -> dict[str, Any]:
    flagged = "harm" in body["input"]
    result = {"flagged": flagged, "categories": {"violence": flagged}, "category_scores": {}}
    return {"id": "modr-1", "model": body["model"], "results": [result]}


def _went_on(body: Mapping[str, Any]) -> web.Response:
    """Each word of the prompt once more."""
    pieces = [f"{word} " for word in body["prompt"].split()]
    if not body.get("stream"):
        return web.json_response(_completion(body, "".join(pieces), "stop"))
    chunks = [_completion(body, piece, None) for piece in pieces]
    told = b"".join(encode_sse(iter([*chunks, _completion(body, "", "stop")])))
    return web.Response(body=told, content_type="text/event-stream")


def _completion(body: Mapping[str, Any], text: str, finish_reason: str | None) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "finish_reason": finish_reason, "logprobs": None}
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 0,
        "model": body["model"],
        "choices": [choice],
    }
