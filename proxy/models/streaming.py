"""Completions that arrive as server-sent events, and the usage in relayed responses. The module
does no I/O.

`CompletionStream` decodes a streamed completion into deltas, `StreamSupport` remembers whether and
how a server streams, and `UsageReader` finds the usage in the bytes of a relayed response.
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from policies.json_bounds import JSONBoundsCheck, TooMuchJSONError, is_small
from policies.prices import CHARS_PER_TOKEN, estimate_prompt_tokens
from proxy.agent.events import ModelDelta
from proxy.agent.model import Completion
from proxy.errors import AnswerTooLargeError, BackendError
from proxy.models.backend_errors import (
    backend_error,
    connection_lost_error,
    is_error,
    parse_json,
)
from proxy.models.completion_builder import CompletionBuilder

_DONE = b"[DONE]"
MAX_COMPLETION_BYTES = 512 << 20
"""Maximum size of a streamed completion: log probabilities take kilobytes per token."""
_REFUSED_STATUSES = frozenset({400, 404, 405, 422, 501})
_REFUSED_WORDS = re.compile(
    r"\bstream(?:ing|ed)?\b[^.]{0,60}\b(?:not|un) ?(?:supported|available|allowed|implemented)\b"
    r"|\b(?:not|cannot|can't|doesn't) (?:support |allow )?stream",
    re.IGNORECASE,
)
_COMBINATION_WORDS = re.compile(r"\b(?:with|when|while|if|together)\b", re.IGNORECASE)
REFUSAL_HOLDS_S = 600.0
"""Seconds for which a refusal to stream a model is remembered."""
_MAX_REFUSED_MODELS = 1000
_PARAMETER_WORDS = re.compile(r"log_?probs|tool|\bn\b", re.IGNORECASE)
_RUNNING_USAGE_SERVERS = frozenset({"vllm", "sglang"})
"""The `owned_by` of the models that vLLM and SGLang list. These servers can send the usage with
each chunk."""
_TIMINGS_SERVER = "llamacpp"
"""The `owned_by` of the models that llama.cpp lists, which can send `timings` with each token."""
MAX_EVENT_BYTES = 32 << 20
"""Maximum size of a server-sent event."""
MAX_USAGE_BYTES = 16 << 20
"""Maximum size of a JSON response that is parsed as a whole for its usage. Of a larger response,
only the end is parsed."""
_TAIL_BYTES = 1 << 16
"""Number of bytes that are parsed at the end of a larger response. The usage follows the generated
text."""
_USAGE_PARENTS = ("response", "message")
"""In events of /v1/responses and /v1/messages, the fields whose object contains the usage."""
_GENERATED_TEXT_FIELDS = ("choices", "output", "content")
"""The fields that contain the generated text in responses of /v1/chat/completions, /v1/responses
and /v1/messages."""
_USAGE = re.compile(r'"usage"\s*:\s*\{')
_MAX_PARSE_ATTEMPTS = 16


def refuses_to_stream(error: BackendError) -> bool:
    """Return True if the error says that the server does not stream this model."""
    if error.status not in _REFUSED_STATUSES or _PARAMETER_WORDS.search(error.message):
        return False
    return _REFUSED_WORDS.search(error.message) is not None


class StreamSupport:
    """Remembers which models a server refuses to stream, and which token counts it can send."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._refused_until: dict[str, float] = {}
        """The time until which each refused model is not streamed, oldest refusal first."""
        self._server_kinds: frozenset[str] = frozenset()

    def is_supported(self, model: str) -> bool:
        """Return False if the server has refused to stream the model in the last
        `REFUSAL_HOLDS_S`."""
        return self._refused_until.get(model, -1.0) < self._now()

    def note_refusal(self, model: str, error: BackendError) -> None:
        """Remember that the server refused to stream the model, unless the refusal is about a
        combination with another parameter."""
        if _COMBINATION_WORDS.search(error.message):
            return
        self._refused_until.pop(model, None)
        while len(self._refused_until) >= _MAX_REFUSED_MODELS:
            del self._refused_until[next(iter(self._refused_until))]
        self._refused_until[model] = self._now() + REFUSAL_HOLDS_S

    def note_server_kind(self, models: Iterable[Mapping[str, Any]]) -> None:
        """Remember the kind of the server, from the `owned_by` of the models that it lists."""
        self._server_kinds = frozenset(str(model.get("owned_by")) for model in models)

    def request_body(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the body of a streamed request.

        The body requests running token counts only from servers that are known to send them: other
        servers refuse unknown fields.
        """
        options = {**(body.get("stream_options") or {}), "include_usage": True}
        if self._server_kinds & _RUNNING_USAGE_SERVERS:
            options["continuous_usage_stats"] = True
        streamed = {**body, "stream": True, "stream_options": options}
        if _TIMINGS_SERVER in self._server_kinds:
            streamed["timings_per_token"] = True
        return streamed


class CompletionStream:
    """Decodes the bytes of one streamed completion, first into deltas, then into a Completion."""

    def __init__(self, *, secret: str | None = None) -> None:
        self.is_done = False
        """True once the backend has sent [DONE]. Later events are ignored."""
        self._decoder = SSEDecoder()
        self._bytes = 0
        self._builder = CompletionBuilder()
        self._secret = secret

    def feed(self, piece: bytes) -> Iterator[ModelDelta]:
        """Return an iterator over the deltas in these bytes.

        Raises AnswerTooLargeError at once if the stream or an event is too long. The iterator
        raises BackendError after the deltas that precede the error.
        """
        self._bytes += len(piece)
        if self._bytes > MAX_COMPLETION_BYTES:
            raise AnswerTooLargeError(f"it is longer than {MAX_COMPLETION_BYTES >> 20} MiB")
        try:
            events = self._decoder.feed(piece)
        except EventTooLongError as error:
            raise AnswerTooLargeError(str(error)) from error
        return self._deltas(events)

    def end(self) -> Iterator[ModelDelta]:
        """Yield the deltas that the end of the stream completes. Raises BackendError if the
        completion is incomplete."""
        yield from self._deltas(self._decoder.flush())
        if not self.is_done and self._builder.finish_reason is None:
            raise connection_lost_error()

    def build(self) -> Completion:
        """Return the completion so far. Until the backend has sent a finish reason, the finish
        reason is `tool_calls` if there are calls, else `stop`."""
        return self._builder.build()

    def _deltas(self, events: Iterable[bytes]) -> Iterator[ModelDelta]:
        for event in events:
            if event.strip() == _DONE:
                self.is_done = True
            if self.is_done:
                return
            yield from self._builder.add(self._parse_chunk(event))

    def _parse_chunk(self, event: bytes) -> Any:
        if not is_small(event):
            try:
                JSONBoundsCheck().check(event)
            except TooMuchJSONError as error:
                raise AnswerTooLargeError(f"an event has more than {error}") from error
        chunk = parse_json(event)
        if is_error(chunk):
            raise backend_error(chunk, status=None, secret=self._secret)
        return chunk


class EventTooLongError(Exception):
    """An event is longer than `MAX_EVENT_BYTES`."""


class SSEDecoder:
    """Decodes a stream of server-sent events, split at any byte, into the `data` of each event."""

    def __init__(self) -> None:
        self._unfinished_line = bytearray()
        self._data: list[bytes] = []
        self._data_bytes = 0
        """The length of the lines in `_data`, with their field names."""

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the `data` of the events that these bytes complete. Raises EventTooLongError."""
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
        return [event for line in lines if (event := self._add_line(line)) is not None]

    def flush(self) -> list[bytes]:
        """Return the event that the end of the stream completes, if any: some servers omit the last
        empty line. An unfinished line is ignored."""
        event = self._add_line(b"")
        return [] if event is None else [event]

    def _add_line(self, line: bytes) -> bytes | None:
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
    """Reads the usage from the JSON or the server-sent events of one response of
    /v1/chat/completions, /v1/responses or /v1/messages."""

    def __init__(self, content_type: str) -> None:
        kind = content_type.lower()
        self.usage: dict[str, Any] = {}
        self.estimated_tokens = 0
        """An estimate of the generated tokens, for a response without usage. For server-sent
        events: the number of events. For JSON: an estimate from the length of the generated text,
        or of the whole body if it cannot be parsed."""
        self._decoder = SSEDecoder() if kind.startswith("text/event-stream") else None
        self._is_json = "json" in kind
        self._body = bytearray()
        self._bytes = 0

    def feed(self, piece: bytes) -> None:
        """Read the next bytes of the response."""
        if self._decoder:
            try:
                self._read_events(self._decoder.feed(piece))
            except EventTooLongError:  # the rest of the response is relayed unread
                self._decoder, self._is_json = None, False
        elif self._is_json:
            self._body += piece
            self._bytes += len(piece)
            if self._bytes > MAX_USAGE_BYTES:
                del self._body[:-_TAIL_BYTES]

    def end(self) -> None:
        """Read the usage from the bytes that are still buffered at the end of the response."""
        if self._decoder:
            self._read_events(self._decoder.flush())
        elif self._is_json:
            self._read_body()

    def _read_events(self, events: list[bytes]) -> None:
        for event in events:
            self.estimated_tokens += 1
            if b'"usage"' in event:
                self._add_usage(_parse_json_or_none(event))

    def _read_body(self) -> None:
        is_complete = self._bytes <= MAX_USAGE_BYTES
        value = _parse_json_or_none(self._body) if is_complete else _parse_from_usage(self._body)
        self._add_usage(value)
        if value is None:  # too long, or the client disconnected
            self.estimated_tokens = self._bytes // CHARS_PER_TOKEN
        elif isinstance(value, dict):
            self.estimated_tokens = estimate_prompt_tokens(
                [value.get(name) for name in _GENERATED_TEXT_FIELDS]
            )

    def _add_usage(self, value: Any) -> None:
        if not isinstance(value, dict):
            return
        for parent in (value, *(value.get(name) for name in _USAGE_PARENTS)):
            usage = parent.get("usage") if isinstance(parent, Mapping) else None
            if isinstance(usage, Mapping):
                # Anthropic's last event has only the output tokens.
                self.usage |= {key: value for key, value in usage.items() if value is not None}


def _parse_json_or_none(text: bytes | bytearray | str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _parse_from_usage(tail: bytes | bytearray) -> Any:
    """Parse the end of a JSON object from its `usage` field on, or return None. A nested `usage`,
    which may be the client's text, does not parse: more closing brackets follow it than the parsed
    text opens."""
    text = tail.decode(errors="replace")
    starts = [match.start() for match in _USAGE.finditer(text)]
    parsed = (
        _parse_json_or_none("{" + text[at:]) for at in islice(reversed(starts), _MAX_PARSE_ATTEMPTS)
    )
    return next((value for value in parsed if value is not None), None)
