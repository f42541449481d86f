"""A reply out of a backend's JSON: whole, or put together from streamed chunks. Pure."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from proxy.agent.events import (
    ModelDelta,
    ReasoningDelta,
    TextDelta,
    TokenCount,
    ToolCallDelta,
)
from proxy.agent.history import text_of, thoughts_in
from proxy.agent.model import Reply, ReplyStopped
from proxy.models.backend_errors import bad_response, expected
from proxy.models.merging import REPLACED, merge
from proxy.models.tool_call_assembly import ToolCallAssembly

MAX_TEXT_CHARS = 64 << 20
"""The characters of all text fields of one streamed reply; the arguments of its calls have a bound
of their own."""
MAX_BLOCKS = 10_000
"""The parts of the content, or the thinking blocks, of one streamed reply."""
COUNT_EVERY = 8
"""Of so many chunks one passes on the server's running token count."""


def reply_of(completion: Any) -> Reply:
    """The reply in a chat completion that came whole. Raises BackendError."""
    choices = completion.get("choices") if isinstance(completion, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise bad_response("it has no choices")
    message = choices[0].get("message")
    if not isinstance(message, dict):
        raise bad_response("its choice has no message")
    usage = completion.get("usage")
    return Reply(
        message=message,
        finish_reason=choices[0].get("finish_reason") or _natural_end(message),
        usage=usage if isinstance(usage, dict) else {},
        choice=_without(choices[0], "message", "finish_reason"),
        response=_without(completion, "choices", "usage"),
    )


def deltas_of(reply: Reply) -> list[ModelDelta]:
    """The pieces of a reply that came whole although it was to be streamed."""
    message = reply.message
    deltas: list[ModelDelta] = [ReasoningDelta(thought) for thought in thoughts_in(message)]
    text, logprobs = text_of(message), reply.choice.get("logprobs")
    if text or logprobs:
        deltas.append(TextDelta(text, logprobs))
    calls = message.get("tool_calls")
    for index, call in enumerate(calls if isinstance(calls, list) else ()):
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(name := function.get("name"), str):
            written = function.get("arguments")
            arguments = written if isinstance(written, str) else json.dumps(written or {})
            deltas.append(ToolCallDelta(index, name, arguments))
    return deltas


@contextmanager
def reply_when_stopped(reply: Callable[[], Reply]) -> Iterator[None]:
    """Give a ReplyStopped that passes through the `reply` as far as it came."""
    try:
        yield
    except ReplyStopped as stopped:
        stopped.reply = reply()
        raise


class Assembly:
    """Puts the chunks of one streamed reply together."""

    def __init__(self) -> None:
        self.finish_reason: str | None = None
        self._message: dict[str, Any] = {"role": "assistant", "content": None}
        self._texts: dict[str, list[str]] = {}
        self._thoughts: list[list[str]] = []
        """The pieces of text of each thinking block."""
        self._chars = 0
        """The length of those texts and thoughts together."""
        self._calls = ToolCallAssembly()
        self._choice: dict[str, Any] = {}
        self._response: dict[str, Any] = {}
        self._usage: Mapping[str, Any] = {}
        self._chunks = 0

    def add(self, chunk: Any) -> list[ModelDelta]:
        """Take one chunk in; gives what it adds. Raises BackendError."""
        if not isinstance(chunk, dict):
            raise bad_response("a chunk is not a JSON object")
        count = None
        if isinstance(usage := chunk.get("usage"), dict) and usage:
            self._usage = usage
            count = _count(usage.get("prompt_tokens"), usage.get("completion_tokens"))
        elif isinstance(timings := chunk.get("timings"), dict):
            count = _timed_count(timings)
        self._response.update(_without(chunk, "choices", "usage"))
        deltas: list[ModelDelta] = []
        with expected("a chunk"):
            for choice in chunk.get("choices") or []:
                if isinstance(choice, dict) and choice.get("index") in (0, None):
                    deltas += self._add_choice(choice)
        self._chunks += 1
        if count and deltas and self._chunks % COUNT_EVERY == 0:
            deltas.append(count)
        return deltas

    def reply(self) -> Reply:
        """What the chunks so far amount to."""
        message = {**self._message, **{key: "".join(self._texts[key]) for key in self._texts}}
        if calls := self._calls.whole():
            message["tool_calls"] = calls
        if blocks := self._message.get("thinking_blocks"):
            message["thinking_blocks"] = list(map(_with_thoughts, blocks, self._thoughts))
        response = dict(self._response)
        if "object" in response:
            response["object"] = "chat.completion"
        return Reply(
            message=message,
            finish_reason=self.finish_reason or _natural_end(message),
            usage=self._usage,
            choice=self._choice,
            response=response,
        )

    def _add_choice(self, choice: Mapping[str, Any]) -> list[ModelDelta]:
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        merge(self._choice, _without(choice, "delta", "finish_reason"))
        delta = choice.get("delta") or {}
        self._add_to_message(delta)
        pieces: list[ModelDelta] = [ReasoningDelta(text) for text in thoughts_in(delta)]
        called = self._calls.add(delta.get("tool_calls") or [])
        text, logprobs = text_of(delta), choice.get("logprobs")
        is_text = isinstance(delta.get("content"), str)
        # A token that is only half a character comes as an empty text with its log probabilities.
        if text or (is_text and logprobs and not pieces and not called):
            pieces.append(TextDelta(text, logprobs))
        return pieces + called

    def _add_to_message(self, delta: Mapping[str, Any]) -> None:
        for key, value in delta.items():
            if key == "tool_calls":
                continue
            if key == "thinking_blocks":
                self._add_thinking_blocks(value or [])
            elif key == "content" and list in (type(value), type(self._message["content"])):
                self._add_parts(value)
            elif isinstance(value, str) and key not in REPLACED:
                self._message.setdefault(key, None)
                self._texts.setdefault(key, []).append(self._counted(value))
            else:
                merge(self._message, {key: value})

    def _add_parts(self, value: str | list[dict[str, Any]] | None) -> None:
        """Mistral's content while it thinks, and the plain text that goes on after it."""
        begun = "".join(self._texts.pop("content", ()))
        parts = self._message["content"] or ([{"type": "text", "text": begun}] if begun else [])
        parts += [{"type": "text", "text": value}] if isinstance(value, str) else value or []
        self._message["content"] = _bounded(parts)

    def _add_thinking_blocks(self, blocks: list[dict[str, Any]]) -> None:
        """Anthropic's signed thinking, through litellm: a signature ends a block."""
        kept = self._message.setdefault("thinking_blocks", [])
        for block in blocks:
            if not (block.get("type") == "thinking" and kept and _goes_on(kept[-1])):
                kept.append({})
                self._thoughts.append([])
            merge(kept[-1], _without(block, "thinking"))
            self._thoughts[-1].append(self._counted(block.get("thinking") or ""))
        _bounded(kept)

    def _counted(self, text: str) -> str:
        self._chars += len(text)
        if self._chars > MAX_TEXT_CHARS:
            raise bad_response(f"its text has more than {MAX_TEXT_CHARS} characters")
        return text


def _bounded(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if len(blocks) > MAX_BLOCKS:
        raise bad_response(f"it has more than {MAX_BLOCKS} blocks")
    return blocks


def _with_thoughts(block: dict[str, Any], pieces: list[str]) -> dict[str, Any]:
    return {**block, "thinking": "".join(pieces)} if block.get("type") == "thinking" else block


def _goes_on(block: Mapping[str, Any]) -> bool:
    return block.get("type") == "thinking" and not block.get("signature")


def _count(prompt: Any, completion: Any) -> TokenCount | None:
    return TokenCount(prompt, completion) if type(prompt) is type(completion) is int else None


def _timed_count(timings: Mapping[str, Any]) -> TokenCount | None:
    """llama.cpp's count, in which cached tokens of the prompt stand apart."""
    cached, read = timings.get("cache_n"), timings.get("prompt_n")
    whole = (cached if isinstance(cached, int) else 0) + read if isinstance(read, int) else None
    return _count(whole, timings.get("predicted_n"))


def _natural_end(message: Mapping[str, Any]) -> str:
    return "tool_calls" if message.get("tool_calls") else "stop"


def _without(fields: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key not in names}
