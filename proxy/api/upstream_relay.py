"""Passes requests on to the backend and its responses back, as bytes: the client's disconnect, the
check of URLs that the backend would fetch, and the count of what a daily budget has left. Which
requests are passed on is decided in chat, messages, responses and passthrough."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from policies.artifacts import without_links
from policies.budgets import NAMES, DailyBudget, Expense, Receipt
from policies.json_bounds import SMALL_BYTES, JSONBounds, decoded, encoded
from policies.passthrough import URL_FIELDS, remote_urls
from policies.prices import Counted, Tariff, cost_usd, counted, expected_tokens
from policies.routing import plain_name
from proxy.agent.model import UpstreamBody, UpstreamPaths, UpstreamRequest, UpstreamResponse
from proxy.agent.task import BudgetAccount
from proxy.api.dependencies import (
    Disconnect,
    authorize,
    cancel_on_disconnect,
    get_model,
    get_owner,
    get_services,
    reserve_memory,
    wait_for_disconnect,
    while_connected,
)
from proxy.api.routing import RoutingDecision
from proxy.errors import BackendError, BadRequestError, BudgetError, ProxyError
from proxy.models.prices import Prices
from proxy.models.streamed_reply import UsageReader

log = logging.getLogger(__name__)

WATCH_AFTER_S = 0.1
"""How long an answer may take before its client's connection is watched: to watch it costs an
eighth of a short one."""
MAX_WHOLE_BYTES = 256 << 10
"""An answer up to this length is sent in one piece."""
_SUSPECT = re.compile(b'"(?:%s)":' % "|".join(sorted(URL_FIELDS)).encode())
"""The name of a field that holds a URL, in JSON without blanks."""
_ESCAPED_LETTER = re.compile(rb"(?<!\\)\\u00(?:[46][1-9a-f]|[57][0-9a]|5f)", re.IGNORECASE)
"""An escaped letter of a field's name, which no JSON encoder writes."""
_ESCAPED_BLANK = re.compile(rb"\\(?:[bfnrt]|u00(?:[01][0-9a-f]|20))", re.IGNORECASE)
_BEGUN_ESCAPE = re.compile(rb"\\(?:u[0-9a-f]{0,3})?\Z", re.IGNORECASE)
_TAIL_BYTES = max(map(len, URL_FIELDS)) + len('"":')
"""The length of the longest match."""
_PASSED_OVER = b" \t\r\n\0"
"""Blanks, and the zero bytes between the letters of a name in UTF-16 and UTF-32."""
ResponseHook = Callable[[UpstreamResponse], UpstreamResponse]
"""Replaces a response by one whose body is read as it passes."""


async def relay_chat(
    request: Request, body: Mapping[str, Any], decision: RoutingDecision
) -> Response:
    """Relay a chat completion to the backend. The headers of `decision` are added to the response.

    Raises BadRequestError for a private URL, BudgetError, BackendError if the backend cannot be
    reached, ClientDisconnect.
    """
    await refuse_private_urls(request, body)
    fields = strip_plain_suffix(body, decision.route.model)
    disconnect = partial(wait_for_disconnect, request)
    work = _relayed_chat(request, fields, decision, disconnect)
    return await cancel_on_disconnect(disconnect, work, watch_after_s=WATCH_AFTER_S)


async def _relayed_chat(
    request: Request,
    fields: Mapping[str, Any],
    decision: RoutingDecision,
    disconnect: Disconnect,
) -> Response:
    send = partial(get_model(request).relay, fields, request.headers)
    relayed = await metered_relay(request, decision.profile.per_day.of_model_calls, fields, send)
    # Added to the mapping, because the headers of a Response are a list that is searched.
    headers = {**relayed.headers, **decision.headers}
    relayed = UpstreamResponse(relayed.status, headers, relayed.body)
    if is_stream(relayed):
        return RelayResponse(relayed, disconnect)
    return await read_whole(relayed, disconnect)


async def forward_json(
    request: Request,
    body: Mapping[str, Any],
    day: DailyBudget = DailyBudget(),
    hook: ResponseHook | None = None,
) -> Response:
    """Pass on the fields of a request to a `:plain` model, as `forward` does. Raises
    BadRequestError too, for a private URL."""
    fields = strip_plain_suffix(body, plain_name(body["model"]))
    await refuse_private_urls(request, fields)
    disconnect = partial(wait_for_disconnect, request)
    return await forward(request, upstream_of(request), encoded(fields), disconnect, day, hook)


