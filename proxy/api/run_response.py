"""HTTP responses of a run, for every API: `json_response`, `stream_response` and `replay_response`.
A ResponseBuilder or a StreamEncoder of `proxy.schemas` writes the format of one API."""

import json
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

import anyio
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from policies.headers import ResponseHeader
from proxy.agent.events import ChoiceEvent, Event, ModelCallFailed, RunStarted, TurnStarted
from proxy.agent.result import Result
from proxy.agent.status_hold import StatusHold
from proxy.api.dependencies import (
    ClientRequest,
    JSONResponse,
    get_services,
    run_while_connected,
    set_run_id,
)
from proxy.errors import ProxyError, internal_error
from proxy.runs.run import MAX_BEHIND, Run, Subscriber
from proxy.schemas.request_options import RequestOptions, read_request_options

log = logging.getLogger(__name__)

SEND_TIMEOUT_S = 300
"""Seconds without progress after which a client that does not read is disconnected."""
SHUTDOWN_GRACE_S = 4.5
"""Seconds that a stream may continue when the server stops, so that the client receives its last
events."""
KEEP_ALIVES_PER_TIMEOUT = 3
"""Number of keep-alives within a client's read timeout."""
MIN_KEEP_ALIVE_S = 1.0
KEEP_ALIVE = ServerSentEvent(comment="keep-alive", sep="\n")
"""A comment that a stream sends every 10 s. If the client's read timeout is below 30 s, the comment
is sent three times within the timeout, but at most once a second."""
EVENTS_PER_WAIT = MAX_BEHIND // 2
"""Number of events to wait for at once when the client receives nothing before the end of the
run."""
GENERIC_ERROR = (
    f"event: error\ndata: {json.dumps({'type': 'error', **internal_error().body()})}\n\n"
)
"""The last frame of a stream whose encoder cannot write the error. Clients of every API understand
the frame."""
BLANK = b" \n"
"""Whitespace that is sent before a JSON body every `server.nonstream_keep_alive_s` seconds, or
three times within the client's read timeout if that is more often. Not sent if the setting is
null."""


class ResponseBuilder(Protocol):
    """Builds a JSON response in the format of one API."""

    def add_event(self, event: Event) -> None:
        """Record an event of the run."""

    def finish(self, result: Result) -> dict[str, Any]:
        """Return the response of a finished run."""

    def fail(self, error: ProxyError) -> Mapping[str, Any]:
        """Return the error body of a failed run."""


class StreamEncoder(Protocol):
    """Writes a response as server-sent events, in the format of one API. Each method returns
    complete events, or an empty string."""

    def begin(self) -> str:
        """Return the first events of the stream."""

    def encode(self, event: Event) -> str:
        """Return the client's events for an event of the run."""

    def finish(self, result: Result) -> str:
        """Return the last events of the stream of a finished run."""

    def fail(self, error: ProxyError) -> str:
        """Return the last events of the stream of a failed run."""


async def json_response(
    request: ClientRequest,
    subscriber: Subscriber,
    builder: ResponseBuilder,
    options: RequestOptions,
) -> Response:
    """Return the result of a run as JSON, and unsubscribe from the run. Raises the run's error. If
    the run takes so long that the response begins with keep-alives, the body reports the error
    instead."""
    set_run_id(request.http, subscriber.run.id)
    interval_s = request.services.nonstream_keep_alive_s
    if interval_s is not None:
        interval_s = _keep_alive_interval(interval_s, options)
    try:
        if not await run_while_connected(
            request.http, _collect_events(subscriber, builder, interval_s)
        ):
            return _KeepAliveJSONResponse(subscriber, builder, interval_s)
        content = builder.finish(subscriber.run.result())
    except BaseException:
        subscriber.unsubscribe()
        raise
    subscriber.unsubscribe()
    return JSONResponse(
        content, headers=run_headers(subscriber.run.id, subscriber.run.container_id)
    )


async def stream_response(
    request: ClientRequest,
    subscriber: Subscriber,
    encoder: StreamEncoder,
    options: RequestOptions,
    hold: StatusHold,
    keep_alive: ServerSentEvent = KEEP_ALIVE,
) -> Response:
    """Return the events of a run as server-sent events, once the status of the response is known.
    At the end of the response, unsubscribe from the run. Raises the run's error if the run fails
    before the status is known."""
    set_run_id(request.http, subscriber.run.id)
    wait_s = request.services.status_wait_s
    interval_s = _keep_alive_interval(request.services.keep_alive_s, options)
    try:
        received = await run_while_connected(
            request.http, _wait_for_status(subscriber, hold, wait_s)
        )
    except BaseException:
        subscriber.unsubscribe()
        raise
    hold.is_held = False
    return _StreamResponse(subscriber, received, encoder, interval_s, keep_alive)


async def _wait_for_status(subscriber: Subscriber, hold: StatusHold, wait_s: float) -> list[Event]:
    """Wait until the backend accepts the first model call, and return the events so far.

    The wait ends after `wait_s` seconds or, once a model call has failed, at the end of the hold.
    Raises the run's error.
    """
    received: list[Event] = []
    with anyio.move_on_after(wait_s) as waiting:
        waiting.deadline = min(waiting.deadline, hold.held_until)
        while events := await subscriber.events():
            received += events
            if any(map(_follows_accepted_call, events)):
                return received
            if any(isinstance(_inner_event(event), ModelCallFailed) for event in events):
                waiting.deadline = hold.held_until
        subscriber.run.result()
    return received


