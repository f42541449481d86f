"""Reads a completion from a backend's JSON, or assembles it from streamed chunks. Pure.

Open it when the text or the tool calls of a backend's reply come out wrong.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from proxy.agent.events import ModelDelta, ReasoningDelta, TextDelta, TokenCount, ToolCallDelta
from proxy.agent.history import reasoning_texts, text_of
from proxy.agent.model import MAX_CALLS, Completion, CompletionStopped
from proxy.models.backend_errors import bad_response, expected

MAX_TEXT_CHARS = 64 << 20
"""The most characters in all text fields of one streamed reply together, without the arguments of
its tool calls."""
MAX_BLOCKS = 10_000
"""The most content parts, and the most thinking blocks, in one streamed reply."""
COUNT_EVERY = 8
"""One chunk in this many passes on the server's running token count."""
MAX_ARGUMENTS_CHARS = 64 << 20
"""The most characters in the arguments of all tool calls of one reply together."""
MAX_NAME_CHARS = 4096
"""The longest name of a function."""
MAX_FIELD_CHARS = 1 << 20
"""The longest text that `merge` puts together. Adding a piece copies the whole text, so a longer
one would cost quadratic time."""
REPLACED = frozenset({"id", "index", "object", "role", "type", "format"})
"""Fields that every chunk repeats: a new value replaces the old one."""


