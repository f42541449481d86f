"""Requests of any kind on their way to the backend's server, their bytes passed on both ways."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from policies.budgets import DailyBudget
from policies.json_bounds import encoded
from policies.routing import plain_name
from proxy.agent.model import Passage, Passing, Relayed
from proxy.api import spending
from proxy.api.body_stream import BodyStream
from proxy.api.dependencies import Disconnect, cancel_on_disconnect, model, wait_for_disconnect
from proxy.api.private_urls import refuse_private_urls
from proxy.api.relay import LOOK_AFTER_S, MAX_WHOLE_BYTES, RelayResponse, is_stream, whole
from proxy.errors import BackendError
from proxy.wire.plain import for_the_backend

Watch = Callable[[Relayed], Relayed]
"""Makes of an answer one whose body is looked at as it passes."""


def passage_of(request: Request) -> Passage:
    """The way to the backend's server, where there is one."""
    passage = model(request).passage
    if passage is None:
        raise HTTPException(404, "Not Found, and the backend is no server to pass it on to")
    return passage


async def pass_on(
    request: Request,
    passage: Passage,
    body: bytes | BodyStream | None,
    gone: Disconnect,
    day: DailyBudget = DailyBudget(),
    watch: Watch | None = None,
) -> Response:
    """The backend's answer; `day` is what bounds its spending, `watch` sees it pass.

    Raises ClientDisconnect, BudgetError, BackendError.
    """
    passing = _passing(request, body, is_read=day.is_set or watch is not None)
    work = _passed(request, passage, passing, gone, day, watch)
    return await cancel_on_disconnect(gone, work, look_after_s=LOOK_AFTER_S)


async def pass_plain(
    request: Request,
    body: Mapping[str, Any],
    day: DailyBudget = DailyBudget(),
    watch: Watch | None = None,
) -> Response:
    """The same for the fields of a request to a `:plain` model. Raises BadRequestError too, for a
    private URL."""
    fields = for_the_backend(body, plain_name(body["model"]))
    await refuse_private_urls(request, fields)
    written = encoded(fields)
    return await pass_on(
        request, passage_of(request), written, partial(wait_for_disconnect, request), day, watch
    )


def _passing(request: Request, body: bytes | BodyStream | None, *, is_read: bool) -> Passing:
    query = request.scope["query_string"].decode("latin-1")
    headers = request.headers
    # Its length is the business of whoever writes it anew; and of two that a client gave, the one
    # that was not read by could be another's request to the backend.
    if not isinstance(body, BodyStream) or "transfer-encoding" in headers:
        headers = _without(headers, "content-length")
    if is_read:  # what is compressed tells nothing
        headers = _without(headers, "accept-encoding")
    path = f"{written_path(request)}?{query}" if query else written_path(request)
    return Passing(request.method, path, headers, body)


def _without(headers: Headers, name: str) -> Headers:
    return Headers(raw=[line for line in headers.raw if line[0] != name.encode()])


def written_path(request: Request) -> str:
    """As the client wrote it."""
    raw: bytes = request.scope["raw_path"]
    return raw.decode("latin-1")


async def _passed(
    request: Request,
    passage: Passage,
    passing: Passing,
    gone: Disconnect,
    day: DailyBudget,
    watch: Watch | None,
) -> Response:
    body = passing.body if isinstance(passing.body, bytes) else None
    try:
        relayed = await spending.relayed(request, day, body, partial(passage.pass_on, passing))
    except BackendError as error:
        if isinstance(passing.body, BodyStream) and passing.body.refusal is not None:
            raise passing.body.refusal from error
        raise
    if watch:
        relayed = watch(relayed)
    length = relayed.headers.get("content-length", "")
    is_short = length.isdecimal() and int(length) <= MAX_WHOLE_BYTES
    if is_short and not is_stream(relayed):
        return await whole(relayed, gone)
    return RelayResponse(relayed, gone)
