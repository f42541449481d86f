"""HTTP responses with the answer of a run, for every API: in one piece, or streamed while the run
goes on. A `ResponseBuilder` or a `StreamEncoder` of proxy.schemas gives them their content."""

import json
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

import anyio
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from proxy.agent.events import CallFailed, ChoiceEvent, Event, RunStarted, TurnStarted
from proxy.agent.result import Result
from proxy.agent.task import StatusHold
from proxy.api.dependencies import JSONResponse, get_services, set_run_id, while_connected
from proxy.errors import ProxyError, internal_error
from proxy.runs.run import MAX_BEHIND, Run, Subscriber
from proxy.schemas.request_options import RequestOptions, read_terms

log = logging.getLogger(__name__)

SEND_TIMEOUT_S = 300
"""How long a client may not read before it counts as gone."""
STOPPING_S = 4.5
"""How long a stream may still go on when the server stops, for it to tell its end."""
SHARE_OF_PATIENCE = 3
"""How many keep-alives a client gets in the time that it waits without data."""
SHORTEST_SILENCE_S = 1.0
KEEP_ALIVE = ServerSentEvent(comment="keep-alive", sep="\n")
MANY = MAX_BEHIND // 2
"""The number of events to wait for at a time if the client gets nothing before the run's end."""
ANY_ERROR = f"event: error\ndata: {json.dumps({'type': 'error', **internal_error().body()})}\n\n"
"""The end of a stream whose encoder fails. Clients of every API understand it."""
BLANK = b" \n"
"""Whitespace before JSON, sent to keep the connection alive."""


class ResponseBuilder(Protocol):
    """Builds an answer in one piece, in the format of one API."""

    def event(self, event: Event) -> None:
        """Record an event of the run."""

    def finish(self, result: Result) -> dict[str, Any]:
        """Return the answer of a finished run."""

    def fail(self, error: ProxyError) -> Mapping[str, Any]:
        """Return the answer of a failed run."""


class StreamEncoder(Protocol):
    """Writes an answer as server-sent events, in the format of one API. Each method returns whole
    events, or an empty string."""

    def begin(self) -> str:
        """Return what is sent before the run has begun."""

    def event(self, event: Event) -> str:
        """Return what the client sees of an event of the run."""

    def finish(self, result: Result) -> str:
        """Return the end of the stream of a finished run."""

    def fail(self, error: ProxyError) -> str:
        """Return the end of the stream of a failed run."""


async def json_response(
    request: Request, subscriber: Subscriber, builder: ResponseBuilder, terms: RequestOptions
) -> Response:
    """Return the answer in one piece. Leaves the listener. Raises the run's error."""
    set_run_id(request, subscriber.run.id)
    silence_s = get_services(request).nonstream_keep_alive_s
    if silence_s is not None:
        silence_s = _within_patience(silence_s, terms)
    try:
        if not await while_connected(request, _collect(subscriber, builder, silence_s)):
            return _ProlongedResponse(subscriber, builder, silence_s)
        content = builder.finish(subscriber.run.result())
    except BaseException:
        subscriber.leave()
        raise
    subscriber.leave()
    return JSONResponse(content, headers=headers(subscriber.run.id, subscriber.run.container_id))


async def stream_response(
    request: Request,
    subscriber: Subscriber,
    encoder: StreamEncoder,
    terms: RequestOptions,
    hold: StatusHold,
    alive: ServerSentEvent = KEEP_ALIVE,
) -> Response:
    """Return the answer as server-sent events, once the status of the response is known; `alive` is
    the keep-alive. Leaves the listener. Raises the run's error if it failed before that."""
    set_run_id(request, subscriber.run.id)
    wait_s = get_services(request).status_wait_s
    silence_s = _within_patience(get_services(request).keep_alive_s, terms)
    try:
        heard = await while_connected(request, _until_status(subscriber, hold, wait_s))
    except BaseException:
        subscriber.leave()
        raise
    hold.is_held = False
    return _StreamResponse(subscriber, heard, encoder, silence_s, alive)


async def _until_status(subscriber: Subscriber, hold: StatusHold, wait_s: float) -> list[Event]:
    """Wait until the status of the response is known, at most for `wait_s` or, if a model call has
    failed, until the hold ends. Return the events so far. Raises the run's error."""
    heard: list[Event] = []
    with anyio.move_on_after(wait_s) as waiting:
        waiting.deadline = min(waiting.deadline, hold.until)
        while events := await subscriber.events():
            heard += events
            if any(map(_is_answered, events)):
                return heard
            if any(isinstance(_of(event), CallFailed) for event in events):
                waiting.deadline = hold.until
        subscriber.run.result()
    return heard