def reply_of(completion: Any) -> Completion:
    """Return the reply in a chat completion that came whole. Raises BackendError."""
    choices = completion.get("choices") if isinstance(completion, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise bad_response("it has no choices")
    message = choices[0].get("message")
    if not isinstance(message, dict):
        raise bad_response("its choice has no message")
    usage = completion.get("usage")
    return Completion(
        message=message,
        finish_reason=choices[0].get("finish_reason") or _default_finish_reason(message),
        usage=usage if isinstance(usage, dict) else {},
        choice=_without(choices[0], "message", "finish_reason"),
        response=_without(completion, "choices", "usage"),
    )


def deltas_of(reply: Completion) -> list[ModelDelta]:
    """Return a whole reply as deltas, for a caller that asked for a stream."""
    message = reply.message
    deltas: list[ModelDelta] = [ReasoningDelta(thought) for thought in reasoning_texts(message)]
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
def reply_when_stopped(reply: Callable[[], Completion]) -> Iterator[None]:
    """Put the `reply` so far into a CompletionStopped that passes through."""
    try:
        yield
    except CompletionStopped as stopped:
        stopped.reply = reply()
        raise


class Assembly:
    """Assembles one reply from its streamed chunks."""

    def __init__(self) -> None:
        self.finish_reason: str | None = None
        self._message: dict[str, Any] = {"role": "assistant", "content": None}
        self._texts: dict[str, list[str]] = {}
        self._thoughts: list[list[str]] = []
        """The pieces of each thinking block's text."""
        self._chars = 0
        """The characters in `_texts` and `_thoughts`."""
        self._calls = ToolCallAssembly()
        self._choice: dict[str, Any] = {}
        self._response: dict[str, Any] = {}
        self._usage: Mapping[str, Any] = {}
        self._chunks = 0

    def add(self, chunk: Any) -> list[ModelDelta]:
        """Add one chunk and return its deltas. Raises BackendError."""
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

    def reply(self) -> Completion:
        """Return the reply made of all chunks so far."""
        message = {**self._message, **{key: "".join(self._texts[key]) for key in self._texts}}
        if calls := self._calls.whole():
            message["tool_calls"] = calls
        if blocks := self._message.get("thinking_blocks"):
            message["thinking_blocks"] = [
                {**block, "thinking": "".join(pieces)} if block.get("type") == "thinking" else block
                for block, pieces in zip(blocks, self._thoughts, strict=True)
            ]
        response = dict(self._response)
        if "object" in response:
            response["object"] = "chat.completion"
        return Completion(
            message=message,
            finish_reason=self.finish_reason or _default_finish_reason(message),
            usage=self._usage,
            choice=self._choice,
            response=response,
        )

    def _add_choice(self, choice: Mapping[str, Any]) -> list[ModelDelta]:
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        merge(self._choice, _without(choice, "delta", "finish_reason"))
        delta = choice.get("delta") or {}
        self._add_to_message(delta)
        pieces: list[ModelDelta] = [ReasoningDelta(text) for text in reasoning_texts(delta)]
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
        """Add to a content that is a list: Mistral sends one while it thinks, and plain text
        after."""
        begun = "".join(self._texts.pop("content", ()))
        parts = self._message["content"] or ([{"type": "text", "text": begun}] if begun else [])
        parts += [{"type": "text", "text": value}] if isinstance(value, str) else value or []
        self._message["content"] = _bounded(parts)

    def _add_thinking_blocks(self, blocks: list[dict[str, Any]]) -> None:
        """Add to Anthropic's signed thinking, as litellm streams it: a signature ends a block."""
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


class ToolCallAssembly:
    """Assembles the tool calls of one reply, however the backend numbers their pieces."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._chars = 0

    def add(self, pieces: list[dict[str, Any]]) -> list[ModelDelta]:
        """Add the `tool_calls` of one chunk and return their deltas. Raises BackendError."""
        deltas: list[ModelDelta] = []
        for piece in pieces:
            if len(self._calls) > MAX_CALLS:
                break  # the loop ends a reply with one call too many
            call = self._call_of(piece)
            arguments = call.add(piece)
            self._chars += len(arguments)
            if self._chars > MAX_ARGUMENTS_CHARS:
                raise bad_response(f"its calls have more than {MAX_ARGUMENTS_CHARS} characters")
            if arguments or (piece.get("function") or {}).get("name"):
                deltas.append(ToolCallDelta(self._calls.index(call), call.name, arguments))
        return deltas

    def whole(self) -> list[dict[str, Any]]:
        """Return the calls as an assistant message lists them."""
        return [call.whole() for call in self._calls]

    def _call_of(self, piece: Mapping[str, Any]) -> "_Call":
        index = piece.get("index")
        started = [call for call in self._calls if index is None or call.index == index]
        if started and not started[-1].is_over_before(piece):
            return started[-1]
        call = _Call(index)
        self._calls.append(call)
        return call


class _Call:
    def __init__(self, index: int | None) -> None:
        self.index = index
        self.name = ""
        self._arguments: list[str] = []
        self._fields: dict[str, Any] = {}
        self._function: dict[str, Any] = {}

    def is_over_before(self, piece: Mapping[str, Any]) -> bool:
        """Return True if the piece opens another call. Gemini numbers all parallel calls 0 and some
        servers number none: there a name with another id, or a name after arguments, opens a call.
        An id alone does not: old vLLM sends a new one with every piece."""
        if not (piece.get("function") or {}).get("name"):
            return False
        old_id, new_id = self._fields.get("id"), piece.get("id")
        if old_id and new_id:
            return bool(old_id != new_id)
        return piece.get("index") is None and bool(self._arguments)

    def add(self, piece: Mapping[str, Any]) -> str:
        """Add one piece and return the arguments in it."""
        function = dict(piece.get("function") or {})
        name, arguments = function.pop("name", None), function.pop("arguments", None)
        if name and name != self.name:  # some servers repeat the name in every piece
            if len(self.name) + len(name) > MAX_NAME_CHARS:
                raise bad_response(f"a call names a function of over {MAX_NAME_CHARS} characters")
            self.name += name
        merge(self._function, function)
        known = ("index", "function", "id") if self._fields.get("id") else ("index", "function")
        merge(self._fields, {key: piece[key] for key in piece if key not in known})
        if not isinstance(arguments, str):
            return ""
        self._arguments.append(arguments)
        return arguments

    def whole(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": "".join(self._arguments), **self._function}
        return {"type": "function", **self._fields, "function": function}


def _bounded(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if len(blocks) > MAX_BLOCKS:
        raise bad_response(f"it has more than {MAX_BLOCKS} blocks")
    return blocks


def _goes_on(block: Mapping[str, Any]) -> bool:
    return block.get("type") == "thinking" and not block.get("signature")


def _count(prompt: Any, completion: Any) -> TokenCount | None:
    return TokenCount(prompt, completion) if type(prompt) is type(completion) is int else None


def _timed_count(timings: Mapping[str, Any]) -> TokenCount | None:
    """Return llama.cpp's count, which lists cached prompt tokens separately."""
    cached, read = timings.get("cache_n"), timings.get("prompt_n")
    whole = (cached if isinstance(cached, int) else 0) + read if isinstance(read, int) else None
    return _count(whole, timings.get("predicted_n"))


def _default_finish_reason(message: Mapping[str, Any]) -> str:
    return "tool_calls" if message.get("tool_calls") else "stop"


def _without(fields: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key not in names}


def merge(whole: dict[str, Any], piece: Mapping[str, Any]) -> None:
    """Merge the fields of one streamed piece into the whole: texts, lists and objects are
    continued, other values replaced, and null changes nothing. Raises ValueError for a text longer
    than `MAX_FIELD_CHARS`."""
    for key, new in piece.items():
        whole[key] = _merged(whole.get(key), new, key in REPLACED)


def _merged(old: Any, new: Any, replaced: bool) -> Any:
    if new is None:
        return old
    if isinstance(new, list):
        old = [] if not isinstance(old, list) or replaced else old
        old.extend(new)  # in place: log probabilities come by the thousand
        return old
    if isinstance(new, dict):
        old = {} if not isinstance(old, dict) or replaced else old
        merge(old, new)
        return old
    if isinstance(old, str) and isinstance(new, str) and not replaced:
        if len(old) + len(new) > MAX_FIELD_CHARS:
            raise ValueError(f"a field has more than {MAX_FIELD_CHARS} characters")
        return old + new
    return new
