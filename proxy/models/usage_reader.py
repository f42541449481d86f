"""The usage that an answer tells of, found in its bytes as they pass by."""

import json
import re
from collections.abc import Mapping
from itertools import islice
from typing import Any

from policies.prices import CHARS_PER_TOKEN, expected_tokens
from proxy.models.sse import EventTooLongError, SSEDecoder

MAX_BYTES = 16 << 20
"""Of a longer answer in one piece only the end is read."""
TAIL_BYTES = 1 << 16
"""How much of it: usage stands there, after what was made."""
_PLACES = ("response", "message")
"""Where events of /v1/responses and /v1/messages have it, if not at their top."""
_MADE = ("choices", "output", "content")
"""Where an answer has what the model made."""
_USAGE = re.compile(r'"usage"\s*:\s*\{')
_MAX_TRIES = 16


class UsageReader:
    """Hears one answer, whole or as server-sent events, of whichever API."""

    def __init__(self, content_type: str) -> None:
        kind = content_type.lower()
        self.usage: dict[str, Any] = {}
        self.made = 0
        """About how many tokens an answer has that tells no usage: one for each event, else by its
        characters."""
        self._decoder = SSEDecoder() if kind.startswith("text/event-stream") else None
        self._is_json = "json" in kind
        self._body = bytearray()
        self._bytes = 0

    def feed(self, piece: bytes) -> None:
        """Take in what comes."""
        if self._decoder:
            try:
                self._hear(self._decoder.feed(piece))
            except EventTooLongError:  # it is passed on all the same, unread from here on
                self._decoder, self._is_json = None, False
        elif self._is_json:
            self._body += piece
            self._bytes += len(piece)
            if self._bytes > MAX_BYTES:
                del self._body[:-TAIL_BYTES]

    def end(self) -> None:
        """Nothing more comes."""
        if self._decoder:
            self._hear(self._decoder.flush())
        elif self._is_json:
            self._read_body()

    def _hear(self, events: list[bytes]) -> None:
        for event in events:
            self.made += 1
            if b'"usage"' in event:
                self._take(_read(event))

    def _read_body(self) -> None:
        value = _read(self._body) if self._bytes <= MAX_BYTES else _read_end(self._body)
        self._take(value)
        if value is None:  # too long, or cut off by a client that has what it wanted
            self.made = self._bytes // CHARS_PER_TOKEN
        elif isinstance(value, dict):
            self.made = expected_tokens([value.get(place) for place in _MADE])

    def _take(self, value: Any) -> None:
        if not isinstance(value, dict):
            return
        for holder in (value, *(value.get(place) for place in _PLACES)):
            usage = holder.get("usage") if isinstance(holder, Mapping) else None
            if isinstance(usage, Mapping):
                told = {key: each for key, each in usage.items() if each is not None}
                self.usage |= told  # Anthropic's last event counts only what was made


def _read(text: bytes | bytearray | str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _read_end(tail: bytes | bytearray) -> Any:
    """The end of an object, from its own usage on. One further inside, which a client may have
    written, is followed by too many brackets."""
    text = tail.decode(errors="replace")
    begins = [match.start() for match in _USAGE.finditer(text)]
    tried = (_read("{" + text[at:]) for at in islice(reversed(begins), _MAX_TRIES))
    return next((value for value in tried if value is not None), None)
