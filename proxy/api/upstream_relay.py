"""The relay of requests to the backend, and of its responses, as bytes.

The relay rejects URLs that the backend must not fetch, charges the daily budget (see
`proxy.api.daily_budget`), and ends when the client disconnects. The routes of chat, messages,
responses and passthrough decide which requests are relayed.
"""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from policies.artifacts import replace_signed_links
from policies.budgets import DailyBudget
from policies.json_bounds import SMALL_BYTES, JSONBoundsCheck
from policies.passthrough import URL_FIELDS, remote_urls
from policies.routing import backend_model_name
from proxy import stepwise
from proxy.agent.model import Upstream, UpstreamRequest, UpstreamResponse
from proxy.api.daily_budget import metered_relay
from proxy.api.dependencies import (
    SLOW_BYTES,
    ClientRequest,
    Disconnect,
    ModelRequest,
    body_reservation,
    cancel_on_disconnect,
    run_while_connected,
    wait_for_disconnect,
)
from proxy.api.routing import RoutingDecision
from proxy.errors import (
    BackendError,
    BadRequestError,
    ProxyError,
    may_be_file_refusal,
    unreadable_files_error,
)
from proxy.models.backend_errors import backend_error_from_response
from proxy.models.relay import BufferedBody, read_if_at_most
from proxy.schemas.content_parts import (
    UploadedFile,
    documents_and_uploads,
    uploads_in_sandbox_field,
)

log = logging.getLogger(__name__)

WATCH_AFTER_S = 0.1
"""Seconds after which the client's connection is watched for a disconnect. A short response needs
no watch, which would cost an eighth of its time (`bench/relay.py`)."""
MAX_BUFFERED_BYTES = 256 << 10
"""Maximum size of a response that is buffered and sent in one piece, in bytes."""
_URL_FIELD = re.compile(b'"(?:%s)":' % "|".join(sorted(URL_FIELDS)).encode())
"""Matches the name of a field with a URL, in JSON without whitespace."""
_ESCAPED_LETTER = re.compile(rb"(?<!\\)\\u00(?:[46][1-9a-f]|[57][0-9a]|5f)", re.IGNORECASE)
"""Matches the escape of an ASCII letter or of `_`. No JSON encoder escapes these, and the escape
could hide a field's name."""
_ESCAPED_BLANK = re.compile(rb"\\(?:[bfnrt]|u00(?:[01][0-9a-f]|20))", re.IGNORECASE)
_INCOMPLETE_ESCAPE = re.compile(rb"\\(?:u[0-9a-f]{0,3})?\Z", re.IGNORECASE)
_TAIL_BYTES = max(map(len, URL_FIELDS)) + len('"":')
"""The length of the longest match of `_URL_FIELD`."""
_IGNORED_BYTES = b" \t\r\n\0"
"""Whitespace, and the zero bytes of ASCII letters in UTF-16 and UTF-32."""
ResponseHook = Callable[[UpstreamResponse], UpstreamResponse]
"""A function that wraps a backend's response, to read its body while the body is relayed."""


async def relay_chat(request: ModelRequest, decision: RoutingDecision) -> Response:
    """Relay a chat completion to the backend. The headers of `decision` are added to the response.

    Raises BadRequestError for a private URL and for files that a model without tools cannot read,
    BackendError if the backend cannot be reached, BudgetError and ClientDisconnect.
    """
    await refuse_private_urls(request, request.body)
    has_files = await check_for_refusable_files(request, decision, request.body)
    fields = await fields_for_backend(request.body, decision.route.model)
    disconnect = partial(wait_for_disconnect, request.http)
    work = _chat_response(request, fields, decision, has_files, disconnect)
    return await cancel_on_disconnect(disconnect, work, watch_after_s=WATCH_AFTER_S)


