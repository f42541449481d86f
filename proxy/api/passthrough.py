"""Relays requests to paths without a route, by the rules of `backend.passthrough`, and requests of
the Responses API for `:plain` models. The backend stores the responses of the Responses API; a
client may use only the responses to its own requests."""

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial, wraps
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from policies.budgets import DailyBudget
from policies.headers import ResponseHeader
from policies.json_bounds import TooMuchJSONError, decode_json
from policies.passthrough import PathKind, can_refer_to_responses, is_stateless, path_kind
from policies.routing import PLAIN_SUFFIX, backend_model_name
from proxy import stepwise
from proxy.agent.model import Upstream, UpstreamResponse, UpstreamResponseBody
from proxy.api.dependencies import (
    SLOW_BYTES,
    ClientRequest,
    JSONResponse,
    ModelRequest,
    authenticate,
    body_reservation,
    wait_for_disconnect,
)
from proxy.api.upstream_relay import (
    RequestBodyStream,
    URLScanner,
    fields_for_backend,
    forward,
    forward_json,
    raw_path,
    refuse_private_urls,
    uncheckable_urls_error,
    upstream_of,
)
from proxy.errors import (
    BadRequestError,
    BodyTooLargeError,
    ForbiddenError,
    NotFoundError,
    ProxyError,
)
from proxy.store.responses import ResponseRepository

RELAYED_METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
"""Methods that are relayed. TRACE is not: its response would reveal the backend's key."""
MAX_SEARCHED_BYTES = 64 << 10
"""Number of leading bytes of a response that are searched for its id."""
_RESPONSE_ID = re.compile(rb'"id"\s*:\s*"(resp[\w.+/=-]{1,1000})"')
"""Matches a response's id. Proxies in front of a backend may extend the id, in base64."""

Handler = Callable[[Request, str], Awaitable[Response]]
_REFERENCE_FIELDS = frozenset({"id", "type"})
"""The fields of a reference. An item with no other fields refers to an item that the backend
stores."""
_REFERENCE_TYPE = "item_reference"


async def forward_unmatched_request(scope: Scope, receive: Receive, send: Send) -> None:
    """Relay a request that no route matches, or reject it."""
    if scope["type"] == "websocket" or _is_upgrade(scope):
        error = BadRequestError("WebSockets are not supported.", code="unsupported_protocol")
        await JSONResponse(error.body(), status_code=error.status)(scope, receive, send)
        return
    request = Request(scope, receive)
    response = await _relay(authenticate(request))
    await response(scope, receive, send)


def _is_upgrade(scope: Scope) -> bool:
    return Headers(scope=scope).get("upgrade", "").lower() == "websocket"


async def _relay(request: ClientRequest) -> Response:
    http, services = request.http, request.services
    path_class = path_kind(raw_path(http))
    upstream = _upstream(request, path_class)
    stream = RequestBodyStream(http)
    body = await _read_body(request, stream)
    fields = await _body_fields(request, body)
    plain = await _plain_fields(fields)
    if path_class == "plain only" and plain is None:
        raise NotFoundError(
            f"{http.method} {http.url.path} is not served with a sandbox. Name the model"
            " '<model>:plain' to relay the request to the backend.",
            code="unknown_url",
        )
    _require_stateless(request)
    await _require_owned_state(request, body, fields)
    calls_model = http.method == "POST"
    profile = services.profiles.select(request.key, _model_name(plain or fields), None, {})
    if calls_model and profile.enabled == "always":
        raise ForbiddenError(
            f"enabled: always holds here (profile {profile.name!r}), and requests that are"
            " passed on to the backend have no sandbox.",
            param="sandbox.enabled",
        )
    budget = profile.budgets.daily.for_model_calls if calls_model else DailyBudget()
    await refuse_private_urls(request, plain or fields)
    sent = body if plain is None else await stepwise.encode(plain)
    return await forward(
        request, upstream, sent, plain or fields, stream.wait_for_disconnect, budget
    )


