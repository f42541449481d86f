"""Requests of any kind on their way to the backend's server, their bytes passed on both ways."""

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from proxy.agent.model import Passage, Passing
from proxy.api.connection import left, services, unless
from proxy.api.relay import LOOK_AFTER_S, RelayResponse, is_stream, whole
from proxy.api.upload import Upload
from proxy.wire.plain import as_the_backend_knows_it

MAX_WHOLE_BYTES = 256 << 10
"""An answer up to this length is sent in one piece."""
Gone = Callable[[], Coroutine[Any, Any, None]]
"""Waits until the client has left."""


def passage_of(request: Request) -> Passage:
    """The way to the backend's server, where there is one."""
    passage = services(request).model.passage
    if passage is None:
        raise HTTPException(404, "Not Found, and the backend is no server to pass it on to")
    return passage


async def pass_on(
    request: Request, passage: Passage, body: bytes | Upload | None, gone: Gone
) -> Response:
    """The backend's answer. Raises ClientDisconnect, BackendError."""
    work = _passed(passage, _passing(request, body), gone)
    return await unless(gone, work, look_after_s=LOOK_AFTER_S)


async def pass_plain(request: Request, written: bytes) -> Response:
    """The same for a request to a `:plain` model that was read already."""
    body = as_the_backend_knows_it(written) or written
    return await pass_on(request, passage_of(request), body, partial(left, request))


def _passing(request: Request, body: bytes | Upload | None) -> Passing:
    query = request.scope["query_string"].decode("latin-1")
    headers = request.headers
    # Its length is the business of whoever writes it anew; and of two that a client gave, the one
    # that was not read by could be another's request to the backend.
    if not isinstance(body, Upload) or "transfer-encoding" in headers:
        raw = [line for line in headers.raw if line[0] != b"content-length"]
        headers = Headers(raw=raw)
    path = f"{written_path(request)}?{query}" if query else written_path(request)
    return Passing(request.method, path, headers, body)


def written_path(request: Request) -> str:
    """As the client wrote it."""
    raw: bytes = request.scope["raw_path"]
    return raw.decode("latin-1")


async def _passed(passage: Passage, passing: Passing, gone: Gone) -> Response:
    relayed = await passage.pass_on(passing)
    length = relayed.headers.get("content-length", "")
    is_short = length.isdecimal() and int(length) <= MAX_WHOLE_BYTES
    if is_short and not is_stream(relayed):
        return await whole(relayed)
    return RelayResponse(relayed, gone)