async def _chat_response(
    request: ModelRequest,
    fields: Mapping[str, Any],
    decision: RoutingDecision,
    has_files: bool,
    disconnect: Disconnect,
) -> Response:
    send = partial(request.model.relay, fields, request.headers)
    response = await metered_relay(
        request, decision.profile.budgets.daily.for_model_calls, fields, send
    )
    if has_files and response.status >= 400:
        response = await _require_no_file_refusal(response, decision)
    # The headers are merged here, because adding one to a Response later searches its header list.
    headers = {**response.headers, **decision.headers}
    response = UpstreamResponse(response.status, headers, response.body)
    if is_stream(response):
        return RelayResponse(response, disconnect)
    return await buffer_response(response, disconnect)


async def check_for_refusable_files(
    request: ModelRequest, decision: RoutingDecision, body: Mapping[str, Any]
) -> bool:
    """Return True if the request has files that the backend may refuse, and gets no sandbox because
    its model does not support tools. Raises BadRequestError if one of these files is an upload of
    this server, which the backend cannot read."""
    verdict = decision.verdict
    if not decision.is_plain or verdict.reason is None:
        return False
    for upload in uploads_in_sandbox_field(body):
        raise unreadable_files_error(verdict, param=upload.param)
    files = documents_and_uploads(body["messages"])
    params = {
        file.source.file_id: file.param for file in files if isinstance(file.source, UploadedFile)
    }
    missing = await request.services.inputs.missing_uploads(request.owner, params)
    for file_id, param in params.items():
        if file_id not in missing:
            raise unreadable_files_error(verdict, param=param)
    return bool(files)


async def _require_no_file_refusal(
    response: UpstreamResponse, decision: RoutingDecision
) -> UpstreamResponse:
    """Return the backend's error response to a request with files, or raise BadRequestError if the
    backend may have refused the files."""
    content = await read_if_at_most(response.body, MAX_BUFFERED_BYTES) or b""
    now = datetime.now(UTC)
    error = backend_error_from_response(response.status, response.headers, content, now=now)
    if may_be_file_refusal(error):
        raise unreadable_files_error(decision.verdict, refusal=error.message) from error
    return replace(response, body=BufferedBody([content]))


async def forward_json(
    request: ClientRequest,
    body: Mapping[str, Any],
    budget: DailyBudget = DailyBudget(),
    hook: ResponseHook | None = None,
) -> Response:
    """Relay a decoded request to a `:plain` model. Raises BadRequestError for a private URL, and
    the errors of `upstream_of` and `forward`."""
    fields = await fields_for_backend(body, backend_model_name(body["model"]))
    await refuse_private_urls(request, fields)
    disconnect = partial(wait_for_disconnect, request.http)
    encoded = await stepwise.encode(fields)
    return await forward(request, upstream_of(request), encoded, fields, disconnect, budget, hook)


async def forward(
    request: ClientRequest,
    upstream: Upstream,
    body: "bytes | bytearray | RequestBodyStream | None",
    fields: Mapping[str, Any],
    disconnect: Disconnect,
    budget: DailyBudget = DailyBudget(),
    hook: ResponseHook | None = None,
) -> Response:
    """Relay a request to any path of the backend, within the daily budget. `fields` are the body's
    decoded fields; empty if the body is no JSON object or was not read.

    Raises ClientDisconnect, BudgetError, BackendError.
    """
    sent = _upstream_request(request.http, body, reads_response=budget.is_set or hook is not None)
    work = _forwarded_response(request, upstream, sent, fields, disconnect, budget, hook)
    return await cancel_on_disconnect(disconnect, work, watch_after_s=WATCH_AFTER_S)


def upstream_of(request: ClientRequest) -> Upstream:
    """Return the `Upstream` that sends requests to any path of the backend. Raises HTTPException if
    the backend is not an HTTP server."""
    upstream = request.model.upstream
    if upstream is None:
        raise HTTPException(
            404, "Not Found, and the backend is not an HTTP server that could get the request"
        )
    return upstream


