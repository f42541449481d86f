"""Which web pages may ask, for a browser looks before it hands a page our answer (CORS)."""

import re
from ipaddress import ip_address
from typing import NamedTuple
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from proxy.api.faults import told
from proxy.errors import ForbiddenError

LOCAL_PAGES = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"
_WEB = {"http": 80, "https": 443}
_NOWHERE = "null"
"""The origin of a page in a sandboxed frame, or of a file."""
_EVERYTHING = ("*",)
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
"""Methods that change nothing: any page may use them, and its browser hides the answer from it."""


class WebPages:
    """Answers browsers: every page may ask that has the key; where none is needed, only pages of
    this machine and of `public_url`, for any other could use what its visitor alone can reach.

    To hide the answer is not enough there: a page may send a simple POST without asking first, and
    one whose name is given this machine's address (DNS rebinding) is no other site to a browser.
    """

    def __init__(self, app: ASGIApp, *, needs_key: bool, public_url: str | None) -> None:
        self._app = app
        self._needs_key = needs_key
        self._own_page = _site(public_url) if public_url else None
        self._for_pages = CORSMiddleware(
            app,
            allow_origins=_EVERYTHING if needs_key else (),
            allow_origin_regex=None if needs_key else LOCAL_PAGES,
            allow_methods=_EVERYTHING,
            allow_headers=_EVERYTHING,
            expose_headers=_EVERYTHING,
            allow_private_network=True,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Other clients are spared the cost, which is a call more for each piece of a stream.
        if not _of_a_page(scope):
            await self._app(scope, receive, send)
        elif self._needs_key or scope["method"] in _SAFE_METHODS or self._is_of_here(scope):
            await self._for_pages(scope, receive, send)
        else:
            error = ForbiddenError(
                "This server needs no key, so only web pages of its own machine, and those of"
                " server.public_url, may send it requests."
            )
            await told(Request(scope, receive), error)(scope, receive, send)

    def _is_of_here(self, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        page = _site(headers["origin"])
        if page is None:
            return False
        if page.scheme not in _WEB:  # a browser extension, or a desktop application
            return headers["origin"] != _NOWHERE
        if page == self._own_page or re.fullmatch(LOCAL_PAGES, headers["origin"]):
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
    return _Site(parts.scheme, parts.hostname or "", port or _WEB.get(parts.scheme))


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _of_a_page(scope: Scope) -> bool:
    return scope["type"] == "http" and any(name == b"origin" for name, _ in scope["headers"])
