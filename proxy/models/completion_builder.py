"""Parses a completion from a backend's JSON, or builds it from streamed chunks. The module does no
I/O.

Open it when the text or the tool calls of a completion are wrong.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from proxy.agent.events import ModelDelta, ReasoningDelta, TextDelta, TokenCount, ToolCallDelta
from proxy.agent.history import reasoning_texts, text_of
from proxy.agent.model import MAX_CALLS, Completion, CompletionStopped
from proxy.errors import AnswerTooLargeError
from proxy.models.backend_errors import bad_response_error, raise_backend_error_for_wrong_types

MAX_TEXT_CHARS = 64 << 20
"""Maximum number of characters of all text fields of one streamed completion together, without the
arguments of its tool calls."""
MAX_BLOCKS = 10_000
"""Maximum number of content parts, and of thinking blocks, in one streamed completion."""
COUNT_EVERY = 8
"""`CompletionBuilder.add` returns the server's running token count once in this many chunks."""
MAX_ARGUMENTS_CHARS = 64 << 20
"""Maximum number of characters of the arguments of all tool calls of one completion together."""
MAX_NAME_CHARS = 4096
"""Maximum length of the name of a function."""
MAX_FIELD_CHARS = 1 << 20
"""Maximum length of a text that `merge` builds. Each appended piece copies the whole text, so that
the time grows with the square of the length."""
_REPLACED_FIELDS = frozenset({"id", "index", "object", "role", "type", "format"})
"""Fields that every chunk repeats: a new value replaces the old value."""


