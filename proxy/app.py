"""The web application: its routes, and every error in the words of the API that was asked."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from types import ModuleType

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from proxy.api import (
    capabilities,
    chat,
    container_files,
    containers,
    conversations,
    files,
    health,
    messages,
    metrics,
    models,
    passthrough,
    responses,
    runs,
    stored_responses,
    token_counts,
)
from proxy.api.client_keys import ClientKeyMiddleware
from proxy.api.connection import release, with_request_id
from proxy.api.faults import told
from proxy.api.web_pages import WebPages
from proxy.errors import BadRequestError, ProxyError, internal_error
from proxy.services import Services

log = logging.getLogger(__name__)

CLIENT_LEFT = 499
SURFACES = (
    chat,
    responses,
    stored_responses,
    conversations,
    messages,
    token_counts,
    models,
    files,
    containers,
    container_files,
    runs,
    capabilities,
    metrics,
    health,
)
OF_MODELS = (chat, responses, messages)
Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


def create_app(services: Services, lifespan: Lifespan | None = None) -> ASGIApp:
    """The application over the given parts."""
    return _ShortCut(routed(services, lifespan))


def routed(services: Services, lifespan: Lifespan | None = None) -> FastAPI:
    """All its routes."""
    # As they are: include_router makes each anew, when its first request comes.
    routes: list[BaseRoute] = list(_routes())
    app = FastAPI(routes=routes, docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.state.services = services
    app.state.endpoints = _endpoints()
    app.router.default = passthrough.unmatched
    app.add_exception_handler(ProxyError, _told)
    app.add_exception_handler(HTTPException, _no_route)
    app.add_exception_handler(RequestValidationError, _wrong)
    app.add_exception_handler(ClientDisconnect, _left)
    app.add_exception_handler(RecursionError, _too_deep)
    app.add_exception_handler(Exception, _failed)
    if services.client_keys:
        app.add_middleware(ClientKeyMiddleware, keys=services.client_keys)
    app.add_middleware(_pages, services)
    return app


class _ShortCut:
    """Takes what is asked of a model straight to who answers it: FastAPI's way there took a tenth
    of the time of a relayed request. All else goes that way."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        services = app.state.services
        kinds = app.exception_handlers
        handlers = {kind: handler for kind, handler in kinds.items() if kind is not Exception}
        self._answering = {
            route.path: ServerErrorMiddleware(
                _pages(_let_in(services, ExceptionMiddleware(route.app, handlers)), services),
                _failed,
            )
            for route in _routes(OF_MODELS)
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            send = with_request_id(scope, send)
        is_asked = scope["type"] == "http" and scope["method"] == "POST"
        answer = self._answering.get(scope["path"]) if is_asked else None
        try:
            if answer:
                scope["app"] = self._app
                await answer(scope, receive, send)
            else:
                await self._app(scope, receive, send)
        finally:
            release(scope)


def _pages(app: ASGIApp, services: Services) -> WebPages:
    return WebPages(app, needs_key=not services.keyring.is_open, public_url=services.public_url)


def _let_in(services: Services, app: ASGIApp) -> ASGIApp:
    """The same for those alone whose own key the backend accepts, where clients come with such."""
    return ClientKeyMiddleware(app, services.client_keys) if services.client_keys else app


def _routes(surfaces: Sequence[ModuleType] = SURFACES) -> Iterator[Route]:
    for surface in surfaces:
        for route in surface.router.routes:
            if isinstance(route, Route):
                yield route


def _endpoints() -> list[str]:
    return sorted(
        f"{method} {route.path}"
        for route in _routes()
        for method in (route.methods or set()) - {"HEAD"}
    )


def _methods(scope: Scope) -> list[str]:
    """All that may be done at a path; the router tells of the first of its routes alone."""
    here = (route for route in _routes() if route.matches(scope)[0] is not Match.NONE)
    return sorted({method for route in here for method in route.methods or ()})


async def _told(request: Request, error: Exception) -> Response:
    assert isinstance(error, ProxyError)
    return told(request, error)


async def _no_route(request: Request, error: Exception) -> Response:
    """The router's own 404 and 405."""
    assert isinstance(error, HTTPException)
    words = f"{error.detail}: {request.method} {request.url.path}."
    headers = dict(error.headers or {})
    if error.status_code == 405 and (methods := _methods(request.scope)):
        headers["Allow"] = ", ".join(methods)
    return told(
        request,
        ProxyError(
            words,
            status=error.status_code,
            type="invalid_request_error",
            code="unknown_url" if error.status_code == 404 else None,
            headers=headers,
        ),
    )


async def _wrong(request: Request, error: Exception) -> Response:
    """What FastAPI itself finds wrong, which it would answer with a 422 of its own."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    # The first step says where the field was looked for: body, query, path or header.
    param = ".".join(str(step) for step in first["loc"][1:]) or None
    return told(request, BadRequestError(f"{first['msg']}.", param=param, code="invalid_value"))


async def _too_deep(request: Request, error: Exception) -> Response:
    """JSON that can just be read, and not be written again."""
    return told(request, BadRequestError("The request body is nested too deeply."))


async def _left(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_LEFT)


async def _failed(request: Request, error: Exception) -> Response:
    """Ours; Starlette logs the traceback."""
    return told(request, internal_error())
