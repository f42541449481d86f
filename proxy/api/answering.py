"""Responses that tell a client of a run, in whatever dialect: in one piece, or as it goes on."""

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

import anyio
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from proxy.agent.events import Event
from proxy.agent.task import Result
from proxy.api.connection import services, while_connected
from proxy.api.json_response import JSON
from proxy.errors import ProxyError, internal_error
from proxy.runs.recording import Recording
from proxy.runs.run import MAX_BEHIND, Listener
from proxy.wire.terms import Terms, read_terms

SEND_TIMEOUT_S = 300
"""How long a client may not read before it counts as gone."""
STOPPING_S = 4.5
"""How long a stream may still go on when the server stops, for it to tell its end."""
SHARE_OF_PATIENCE = 3
"""How many signs of life a client gets in the time that it waits in silence."""
SHORTEST_SILENCE_S = 1.0
KEEP_ALIVE = ServerSentEvent(comment="keep-alive", sep="\n")
MANY = MAX_BEHIND // 2
"""So many events at a time are soon enough for who waits for the end."""
BLANK = b" \n"
"""What JSON may begin with, any number of times."""


class Document(Protocol):
    """An answer in one piece, in one dialect."""

    def event(self, event: Event) -> None:
        """Note what has happened."""

    def finish(self, result: Result) -> dict[str, Any]:
        """The answer."""

    def fail(self, error: ProxyError) -> Mapping[str, Any]:
        """The same where the run has failed."""


class Frames(Protocol):
    """An answer as server-sent events, in one dialect. Each method gives whole frames, or ""."""

    def begin(self) -> str:
        """What is sent before anything is known."""

    def event(self, event: Event) -> str:
        """What shows of an event."""

    def finish(self, result: Result) -> str:
        """What comes last."""

    def fail(self, error: ProxyError) -> str:
        """The same where the run has failed."""


async def whole(request: Request, listener: Listener, document: Document, terms: Terms) -> Response:
    """The answer in one piece. Leaves the listener. Raises what the run failed with."""
    silence_s = services(request).nonstream_keep_alive_s
    if silence_s is not None:
        silence_s = _within_patience(silence_s, terms)
    try:
        if not await while_connected(request, _heard_out(listener, document, silence_s)):
            return _ProlongedResponse(listener, document, silence_s)
        content = document.finish(listener.run.result())
    except BaseException:
        listener.leave()
        raise
    listener.leave()
    return JSON(content, headers=headers(listener.run.id, listener.run.container_id))


def streamed(
    request: Request,
    listener: Listener,
    frames: Frames,
    terms: Terms,
    alive: ServerSentEvent = KEEP_ALIVE,
) -> Response:
    """The answer as it comes; `alive` is said in silence. Leaves the listener."""
    silence_s = _within_patience(services(request).keep_alive_s, terms)
    return _StreamResponse(listener, frames, silence_s, alive)


def replayed(
    request: Request, headers: Mapping[str, str], recording: Recording, first: int
) -> Response:
    """The answer from a frame on, as it was told and as it goes on; who leaves may come back."""
    silence_s = _within_patience(services(request).keep_alive_s, read_terms({}, request.headers))
    return _Events(_again(recording, first), silence_s, headers)


def _within_patience(silence_s: float, terms: Terms) -> float:
    if terms.patience_s is None:
        return silence_s
    return min(silence_s, max(SHORTEST_SILENCE_S, terms.patience_s / SHARE_OF_PATIENCE))


async def _heard_out(listener: Listener, document: Document, within_s: float | None) -> bool:
    """Listen for so long; whether the run has ended."""
    with anyio.move_on_after(within_s):
        while events := await listener.events(MANY):
            for event in events:
                document.event(event)
        return True
    return False


class _ProlongedResponse(StreamingResponse):
    """The answer in one piece, blanks before it while it is not there; its status has to be 200."""

    def __init__(self, listener: Listener, document: Document, every_s: float | None) -> None:
        content = _prolonged(listener, document, every_s)
        super().__init__(
            content,
            media_type="application/json",
            headers=headers(listener.run.id, listener.run.container_id),
        )
        self._listener = listener

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._listener:
            await super().__call__(scope, receive, send)


async def _prolonged(
    listener: Listener, document: Document, every_s: float | None
) -> AsyncIterator[bytes]:
    yield BLANK
    while not await _heard_out(listener, document, every_s):
        yield BLANK
    try:
        content: Mapping[str, Any] = document.finish(listener.run.result())
    except ProxyError as error:
        content = document.fail(error)
    except Exception:  # noqa: BLE001 - the head is out: the client must hear of it here
        content = document.fail(internal_error())
    yield json.dumps(content).encode()


class _Events(EventSourceResponse):
    """Server-sent events for as long as the client is there."""

    def __init__(
        self,
        content: AsyncIterator[bytes],
        silence_s: float,
        headers: Mapping[str, str],
        alive: ServerSentEvent = KEEP_ALIVE,
    ) -> None:
        super().__init__(
            content,
            send_timeout=SEND_TIMEOUT_S,
            ping=silence_s,
            ping_message_factory=lambda: alive,
            sep="\n",
            shutdown_grace_period=STOPPING_S,
            headers={**headers, "Cache-Control": "no-cache"},
        )


class _StreamResponse(_Events):
    """The answer as it comes."""

    def __init__(
        self, listener: Listener, frames: Frames, silence_s: float, alive: ServerSentEvent
    ) -> None:
        names = headers(listener.run.id, listener.run.container_id)
        super().__init__(_stream(listener, frames), silence_s, names, alive)
        self._listener = listener

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._listener:
            await super().__call__(scope, receive, send)


async def _stream(listener: Listener, frames: Frames) -> AsyncIterator[bytes]:
    yield frames.begin().encode()
    while events := await listener.events():
        if shown := "".join(map(frames.event, events)):
            yield shown.encode()
    try:
        last = frames.finish(listener.run.result())
    except ProxyError as error:
        last = frames.fail(error)
    except Exception:  # noqa: BLE001 - the headers are out: the client must hear of it here
        last = frames.fail(internal_error())
    yield last.encode()


async def _again(recording: Recording, first: int) -> AsyncIterator[bytes]:
    while frames := await recording.since(first):
        first = max(first, recording.first) + len(frames)
        yield "".join(frames).encode()


def headers(run_id: str, container_id: str) -> dict[str, str]:
    """What every answer has beside its body."""
    return {"X-Sandbox-Run": run_id, "X-Sandbox-Container": container_id}