def parse_completion(payload: Any) -> Completion:
    """Return the completion in a backend's decoded JSON response. Raises BackendError."""
    choices = payload.get("choices") if isinstance(payload, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise bad_response_error("it has no choices")
    message = choices[0].get("message")
    if not isinstance(message, dict):
        raise bad_response_error("its choice has no message")
    usage = payload.get("usage")
    return Completion(
        message=message,
        finish_reason=choices[0].get("finish_reason") or _default_finish_reason(message),
        usage=usage if isinstance(usage, dict) else {},
        choice=_without_fields(choices[0], "message", "finish_reason"),
        response=_without_fields(payload, "choices", "usage"),
    )


@contextmanager
def attach_partial_completion(build: Callable[[], Completion]) -> Iterator[None]:
    """If the block raises CompletionStopped, set its `partial_completion` to `build()`."""
    try:
        yield
    except CompletionStopped as stopped:
        stopped.partial_completion = build()
        raise


class CompletionBuilder:
    """Builds one completion from its streamed chunks."""

    def __init__(self) -> None:
        self.finish_reason: str | None = None
        self._message: dict[str, Any] = {"role": "assistant", "content": None}
        self._texts: dict[str, list[str]] = {}
        self._thoughts: list[list[str]] = []
        """The pieces of the text of each thinking block."""
        self._chars = 0
        """The number of characters in `_texts` and `_thoughts`."""
        self._calls = ToolCallBuilder()
        self._choice: dict[str, Any] = {}
        self._response: dict[str, Any] = {}
        self._usage: Mapping[str, Any] = {}
        self._chunks = 0

    def add(self, chunk: Any) -> list[ModelDelta]:
        """Add one chunk and return its deltas. Raises BackendError."""
        if not isinstance(chunk, dict):
            raise bad_response_error("a chunk is not a JSON object")
        count = None
        if isinstance(usage := chunk.get("usage"), dict) and usage:
            self._usage = usage
            count = _token_count(usage.get("prompt_tokens"), usage.get("completion_tokens"))
        elif isinstance(timings := chunk.get("timings"), dict):
            count = _llama_cpp_token_count(timings)
        self._response.update(_without_fields(chunk, "choices", "usage"))
        deltas: list[ModelDelta] = []
        with raise_backend_error_for_wrong_types("a chunk"):
            for choice in chunk.get("choices") or []:
                if isinstance(choice, dict) and choice.get("index") in (0, None):
                    deltas += self._add_choice(choice)
        self._chunks += 1
        if count and deltas and self._chunks % COUNT_EVERY == 0:
            deltas.append(count)
        return deltas

    def build(self) -> Completion:
        """Return the completion that consists of all chunks so far."""
        message = {**self._message, **{key: "".join(self._texts[key]) for key in self._texts}}
        if calls := self._calls.build():
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
        merge(self._choice, _without_fields(choice, "delta", "finish_reason"))
        delta = choice.get("delta") or {}
        self._add_to_message(delta)
        deltas: list[ModelDelta] = [ReasoningDelta(text) for text in reasoning_texts(delta)]
        call_deltas = self._calls.add(delta.get("tool_calls") or [])
        text, logprobs = text_of(delta), choice.get("logprobs")
        is_text = isinstance(delta.get("content"), str)
        # A token that is part of a character has an empty text, but has log probabilities.
        if text or (is_text and logprobs and not deltas and not call_deltas):
            deltas.append(TextDelta(text, logprobs))
        return deltas + call_deltas

    def _add_to_message(self, delta: Mapping[str, Any]) -> None:
        for key, value in delta.items():
            if key == "tool_calls":
                continue
            if key == "thinking_blocks":
                self._add_thinking_blocks(value or [])
            elif key == "content" and list in (type(value), type(self._message["content"])):
                self._add_parts(value)
            elif isinstance(value, str) and key not in _REPLACED_FIELDS:
                self._message.setdefault(key, None)
                self._texts.setdefault(key, []).append(self._check_char_count(value))
            else:
                merge(self._message, {key: value})

    def _add_parts(self, value: str | list[dict[str, Any]] | None) -> None:
        """Append a value to the content as a list of parts. If the content is text so far, the text
        becomes the first part. Mistral sends parts while the model thinks, and text afterwards."""
        text = "".join(self._texts.pop("content", ()))
        parts = self._message["content"] or ([{"type": "text", "text": text}] if text else [])
        parts += [{"type": "text", "text": value}] if isinstance(value, str) else value or []
        self._message["content"] = _check_block_count(parts)

    def _add_thinking_blocks(self, blocks: list[dict[str, Any]]) -> None:
        """Append to the message's thinking blocks, which litellm streams in Anthropic's format. A
        signature ends a block."""
        merged = self._message.setdefault("thinking_blocks", [])
        for block in blocks:
            if not (block.get("type") == "thinking" and merged and _is_unsigned(merged[-1])):
                merged.append({})
                self._thoughts.append([])
            merge(merged[-1], _without_fields(block, "thinking"))
            self._thoughts[-1].append(self._check_char_count(block.get("thinking") or ""))
        _check_block_count(merged)

    def _check_char_count(self, text: str) -> str:
        self._chars += len(text)
        if self._chars > MAX_TEXT_CHARS:
            raise AnswerTooLargeError(f"its text has more than {MAX_TEXT_CHARS} characters")
        return text


class ToolCallBuilder:
    """Builds the tool calls of one completion, however the backend numbers their pieces."""

    def __init__(self) -> None:
        self._calls: list[_ToolCall] = []
        self._chars = 0

    def add(self, pieces: list[dict[str, Any]]) -> list[ModelDelta]:
        """Add the `tool_calls` of one chunk and return their deltas. Once there are more than
        MAX_CALLS calls, further pieces are ignored. Raises AnswerTooLargeError. Fields of a wrong
        type raise other errors, which `raise_backend_error_for_wrong_types` converts."""
        deltas: list[ModelDelta] = []
        for piece in pieces:
            if len(self._calls) > MAX_CALLS:
                break  # the agent loop stops a completion that has more than MAX_CALLS calls
            call = self._call_of(piece)
            arguments = call.add(piece)
            self._chars += len(arguments)
            if self._chars > MAX_ARGUMENTS_CHARS:
                raise AnswerTooLargeError(
                    f"its calls have more than {MAX_ARGUMENTS_CHARS} characters"
                )
            if arguments or (piece.get("function") or {}).get("name"):
                deltas.append(ToolCallDelta(self._calls.index(call), call.name, arguments))
        return deltas

    def build(self) -> list[dict[str, Any]]:
        """Return the `tool_calls` of the assistant message."""
        return [call.build() for call in self._calls]

    def _call_of(self, piece: Mapping[str, Any]) -> "_ToolCall":
        index = piece.get("index")
        started = [call for call in self._calls if index is None or call.index == index]
        if started and not started[-1].is_ended_by(piece):
            return started[-1]
        call = _ToolCall(index)
        self._calls.append(call)
        return call


class _ToolCall:
    def __init__(self, index: int | None) -> None:
        self.index = index
        self.name = ""
        self._arguments: list[str] = []
        self._fields: dict[str, Any] = {}
        self._function: dict[str, Any] = {}

    def is_ended_by(self, piece: Mapping[str, Any]) -> bool:
        """Return True if the piece begins another call.

        Gemini gives all parallel calls the index 0, and some servers give no index. So a piece with
        a name begins another call if its id differs. Without ids and indexes, it begins another
        call if it follows arguments. A new id without a name does not begin a call, because old
        vLLM sends a new id with every piece.
        """
        if not (piece.get("function") or {}).get("name"):
            return False
        old_id, new_id = self._fields.get("id"), piece.get("id")
        if old_id and new_id:
            return bool(old_id != new_id)
        return piece.get("index") is None and bool(self._arguments)

    def add(self, piece: Mapping[str, Any]) -> str:
        """Add one piece and return its arguments."""
        function = dict(piece.get("function") or {})
        name, arguments = function.pop("name", None), function.pop("arguments", None)
        if name and name != self.name:  # some servers repeat the name in every piece
            if len(self.name) + len(name) > MAX_NAME_CHARS:
                raise AnswerTooLargeError(
                    f"a call names a function of over {MAX_NAME_CHARS} characters"
                )
            self.name += name
        merge(self._function, function)
        merged = ("index", "function", "id") if self._fields.get("id") else ("index", "function")
        merge(self._fields, _without_fields(piece, *merged))
        if not isinstance(arguments, str):
            return ""
        self._arguments.append(arguments)
        return arguments

    def build(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": "".join(self._arguments), **self._function}
        return {"type": "function", **self._fields, "function": function}


def _check_block_count(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if len(blocks) > MAX_BLOCKS:
        raise AnswerTooLargeError(f"it has more than {MAX_BLOCKS} blocks")
    return blocks


def _is_unsigned(block: Mapping[str, Any]) -> bool:
    return block.get("type") == "thinking" and not block.get("signature")


def _token_count(prompt: Any, completion: Any) -> TokenCount | None:
    return TokenCount(prompt, completion) if type(prompt) is type(completion) is int else None


def _llama_cpp_token_count(timings: Mapping[str, Any]) -> TokenCount | None:
    """Return the token count in llama.cpp's `timings`, whose `prompt_n` excludes cached tokens."""
    cached, prompt = timings.get("cache_n"), timings.get("prompt_n")
    if isinstance(prompt, int) and isinstance(cached, int):
        prompt += cached
    return _token_count(prompt, timings.get("predicted_n"))


def _default_finish_reason(message: Mapping[str, Any]) -> str:
    return "tool_calls" if message.get("tool_calls") else "stop"


def _without_fields(fields: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key not in names}


def merge(target: dict[str, Any], piece: Mapping[str, Any]) -> None:
    """Merge the fields of one streamed piece into `target`.

    Texts and lists are appended, objects are merged, other values replace the old value, and null
    changes nothing. In the fields in `_REPLACED_FIELDS`, each value other than null replaces the
    old value. Raises ValueError for a text longer than `MAX_FIELD_CHARS`.
    """
    for key, new in piece.items():
        target[key] = _merge_value(target.get(key), new, key in _REPLACED_FIELDS)


def _merge_value(old: Any, new: Any, is_replaced: bool) -> Any:
    if new is None:
        return old
    if isinstance(new, list):
        old = [] if not isinstance(old, list) or is_replaced else old
        old.extend(new)  # in place: there are thousands of log probabilities
        return old
    if isinstance(new, dict):
        old = {} if not isinstance(old, dict) or is_replaced else old
        merge(old, new)
        return old
    if isinstance(old, str) and isinstance(new, str) and not is_replaced:
        if len(old) + len(new) > MAX_FIELD_CHARS:
            raise ValueError(f"a field has more than {MAX_FIELD_CHARS} characters")
        return old + new
    return new
