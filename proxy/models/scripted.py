"""A model that plays a script of replies, for tests and demonstrations.

The module contains the model, the script's format, and the completions and chunks of a server that
plays a script.
"""

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from proxy.agent.events import ModelCallAccepted, OnDelta
from proxy.agent.history import REASONING_FIELDS, completion_deltas
from proxy.agent.model import Completion, Credentials, UpstreamResponse
from proxy.errors import BackendError
from proxy.models.backend_errors import backend_error
from proxy.models.completion_builder import (
    CompletionBuilder,
    attach_partial_completion,
    parse_completion,
)
from proxy.models.relay import BufferedBody, error_response, json_response

PIECE_CHARS = 8
"""Maximum number of characters in one streamed piece."""


class _ScriptPart(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ScriptedCall(_ScriptPart):
    """One tool call of a reply."""

    name: str
    arguments: dict[str, Any] | str = {}
    """An object, or the JSON text as the model writes it, which may be invalid."""
    id: str | None = None


class ScriptedError(_ScriptPart):
    """An error that the model raises in place of a reply."""

    message: str
    status: int = 500
    type: str | None = None
    code: str | None = None
    retry_after_s: float | None = None


class ScriptedReply(_ScriptPart):
    """One entry of a script: a reply, or an error in place of a reply."""

    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ScriptedCall] = []
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    error: ScriptedError | None = None
    message: dict[str, Any] | None = None
    """An assistant message to send unchanged and not streamed, in place of `content`, `reasoning`
    and `tool_calls`."""


class Script(_ScriptPart):
    """The name and the replies of one model. A file contains one script or a list of scripts."""

    model: str = "script"
    """The model's name in `GET /v1/models`."""
    replies: list[ScriptedReply]


_SCRIPTS = TypeAdapter(Annotated[list[Script], Field(min_length=1)])


def read_scripts(data: Any, source: str) -> list[Script]:
    """Validate a script or a list of scripts. Raises ValueError with one line that names the
    invalid field."""
    try:
        if isinstance(data, list):
            return _SCRIPTS.validate_python(data)
        return [Script.model_validate(data)]
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the script"
        raise ValueError(f"{source}: {place}: {first['msg']}") from error


