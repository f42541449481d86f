"""How full the context is: what the backend has counted, and an estimate of what came since."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from policies.context import PICTURE_BYTES, TOKENS_PER_BYTE, density
from proxy.agent.model import Message

_BESIDE_BYTES = 16
"""What a chat template writes around a message."""


class Gauge:
    """Of one run's history."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._tools = tools
        self._density = TOKENS_PER_BYTE
        self._tokens = 0
        self._counted: Sequence[Message] = ()
        """What these tokens are of."""
        self._bytes = 0
        """Of the same."""
        self._untaken: tuple[Sequence[Message], int, int] | None = None
        """What was counted last, as long as nobody has asked for anything: mostly nobody does."""

    def counted(self, messages: Sequence[Message], prompt: int, answer: int) -> None:
        """The backend has counted these messages and what it answered."""
        if prompt:
            self._untaken = messages, prompt, answer

    @cached_property
    def _tools_bytes(self) -> int:
        return len(json.dumps(self._tools)) if self._tools else 0

    def _take_in(self) -> None:
        if self._untaken is None:
            return
        (messages, prompt, answer), self._untaken = self._untaken, None
        known = len(self._counted) if _begins_with(messages, self._counted) else 0
        before = self._bytes if known else 0
        self._bytes = before + _bytes_of_all(messages[known:])
        self._density = density(prompt, self._tools_bytes + self._bytes)
        self._tokens = prompt + answer
        self._counted = messages

    def tokens(self, messages: Sequence[Message]) -> int:
        """Of a prompt of these messages and the tools."""
        self._take_in()
        known = len(self._counted)
        if known and _begins_with(messages, self._counted):
            # What follows is the answer, which is counted already, and what came after it.
            return self._tokens + self.estimate(messages[known + 1 :])
        return round(self._tools_bytes * self._density) + self.estimate(messages)

    def estimate(self, messages: Sequence[Message]) -> int:
        """Of these messages alone, by what the others had."""
        self._take_in()
        return round(_bytes_of_all(messages) * self._density)

    def chars(self, tokens: int) -> int:
        """How much text has so many tokens."""
        self._take_in()
        return int(tokens / self._density)


def _begins_with(messages: Sequence[Message], others: Sequence[Message]) -> bool:
    """Whether they are the same objects: a segment keeps those that it does not replace."""
    if len(messages) < len(others):
        return False
    return all(one is other for one, other in zip(messages, others, strict=False))


def _bytes_of_all(messages: Sequence[Message]) -> int:
    return sum(_bytes_of(message) for message in messages)


def _bytes_of(message: Message) -> int:
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    size = _BESIDE_BYTES + sum(_bytes_of_part(part) for part in parts if part)
    beside = {key: each for key, each in message.items() if key not in ("role", "content")}
    return size + (len(json.dumps(beside)) if beside else 0)


def _bytes_of_part(part: Any) -> int:
    text = part.get("text") if isinstance(part, dict) else part
    if not isinstance(text, str):
        return PICTURE_BYTES
    return len(text) if text.isascii() else len(text.encode(errors="replace"))
