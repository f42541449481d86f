"""The web application: its routes and middleware, and the error responses."""

from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager

from fastapi.exceptions import RequestValidationError
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Scope

from policies.headers import ResponseHeader
from proxy.api import (
    chat,
    containers,
    conversations,
    description,
    files,
    messages,
    passthrough,
    responses,
    runs,
    stored_responses,
    system,
    trajectories,
)
from proxy.api.dependencies import Services, error_response
from proxy.api.middleware import (
    BrowserMiddleware,
    ClientKeyMiddleware,
    FastPathMiddleware,
    RequestMiddleware,
    SessionPathMiddleware,
)
from proxy.errors import BadRequestError, ProxyError, internal_error
from proxy.schemas.resources import validation_error

CLIENT_CLOSED_REQUEST = 499
ROUTERS = (
    chat,
    responses,
    stored_responses,
    conversations,
    messages,
    files,
    containers,
    runs,
    trajectories,
    system,
    description,
)
HOT_PATHS = frozenset({"/v1/chat/completions", "/v1/responses", "/v1/messages"})
"""The routes that call a model."""
Lifespan = Callable[[Starlette], AbstractAsyncContextManager[None]]


def create_app(services: Services, lifespan: Lifespan | None = None) -> ASGIApp:
    """Return the server's ASGI application: the application of `build_app` inside the two
    middlewares that every request passes first."""
    return SessionPathMiddleware(RequestMiddleware(build_app(services, lifespan), services))


def build_app(services: Services, lifespan: Lifespan | None = None) -> Starlette:
    """Return the application with FastAPI's routes. All routes have the same middleware. The
    innermost middleware is the fast path to the routes that call a model."""
    # Starlette instead of FastAPI, whose telemetry and limit on the size of a body cost a tenth of
    # the time of a relayed request (`bench/relay.py`). FastAPI's routes need only
    # AsyncExitStackMiddleware.
    routes: list[BaseRoute] = list(_routes())
    app = Starlette(routes=routes, lifespan=lifespan)
    app.state.endpoints = _endpoints()
    app.state.backend_check = system.BackendCheck(services.model)
    app.router.default = passthrough.forward_unmatched_request
    hot = {route.path: route.app for route in _routes() if route.path in HOT_PATHS}
    router = AsyncExitStackMiddleware(app.router.middleware_stack)
    app.router.middleware_stack = FastPathMiddleware(router, hot)
    app.add_exception_handler(ProxyError, _on_proxy_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(RecursionError, _on_recursion_error)
    app.add_exception_handler(Exception, _on_exception)
    if services.client_keys:
        app.add_middleware(ClientKeyMiddleware, keys=services.client_keys)
    app.add_middleware(
        BrowserMiddleware,
        needs_key=not services.keyring.is_open,
        public_url=services.public_url,
    )
    return app


def _routes() -> Iterator[Route]:
    for module in ROUTERS:
        for route in module.router.routes:
            if isinstance(route, Route):
                yield route


def _endpoints() -> list[str]:
    return sorted(
        f"{method} {route.path}"
        for route in _routes()
        for method in (route.methods or set()) - {"HEAD"}
    )


def _allowed_methods(scope: Scope) -> list[str]:
    """Return all methods of a path. A 405 response of Starlette names only the methods of the first
    matching route."""
    matching = (route for route in _routes() if route.matches(scope)[0] is not Match.NONE)
    return sorted({method for route in matching for method in route.methods or ()})


async def _on_proxy_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ProxyError)
    return error_response(request, error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Return the router's 404 or 405 as an error response."""
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {request.url.path}."
    headers = dict(error.headers or {})
    if error.status_code == 405 and (methods := _allowed_methods(request.scope)):
        headers[ResponseHeader.ALLOW] = ", ".join(methods)
    return error_response(
        request,
        ProxyError(
            message,
            status=error.status_code,
            type="invalid_request_error",
            code="unknown_url" if error.status_code == 404 else None,
            headers=headers,
        ),
    )


async def _on_validation_error(request: Request, error: Exception) -> Response:
    """Return a validation error of FastAPI as status 400 instead of 422."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    # The first element of `loc` is the part of the request: body, query, path or header.
    return error_response(request, validation_error({**first, "loc": first["loc"][1:]}))


async def _on_recursion_error(request: Request, error: Exception) -> Response:
    """Reject JSON that could be decoded, but is nested too deeply to be encoded again."""
    return error_response(request, BadRequestError("The request body is nested too deeply."))


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _on_exception(request: Request, error: Exception) -> Response:
    """Return an internal error. Starlette then raises the exception again, and uvicorn logs the
    traceback."""
    return error_response(request, internal_error())
