"""Every path that is not ours: the backend's, its bytes passed on both ways."""

from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from policies.budgets import DailyBudget
from policies.json_bounds import decoded, encoded
from policies.passthrough import Way, goes_on_from_responses, is_stateless, way
from policies.routing import plain_name
from proxy.agent.model import Passage
from proxy.api.body_stream import BodyStream
from proxy.api.dependencies import JSONResponse, authorize, services
from proxy.api.passing import pass_on, passage_of, written_path
from proxy.api.plain_responses import require_own
from proxy.api.private_urls import URLScan, refuse_private_urls, unchecked
from proxy.errors import BadRequestError, ForbiddenError, NotFoundError, ProxyError
from proxy.wire.plain import plain_fields

METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
"""Not TRACE: it would tell the client the backend's key."""


async def unmatched(scope: Scope, receive: Receive, send: Send) -> None:
    """What no route has taken."""
    if scope["type"] == "websocket" or _asks_for_one(scope):
        error = BadRequestError("WebSockets are not served here.", code="unsupported_protocol")
        await JSONResponse(error.body(), status_code=error.status)(scope, receive, send)
        return
    request = Request(scope, receive)
    response = await _answer(request)
    await response(scope, receive, send)


def _asks_for_one(scope: Scope) -> bool:
    return Headers(scope=scope).get("upgrade", "").lower() == "websocket"


async def _answer(request: Request) -> Response:
    key = authorize(request)
    where = way(written_path(request))
    passage = _passage(request, where)
    stream = BodyStream(request)
    body = await _body(request, stream)
    fields = _fields(body)
    plain = plain_fields(fields)
    if where == "plain only" and plain is None:
        raise NotFoundError(
            f"{request.method} {request.url.path} is not served with a sandbox: name the model"
            " '<model>:plain' to have the request passed on to the backend.",
            code="unknown_url",
        )
    _require_stateless(request)
    await _require_own(request, body, fields)
    asks_a_model = request.method == "POST"
    profile = services(request).profiles.of(key, _model(plain or fields), None, {})
    if asks_a_model and profile.computer == "always":
        raise ForbiddenError(
            f"computer: always holds here (profile {profile.name!r}), and what is passed on to the"
            " backend has none.",
            param="sandbox.computer",
        )
    day = profile.per_day.of_model_calls if asks_a_model else DailyBudget()
    await refuse_private_urls(request, plain or fields)
    written = body if plain is None else encoded(plain)
    return await pass_on(request, passage, written, stream.left, day)


def _fields(body: bytes | BodyStream | None) -> dict[str, Any]:
    """Return a body's fields; none of what is no JSON object, or too long to be read. Raises
    BadRequestError for what is no JSON: a backend may read it more kindly."""
    if not body or not isinstance(body, bytes):
        return {}
    try:
        fields = decoded(body)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"The request body is not valid JSON: {error}.") from error
    return fields if isinstance(fields, dict) else {}


def _model(fields: Mapping[str, Any]) -> str:
    """Return the model whose policy holds; without one, the key's alone does."""
    model = fields.get("model")
    return plain_name(model) if isinstance(model, str) else ""


def _passage(request: Request, where: Way) -> Passage:
    """The way to the backend, if it is open for this request. Raises ProxyError."""
    named = f"{request.method} {request.url.path}"
    if request.method not in METHODS:
        raise HTTPException(405, headers={"Allow": ", ".join(METHODS)})
    if where == "unreadable":
        raise HTTPException(404, "Not Found, and of a path that servers read differently")
    if where == "closed":
        raise ProxyError(
            f"{named} is for the backend's administrators and is not passed on.",
            status=403,
            type="invalid_request_error",
            code="path_closed",
        )
    if where == "ours":
        raise HTTPException(404)
    return passage_of(request)


def _require_stateless(request: Request) -> None:
    """Raise ProxyError where the backend may keep something, and clients would share it."""
    if services(request).passthrough == "all" or is_stateless(
        request.method, written_path(request)
    ):
        return
    raise ProxyError(
        f"{request.method} {request.url.path} is not passed on: the backend may keep something of"
        " it, and does not tell one client of this server from another. The operator opens such"
        " paths with backend.passthrough: all.",
        status=403,
        type="invalid_request_error",
        code="path_keeps_state",
    )


async def _require_own(
    request: Request, body: bytes | BodyStream | None, fields: Mapping[str, Any]
) -> None:
    """Raise ProxyError where the request goes on from what the backend keeps for others, or where
    nobody can tell."""
    if services(request).passthrough == "all" or not goes_on_from_responses(written_path(request)):
        return
    if isinstance(body, BodyStream):
        raise BadRequestError(
            "The request body cannot be checked for responses of other clients: send less, as"
            " application/json and not compressed."
        )
    await require_own(request, fields)


async def _body(request: Request, stream: BodyStream) -> bytes | BodyStream | None:
    """The body, read where it may name a model; else as it comes."""
    headers = request.headers
    if "transfer-encoding" not in headers and headers.get("content-length", "0") == "0":
        await stream.read(0)
        return None
    kind, is_compressed = headers.get("content-type", "").lower(), "content-encoding" in headers
    if kind.startswith("application/json") and not is_compressed:
        read = await stream.read(services(request).inputs.max_body_bytes)
        if read is not None:
            return read
    # A form has its fields apart: none of them is a part of a message.
    if not kind.startswith("multipart/form-data") and not services(request).inputs.backend_fetches:
        if is_compressed:
            raise unchecked("is compressed")
        stream.check_with(URLScan().check)
    return stream
