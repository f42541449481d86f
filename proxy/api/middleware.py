"""What a request passes before its route: its id, the check of a browser's page, the check of the
client's own key of the backend, and the short way to the routes that ask a model."""

import re
from collections.abc import Mapping
from ipaddress import ip_address
from typing import NamedTuple
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from proxy.agent.model import Credentials
from proxy.api.dependencies import (
    error_response,
    is_operator,
    owner_of,
    release_body_memory,
    sent_key,
    set_client_credentials,
    with_request_id,
)
from proxy.errors import ForbiddenError, ProxyError
from proxy.keys import ClientKeys, Key

LOCAL_ORIGINS = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"
_PORTS = {"http": 80, "https": 443}
_OPAQUE_ORIGIN = "null"
"""The origin of a page in a sandboxed frame, or of a file."""
_ALL = ("*",)
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
"""Methods that change nothing: any page may use them, and its browser hides the answer from it."""
_ACCOUNT_HEADERS = ("openai-organization", "openai-project")
_OPEN_PATHS = frozenset({"/health"})


class RequestMiddleware:
    """Sends the `x-request-id` header with every answer, also where another middleware fails, and
    releases the memory of the request's body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            send = with_request_id(scope, send)
        try:
            await self._app(scope, receive, send)
        finally:
            release_body_memory(scope)


class FastPathMiddleware:
    """Calls the routes that ask a model directly, and the router for all others: the router's own
    way to a route took a tenth of the time of a relayed request."""

    def __init__(self, router: ASGIApp, routes: Mapping[str, ASGIApp]) -> None:
        """`routes` are the routes of POST requests by path."""
        self._router = router
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        route = self._routes.get(scope["path"]) if is_post else None
        await (route or self._router)(scope, receive, send)


class ClientKeyMiddleware:
    """Refuses a request whose key the backend does not accept. A request without a key passes, and
    one with the operator's, which the backend must not see: its route decides whether that will
    do."""

    def __init__(self, app: ASGIApp, keys: ClientKeys) -> None:
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
                # Each key has a daily budget of its own, under a name that does not reveal it.
                set_client_credentials(request, Key(owner_of(key)), credentials)
        await self._app(scope, receive, send)


class BrowserMiddleware:
    """Decides which web pages may send requests (CORS): every page that has the key; on a server
    without keys only pages of this machine and of `public_url`, for any other could use what its
    visitor alone can reach.

    To hide the answer is not enough there: a page may send a simple POST without asking first, and
    a page whose name resolves to this machine's address (DNS rebinding) is no other site to a
    browser.
    """

    def __init__(self, app: ASGIApp, *, needs_key: bool, public_url: str | None) -> None:
        self._app = app
        self._needs_key = needs_key
        self._own_site = _site(public_url) if public_url else None
        self._with_cors = CORSMiddleware(
            app,
            allow_origins=_ALL if needs_key else (),
            allow_origin_regex=None if needs_key else LOCAL_ORIGINS,
            allow_methods=_ALL,
            allow_headers=_ALL,
            expose_headers=_ALL,
            allow_private_network=True,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Other clients are spared the cost, which is a call more for each piece of a stream.
        if not _is_from_page(scope):
            await self._app(scope, receive, send)
        elif self._needs_key or scope["method"] in _SAFE_METHODS or self._is_same_site(scope):
            await self._with_cors(scope, receive, send)
        else:
            error = ForbiddenError(
                "This server needs no key, so only web pages of its own machine, and those of"
                " server.public_url, may send it requests."
            )
            await error_response(Request(scope, receive), error)(scope, receive, send)

    def _is_same_site(self, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        page = _site(headers["origin"])
        if page is None:
            return False
        if page.scheme not in _PORTS:  # a browser extension, or a desktop application
            return headers["origin"] != _OPAQUE_ORIGIN
        if page == self._own_site or re.fullmatch(LOCAL_ORIGINS, headers["origin"]):
            return True
        # A page of this server, by its address. DNS rebinding needs a name, so an address is safe.
        return _is_address(page.host) and page == _site(
            f"{page.scheme}://{headers.get('host', '')}"
        )


class _Site(NamedTuple):
    scheme: str
    host: str
    port: int | None


def _site(url: str) -> _Site | None:
    """Return the site of a URL, or None for a URL that cannot be read."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return None
    return _Site(parts.scheme, parts.hostname or "", port or _PORTS.get(parts.scheme))


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _is_from_page(scope: Scope) -> bool:
    return scope["type"] == "http" and any(name == b"origin" for name, _ in scope["headers"])