async def forward(
    request: Request,
    upstream: UpstreamPaths,
    body: "bytes | RequestBodyStream | None",
    disconnect: Disconnect,
    day: DailyBudget = DailyBudget(),
    hook: ResponseHook | None = None,
) -> Response:
    """Pass a request of any kind on, and return the backend's response; `day` bounds what it
    spends.

    Raises ClientDisconnect, BudgetError, BackendError.
    """
    passing = _passing(request, body, is_read=day.is_set or hook is not None)
    work = _forwarded(request, upstream, passing, disconnect, day, hook)
    return await cancel_on_disconnect(disconnect, work, watch_after_s=WATCH_AFTER_S)


def upstream_of(request: Request) -> UpstreamPaths:
    """Return the backend's server. Raises HTTPException if the backend is none."""
    upstream = get_model(request).passage
    if upstream is None:
        raise HTTPException(404, "Not Found, and the backend is no server to pass it on to")
    return upstream


def strip_plain_suffix(fields: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Return the fields of a request that are the backend's too: with its own name for the model,
    and without what opens the links to produced files."""
    others = {key: without_links(value) for key, value in fields.items() if key != "sandbox"}
    return {**others, "model": model}


def written_path(request: Request) -> str:
    """Return the path as the client wrote it."""
    raw: bytes = request.scope["raw_path"]
    return raw.decode("latin-1")


def _passing(
    request: Request, body: "bytes | RequestBodyStream | None", *, is_read: bool
) -> UpstreamRequest:
    query = request.scope["query_string"].decode("latin-1")
    headers = request.headers
    # A body that is encoded anew has another length. Of Content-Length and Transfer-Encoding only
    # the latter is read here: the backend must not read the body by the former (smuggling).
    if not isinstance(body, RequestBodyStream) or "transfer-encoding" in headers:
        headers = _without(headers, "content-length")
    if is_read:  # a compressed response cannot be read
        headers = _without(headers, "accept-encoding")
    path = f"{written_path(request)}?{query}" if query else written_path(request)
    return UpstreamRequest(request.method, path, headers, body)


def _without(headers: Headers, name: str) -> Headers:
    return Headers(raw=[line for line in headers.raw if line[0] != name.encode()])


async def _forwarded(
    request: Request,
    upstream: UpstreamPaths,
    passing: UpstreamRequest,
    disconnect: Disconnect,
    day: DailyBudget,
    hook: ResponseHook | None,
) -> Response:
    body = passing.body if isinstance(passing.body, bytes) else None
    try:
        relayed = await metered_relay(request, day, body, partial(upstream.pass_on, passing))
    except BackendError as error:
        if isinstance(passing.body, RequestBodyStream) and passing.body.rejected is not None:
            raise passing.body.rejected from error
        raise
    if hook:
        relayed = hook(relayed)
    length = relayed.headers.get("content-length", "")
    is_short = length.isdecimal() and int(length) <= MAX_WHOLE_BYTES
    if is_short and not is_stream(relayed):
        return await read_whole(relayed, disconnect)
    return RelayResponse(relayed, disconnect)


def is_stream(relayed: UpstreamResponse) -> bool:
    """Return True if a response is server-sent events."""
    return relayed.headers.get("content-type", "").startswith("text/event-stream")


async def read_whole(relayed: UpstreamResponse, disconnect: Disconnect) -> Response:
    """Read a response to its end and return it in one piece: to stream it costs as much again as
    the rest of the relay. One longer than `MAX_WHOLE_BYTES` is streamed."""
    pieces: list[bytes] = []
    size = 0
    try:
        async for piece in relayed.body:
            pieces.append(piece)
            size += len(piece)
            if size > MAX_WHOLE_BYTES:
                return RelayResponse(relayed, disconnect, pieces)
    except BaseException:
        await relayed.body.aclose()
        raise
    await relayed.body.aclose()
    return Response(b"".join(pieces), relayed.status, relayed.headers)


class RelayResponse(Response):
    """A backend's response piece by piece, which is closed when the client disconnects."""

    def __init__(
        self, relayed: UpstreamResponse, disconnect: Disconnect, read: Sequence[bytes] = ()
    ) -> None:
        """`read` are the body's first pieces, if they have been read."""
        self.status_code = relayed.status
        self.background = None
        self._read = read
        self._body = relayed.body
        self._disconnect = disconnect
        self.init_headers(relayed.headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._body):
            try:
                await cancel_on_disconnect(
                    self._disconnect, self._send(send), watch_after_s=WATCH_AFTER_S
                )
            except ClientDisconnect:
                pass
            except BackendError as error:
                # The server hangs up, so that half a response is not taken for a whole one.
                log.warning("a relayed answer broke off: %s", error)

    async def _send(self, send: Send) -> None:
        headers = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **headers})
        for piece in self._read:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        self._read = ()
        async for piece in self._body:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class RequestBodyStream:
    """A request's body, passed on piece by piece while it arrives; it can be read once."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._stream = request.stream()
        self._ready: list[bytes] = []
        self._over = asyncio.Event()
        self._check: Callable[[bytes], None] | None = None
        self.rejected: ProxyError | None = None
        """The error of the piece that was not passed on, if one was rejected."""

    def check_with(self, check: Callable[[bytes], None]) -> None:
        """Call `check` with each piece before it is passed on; a ProxyError that it raises ends the
        body."""
        self._check = check

    async def read(self, limit: int) -> bytes | None:
        """Return the whole body, or None if it is longer than the limit, or has more JSON values
        than are decoded at once: then it can still be passed on. Raises ClientDisconnect,
        BusyError."""
        size, counted, bounds = 0, 0, JSONBounds()
        async for piece in self._stream:
            self._ready.append(piece)
            size += len(piece)
            if size > SMALL_BYTES:
                reserve_memory(self._request, size - counted)
                counted = size
            if size > limit or not bounds.has_room_for(piece):
                return None
        if counted:
            reserve_memory(self._request, size)  # for what is decoded of it
        self._over.set()
        whole = b"".join(self._ready)
        self._ready.clear()
        return whole

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield the pieces that have not been returned. Raises ClientDisconnect, and the check's
        ProxyError."""
        try:
            while self._ready:
                yield self._checked(self._ready.pop(0))
            async for piece in self._stream:
                yield self._checked(piece)
        finally:
            self._over.set()

    def _checked(self, piece: bytes) -> bytes:
        if self._check is not None:
            try:
                self._check(piece)
            except ProxyError as error:
                self.rejected = error
                raise
        return piece

    async def wait_for_disconnect(self) -> None:
        """Wait until the client has disconnected. While it still sends, its disconnect ends the
        iteration instead."""
        await self._over.wait()
        await wait_for_disconnect(self._request)


