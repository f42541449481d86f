"""A script of replies, and what a server that plays it sends. Pure."""

import json
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from proxy.agent.history import REASONING_FIELDS

PIECE_CHARS = 8
"""Characters in one streamed piece."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ScriptedCall(_Part):
    """One tool call of a reply."""

    name: str
    arguments: dict[str, Any] | str = {}
    """A mapping, or the raw text a model would write."""
    id: str | None = None


class ScriptedError(_Part):
    """A refusal instead of a reply."""

    message: str
    status: int = 500
    type: str | None = None
    code: str | None = None
    retry_after_s: float | None = None


class ScriptedReply(_Part):
    """One line of the script."""

    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ScriptedCall] = []
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    error: ScriptedError | None = None
    message: dict[str, Any] | None = None
    """The assistant message itself, used as it stands."""


class Script(_Part):
    """A whole script."""

    model: str = "script"
    """The name it goes by in the list of models."""
    replies: list[ScriptedReply]


def read_script(data: Any, source: str) -> Script:
    """Check a script's values. Raises ValueError with one line that names the place."""
    try:
        return Script.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the script"
        raise ValueError(f"{source}: {place}: {first['msg']}") from error


def completion_of(
    reply: ScriptedReply, *, model: str, position: int, reasoning_field: str = "reasoning_content"
) -> dict[str, Any]:
    """The chat completion that a reply is; `position` makes its ids."""
    message = deepcopy(reply.message) or _message(reply, position, reasoning_field)
    finish_reason = reply.finish_reason or ("tool_calls" if message.get("tool_calls") else "stop")
    completion: dict[str, Any] = {
        "id": f"chatcmpl-script-{position}",
        "object": "chat.completion",
        "created": 0,
        "model": model,
        "system_fingerprint": "script",
        "choices": [{"index": 0, "message": message, "finish_reason": finish_reason}],
    }
    if reply.usage is not None:
        completion["usage"] = dict(reply.usage)
    return completion


def chunks_of(completion: Mapping[str, Any], *, include_usage: bool) -> Iterator[dict[str, Any]]:
    """The same completion as a backend streams it, in small pieces."""
    frame = {key: completion[key] for key in completion if key not in ("choices", "usage")}
    frame["object"] = "chat.completion.chunk"
    choice = completion["choices"][0]
    for delta in _deltas(choice["message"]):
        yield {**frame, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    end = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    yield {**frame, "choices": [end]}
    if include_usage and "usage" in completion:
        yield {**frame, "choices": [], "usage": completion["usage"]}


def sse(frames: Iterator[dict[str, Any]]) -> Iterator[bytes]:
    """The frames as server-sent events, [DONE] included."""
    for frame in frames:
        yield b"data: " + json.dumps(frame).encode() + b"\n\n"
    yield b"data: [DONE]\n\n"


def _message(reply: ScriptedReply, position: int, reasoning_field: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.content}
    if reply.reasoning is not None:
        message[reasoning_field] = reply.reasoning
    if reply.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id or f"call_{position}_{index}",
                "type": "function",
                "function": {"name": call.name, "arguments": _text(call.arguments)},
            }
            for index, call in enumerate(reply.tool_calls)
        ]
    return message


def _text(arguments: Mapping[str, Any] | str) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _deltas(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    pieced = ("content", *REASONING_FIELDS)
    first = {key: message[key] for key in message if key not in (*pieced, "tool_calls")}
    yield {**first, "content": None if message.get("content") is None else ""}
    for field in reversed(pieced):
        for piece in _pieces(message.get(field) or ""):
            yield {field: piece}
    yield from _call_deltas(message.get("tool_calls") or [])


def _call_deltas(calls: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for index, call in enumerate(calls):
        function = call["function"]
        opening = {**call, "index": index, "function": {**function, "arguments": ""}}
        yield {"tool_calls": [opening]}
        for piece in _pieces(function["arguments"]):
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}


def _pieces(text: str) -> Iterator[str]:
    for start in range(0, len(text), PIECE_CHARS):
        yield text[start : start + PIECE_CHARS]