async def fields_for_backend(fields: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Return the request's fields for the backend: with `model` as the model's name, without
    `sandbox`, and without the signatures of links to produced files."""
    others = {key: value for key, value in fields.items() if key != "sandbox"}
    return {**await stepwise.call_in_thread_if_large(replace_signed_links, others), "model": model}


def raw_path(request: Request) -> str:
    """Return the path as the client sent it, percent-encoded."""
    raw: bytes = request.scope["raw_path"]
    return raw.decode("latin-1")


def _upstream_request(
    request: Request, body: "bytes | bytearray | RequestBodyStream | None", *, reads_response: bool
) -> UpstreamRequest:
    query = request.scope["query_string"].decode("latin-1")
    headers = request.headers
    # A re-encoded body has another length. If the request has Transfer-Encoding, its Content-Length
    # is dropped: the two servers could disagree on where the body ends (request smuggling).
    if not isinstance(body, RequestBodyStream) or "transfer-encoding" in headers:
        headers = _without_header(headers, "content-length")
    if reads_response:  # the relay must be able to read the response
        headers = _without_header(headers, "accept-encoding")
    path = f"{raw_path(request)}?{query}" if query else raw_path(request)
    return UpstreamRequest(request.method, path, headers, body)


def _without_header(headers: Headers, name: str) -> Headers:
    return Headers(raw=[line for line in headers.raw if line[0] != name.encode()])


async def _forwarded_response(
    request: ClientRequest,
    upstream: Upstream,
    upstream_request: UpstreamRequest,
    fields: Mapping[str, Any],
    disconnect: Disconnect,
    budget: DailyBudget,
    hook: ResponseHook | None,
) -> Response:
    try:
        response = await metered_relay(
            request, budget, fields, partial(upstream.send, upstream_request)
        )
    except BackendError as error:
        if (
            isinstance(upstream_request.body, RequestBodyStream)
            and upstream_request.body.rejection is not None
        ):
            raise upstream_request.body.rejection from error
        raise
    if hook:
        response = hook(response)
    length = response.headers.get("content-length", "")
    is_short = length.isdecimal() and int(length) <= MAX_BUFFERED_BYTES
    if is_short and not is_stream(response):
        return await buffer_response(response, disconnect)
    return RelayResponse(response, disconnect)


def is_stream(response: UpstreamResponse) -> bool:
    """Return True if the response is a stream of server-sent events."""
    return response.headers.get("content-type", "").startswith("text/event-stream")


async def buffer_response(response: UpstreamResponse, disconnect: Disconnect) -> Response:
    """Return the response in one piece, or as a stream if it is longer than
    `MAX_BUFFERED_BYTES`. Streaming a short response would double the cost of the relay."""
    pieces: list[bytes] = []
    size = 0
    try:
        async for piece in response.body:
            pieces.append(piece)
            size += len(piece)
            if size > MAX_BUFFERED_BYTES:
                return RelayResponse(response, disconnect, pieces)
    except BaseException:
        await response.body.aclose()
        raise
    await response.body.aclose()
    return Response(b"".join(pieces), response.status, response.headers)


class RelayResponse(Response):
    """A backend's response, relayed piece by piece. It is closed when the client disconnects."""

    def __init__(
        self, response: UpstreamResponse, disconnect: Disconnect, read_pieces: Sequence[bytes] = ()
    ) -> None:
        """`read_pieces` are the pieces of the body that have been read already."""
        self.status_code = response.status
        self.background = None
        self._read_pieces = read_pieces
        self._body = response.body
        self._disconnect = disconnect
        self.init_headers(response.headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._body):
            try:
                await cancel_on_disconnect(
                    self._disconnect, self._send(send), watch_after_s=WATCH_AFTER_S
                )
            except ClientDisconnect:
                pass
            except BackendError as error:
                # The response stays incomplete, so the server closes the connection and the client
                # notices.
                log.warning("a relayed answer broke off: %s", error)

    async def _send(self, send: Send) -> None:
        head = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **head})
        for piece in self._read_pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        self._read_pieces = ()
        async for piece in self._body:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class RequestBodyStream:
    """A request's body, relayed piece by piece while it arrives. The body can be read only once."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._stream = request.stream()
        self._buffered_pieces: list[bytes] = []
        self._body_ended = asyncio.Event()
        self._check: Callable[[bytes], None] | None = None
        self.rejection: ProxyError | None = None
        """The error with which the check rejected a piece, or None."""

    def set_piece_check(self, check: Callable[[bytes], None]) -> None:
        """Call `check` with each piece before the piece is relayed. A ProxyError that `check`
        raises ends the body."""
        self._check = check

    async def read(self, limit: int) -> bytes | None:
        """Return the complete body. Return None if the body exceeds `limit` bytes or has too many
        JSON values to decode: the body can still be relayed. Raises ClientDisconnect, BusyError,
        BodyTooLargeError."""
        size, counted, bounds = 0, 0, JSONBoundsCheck()
        async for piece in self._stream:
            self._buffered_pieces.append(piece)
            size += len(piece)
            if size > SMALL_BYTES:
                body_reservation(self._request).take(size - counted)
                counted = size
            if size > limit or not bounds.accept(piece):
                return None
        if counted:
            body_reservation(self._request).take(size)  # for the decoded copy
        self._body_ended.set()
        # A thread joins the pieces of a large body, which `join` copies without the GIL.
        join = partial(b"".join, self._buffered_pieces)
        body = await asyncio.to_thread(join) if size > SLOW_BYTES else join()
        self._buffered_pieces.clear()
        return body

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield the pieces that `read` has not returned. Raises ClientDisconnect, and the check's
        ProxyError."""
        try:
            while self._buffered_pieces:
                yield self._check_piece(self._buffered_pieces.pop(0))
            async for piece in self._stream:
                yield self._check_piece(piece)
        finally:
            self._body_ended.set()

    def _check_piece(self, piece: bytes) -> bytes:
        if self._check is not None:
            try:
                self._check(piece)
            except ProxyError as error:
                self.rejection = error
                raise
        return piece

    async def wait_for_disconnect(self) -> None:
        """Wait until the client has disconnected. While the body is being received, the iteration
        raises ClientDisconnect instead."""
        await self._body_ended.wait()
        await wait_for_disconnect(self._request)