async def _body_fields(
    request: ClientRequest, body: bytes | RequestBodyStream | None
) -> dict[str, Any]:
    """Return the fields of a body that is a JSON object. For another body, or for a body that was
    not read, return an empty dict. Raises BadRequestError for invalid JSON, which a backend might
    parse differently."""
    if not body or not isinstance(body, bytes):
        return {}
    try:
        if len(body) > SLOW_BYTES:
            async with request.services.body_memory.decoding:
                decoded = await stepwise.decode_large(body)
            # `RequestBodyStream.read` has reserved as many bytes as the body has for the decoded
            # copy. Reserve the rest.
            body_reservation(request.http).take(max(0, decoded.memory_bytes - len(body)))
            fields = decoded.value
        else:
            fields = decode_json(body)
    except TooMuchJSONError as error:
        raise BodyTooLargeError(str(error)) from error
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"The request body is not valid JSON: {error}.") from error
    return fields if isinstance(fields, dict) else {}


def _model_name(fields: Mapping[str, Any]) -> str:
    """Return the model whose policy applies, or "" if the body names no model."""
    model = fields.get("model")
    return backend_model_name(model) if isinstance(model, str) else ""


def _upstream(request: ClientRequest, path_class: PathKind) -> Upstream:
    """Return the `Upstream` that sends the request to the backend. Raises ProxyError or
    HTTPException if the request may not be relayed."""
    endpoint = f"{request.http.method} {request.http.url.path}"
    if request.http.method not in RELAYED_METHODS:
        raise HTTPException(405, headers={ResponseHeader.ALLOW: ", ".join(RELAYED_METHODS)})
    if path_class == "unreadable":
        raise HTTPException(404, "Not Found, because servers interpret this path differently")
    if path_class == "closed":
        raise ProxyError(
            f"{endpoint} is for the backend's administrators and is not relayed.",
            status=403,
            type="invalid_request_error",
            code="path_closed",
        )
    if path_class == "ours":
        raise HTTPException(404)
    return upstream_of(request)


def _require_stateless(request: ClientRequest) -> None:
    """Raise ProxyError if the backend may store state for the request: all clients would share the
    state. With `backend.passthrough: all`, all requests pass."""
    http = request.http
    if request.services.passthrough == "all" or is_stateless(http.method, raw_path(http)):
        return
    raise ProxyError(
        f"{http.method} {http.url.path} is not relayed: the backend may store state, which it"
        " would share between all clients of this server. The operator can allow such paths with"
        " backend.passthrough: all.",
        status=403,
        type="invalid_request_error",
        code="path_keeps_state",
    )


async def _require_owned_state(
    request: ClientRequest, body: bytes | RequestBodyStream | None, fields: Mapping[str, Any]
) -> None:
    """Raise ProxyError if the request names state that the backend may store for another client.
    Also raise it if the body cannot be checked, because it is too long, compressed or not declared
    as JSON. Requests to paths outside the Responses API pass. With `backend.passthrough: all`, all
    requests pass."""
    path = raw_path(request.http)
    if request.services.passthrough == "all" or not can_refer_to_responses(path):
        return
    if isinstance(body, RequestBodyStream):
        raise BadRequestError(
            "The request body cannot be checked for responses of other clients. Send a smaller"
            " body, as application/json and not compressed."
        )
    await require_owned_references(request, fields)


async def _read_body(
    request: ClientRequest, stream: RequestBodyStream
) -> bytes | RequestBodyStream | None:
    """Return the body: bytes if the body is JSON and short enough, else a stream; None if the
    request has no body. Raises BadRequestError if a compressed body may contain URLs to check."""
    headers = request.headers
    if "transfer-encoding" not in headers and headers.get("content-length", "0") == "0":
        await stream.read(0)
        return None
    kind, is_compressed = headers.get("content-type", "").lower(), "content-encoding" in headers
    if kind.startswith("application/json") and not is_compressed:
        read = await stream.read(request.services.inputs.max_body_bytes)
        if read is not None:
            return read
    # The fields of a form are never content parts, so the backend fetches no URL in them.
    if (
        not kind.startswith("multipart/form-data")
        and not request.services.inputs.backend_fetches_urls
    ):
        if is_compressed:
            raise uncheckable_urls_error("is compressed")
        stream.set_piece_check(URLScanner().check)
    return stream


