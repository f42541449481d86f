"""A reply that arrives as server-sent events. Pure: bytes in, deltas out."""

from collections.abc import Iterable, Iterator
from typing import Any

from proxy.agent.events import ModelDelta
from proxy.agent.model import Reply
from proxy.models.assembly import Assembly
from proxy.models.backend_errors import backend_error, cut_off, is_error, parsed
from proxy.models.sse import SSEDecoder

_DONE = b"[DONE]"


class StreamedReply:
    """One streamed reply, from its first byte to its last."""

    def __init__(self, *, secret: str | None = None) -> None:
        self.done = False
        """Whether the backend said [DONE]; what follows means nothing."""
        self._decoder = SSEDecoder()
        self._assembly = Assembly()
        self._secret = secret

    def feed(self, piece: bytes) -> Iterator[ModelDelta]:
        """What these bytes add. Raises BackendError, after the deltas that came before it."""
        return self._deltas(self._decoder.feed(piece))

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
        chunk = parsed(event)
        if is_error(chunk):
            raise backend_error(chunk, status=None, secret=self._secret)
        return chunk
