"""Responses that tell a client of a run, in whatever dialect: in one piece, or as it goes on."""

import json
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

import anyio
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from proxy.agent.events import CallFailed, Event, OfChoice, RunStarted, TurnStarted
from proxy.agent.result import Result
from proxy.agent.task import StatusHold
from proxy.api.dependencies import JSONResponse, note_run, services, while_connected
from proxy.errors import ProxyError, internal_error
from proxy.runs.run import MAX_BEHIND, Listener, Run
from proxy.wire.terms import Terms, read_terms

log = logging.getLogger(__name__)

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
ANY_ERROR = f"event: error\ndata: {json.dumps({'type': 'error', **internal_error().body()})}\n\n"
"""An error as the clients of every dialect know it, where an encoder cannot say its own."""
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
    note_run(request, listener.run.id)
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
    return JSONResponse(content, headers=headers(listener.run.id, listener.run.container_id))


async def streamed(
    request: Request,
    listener: Listener,
    frames: Frames,
    terms: Terms,
    hold: StatusHold,
    alive: ServerSentEvent = KEEP_ALIVE,
) -> Response:
    """Return the answer as it comes, once the status line is known; `alive` is said in silence.
    Leaves the listener. Raises what the run failed with while the status was held."""
    note_run(request, listener.run.id)
    wait_s = services(request).status_wait_s
    silence_s = _within_patience(services(request).keep_alive_s, terms)
    try:
        heard = await while_connected(request, _until_status(listener, hold, wait_s))
    except BaseException:
        listener.leave()
        raise
    hold.is_held = False
    return _StreamResponse(listener, heard, frames, silence_s, alive)


async def _until_status(listener: Listener, hold: StatusHold, wait_s: float) -> list[Event]:
    """Wait until the response's status is known, or need not be known any more; return the events
    so far. Raises what the run failed with."""
    heard: list[Event] = []
    with anyio.move_on_after(wait_s) as waiting:
        waiting.deadline = min(waiting.deadline, hold.until)
        while events := await listener.events():
            heard += events
            if any(map(_is_answered, events)):
                return heard
            if any(isinstance(_of(event), CallFailed) for event in events):
                waiting.deadline = hold.until
        listener.run.result()
    return heard


def _is_answered(event: Event) -> bool:
    """Return whether the first model call must have been accepted, if there was one."""
    return not isinstance(_of(event), RunStarted | TurnStarted | CallFailed)


def _of(event: Event) -> Event:
    return event.event if isinstance(event, OfChoice) else event


def replayed(
    request: Request, headers: Mapping[str, str], frames: AsyncIterator[bytes]
) -> Response:
    """Return a recorded answer as server-sent events; the client may leave and come back."""
    silence_s = _within_patience(services(request).keep_alive_s, read_terms({}, request.headers))
    return _Events(frames, silence_s, headers)


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
    content: Mapping[str, Any]
    try:
        while not await _heard_out(listener, document, every_s):
            yield BLANK
        content = document.finish(listener.run.result())
    except ProxyError as error:
        content = document.fail(error)
    except Exception:  # noqa: BLE001 - the head is out: the client must hear of it here
        _log_unwritten(listener.run)
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
        self,
        listener: Listener,
        heard: Sequence[Event],
        frames: Frames,
        silence_s: float,
        alive: ServerSentEvent,
    ) -> None:
        names = headers(listener.run.id, listener.run.container_id)
        super().__init__(_stream(listener, heard, frames), silence_s, names, alive)
        self._listener = listener

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._listener:
            await super().__call__(scope, receive, send)


async def _stream(
    listener: Listener, heard: Sequence[Event], frames: Frames
) -> AsyncIterator[bytes]:
    """Yield the answer's frames, from the events that were `heard` already on."""
    try:
        yield frames.begin().encode()
        events = heard or await listener.events()
        while events:
            if shown := "".join(map(frames.event, events)):
                yield shown.encode()
            events = await listener.events()
        last = frames.finish(listener.run.result())
    except ProxyError as error:
        last = _failed(frames, error)
    except Exception:  # noqa: BLE001 - the head is out: the client must hear of it here
        _log_unwritten(listener.run)
        last = _failed(frames, internal_error())
    yield last.encode()


def _failed(frames: Frames, error: ProxyError) -> str:
    """Return the frames that end a stream in an error."""
    try:
        return frames.fail(error)
    except Exception:
        log.exception("an error cannot be written")
        return ANY_ERROR


def _log_unwritten(run: Run) -> None:
    """Log the exception that is being handled, if it is not the run's own, which is in the log."""
    if run.status != "failed":
        log.exception("run %s: its answer cannot be written", run.id)


def headers(run_id: str, container_id: str) -> dict[str, str]:
    """What every answer has beside its body."""
    return {"X-Sandbox-Run": run_id, "X-Sandbox-Container": container_id}
