"""URLs in requests passed on, which the backend would fetch from inside the operator's network."""

import re
from typing import Any

from starlette.requests import Request

from policies.passthrough import URL_FIELDS, remote_urls
from proxy.api.dependencies import owner, services, while_connected
from proxy.errors import BadRequestError

_SUSPECT = re.compile(b'"(?:%s)":' % "|".join(sorted(URL_FIELDS)).encode())
"""The name of a field that holds a URL, in JSON without blanks."""
_ESCAPED_LETTER = re.compile(rb"(?<!\\)\\u00(?:[46][1-9a-f]|[57][0-9a]|5f)", re.IGNORECASE)
"""An escaped letter of a field's name, which no JSON encoder writes."""
_ESCAPED_BLANK = re.compile(rb"\\(?:[bfnrt]|u00(?:[01][0-9a-f]|20))", re.IGNORECASE)
_BEGUN_ESCAPE = re.compile(rb"\\(?:u[0-9a-f]{0,3})?\Z", re.IGNORECASE)
_TAIL_BYTES = max(map(len, URL_FIELDS)) + len('"":')
"""The longest match."""
_PASSED_OVER = b" \t\r\n\0"
"""Blanks, and the zero bytes between the letters of a name in UTF-16 and UTF-32."""


async def refuse_private_urls(request: Request, body: Any) -> None:
    """Check each URL in a body that the backend is about to fetch, while the client is there.
    Raises BadRequestError, ClientDisconnect."""
    if urls := urls_in(body):
        checking = services(request).inputs.refuse_private(urls, owner(request))
        await while_connected(request, checking)


def urls_in(body: Any) -> list[str]:
    """Return the URLs in a body that the backend would fetch, each once."""
    return list(dict.fromkeys(remote_urls(body)))


class URLScan:
    """Looks for fields that name URLs in a body that is passed on without being decoded: it is too
    long, or does not say that it is JSON."""

    def __init__(self) -> None:
        self._tail = b""
        self._begun = b""

    def check(self, piece: bytes) -> None:
        """Take the next bytes in. Raises BadRequestError."""
        written = self._begun + piece.translate(None, _PASSED_OVER)
        begun = _BEGUN_ESCAPE.search(written, max(0, len(written) - 5))
        self._begun = begun[0] if begun else b""
        text = self._tail + _ESCAPED_BLANK.sub(b"", written[: len(written) - len(self._begun)])
        if _SUSPECT.search(text, 1 if self._tail else 0) or _ESCAPED_LETTER.search(text):
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