async def refuse_private_urls(request: Request, body: Any) -> None:
    """Check each URL in a body that the backend would fetch from inside the operator's network.
    Raises BadRequestError for a private one, ClientDisconnect."""
    if urls := urls_in(body):
        checking = get_services(request).inputs.refuse_private(urls, get_owner(request))
        await while_connected(request, checking)


def urls_in(body: Any) -> list[str]:
    """Return the URLs in a body that the backend would fetch, each once."""
    return list(dict.fromkeys(remote_urls(body)))


class URLScanner:
    """Searches for fields that name URLs in a body that is passed on without being decoded, because
    it is too long or is not declared as JSON."""

    def __init__(self) -> None:
        self._tail = b""
        self._begun = b""

    def check(self, piece: bytes) -> None:
        """Search the next piece. Raises BadRequestError."""
        written = self._begun + piece.translate(None, _PASSED_OVER)
        begun = _BEGUN_ESCAPE.search(written, max(0, len(written) - 5))
        self._begun = begun[0] if begun else b""
        text = self._tail + _ESCAPED_BLANK.sub(b"", written[: len(written) - len(self._begun)])
        if _SUSPECT.search(text, 1 if self._tail else 0) or _ESCAPED_LETTER.search(text):
            raise uncheckable_error("may name URLs")
        self._tail = text[-_TAIL_BYTES:]


