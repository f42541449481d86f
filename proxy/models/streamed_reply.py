"""A reply that arrives as server-sent events. Pure: bytes in, deltas out."""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from policies.json_bounds import JSONBounds, TooMuchJSONError, is_small
from proxy.agent.events import ModelDelta
from proxy.agent.model import Reply
from proxy.errors import BackendError
from proxy.models.assembly import Assembly
from proxy.models.backend_errors import (
    backend_error,
    bad_response,
    cut_off,
    is_error,
    parsed,
)
from proxy.models.sse import EventTooLongError, SSEDecoder

_DONE = b"[DONE]"
MAX_REPLY_BYTES = 512 << 20
"""Of one streamed reply: log probabilities take kilobytes a token."""
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
"""Servers, by the `owned_by` of the models they list, that count tokens while they stream."""


def refuses_streams(error: BackendError) -> bool:
    """Return True if the error says that the server does not stream this model."""
    if error.status not in _REFUSED_STATUSES or _OF_A_PARAMETER.search(error.message):
        return False
    return _REFUSED_WORDS.search(error.message) is not None


class Streaming:
    """How one server streams, as far as is known."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._refused: dict[str, float] = {}
        """Until when each model counts as one that does not stream; oldest first."""
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
        """Take in the models that the server lists."""
        self._owners = frozenset(str(each.get("owned_by")) for each in listed)

    def request(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the body of a streamed request, which asks for running token counts where the
        server knows them: others refuse fields that they do not know."""
        options = {**(body.get("stream_options") or {}), "include_usage": True}
        if self._owners & _COUNTS_USAGE:
            options["continuous_usage_stats"] = True
        asked = {**body, "stream": True, "stream_options": options}
        if _COUNTS_TIMINGS in self._owners:
            asked["timings_per_token"] = True
        return asked


def _require_bounds(event: bytes) -> None:
    """Raise BackendError for more JSON than is decoded at once."""
    if not is_small(event):
        try:
            JSONBounds().check(event)
        except TooMuchJSONError as error:
            raise bad_response(f"an event has more than {error}") from error


class StreamedReply:
    """One streamed reply, from its first byte to its last."""

    def __init__(self, *, secret: str | None = None) -> None:
        self.done = False
        """Whether the backend said [DONE]; what follows means nothing."""
        self._decoder = SSEDecoder()
        self._bytes = 0
        self._assembly = Assembly()
        self._secret = secret

    def feed(self, piece: bytes) -> Iterator[ModelDelta]:
        """What these bytes add. Raises BackendError, after the deltas that came before it."""
        self._bytes += len(piece)
        if self._bytes > MAX_REPLY_BYTES:
            raise bad_response(f"it is longer than {MAX_REPLY_BYTES >> 20} MiB")
        try:
            events = self._decoder.feed(piece)
        except EventTooLongError as error:
            raise bad_response(str(error)) from error
        return self._deltas(events)

    def end(self) -> Iterator[ModelDelta]:
        """What the end of the stream adds. Raises BackendError where the reply is not complete."""
        yield from self._deltas(self._decoder.flush())
        if not self.done and self._assembly.finish_reason is None:
            raise cut_off()

    def reply(self) -> Reply:
        """The whole reply, once the stream has ended."""
        return self._assembly.reply()

    def _deltas(self, events: Iterable[bytes]) -> Iterator[ModelDelta]:
        for event in events:
            if event.strip() == _DONE:
                self.done = True
            if self.done:
                return
            yield from self._assembly.add(self._chunk(event))

    def _chunk(self, event: bytes) -> Any:
        _require_bounds(event)
        chunk = parsed(event)
        if is_error(chunk):
            raise backend_error(chunk, status=None, secret=self._secret)
        return chunk