class ScriptedModel:
    """Plays one script of replies, or the scripts of a file, one for each model.

    A request for a model that has no script gets the replies of the first script.

    A request with k assistant messages gets reply number k, counted from 0, so that every
    conversation plays the script from the beginning. After the last reply the model starts again if
    `cycle` is True, else it fails. An error in the script delays the next reply: the model raises
    each error once and then skips it.
    """

    upstream = None

    def __init__(
        self, replies: Sequence[Mapping[str, Any]], *, cycle: bool = False, name: str = "script"
    ) -> None:
        self.requests: list[dict[str, Any]] = []
        """Copies of all request bodies."""
        scripts = read_scripts({"model": name, "replies": list(replies)}, "script")
        self._replies = {script.model: script.replies for script in scripts}
        self._cycle = cycle
        self._raised_errors: set[tuple[str, int]] = set()
        """The script's name and the reply's index of each error that was raised."""

    @classmethod
    def from_yaml(cls, path: Path) -> "ScriptedModel":
        """Return a model that plays the scripts in a YAML file again and again. Raises ValueError
        with a one-line message, and OSError if the file cannot be read."""
        try:
            data = yaml.safe_load(path.read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            raise ValueError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
        model = cls([], cycle=True)
        model._replies = {script.model: script.replies for script in read_scripts(data, str(path))}
        return model

    async def complete(self, body: Mapping[str, Any], on_delta: OnDelta | None) -> Completion:
        payload, streams = self._next_completion(body)
        if on_delta is None:
            return parse_completion(payload)
        await on_delta(ModelCallAccepted())
        if not streams:
            completion = parse_completion(payload)
            for delta in completion_deltas(completion):
                await on_delta(delta)
            return completion
        builder = CompletionBuilder()
        with attach_partial_completion(builder.build):
            for chunk in completion_chunks(payload, include_usage=True):
                for delta in builder.add(chunk):
                    await on_delta(delta)
                await asyncio.sleep(0)  # as with a backend, other tasks run between two pieces
        return builder.build()

    async def relay(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> UpstreamResponse:
        try:
            completion, _ = self._next_completion(body)
        except BackendError as error:
            return error_response(error)
        if not body.get("stream"):
            return json_response(completion)
        include_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        frames = encode_sse(completion_chunks(completion, include_usage=include_usage))
        return UpstreamResponse(200, {"content-type": "text/event-stream"}, BufferedBody(frames))

    def with_credentials(self, credentials: Credentials) -> "ScriptedModel":
        """See Model. A script needs no key."""
        return self

    def with_timeout(self, timeout_s: float) -> "ScriptedModel":
        """See Model. A script never waits."""
        return self

    def with_upstream(self, url: str) -> "ScriptedModel":
        """See Model. The configuration refuses upstreams for a script, which sends no requests."""
        raise NotImplementedError("backend.upstreams needs backend.provider openai")

    async def count_tokens(self, model: str, text: str) -> int | None:
        """See Model. A script has no tokenizer."""
        return None

    async def tokenize_prompt(self, model: str, prompt: str) -> list[int] | None:
        """See Model. A script has no tokenizer."""
        return None

    def keep_warm(self) -> AbstractAsyncContextManager[None]:
        """See Model. A script has no connection."""
        return nullcontext()

    async def models(self) -> list[dict[str, Any]]:
        about = {"object": "model", "created": 0, "owned_by": "script"}
        return [{"id": name, **about} for name in self._replies]

    async def aclose(self) -> None:
        """See Model. A script has no connection."""

    def _next_completion(self, body: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        """Return the completion for a request, and True if the completion can be streamed. A reply
        with a `message` is not streamed, as if the server ignored `stream`. Raises BackendError."""
        self.requests.append(deepcopy(dict(body)))
        position = sum(message.get("role") == "assistant" for message in body["messages"])
        first = next(iter(self._replies))
        model = body.get("model") or first
        name = model if model in self._replies else first
        replies = self._replies[name]
        count = sum(reply.error is None for reply in replies)
        to_skip = position % count if self._cycle and count else position
        for number, reply in enumerate(replies):
            if reply.error is not None:
                if to_skip == 0 and (name, number) not in self._raised_errors:
                    self._raised_errors.add((name, number))
                    raise _backend_error(reply.error)
            elif to_skip == 0:
                completion = build_completion(reply, model=model, position=position)
                return completion, reply.message is None
            else:
                to_skip -= 1
        raise BackendError("the script has no more replies", status=500, code="script_ended")


def call(name: str, /, **arguments: Any) -> dict[str, Any]:
    """Return a tool call, for `tool_reply`."""
    return {"name": name, "arguments": arguments}


def tool_reply(*calls: Mapping[str, Any], content: str | None = None) -> dict[str, Any]:
    """Return a scripted reply that calls tools."""
    return {"content": content, "tool_calls": list(calls)}


def text_reply(text: str) -> dict[str, Any]:
    """Return a scripted reply that is text."""
    return {"content": text}


def _backend_error(error: ScriptedError) -> BackendError:
    return backend_error(
        {"message": error.message, "type": error.type, "code": error.code},
        status=error.status,
        retry_after_s=error.retry_after_s,
    )


def build_completion(
    reply: ScriptedReply, *, model: str, position: int, reasoning_field: str = "reasoning_content"
) -> dict[str, Any]:
    """Return the chat completion for a reply. The completion's ids contain `position`."""
    message = deepcopy(reply.message) or _reply_message(reply, position, reasoning_field)
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


def completion_chunks(
    completion: Mapping[str, Any], *, include_usage: bool
) -> Iterator[dict[str, Any]]:
    """Yield the chunks in which a backend would stream a completion, each with a small piece."""
    common = {key: completion[key] for key in completion if key not in ("choices", "usage")}
    common["object"] = "chat.completion.chunk"
    choice = completion["choices"][0]
    for delta in _message_deltas(choice["message"]):
        yield {**common, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    end = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    yield {**common, "choices": [end]}
    if include_usage and "usage" in completion:
        yield {**common, "choices": [], "usage": completion["usage"]}


def encode_sse(chunks: Iterator[dict[str, Any]]) -> Iterator[bytes]:
    """Yield the chunks as server-sent events, and [DONE] at the end."""
    for chunk in chunks:
        yield b"data: " + json.dumps(chunk).encode() + b"\n\n"
    yield b"data: [DONE]\n\n"


def _reply_message(reply: ScriptedReply, position: int, reasoning_field: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.content}
    if reply.reasoning is not None:
        message[reasoning_field] = reply.reasoning
    if reply.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id or f"call_{position}_{index}",
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments_text(call.arguments)},
            }
            for index, call in enumerate(reply.tool_calls)
        ]
    return message


def _arguments_text(arguments: Mapping[str, Any] | str) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _message_deltas(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    split = ("content", *REASONING_FIELDS)
    first = {key: message[key] for key in message if key not in (*split, "tool_calls")}
    yield {**first, "content": None if message.get("content") is None else ""}
    for field in reversed(split):
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
