"""The routes' FastAPI dependencies for the client's key, the owner, the services and JSON bodies.
Also the OpenAPI fragments that routes share.

The routes that call a model do not use the dependencies, because the dependencies took a tenth of
the time of a relayed request (`bench/relay.py`).
"""

from collections.abc import Callable, Coroutine
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Security
from fastapi.security import APIKeyHeader, HTTPBearer
from pydantic import BaseModel
from starlette.requests import Request

from proxy.api import dependencies
from proxy.api.dependencies import (
    Services,
    authorize,
    decode_body,
    is_operator,
    read_body,
    read_json_object,
    require_operator,
)
from proxy.keys import Key
from proxy.schemas.resources import parse
from proxy.schemas.validation import check_request_body

M = TypeVar("M", bound=BaseModel)

_BEARER_SCHEME = HTTPBearer(auto_error=False, description="A key of this server.")
_API_KEY_HEADER = APIKeyHeader(
    name="x-api-key", auto_error=False, description="The same key, as Anthropic's SDKs send it."
)


# Async, because FastAPI runs a plain function in a thread.
async def _services(request: Request) -> Services:
    return dependencies.get_services(request)


async def _security_schemes(
    bearer: Annotated[object, Security(_BEARER_SCHEME)],
    header: Annotated[object, Security(_API_KEY_HEADER)],
) -> None:
    """Declare the headers with the key in the OpenAPI description. `authorize` reads the
    headers."""


async def _key(request: Request, schemes: Annotated[None, Depends(_security_schemes)]) -> Key:
    return authorize(request)


async def _key_or_operator(
    request: Request, schemes: Annotated[None, Depends(_security_schemes)]
) -> Key | None:
    return None if is_operator(request) else authorize(request)


async def _operator(request: Request, schemes: Annotated[None, Depends(_security_schemes)]) -> None:
    require_operator(request)


ServicesDep = Annotated[Services, Depends(_services)]
"""The application services."""
REQUIRES_KEY = Depends(_key)
ClientKey = Annotated[Key, REQUIRES_KEY]
"""The client's key; 401 without a valid key."""
KeyOrOperator = Annotated[Key | None, Depends(_key_or_operator)]
"""The client's key, or None for the operator's key; 401 without a valid key."""
REQUIRES_OPERATOR = Depends(_operator)
"""Requires the operator's key: 401 without a valid key, 403 with a client's key."""


async def _owner(request: Request, key: ClientKey) -> str:
    return dependencies.get_owner(request)


Owner = Annotated[str, Depends(_owner)]
"""The owner of the client's files, runs and conversations; 401 without a valid key."""


def json_body(model: type[M]) -> Callable[..., Coroutine[Any, Any, M]]:
    """Return a dependency that parses a JSON body of at most `MAX_JSON_BYTES` as `model`. The
    dependency raises UnauthorizedError, BadRequestError, BodyTooLargeError, BusyError."""

    async def read(request: Request, key: ClientKey) -> M:
        return parse(model, await read_json_object(request))

    return read


def large_json_body(model: type[M]) -> Callable[..., Coroutine[Any, Any, M]]:
    """Return a dependency that parses a JSON body as `model`. The body may be empty, or as large as
    the body of a model request, which can contain files. The dependency raises the errors of
    `json_body`."""

    async def read(request: Request, key: ClientKey, services: ServicesDep) -> M:
        written = await read_body(request, services.inputs.max_body_bytes)
        return parse(
            model, check_request_body(await decode_body(request, written) if written else {})
        )

    return read


Responses = dict[int | str, dict[str, Any]]
"""OpenAPI responses by status."""
BODY_ERRORS = (400, 413, 503)
"""Statuses of the errors of a request body."""
_ERROR_DESCRIPTIONS: dict[int | str, str] = {
    400: "The request is wrong; `param` names the field.",
    401: "The key is missing or wrong.",
    403: "A policy forbids the request.",
    404: "The client has no such object.",
    408: "The client sent nothing for too long.",
    409: "The run was cancelled, or is in progress in another process of the server.",
    413: "The request, or a file in it, is too large.",
    422: "The Idempotency-Key was used before, with another body.",
    429: "The daily budget is used up, or the backend limits the rate.",
    500: "The proxy failed.",
    503: "The server is busy or stopping; `Retry-After` is the delay in seconds.",
    "4XX": "The backend refused the request.",
    "5XX": "The backend failed.",
}
ERROR_COMPONENT = "ErrorResponse"


def errors(*statuses: int | str, component: str = ERROR_COMPONENT) -> Responses:
    """Return the OpenAPI error responses of a route."""
    schema = {"$ref": f"#/components/schemas/{component}"}
    content = {"application/json": {"schema": schema}}
    return {
        status: {"description": _ERROR_DESCRIPTIONS[status], "content": content}
        for status in statuses
    }


def content(media_type: str = "*/*") -> Responses:
    """Return the OpenAPI response of a route that sends a file."""
    schema = {"type": "string", "format": "binary"}
    return {200: {"description": "The content.", "content": {media_type: {"schema": schema}}}}


EVENT_SCHEMA = {
    "type": "object",
    "description": "One server-sent event of the stream.",
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
    "required": ["data"],
}
"""The schema of a stream. Before OpenAPI 3.2, the schema of a stream describes one event."""
EVENT_RESPONSES: Responses = {200: {"content": {"text/event-stream": {"schema": EVENT_SCHEMA}}}}
"""The OpenAPI response of a route that may stream server-sent events."""
FORM_MEDIA_TYPE = "multipart/form-data"


def openapi_body(model: type[BaseModel], *media_types: str) -> dict[str, Any]:
    """Return the OpenAPI request body of a route that parses its body itself."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    types = media_types or ("application/json",)
    return {"requestBody": {"content": {media_type: {"schema": schema} for media_type in types}}}


def openapi_query(model: type[BaseModel]) -> dict[str, Any]:
    """Return the OpenAPI query parameters of a route that parses its query itself."""
    fields = model.model_json_schema()["properties"]
    return {
        "parameters": [
            {"name": name, "in": "query", "required": False, "schema": schema}
            for name, schema in fields.items()
        ]
    }
