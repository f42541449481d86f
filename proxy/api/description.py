"""/openapi.json, and Swagger UI at /docs with assets from this server.

The description is generated at the first request: by FastAPI from its routes, and from the schemas
in this module for the routes that call a model, which bypass FastAPI. It contains no settings of
the operator, so it needs no key.
"""

import asyncio
import json
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from importlib.resources import files
from typing import Any, get_args

from fastapi import APIRouter
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from policies.headers import ResponseHeader
from policies.profile import Capture
from policies.steps import STEPS_MODES, USAGE_SCOPES
from proxy.api.parameters import EVENT_SCHEMA, errors
from proxy.errors import NotFoundError
from proxy.schemas.resources import (
    ContainerCreate,
    ContainerFileCreate,
    ConversationCreate,
    ConversationUpdate,
    ErrorResponse,
    ItemsCreate,
    RewardCreate,
    UploadForm,
)

router = APIRouter(include_in_schema=False)

DISTRIBUTION = "llm-sandbox-proxy"
ASSETS = ("swagger-ui-bundle.js", "swagger-ui.css")
ASSETS_PACKAGE = "fastapi_offline"
PAGE_HEADERS: Mapping[str, str] = {
    ResponseHeader.CONTENT_TYPE_OPTIONS: "nosniff",
    # The page's own script calls Swagger UI. Nothing is loaded from another host.
    ResponseHeader.CONTENT_SECURITY_POLICY: "default-src 'none'; script-src 'self' 'unsafe-inline';"
    " style-src 'self' 'unsafe-inline'; img-src 'self' data:; connect-src 'self'",
}
Tree = dict[str, Any]


@router.get("/openapi.json")
async def openapi(request: Request) -> Response:
    """Return the OpenAPI description."""
    state = request.app.state
    if not hasattr(state, "openapi"):
        # One task for all first requests: the description takes half a second of processor time.
        encoding = asyncio.to_thread(_encode_description, request.app.routes)
        state.openapi = asyncio.ensure_future(encoding)
    description = await asyncio.shield(state.openapi)
    return Response(description, media_type="application/json")


def _encode_description(routes: list[Any]) -> bytes:
    return json.dumps(describe(routes)).encode()


@router.get("/docs")
async def docs(request: Request) -> Response:
    """Return Swagger UI."""
    root = request.scope.get("root_path", "").rstrip("/")
    page = get_swagger_ui_html(
        openapi_url=f"{root}/openapi.json",
        title=DISTRIBUTION,
        swagger_js_url=f"{root}/docs/{ASSETS[0]}",
        swagger_css_url=f"{root}/docs/{ASSETS[1]}",
        swagger_favicon_url="data:,",
        swagger_ui_parameters={
            "validatorUrl": None
        },  # else the page sends the description to swagger.io
    )
    page.headers.update(PAGE_HEADERS)
    return page


@router.get("/docs/{asset}")
async def docs_asset(asset: str) -> Response:
    """Return the script or the style sheet of Swagger UI."""
    if asset not in ASSETS:
        raise NotFoundError(f"No file {asset!r} belongs to /docs.")
    path = str(files(ASSETS_PACKAGE).joinpath("static", asset))
    return FileResponse(path, headers={ResponseHeader.CACHE_CONTROL: "public, max-age=86400"})


# The description

BODY_MODELS = (
    UploadForm,
    ContainerCreate,
    ContainerFileCreate,
    ConversationCreate,
    ConversationUpdate,
    ItemsCreate,
    RewardCreate,
    ErrorResponse,
)
"""Models that FastAPI does not find, because they are not parameters of a route."""
_REF_TEMPLATE = "#/components/schemas/{model}"
_UNSAFE_METHODS = ("post", "delete")
_FASTAPI_ERRORS = ("HTTPValidationError", "ValidationError")
"""Names of the schemas of FastAPI's error response 422, which this server replaces by 400."""