def uncheckable_error(what: str) -> BadRequestError:
    """The error for a body whose URLs cannot be checked."""
    return BadRequestError(
        f"The request body {what}, and URLs in it cannot be checked: the backend would fetch them"
        " from inside its network. Send less, as application/json and not compressed; or the"
        " operator allows it with backend.fetches_urls.",
        code="url_not_allowed",
    )


async def metered_relay(
    request: Request,
    budget: DailyBudget,
    body: Mapping[str, Any] | bytes | None,
    ask: Callable[[], Awaitable[UpstreamResponse]],
) -> UpstreamResponse:
    """Return the backend's response, counted if there is a budget; `body` is None if it was not
    read.

    Raises BudgetError, BadRequestError, and what `ask` raises."""
    if not budget.is_set:
        return await ask()
    asked = _read_fields(body) if isinstance(body, bytes) else body or {}
    model = str(asked.get("model", ""))
    prices = get_services(request).prices
    tariff = prices.own(model) if budget.cost_usd is None else await known_tariff(prices, model)
    account = daily_account(request, budget)
    prompt = Counted(prompt=expected_tokens(asked))
    receipt = await take_from(request, account, _expense(prompt, tariff))
    try:
        answer = await ask()
    except Exception:
        await account.settle(receipt, Expense())
        raise
    if answer.status >= 400:
        await account.settle(receipt, Expense())
        return answer
    return replace(answer, body=_MeteredBody(answer, account, receipt, tariff))


class _MeteredBody:
    """A response body that is counted as it passes: its usage is charged when it ends."""

    def __init__(
        self,
        answer: UpstreamResponse,
        account: BudgetAccount,
        receipt: Receipt,
        tariff: Tariff | None,
    ) -> None:
        self._body: UpstreamBody = answer.body
        self._pieces: AsyncIterator[bytes] = aiter(answer.body)
        self._reader = UsageReader(answer.headers.get("content-type", ""))
        self._account = account
        self._receipt = receipt
        self._tariff = tariff
        self._is_settled = False

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        try:
            piece = await anext(self._pieces)
        except StopAsyncIteration:
            await self._settle()
            raise
        self._reader.feed(piece)
        return piece

    async def aclose(self) -> None:
        """See UpstreamBody."""
        try:
            await self._body.aclose()
        finally:
            await self._settle()

    async def _settle(self) -> None:
        if self._is_settled:
            return
        self._is_settled = True
        self._reader.end()
        tokens = counted(self._reader.usage)
        if not tokens.total and tokens.reported_usd is None:
            # Usage is missing: charge the expected prompt, and about what has passed.
            tokens = Counted(prompt=self._receipt.expected.tokens, completion=self._reader.made)
        await self._account.settle(self._receipt, _expense(tokens, self._tariff))


def daily_account(request: Request, budget: DailyBudget) -> BudgetAccount:
    """Return the daily account of the client's key. It goes by the key's name, so that neither a
    new secret nor one that a client makes up begins a new day."""
    return get_services(request).store.spending.account(authorize(request).name, budget)


async def take_from(request: Request, account: BudgetAccount, expected: Expense) -> Receipt:
    """Charge an expected expense. Raises BudgetError."""
    receipt = await account.take(expected)
    if receipt.used_up:
        wait_s = get_services(request).store.spending.until_midnight_s()
        raise BudgetError(NAMES[receipt.used_up], wait_s)
    return receipt


async def known_tariff(prices: Prices, model: str) -> Tariff:
    """Return the prices of a model. Raises BadRequestError if they are unknown: a bound on cost
    must not be ignored in silence."""
    if tariff := await prices.find(model):
        return tariff
    raise BadRequestError(
        f"What the model {model!r} costs is not known here, and cost is bounded: whoever runs this"
        " server can name its price (backend.prices).",
        param="model",
        code="model_price_unknown",
    )


def _expense(tokens: Counted, tariff: Tariff | None) -> Expense:
    return Expense(tokens=tokens.total, cost_usd=cost_usd(tariff, tokens) or 0.0)


def _read_fields(body: bytes) -> Mapping[str, Any]:
    try:
        asked = decoded(body)
    except (ValueError, RecursionError):
        return {}
    return asked if isinstance(asked, dict) else {}
