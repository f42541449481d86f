"""ASGI middleware: request ids, session names in URLs, protection against requests from other web
sites, the check of a client's backend key, and a fast path to the routes that call a model."""

import re
from collections.abc import Mapping
from ipaddress import ip_address
from typing import NamedTuple
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from policies.headers import RequestHeader
from proxy.agent.model import Credentials
from proxy.api.dependencies import (
    Services,
    error_response,
    is_operator,
    owner_of,
    release_body_memory,
    sent_key,
    set_client_credentials,
    set_services,
    with_request_id,
)
from proxy.errors import ForbiddenError, ProxyError
from proxy.keys import ClientKeyVerifier, Key

LOCAL_ORIGINS = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"
_DEFAULT_PORTS = {"http": 80, "https": 443}
_OPAQUE_ORIGIN = "null"
"""The origin of a page in a sandboxed frame or in a local file."""
_WILDCARD = ("*",)
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
"""Methods without side effects. Pages of all sites may use these methods: the browser hides the
response from the page."""
_ACCOUNT_HEADERS: tuple[str, ...] = (RequestHeader.ORGANIZATION, RequestHeader.PROJECT)
_SESSION_PATH = re.compile(rb"(/sessions/([\w.~!$&'()*+,;=:@-]{1,256}))/v1/")
"""Matches the beginning of a raw path that names a session. A name with percent-encoding does not
match, so the beginning has the same length in the decoded path."""
_OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready"})


class RequestMiddleware:
    """Gives every request the services, adds `x-request-id` to every response, even if another
    middleware fails, and releases the request's reservation in the body memory."""

    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app = app
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        set_services(scope, self._services)
        if scope["type"] == "http":
            send = with_request_id(scope, send)
        try:
            await self._app(scope, receive, send)
        finally:
            release_body_memory(scope)


class SessionPathMiddleware:
    """Serves `/sessions/NAME/v1/...` as `/v1/...` with the header `x-sandbox-session: NAME`, for
    agents that can set a base URL but no header."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/sessions/"):
            scope = _without_session_path(scope)
        await self._app(scope, receive, send)


def _without_session_path(scope: Scope) -> Scope:
    """Return the scope with the session in a header and not in the path. Return the scope unchanged
    if the path names no session."""
    named = _SESSION_PATH.match(scope["raw_path"])
    if named is None:
        return scope
    beginning, name = named.groups()
    header = RequestHeader.SESSION.encode()
    return {
        **scope,
        "path": scope["path"][len(beginning) :],
        "raw_path": scope["raw_path"][len(beginning) :],
        "headers": [*(each for each in scope["headers"] if each[0] != header), (header, name)],
    }


class FastPathMiddleware:
    """Dispatches POST requests directly to the routes that call a model. The lookup of the router
    took a tenth of the time of a relayed request (`bench/relay.py`)."""

    def __init__(self, router: ASGIApp, routes: Mapping[str, ASGIApp]) -> None:
        """`routes` are the applications of POST requests, by path."""
        self._router = router
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        route = self._routes.get(scope["path"]) if is_post else None
        await (route or self._router)(scope, receive, send)


class ClientKeyMiddleware:
    """Rejects a request whose key the backend does not accept. A request without a key passes, and
    so does a request with the operator's key, which the backend must not receive. The route decides
    on both cases."""

    def __init__(self, app: ASGIApp, keys: ClientKeyVerifier) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN_PATHS:
            request = Request(scope)
            key = sent_key(request)
            if key and not is_operator(request):
                headers = request.headers
                account = {name: headers[name] for name in _ACCOUNT_HEADERS if headers.get(name)}
                credentials = Credentials(key, account)
                try:
                    await self._keys.require_accepted(credentials)
                except ProxyError as error:
                    await error_response(request, error)(scope, receive, send)
                    return
                # The daily budget of a key is stored under its digest, which does not reveal the
                # key.
                set_client_credentials(request, Key(owner_of(key)), credentials)
        await self._app(scope, receive, send)


class BrowserMiddleware:
    """Decides which web pages may send requests (CORS).

    On a server with keys, every page that has a key may. On a server without keys, every page may
    use `_SAFE_METHODS`. Other methods are allowed to pages of this machine, of `public_url` and of
    this server under its IP address, and to browser extensions and desktop applications. Any other
    page could use the server through the browser of a visitor who can reach it.

    CORS headers alone do not prevent that. A page may send a simple POST without a preflight
    request, and a page whose host name resolves to this machine's address (DNS rebinding) has the
    server's own origin for the browser. So this class wraps Starlette's CORSMiddleware and rejects
    such requests (`tests/clients/test_cors.py`).
    """

    def __init__(self, app: ASGIApp, *, needs_key: bool, public_url: str | None) -> None:
        self._app = app
        self._needs_key = needs_key
        self._public_origin = _parse_origin(public_url) if public_url else None
        self._cors_app = CORSMiddleware(
            app,
            allow_origins=_WILDCARD if needs_key else (),
            allow_origin_regex=None if needs_key else LOCAL_ORIGINS,
            allow_methods=_WILDCARD,
            allow_headers=_WILDCARD,
            expose_headers=_WILDCARD,
            allow_private_network=True,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Only browsers send Origin. CORSMiddleware costs one call for each piece of a stream.
        if not _has_origin(scope):
            await self._app(scope, receive, send)
        elif self._needs_key or scope["method"] in _SAFE_METHODS or self._is_allowed_page(scope):
            await self._cors_app(scope, receive, send)
        else:
            error = ForbiddenError(
                "This server needs no key, so only web pages of its own machine, and those of"
                " server.public_url, may send it requests."
            )
            await error_response(Request(scope, receive), error)(scope, receive, send)

    def _is_allowed_page(self, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        page = _parse_origin(headers[RequestHeader.ORIGIN])
        if page is None:
            return False
        if page.scheme not in _DEFAULT_PORTS:  # a browser extension, or a desktop application
            return headers[RequestHeader.ORIGIN] != _OPAQUE_ORIGIN
        if page == self._public_origin or re.fullmatch(
            LOCAL_ORIGINS, headers[RequestHeader.ORIGIN]
        ):
            return True
        # A page of this server under an IP address is safe: DNS rebinding needs a host name.
        return _is_ip_address(page.host) and page == _parse_origin(
            f"{page.scheme}://{headers.get('host', '')}"
        )


class _Origin(NamedTuple):
    scheme: str
    host: str
    port: int | None


def _parse_origin(url: str) -> _Origin | None:
    """Return the origin of a URL (RFC 6454), or None if the URL is malformed."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return None
    return _Origin(parts.scheme, parts.hostname or "", port or _DEFAULT_PORTS.get(parts.scheme))


def _is_ip_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _has_origin(scope: Scope) -> bool:
    return scope["type"] == "http" and b"origin" in dict(scope["headers"])