def describe(routes: list[Any]) -> Tree:
    """Return the OpenAPI description of an application with the routes."""
    tree = get_openapi(
        title=DISTRIBUTION,
        version=version(DISTRIBUTION),
        description="An OpenAI-compatible proxy that gives any language model a sandbox."
        " Paths that are not listed are passed on to the model's backend.",
        routes=routes,
    )
    schemas = tree["components"]["schemas"]
    _, found = models_json_schema(
        [(model, "validation") for model in BODY_MODELS], ref_template=_REF_TEMPLATE
    )
    schemas.update(found["$defs"] | _SCHEMAS)
    for name in _FASTAPI_ERRORS:
        schemas.pop(name, None)
    for method, operation in _operations(tree["paths"]):
        _add_common_errors(method, operation)
    tree["paths"].update({path: {"post": operation} for path, operation in _MODEL_ROUTES.items()})
    return tree


def _operations(paths: Tree) -> Iterator[tuple[str, Tree]]:
    for operations in paths.values():
        yield from operations.items()


def _add_common_errors(method: str, operation: Tree) -> None:
    """Remove FastAPI's 422, and add the errors that many routes share, unless the route describes
    them itself. Every route gets 500 and 503. A route that needs a key gets 401, 429 and 5XX,
    because the backend may have to verify the key. An unsafe method gets 403, because a server
    without keys refuses it to web pages of other sites."""
    responses = operation["responses"]
    responses.pop("422", None)
    statuses: list[int | str] = [500, 503]
    if "security" in operation or "401" in responses:
        statuses += [401, 429, "5XX"]
    if method in _UNSAFE_METHODS:
        statuses.append(403)
    for status, response in errors(*statuses).items():
        responses.setdefault(str(status), response)


# The routes that call a model. Their schemas are written by hand, because OpenAI's own types take
# 0.6 s and 58 MiB to import.


def _object(*required: str, **properties: Any) -> Tree:
    return {"type": "object", "properties": properties, "required": list(required)}


def _array(items: Tree, **keywords: Any) -> Tree:
    return {"type": "array", "items": items, **keywords}


def _enum(*words: str) -> Tree:
    return {"type": "string", "enum": list(words)}


def _number(minimum: float, maximum: float) -> Tree:
    return {"type": "number", "minimum": minimum, "maximum": maximum}


def _integer(minimum: int, maximum: int | None = None) -> Tree:
    return {
        "type": "integer",
        "minimum": minimum,
        **({} if maximum is None else {"maximum": maximum}),
    }


def _ref(name: str) -> Tree:
    return {"$ref": _REF_TEMPLATE.format(model=name)}


def _nullable_object(properties: Mapping[str, Tree], *required: str) -> Tree:
    """Return an object schema in which the fields that are not required may be null. Fields that
    `properties` does not name are allowed."""
    optional = {
        name: schema if name in required else {"anyOf": [schema, {"type": "null"}]}
        for name, schema in properties.items()
    }
    return {"type": "object", "properties": optional, "required": list(required)}


