"""URLs in requests passed on, which the backend would fetch from inside the operator's network."""

import re
from typing import Any

from starlette.requests import Request

from policies.remote_urls import remote_urls
from proxy.api.connection import owner, services
from proxy.errors import BadRequestError

_NAMES_URL = re.compile(rb'url":|\\u00(?:75|72|6c|5f)', re.IGNORECASE)
"""A field whose name ends in `url`, in JSON without blanks; or an escaped letter of `_url`."""
_TAIL_BYTES = 5
"""One less than the longest match."""
_PASSED_OVER = b" \t\r\n\0"
"""Blanks, and what UTF-16 and UTF-32 have between the letters of a field's name."""


async def refuse_private_urls(request: Request, body: Any) -> None:
    """Check each URL in a body that the backend is about to fetch. Raises BadRequestError."""
    if urls := list(dict.fromkeys(remote_urls(body))):
        await services(request).inputs.refuse_private(urls, owner(request))


class URLScan:
    """Looks for fields that name URLs in a body that is passed on without being decoded: it is too
    long, compressed, or does not say that it is JSON."""

    def __init__(self) -> None:
        self._tail = b""

    def check(self, piece: bytes) -> None:
        """Take the next bytes in. Raises BadRequestError."""
        text = self._tail + piece.translate(None, _PASSED_OVER)
        if _NAMES_URL.search(text):
            raise unchecked("may name URLs")
        self._tail = text[-_TAIL_BYTES:]


def unchecked(what: str) -> BadRequestError:
    """The error for a body whose URLs cannot be checked."""
    return BadRequestError(
        f"The request body {what}, and URLs in it cannot be checked: the backend would fetch them"
        " from inside its network. Send less, as application/json and not compressed; or the"
        " operator allows it with backend.fetches_urls.",
        code="url_not_allowed",
    )
