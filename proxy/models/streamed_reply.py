"""Replies that arrive as server-sent events, and the usage in passed-on answers. Pure.

`CompletionStream` turns a streamed completion's bytes into deltas, `StreamSupport` remembers how a
server streams, and `UsageReader` finds the usage in the bytes of an answer that is passed on.
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from policies.json_bounds import JSONBounds, TooMuchJSONError, is_small
from policies.prices import CHARS_PER_TOKEN, estimate_prompt_tokens
from proxy.agent.events import ModelDelta
from proxy.agent.model import Completion
from proxy.errors import BackendError
from proxy.models.assembly import Assembly
from proxy.models.backend_errors import backend_error, bad_response, cut_off, is_error, parsed

_DONE = b"[DONE]"
MAX_REPLY_BYTES = 512 << 20
"""The longest streamed reply: log probabilities take kilobytes a token."""
_REFUSED_STATUSES = frozenset({400, 404, 405, 422, 501})
_REFUSED_WORDS = re.compile(
    r"\bstream(?:ing|ed)?\b[^.]{0,60}\b(?:not|un) ?(?:supported|available|allowed|implemented)\b"
    r"|\b(?:not|cannot|can't|doesn't) (?:support |allow )?stream",
    re.IGNORECASE,
)
_OF_THE_REQUEST = re.compile(r"\b(?:with|when|while|if|together)\b", re.IGNORECASE)
REFUSAL_HOLDS_S = 600.0
_MAX_REFUSED = 1000
_OF_A_PARAMETER = re.compile(r"log_?probs|tool|\bn\b", re.IGNORECASE)
_COUNTS_USAGE = frozenset({"vllm", "sglang"})
_COUNTS_TIMINGS = "llamacpp"
"""Servers that count tokens while they stream, by the `owned_by` of the models they list."""
MAX_EVENT_BYTES = 32 << 20
"""The longest server-sent event."""
MAX_USAGE_BYTES = 16 << 20
"""The longest JSON answer whose usage is read from the whole; of a longer one only the end is
kept."""
_TAIL_BYTES = 1 << 16
"""How much of the end is kept: the usage follows the generated text."""
_USAGE_HOLDERS = ("response", "message")
"""Fields that hold the usage in events of /v1/responses and /v1/messages, if not the top level."""
_GENERATED = ("choices", "output", "content")
"""Fields that hold the generated text, by API."""
_USAGE = re.compile(r'"usage"\s*:\s*\{')
_MAX_TRIES = 16


def refuses_streams(error: BackendError) -> bool:
    """Return True if the error says that the server does not stream this model."""
    if error.status not in _REFUSED_STATUSES or _OF_A_PARAMETER.search(error.message):
        return False
    return _REFUSED_WORDS.search(error.message) is not None


class StreamSupport:
    """Remembers which models a server streams, and which token counts it can send."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._refused: dict[str, float] = {}
        """The time until which each model counts as not streamed, oldest first."""
        self._owners: frozenset[str] = frozenset()

    def is_supported(self, model: str) -> bool:
        """Return False for a while after the server has refused to stream the model."""
        return self._refused.get(model, -1.0) < self._now()

    def note_refusal(self, model: str, error: BackendError) -> None:
        """Note that the server refused to stream the model, unless it was for another parameter of
        the request."""
        if _OF_THE_REQUEST.search(error.message):
            return
        self._refused.pop(model, None)
        while len(self._refused) >= _MAX_REFUSED:
            del self._refused[next(iter(self._refused))]
        self._refused[model] = self._now() + REFUSAL_HOLDS_S

    def learn(self, listed: Iterable[Mapping[str, Any]]) -> None:
        """Note which kind of server lists these models."""
        self._owners = frozenset(str(each.get("owned_by")) for each in listed)

    def request(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the body of a streamed request. It asks for running token counts only if the
        server is known to have them: others refuse unknown fields."""
        options = {**(body.get("stream_options") or {}), "include_usage": True}
        if self._owners & _COUNTS_USAGE:
            options["continuous_usage_stats"] = True
        asked = {**body, "stream": True, "stream_options": options}
        if _COUNTS_TIMINGS in self._owners:
            asked["timings_per_token"] = True
        return asked


class CompletionStream:
    """One streamed completion, from its first byte to its last."""

    def __init__(self, *, secret: str | None = None) -> None:
        self.done = False
        """True once the backend has sent [DONE]; anything after it is ignored."""
        self._decoder = SSEDecoder()
        self._bytes = 0
        self._assembly = Assembly()
        self._secret = secret

    def feed(self, piece: bytes) -> Iterator[ModelDelta]:
        """Return the deltas in these bytes. Raises BackendError, after the deltas before the
        fault."""
        self._bytes += len(piece)
        if self._bytes > MAX_REPLY_BYTES:
            raise bad_response(f"it is longer than {MAX_REPLY_BYTES >> 20} MiB")
        try:
            events = self._decoder.feed(piece)
        except EventTooLongError as error:
            raise bad_response(str(error)) from error
        return self._deltas(events)

    def end(self) -> Iterator[ModelDelta]:
        """Return the deltas that the end of the stream completes. Raises BackendError if the reply
        is not complete."""
        yield from self._deltas(self._decoder.flush())
        if not self.done and self._assembly.finish_reason is None:
            raise cut_off()

    def reply(self) -> Completion:
        """Return the whole reply, once the stream has ended."""
        return self._assembly.reply()

    def _deltas(self, events: Iterable[bytes]) -> Iterator[ModelDelta]:
        for event in events:
            if event.strip() == _DONE:
                self.done = True
            if self.done:
                return
            yield from self._assembly.add(self._chunk(event))

    def _chunk(self, event: bytes) -> Any:
        if not is_small(event):
            try:
                JSONBounds().check(event)
            except TooMuchJSONError as error:
                raise bad_response(f"an event has more than {error}") from error
        chunk = parsed(event)
        if is_error(chunk):
            raise backend_error(chunk, status=None, secret=self._secret)
        return chunk


class EventTooLongError(Exception):
    """An event is longer than `MAX_EVENT_BYTES`."""


class SSEDecoder:
    """Decodes server-sent events: bytes, split at any place, into the `data` of each event. Raises
    EventTooLongError."""

    def __init__(self) -> None:
        self._unfinished_line = bytearray()
        self._data: list[bytes] = []
        self._data_bytes = 0
        """The length of the lines whose values are in `_data`."""

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the events that these bytes complete."""
        if self._data_bytes + len(self._unfinished_line) + len(piece) > MAX_EVENT_BYTES:
            raise EventTooLongError(f"an event is longer than {MAX_EVENT_BYTES >> 20} MiB")
        head, newline, tail = piece.rpartition(b"\n")
        if not newline:
            self._unfinished_line += tail
            return []
        if self._unfinished_line:
            head = bytes(self._unfinished_line) + head
            self._unfinished_line.clear()
        if tail:
            self._unfinished_line += tail
        lines = head.split(b"\n")
        return [event for line in lines if (event := self._event_ended_by(line)) is not None]

    def flush(self) -> list[bytes]:
        """Return the event that the end of the stream completes: some servers omit the last empty
        line. A line without a newline was cut off and is ignored."""
        event = self._event_ended_by(b"")
        return [] if event is None else [event]

    def _event_ended_by(self, line: bytes) -> bytes | None:
        line = line.removesuffix(b"\r")
        if line:
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
                self._data_bytes += len(line) + 1
            return None
        if not self._data:
            return None
        event = b"\n".join(self._data)
        self._data, self._data_bytes = [], 0
        return event


class UsageReader:
    """Reads the usage of one answer, JSON or server-sent events, of any of the APIs."""

    def __init__(self, content_type: str) -> None:
        kind = content_type.lower()
        self.usage: dict[str, Any] = {}
        self.made = 0
        """An estimate of the generated tokens, for an answer without usage: one for each event, or
        by the characters of a JSON answer."""
        self._decoder = SSEDecoder() if kind.startswith("text/event-stream") else None
        self._is_json = "json" in kind
        self._body = bytearray()
        self._bytes = 0

    def feed(self, piece: bytes) -> None:
        """Read the next bytes."""
        if self._decoder:
            try:
                self._read_events(self._decoder.feed(piece))
            except EventTooLongError:  # the rest of the answer is passed on unread
                self._decoder, self._is_json = None, False
        elif self._is_json:
            self._body += piece
            self._bytes += len(piece)
            if self._bytes > MAX_USAGE_BYTES:
                del self._body[:-_TAIL_BYTES]

    def end(self) -> None:
        """Read the end of the answer."""
        if self._decoder:
            self._read_events(self._decoder.flush())
        elif self._is_json:
            self._read_body()

    def _read_events(self, events: list[bytes]) -> None:
        for event in events:
            self.made += 1
            if b'"usage"' in event:
                self._take(_read(event))

    def _read_body(self) -> None:
        value = _read(self._body) if self._bytes <= MAX_USAGE_BYTES else _read_end(self._body)
        self._take(value)
        if value is None:  # too long, or cut off by the client
            self.made = self._bytes // CHARS_PER_TOKEN
        elif isinstance(value, dict):
            self.made = estimate_prompt_tokens([value.get(place) for place in _GENERATED])

    def _take(self, value: Any) -> None:
        if not isinstance(value, dict):
            return
        for holder in (value, *(value.get(place) for place in _USAGE_HOLDERS)):
            usage = holder.get("usage") if isinstance(holder, Mapping) else None
            if isinstance(usage, Mapping):
                told = {key: each for key, each in usage.items() if each is not None}
                self.usage |= told  # Anthropic's last event has only the output tokens


def _read(text: bytes | bytearray | str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _read_end(tail: bytes | bytearray) -> Any:
    """Parse the end of an object from its `usage` field on. A `usage` further inside, which a
    client may have written, fails to parse: too many brackets follow it."""
    text = tail.decode(errors="replace")
    begins = [match.start() for match in _USAGE.finditer(text)]
    tried = (_read("{" + text[at:]) for at in islice(reversed(begins), _MAX_TRIES))
    return next((value for value in tried if value is not None), None)