_TEXT: Tree = {"type": "string"}
_FLAG: Tree = {"type": "boolean"}
_ANY_OBJECT: Tree = {"type": "object"}
_TEXT_OR_PARTS: Tree = {"anyOf": [_TEXT, _array(_ANY_OBJECT)]}
_TEXT_OR_OBJECT: Tree = {"anyOf": [_TEXT, _ANY_OBJECT]}
_MODEL: Tree = {
    "type": "string",
    "description": "A model of the backend, or `<model>:plain` for its answer without a sandbox.",
}
_CHAT_MESSAGE = _object(
    "role",
    role={"type": "string", "examples": ["system", "user", "assistant", "tool"]},
    content={"anyOf": [_TEXT, _array({"anyOf": [_TEXT, _ANY_OBJECT]}), {"type": "null"}]},
    name={"anyOf": [_TEXT, {"type": "null"}]},
    tool_call_id={"anyOf": [_TEXT, {"type": "null"}]},
    tool_calls={"anyOf": [_array(_ANY_OBJECT), {"type": "null"}]},
)
_SHARED_FIELDS = {
    "stream": _FLAG,
    "temperature": _number(0, 2),
    "top_p": _number(0, 1),
    "top_logprobs": _integer(0, 20),
    "parallel_tool_calls": _FLAG,
    "metadata": _ANY_OBJECT,
    "store": _FLAG,
    "user": _TEXT,
    "safety_identifier": _TEXT,
    "prompt_cache_key": _TEXT,
    "prompt_cache_retention": _TEXT,
    "prompt_cache_options": {},
    "moderation": {},
    "service_tier": _enum("auto", "default", "flex", "scale", "priority", "fast"),
    "sandbox": _ref("SandboxOptions"),
}
"""The fields that chat completions and responses have in common."""
_CHAT_REQUEST = _nullable_object(
    {
        "model": _MODEL,
        "messages": _array(_CHAT_MESSAGE, minItems=1),
        "n": _integer(1, 128),
        "stream_options": _object(include_usage=_FLAG, include_obfuscation=_FLAG),
        "tools": _array(_ANY_OBJECT),
        "tool_choice": {"anyOf": [_enum("none", "auto", "required"), _ANY_OBJECT]},
        "functions": _array(_ANY_OBJECT),
        "function_call": {"anyOf": [_enum("none", "auto"), _ANY_OBJECT]},
        "max_tokens": _integer(1),
        "max_completion_tokens": _integer(1),
        "response_format": _object("type", type=_TEXT, json_schema=_ANY_OBJECT),
        "stop": {"anyOf": [_TEXT, _array(_TEXT)]},
        "logprobs": _FLAG,
        "logit_bias": {"type": "object", "additionalProperties": _number(-100, 100)},
        "prediction": _ANY_OBJECT,
        "modalities": _array(_TEXT),
        "audio": _ANY_OBJECT,
        "frequency_penalty": _number(-2, 2),
        "presence_penalty": _number(-2, 2),
        "seed": _integer(-(2**63), 2**63 - 1),
        "reasoning_effort": {"anyOf": [_TEXT, _number(0, 1)]},
        "verbosity": _enum("low", "medium", "high"),
        "web_search_options": _ANY_OBJECT,
        **_SHARED_FIELDS,
    },
    "model",
    "messages",
)
_RESPONSES_REQUEST = _nullable_object(
    {
        "model": _MODEL,
        "input": _TEXT_OR_PARTS,
        "instructions": _TEXT,
        "tools": _array(_object("type", type=_TEXT)),
        "tool_choice": {"anyOf": [_enum("none", "auto", "required"), _ANY_OBJECT]},
        "max_tool_calls": _integer(1),
        "text": _object(format=_ANY_OBJECT, verbosity=_enum("low", "medium", "high")),
        "reasoning": _ANY_OBJECT,
        "max_output_tokens": _integer(1),
        "include": _array(_TEXT),
        "stream_options": _object(include_obfuscation=_FLAG),
        "truncation": _enum("auto", "disabled"),
        "background": _FLAG,
        "previous_response_id": _TEXT,
        "conversation": _TEXT_OR_OBJECT,
        "access_programs": {},
        "background_options": {},
        "image": {},
        **_SHARED_FIELDS,
    },
    "model",
    "input",
)
_MESSAGE_FIELDS: Tree = {
    "model": _MODEL,
    "messages": _array(
        _object(
            *("role", "content"),
            role=_enum("user", "assistant", "system"),
            content=_TEXT_OR_PARTS,
        ),
        minItems=1,
    ),
    "max_tokens": _integer(1),
    "system": _TEXT_OR_PARTS,
    "stop_sequences": _array(_TEXT),
    "stream": _FLAG,
    "temperature": _number(0, 1),
    "top_p": _number(0, 1),
    "top_k": _integer(0),
    "metadata": _object(user_id=_TEXT),
    "service_tier": _enum("auto", "standard_only"),
    "thinking": _object("type", type=_TEXT, budget_tokens=_integer(1)),
    "tool_choice": _object("type", type=_enum("auto", "any", "tool", "none"), name=_TEXT),
    "tools": _array(_ANY_OBJECT),
    "output_config": _ANY_OBJECT,
    "output_format": _ANY_OBJECT,
    "container": _TEXT_OR_OBJECT,
    "thread": _object("type", type=_enum("create", "continue"), previous_message_id=_TEXT),
    "sandbox": _ref("SandboxOptions"),
}
_SANDBOX_OPTIONS = _nullable_object(
    {
        "profile": _TEXT,
        "enabled": _enum("always", "auto", "never"),
        "prompt": _enum("compute_first", "neutral", "none"),
        "steps": _enum(*STEPS_MODES),
        "offload_documents": _FLAG,
        "usage": _enum(*USAGE_SCOPES),
        "deadline_s": {"type": "number", "exclusiveMinimum": 0},
        "on_disconnect": _enum("cancel", "detach"),
        "capture": _enum(*get_args(Capture)),
        "upstream": {"type": "string", "format": "uri"},
        "session": _TEXT,
        "container_id": _TEXT,
        "file_ids": _array(_TEXT),
        **dict.fromkeys(("limits", "isolation", "inputs", "observation", "artifacts"), _ANY_OBJECT),
    }
)
_SANDBOX_OPTIONS |= {
    "additionalProperties": False,
    "description": "Settings of the request's sandbox, within the limits of its profile.",
}
_SCHEMAS: Tree = {
    "ChatCompletionRequest": _CHAT_REQUEST,
    "ChatCompletion": {
        "additionalProperties": True,  # such as the backend's `system_fingerprint`
        **_object(
            *("id", "object", "created", "model", "choices"),
            id=_TEXT,
            object=_enum("chat.completion"),
            created=_integer(0),
            model=_TEXT,
            choices=_array(_ANY_OBJECT),
            usage=_ANY_OBJECT,
            sandbox=_ANY_OBJECT,
        ),
    },
    "ResponseRequest": _RESPONSES_REQUEST,
    "MessageRequest": _nullable_object(_MESSAGE_FIELDS, "model", "messages", "max_tokens"),
    "TokenCountRequest": _nullable_object(_MESSAGE_FIELDS, "model", "messages"),
    "Message": _object(
        *("id", "type", "role", "model", "content", "stop_reason", "usage"),
        id=_TEXT,
        type=_enum("message"),
        role=_enum("assistant"),
        model=_TEXT,
        content=_array(_ANY_OBJECT),
        container={"anyOf": [_ANY_OBJECT, {"type": "null"}]},
        stop_reason={"anyOf": [_TEXT, {"type": "null"}]},
        stop_sequence={"anyOf": [_TEXT, {"type": "null"}]},
        stop_details={"anyOf": [_ANY_OBJECT, {"type": "null"}]},
        usage=_ANY_OBJECT,
        sandbox=_ANY_OBJECT,
    ),
    "TokenCount": _object("input_tokens", input_tokens=_integer(0)),
    "MessagesErrorResponse": {
        "description": "Anthropic's error body.",
        **_object(
            *("type", "error"),
            type=_enum("error"),
            error=_object("type", "message", type=_TEXT, message=_TEXT),
            request_id=_TEXT,
        ),
    },
    "SandboxOptions": _SANDBOX_OPTIONS,
}
_SECURITY: list[Tree] = [{"HTTPBearer": []}, {"APIKeyHeader": []}]
_MODEL_ROUTE_ERRORS = (400, 401, 403, 404, 409, 413, 422, 429, 500, 503, "4XX", "5XX")