def _follows_accepted_call(event: Event) -> bool:
    """Return True if the event shows that the backend has accepted the first model call."""
    return not isinstance(_inner_event(event), RunStarted | TurnStarted | ModelCallFailed)


def _inner_event(event: Event) -> Event:
    """Return the event that a ChoiceEvent contains, or the event itself."""
    return event.event if isinstance(event, ChoiceEvent) else event


def replay_response(
    request: Request, headers: Mapping[str, str], frames: AsyncIterator[bytes]
) -> Response:
    """Return recorded frames as server-sent events. The response needs no subscription to the
    run."""
    interval_s = _keep_alive_interval(
        get_services(request).keep_alive_s, read_request_options({}, request.headers)
    )
    return _EventStream(frames, interval_s, headers)


def _keep_alive_interval(interval_s: float, options: RequestOptions) -> float:
    if options.read_timeout_s is None:
        return interval_s
    return min(interval_s, max(MIN_KEEP_ALIVE_S, options.read_timeout_s / KEEP_ALIVES_PER_TIMEOUT))


async def _collect_events(
    subscriber: Subscriber, builder: ResponseBuilder, timeout_s: float | None
) -> bool:
    """Pass the run's events to the builder for `timeout_s` seconds. Return True if the run has
    ended."""
    with anyio.move_on_after(timeout_s):
        while events := await subscriber.events(EVENTS_PER_WAIT):
            for event in events:
                builder.add_event(event)
        return True
    return False


class _KeepAliveJSONResponse(StreamingResponse):
    """A JSON response that sends whitespace until the run ends, and then the body. The status is
    200 even if the run fails."""

    def __init__(
        self, subscriber: Subscriber, builder: ResponseBuilder, interval_s: float | None
    ) -> None:
        content = _json_after_keep_alives(subscriber, builder, interval_s)
        super().__init__(
            content,
            media_type="application/json",
            headers=run_headers(subscriber.run.id, subscriber.run.container_id),
        )
        self._subscriber = subscriber

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._subscriber:
            await super().__call__(scope, receive, send)


async def _json_after_keep_alives(
    subscriber: Subscriber, builder: ResponseBuilder, interval_s: float | None
) -> AsyncIterator[bytes]:
    yield BLANK
    content: Mapping[str, Any]
    try:
        while not await _collect_events(subscriber, builder, interval_s):
            yield BLANK
        content = builder.finish(subscriber.run.result())
    except ProxyError as error:
        content = builder.fail(error)
    except Exception:  # noqa: BLE001 - the status is sent already, so the body reports it
        _log_encoder_error(subscriber.run)
        content = builder.fail(internal_error())
    yield json.dumps(content).encode()


class _EventStream(EventSourceResponse):
    """Server-sent events, with keep-alives."""

    def __init__(
        self,
        content: AsyncIterator[bytes],
        interval_s: float,
        headers: Mapping[str, str],
        keep_alive: ServerSentEvent = KEEP_ALIVE,
    ) -> None:
        super().__init__(
            content,
            send_timeout=SEND_TIMEOUT_S,
            ping=interval_s,
            ping_message_factory=lambda: keep_alive,
            sep="\n",
            shutdown_grace_period=SHUTDOWN_GRACE_S,
            headers={**headers, ResponseHeader.CACHE_CONTROL: "no-cache"},
        )


class _StreamResponse(_EventStream):
    """The events of a run as server-sent events, until the run ends."""

    def __init__(
        self,
        subscriber: Subscriber,
        received_events: Sequence[Event],
        encoder: StreamEncoder,
        interval_s: float,
        keep_alive: ServerSentEvent,
    ) -> None:
        headers = run_headers(subscriber.run.id, subscriber.run.container_id)
        super().__init__(
            _stream_frames(subscriber, received_events, encoder), interval_s, headers, keep_alive
        )
        self._subscriber = subscriber

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._subscriber:
            await super().__call__(scope, receive, send)


async def _stream_frames(
    subscriber: Subscriber, events: Sequence[Event], encoder: StreamEncoder
) -> AsyncIterator[bytes]:
    """Yield the frames of the response. `events` are the events that the subscriber has received
    already."""
    try:
        yield encoder.begin().encode()
        events = events or await subscriber.events()
        while events:
            if frames := "".join(map(encoder.encode, events)):
                yield frames.encode()
            events = await subscriber.events()
        last = encoder.finish(subscriber.run.result())
    except ProxyError as error:
        last = _error_frames(encoder, error)
    except Exception:  # noqa: BLE001 - the status is sent already, so the body reports it
        _log_encoder_error(subscriber.run)
        last = _error_frames(encoder, internal_error())
    yield last.encode()


def _error_frames(encoder: StreamEncoder, error: ProxyError) -> str:
    """Return the last frames of a stream that ends in an error."""
    try:
        return encoder.fail(error)
    except Exception:
        log.exception("the stream encoder cannot write the error; a generic error is sent")
        return GENERIC_ERROR


def _log_encoder_error(run: Run) -> None:
    """Log the current exception, unless it is the run's own, which is logged already."""
    if run.status != "failed":
        log.exception("run %s: the response cannot be encoded", run.id)


def run_headers(run_id: str, container_id: str) -> dict[str, str]:
    """Return the headers of every response of a run."""
    return {ResponseHeader.RUN: run_id, ResponseHeader.CONTAINER: container_id}