async def refuse_private_urls(request: ClientRequest, body: Any) -> None:
    """Raise BadRequestError if the body names a private URL, which the backend would fetch from
    inside the operator's network. Raises ClientDisconnect."""
    if urls := urls_in(body):
        check = request.services.inputs.refuse_unsafe_urls(urls, request.owner)
        await run_while_connected(request.http, check)


def urls_in(body: Any) -> list[str]:
    """Return the distinct URLs in the body that the backend would fetch."""
    return list(dict.fromkeys(remote_urls(body)))


class URLScanner:
    """Searches a body for fields with URLs without decoding the body, which is too long or not
    declared as JSON."""

    def __init__(self) -> None:
        self._tail = b""
        self._incomplete_escape = b""

    def check(self, piece: bytes) -> None:
        """Search the next piece. Raises BadRequestError if it may name a URL."""
        written = self._incomplete_escape + piece.translate(None, _IGNORED_BYTES)
        incomplete = _INCOMPLETE_ESCAPE.search(written, max(0, len(written) - 5))
        self._incomplete_escape = incomplete[0] if incomplete else b""
        text = self._tail + _ESCAPED_BLANK.sub(
            b"", written[: len(written) - len(self._incomplete_escape)]
        )
        if _URL_FIELD.search(text, 1 if self._tail else 0) or _ESCAPED_LETTER.search(text):
            raise uncheckable_urls_error("may name URLs")
        self._tail = text[-_TAIL_BYTES:]


def uncheckable_urls_error(predicate: str) -> BadRequestError:
    """Return the error for a body whose URLs cannot be checked. `predicate` completes the message,
    for example "is compressed"."""
    return BadRequestError(
        f"The request body {predicate}, and URLs in it cannot be checked: the backend would fetch"
        " them from inside its network. Send a smaller body, as application/json and not"
        " compressed. The operator can allow any URL with backend.fetches_urls.",
        code="url_not_allowed",
    )
