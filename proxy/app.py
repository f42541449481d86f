"""The web application: its routes, and every error in the words of the API that was asked."""

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from proxy.api import (
    capabilities,
    chat,
    container_files,
    containers,
    files,
    health,
    messages,
    metrics,
    models,
    passthrough,
    responses,
    runs,
    token_counts,
)
from proxy.api.faults import told
from proxy.errors import BadRequestError, ProxyError, internal_error
from proxy.services import Services

log = logging.getLogger(__name__)

CLIENT_LEFT = 499
SURFACES = (
    chat,
    responses,
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
Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


def create_app(services: Services, lifespan: Lifespan | None = None) -> FastAPI:
    """The application over the given parts."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.state.services = services
    app.state.endpoints = _endpoints(surface.router for surface in SURFACES)
    for surface in SURFACES:
        app.include_router(surface.router)
    app.router.default = passthrough.unmatched
    app.add_exception_handler(ProxyError, _told)
    app.add_exception_handler(HTTPException, _no_route)
    app.add_exception_handler(RequestValidationError, _wrong)
    app.add_exception_handler(ClientDisconnect, _left)
    app.add_exception_handler(RecursionError, _too_deep)
    app.add_exception_handler(Exception, _failed)
    return app


def _endpoints(routers: Iterable[APIRouter]) -> list[str]:
    routes = (route for router in routers for route in router.routes)
    return sorted(
        f"{method} {route.path}"
        for route in routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    )


async def _told(request: Request, error: Exception) -> Response:
    assert isinstance(error, ProxyError)
    return told(request, error)


async def _no_route(request: Request, error: Exception) -> Response:
    """The router's own 404 and 405."""
    assert isinstance(error, HTTPException)
    words = f"{error.detail}: {request.method} {request.url.path}."
    return told(
        request,
        ProxyError(
            words,
            status=error.status_code,
            type="invalid_request_error",
            code="unknown_url" if error.status_code == 404 else None,
            headers=error.headers,
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