def _is_answered(event: Event) -> bool:
    """Return True if the event shows that the backend has accepted the first model call."""
    return not isinstance(_of(event), RunStarted | TurnStarted | CallFailed)


def _of(event: Event) -> Event:
    return event.event if isinstance(event, ChoiceEvent) else event


def replay_response(
    request: Request, headers: Mapping[str, str], frames: AsyncIterator[bytes]
) -> Response:
    """Return a recorded answer as server-sent events; the client may disconnect and come back."""
    silence_s = _within_patience(
        get_services(request).keep_alive_s, read_terms({}, request.headers)
    )
    return _Events(frames, silence_s, headers)


def _within_patience(silence_s: float, terms: RequestOptions) -> float:
    if terms.patience_s is None:
        return silence_s
    return min(silence_s, max(SHORTEST_SILENCE_S, terms.patience_s / SHARE_OF_PATIENCE))


async def _collect(
    subscriber: Subscriber, builder: ResponseBuilder, within_s: float | None
) -> bool:
    """Pass the run's events to the builder for at most `within_s` seconds. Return True if the run
    has ended."""
    with anyio.move_on_after(within_s):
        while events := await subscriber.events(MANY):
            for event in events:
                builder.event(event)
        return True
    return False


class _ProlongedResponse(StreamingResponse):
    """The answer in one piece, with whitespace before it while the run goes on. Its status is 200
    even if the run fails."""

    def __init__(
        self, subscriber: Subscriber, builder: ResponseBuilder, every_s: float | None
    ) -> None:
        content = _prolonged(subscriber, builder, every_s)
        super().__init__(
            content,
            media_type="application/json",
            headers=headers(subscriber.run.id, subscriber.run.container_id),
        )
        self._listener = subscriber

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._listener:
            await super().__call__(scope, receive, send)


async def _prolonged(
    subscriber: Subscriber, builder: ResponseBuilder, every_s: float | None
) -> AsyncIterator[bytes]:
    yield BLANK
    content: Mapping[str, Any]
    try:
        while not await _collect(subscriber, builder, every_s):
            yield BLANK
        content = builder.finish(subscriber.run.result())
    except ProxyError as error:
        content = builder.fail(error)
    except Exception:  # noqa: BLE001 - the status is sent, so the body has to tell
        _log_unwritten(subscriber.run)
        content = builder.fail(internal_error())
    yield json.dumps(content).encode()


class _Events(EventSourceResponse):
    """Server-sent events, with keep-alives."""

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
    """The answer as server-sent events while the run goes on."""

    def __init__(
        self,
        subscriber: Subscriber,
        heard: Sequence[Event],
        encoder: StreamEncoder,
        silence_s: float,
        alive: ServerSentEvent,
    ) -> None:
        names = headers(subscriber.run.id, subscriber.run.container_id)
        super().__init__(_stream(subscriber, heard, encoder), silence_s, names, alive)
        self._listener = subscriber

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._listener:
            await super().__call__(scope, receive, send)


async def _stream(
    subscriber: Subscriber, events: Sequence[Event], encoder: StreamEncoder
) -> AsyncIterator[bytes]:
    """Yield the answer's frames, from the `events` that the listener has returned so far on."""
    try:
        yield encoder.begin().encode()
        events = events or await subscriber.events()
        while events:
            if frames := "".join(map(encoder.event, events)):
                yield frames.encode()
            events = await subscriber.events()
        last = encoder.finish(subscriber.run.result())
    except ProxyError as error:
        last = _failed(encoder, error)
    except Exception:  # noqa: BLE001 - the status is sent, so the body has to tell
        _log_unwritten(subscriber.run)
        last = _failed(encoder, internal_error())
    yield last.encode()


def _failed(encoder: StreamEncoder, error: ProxyError) -> str:
    """Return the frames that end a stream in an error."""
    try:
        return encoder.fail(error)
    except Exception:
        log.exception("an error cannot be written")
        return ANY_ERROR


def _log_unwritten(run: Run) -> None:
    """Log the exception that is being handled, if it is not the run's own, which is in the log."""
    if run.status != "failed":
        log.exception("run %s: its answer cannot be written", run.id)


def headers(run_id: str, container_id: str) -> dict[str, str]:
    """Return the headers that the answer of every run has."""
    return {"X-Sandbox-Run": run_id, "X-Sandbox-Container": container_id}