def _model_route(
    summary: str, tag: str, body_schema: str, answer_schema: str, *, streams: bool = True
) -> Tree:
    """Return the operation of a route that calls a model."""
    component = "MessagesErrorResponse" if tag == "Messages" else "ErrorResponse"
    content: Tree = {"application/json": {"schema": _ref(answer_schema)}}
    if streams:
        content["text/event-stream"] = {"schema": EVENT_SCHEMA}
    failed = errors(*_MODEL_ROUTE_ERRORS, component=component)
    return {
        "tags": [tag],
        "summary": summary,
        "operationId": summary.lower().replace(" ", "_"),
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _ref(body_schema)}},
        },
        "responses": {
            "200": {"description": "The answer, in one piece or as a stream.", "content": content},
            **{str(status): response for status, response in failed.items()},
        },
        "security": _SECURITY,
    }


_MODEL_ROUTES = {
    "/v1/chat/completions": _model_route(
        "Create chat completion", "Chat", "ChatCompletionRequest", "ChatCompletion"
    ),
    "/v1/responses": _model_route(
        "Create response", "Responses", "ResponseRequest", "ResponseObject"
    ),
    "/v1/messages": _model_route("Create message", "Messages", "MessageRequest", "Message"),
    "/v1/messages/count_tokens": _model_route(
        "Count tokens", "Messages", "TokenCountRequest", "TokenCount", streams=False
    ),
}
