"""Selects the headers that a relayed request and its answer keep, and builds relayed answers.

Open it when a header is missing on either side, or must not be passed on.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import aclosing
from typing import Any

from proxy.agent.model import UpstreamBody, UpstreamResponse
from proxy.errors import BackendError

_OF_THE_CONNECTION = frozenset(
    {
        *("connection", "expect", "host", "keep-alive", "te", "trailer", "transfer-encoding"),
        *("proxy-authenticate", "proxy-authorization", "proxy-connection", "upgrade"),
    }
)
_OF_THE_ACCOUNT = frozenset(
    {
        *("authorization", "api-key", "x-api-key", "x-goog-api-key", "cookie"),
        *("openai-organization", "openai-project"),
    }
)
"""Headers of the client's account with this proxy."""
_OF_THE_BODY = frozenset({"accept-encoding", "content-encoding", "content-length", "content-type"})
_OURS_PREFIX = "x-sandbox-"
_ANSWERED = frozenset(
    {"content-type", "retry-after", "retry-after-ms", "x-request-id", "x-should-retry"}
)
_ANSWERED_PREFIXES = ("openai-", "x-ratelimit-")
_OF_THE_SERVER = frozenset({"alt-svc", "date", "server", "set-cookie", "strict-transport-security"})
"""Headers of the host that an answer comes from."""
_OF_PAGES_PREFIX = "access-control-"
"""This proxy decides itself which web pages may read its answers."""
_NOT_PASSED = _OF_THE_CONNECTION | _OF_THE_ACCOUNT
_NOT_BESIDE_OUR_BODY = _NOT_PASSED | _OF_THE_BODY
_NOT_ANSWERED = _OF_THE_CONNECTION | _OF_THE_SERVER


def completion_request_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the client's headers that go to the backend with a body written by the proxy."""
    return _passed(headers, _NOT_BESIDE_OUR_BODY)


def end_to_end_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the client's headers without those of its connection and its account."""
    return _passed(headers, _NOT_PASSED)


def _passed(headers: Mapping[str, str], but: Collection[str]) -> dict[str, str]:
    return {
        name: value
        for name, value in _without_connection(_joined(headers), but)
        if not name.startswith(_OURS_PREFIX)
    }


def completion_response_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the backend's headers that a client needs with a chat completion."""
    named = ((name.lower(), value) for name, value in headers.items())
    return {
        name: value
        for name, value in named
        if name in _ANSWERED or name.startswith(_ANSWERED_PREFIXES)
    }


def relayed_response_headers(headers: Mapping[str, str], server: str) -> dict[str, str]:
    """Return the backend's headers without those of its connection and its host. A redirect within
    `server`, the backend's address, becomes one within this proxy."""
    named = {
        # aiohttp reads UTF-8, Starlette writes Latin-1: so the bytes stay what they are.
        name: value.encode(errors="surrogateescape").decode("latin-1")
        for name, value in _without_connection(_joined(headers), _NOT_ANSWERED)
        if not name.startswith(_OF_PAGES_PREFIX)
    }
    if named.get("location", "").startswith(f"{server}/"):
        named["location"] = named["location"].removeprefix(server)
    return named


def _joined(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers by lower-case name, with the lines of one name joined."""
    named: dict[str, str] = {}
    for name, value in headers.items():  # a multi-mapping yields every line
        key = name.lower()
        named[key] = f"{named[key]}, {value}" if key in named else value
    return named


def _without_connection(
    named: Mapping[str, str], but: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Yield the headers that neither `but` nor the Connection header names."""
    connection = named.get("connection")
    if connection is not None:
        but = {*but, *(name.strip().lower() for name in connection.split(","))}
    return ((name, value) for name, value in named.items() if name not in but)


class BufferedBody:
    """A relayed body whose pieces are in memory."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)

    def __aiter__(self) -> "BufferedBody":
        return self

    async def __anext__(self) -> bytes:
        for piece in self._pieces:
            return piece
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Drop the pieces not yet read. Safe to call twice."""
        self._pieces = iter(())


def error_response(error: BackendError) -> UpstreamResponse:
    """Return the answer of a backend that fails with this error."""
    headers = {name.lower(): value for name, value in error.headers.items()}
    return json_response(error.body(), status=error.status, headers=headers)


def json_response(
    value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> UpstreamResponse:
    """Return a JSON answer."""
    body = BufferedBody([json.dumps(value).encode()])
    return UpstreamResponse(status, {"content-type": "application/json", **(headers or {})}, body)


async def read_at_most(body: UpstreamBody, max_bytes: int) -> bytes | None:
    """Read a body to its end and close it; None if it is longer. Raises BackendError."""
    read = bytearray()
    async with aclosing(body):
        async for piece in body:
            read += piece
            if len(read) > max_bytes:
                return None
    return bytes(read)