async def _plain_fields(fields: dict[str, Any]) -> dict[str, Any] | None:
    """Return the fields for the backend if the model is `:plain`, else None."""
    model = fields.get("model")
    if not isinstance(model, str) or not model.endswith(PLAIN_SUFFIX):
        return None
    return await fields_for_backend(fields, backend_model_name(model))


async def forward_response_request(request: ModelRequest, budget: DailyBudget) -> Response:
    """Relay a request to create a response. Unless `store` is false, store the id of the new
    response as the client's. Raises the errors of `require_owned_references` and `forward_json`."""
    await require_owned_references(request, request.body)
    if request.body.get("store") is False:
        return await forward_json(request, request.body, budget)
    record_id = partial(_record_response_id, request.services.store.responses, request.owner)
    return await forward_json(request, request.body, budget, record_id)


async def require_owned_references(request: ClientRequest, body: Mapping[str, Any]) -> None:
    """Raise NotFoundError if the request names state that the backend may store for another
    client."""
    if request.credentials is not None:
        return  # the backend tells its clients apart by their keys
    before = body.get("previous_response_id")
    services = request.services
    is_own = services.store.responses.is_backend_response
    if before and not await is_own(request.owner, str(before)):
        raise NotFoundError(
            f"Previous response with id {str(before)!r} not found.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    if not services.keyring.has_many_keys or services.passthrough == "all":
        return
    if param := _stored_state_reference(body):
        raise NotFoundError(
            f"Invalid '{param}': state that the backend stores cannot be named here, because the"
            " backend shares it between all clients of this server. Send the items themselves, or"
            " previous_response_id. The operator can allow it with backend.passthrough: all.",
            param=param,
        )


def with_upstream_fallback(handler: Handler) -> Handler:
    """Return a handler that calls `handler`, and relays the request to the backend if `handler`
    raises NotFoundError and the backend stores the response for the client."""

    @wraps(handler)
    async def handler_or_upstream(request: Request, response_id: str) -> Response:
        try:
            return await handler(request, response_id)
        except NotFoundError:
            client = authenticate(request)
            repository = client.services.store.responses
            if not await repository.is_backend_response(client.owner, response_id):
                raise
        return await forward(
            client, upstream_of(client), None, {}, partial(wait_for_disconnect, request)
        )

    return handler_or_upstream


def _record_response_id(
    repository: ResponseRepository, owner: str, response: UpstreamResponse
) -> UpstreamResponse:
    if response.status >= 400:
        return response
    return replace(
        response,
        body=_ResponseIdRecorder(response.body, partial(repository.add_backend_response, owner)),
    )


class _ResponseIdRecorder:
    """The body of a relayed response, which is searched for the response's id. The id is stored as
    the client's before the client receives the id."""

    def __init__(
        self, body: UpstreamResponseBody, store_id: Callable[[str], Awaitable[None]]
    ) -> None:
        self._body = body
        self._pieces: AsyncIterator[bytes] = aiter(body)
        self._store_id = store_id
        self._searched_bytes = b""
        self._is_done = False

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        piece = await anext(self._pieces)
        if not self._is_done:
            self._searched_bytes += piece
            found = _RESPONSE_ID.search(self._searched_bytes)
            self._is_done = bool(found) or len(self._searched_bytes) > MAX_SEARCHED_BYTES
            if found:
                await self._store_id(found[1].decode())
        return piece

    async def aclose(self) -> None:
        await self._body.aclose()


def _stored_state_reference(fields: Mapping[str, Any]) -> str | None:
    """Return the path of the first field of a Responses API request that names a conversation, an
    item or a container in the backend's store, or None."""
    if fields.get("conversation"):
        return "conversation"
    for name, is_reference in (("input", _is_item_reference), ("tools", _names_container)):
        values = fields.get(name)
        for index, value in enumerate(values if isinstance(values, list) else ()):
            if isinstance(value, dict) and is_reference(value):
                return f"{name}[{index}]"
    return None


def _is_item_reference(item: Mapping[str, Any]) -> bool:
    return item.get("type") == _REFERENCE_TYPE or (
        "id" in item and item.keys() <= _REFERENCE_FIELDS
    )


def _names_container(tool: Mapping[str, Any]) -> bool:
    environment = tool.get("environment")
    if isinstance(environment, dict) and environment.get("container_id"):
        return True
    return isinstance(tool.get("container"), str)
