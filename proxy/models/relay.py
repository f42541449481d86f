"""Selects the headers that relayed requests and responses keep, and builds responses in memory.

Open it when a relayed request or response lacks a header, or has a header that must not be relayed.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import aclosing
from typing import Any

from proxy.agent.model import UpstreamResponse, UpstreamResponseBody
from proxy.errors import BackendError

_CONNECTION_HEADERS = frozenset(
    {
        *("connection", "expect", "host", "keep-alive", "te", "trailer", "transfer-encoding"),
        *("proxy-authenticate", "proxy-authorization", "proxy-connection", "upgrade"),
    }
)
_ACCOUNT_HEADERS = frozenset(
    {
        *("authorization", "api-key", "x-api-key", "x-goog-api-key", "cookie"),
        *("openai-organization", "openai-project"),
    }
)
"""Headers that identify the client to this proxy."""
_BODY_HEADERS = frozenset({"accept-encoding", "content-encoding", "content-length", "content-type"})
_PROXY_HEADER_PREFIX = "x-sandbox-"
_COMPLETION_HEADERS = frozenset(
    {"content-type", "retry-after", "retry-after-ms", "x-request-id", "x-should-retry"}
)
_COMPLETION_HEADER_PREFIXES = ("openai-", "x-ratelimit-")
_HOST_HEADERS = frozenset({"alt-svc", "date", "server", "set-cookie", "strict-transport-security"})
"""Headers about the host that sends a response. The backend's are not relayed."""
_CORS_PREFIX = "access-control-"
"""The prefix of CORS headers. They are not relayed, because this proxy sends its own CORS
headers."""
_NOT_IN_REQUESTS = _CONNECTION_HEADERS | _ACCOUNT_HEADERS
_NOT_WITH_ENCODED_BODY = _NOT_IN_REQUESTS | _BODY_HEADERS
_NOT_IN_RESPONSES = _CONNECTION_HEADERS | _HOST_HEADERS


def completion_request_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the client's headers to relay to the backend, for a request whose body the proxy has
    encoded. Headers about bodies are left out."""
    return _relayed_headers(headers, _NOT_WITH_ENCODED_BODY)


def upstream_request_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the client's headers to relay to the backend: all except connection headers,
    headers that identify the client, and the proxy's own headers."""
    return _relayed_headers(headers, _NOT_IN_REQUESTS)


def _relayed_headers(headers: Mapping[str, str], excluded_names: Collection[str]) -> dict[str, str]:
    return {
        name: value
        for name, value in _filter_headers(_join_repeated_headers(headers), excluded_names)
        if not name.startswith(_PROXY_HEADER_PREFIX)
    }


def completion_response_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the backend's headers that a client needs with a chat completion."""
    named = ((name.lower(), value) for name, value in headers.items())
    return {
        name: value
        for name, value in named
        if name in _COMPLETION_HEADERS or name.startswith(_COMPLETION_HEADER_PREFIXES)
    }


def relayed_response_headers(headers: Mapping[str, str], server_url: str) -> dict[str, str]:
    """Return the backend's headers without connection, host and CORS headers. A redirect within
    `server_url`, the backend's address, becomes a redirect within this proxy."""
    relayed = {
        # aiohttp decodes UTF-8 and Starlette encodes Latin-1: the bytes stay the same.
        name: value.encode(errors="surrogateescape").decode("latin-1")
        for name, value in _filter_headers(_join_repeated_headers(headers), _NOT_IN_RESPONSES)
        if not name.startswith(_CORS_PREFIX)
    }
    if relayed.get("location", "").startswith(f"{server_url}/"):
        relayed["location"] = relayed["location"].removeprefix(server_url)
    return relayed


def _join_repeated_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers by lower-case name. The values of a repeated name are joined."""
    joined: dict[str, str] = {}
    for name, value in headers.items():  # a multi-mapping yields every line
        key = name.lower()
        joined[key] = f"{joined[key]}, {value}" if key in joined else value
    return joined


def _filter_headers(
    headers: Mapping[str, str], excluded_names: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Return the headers except those in `excluded_names` and those that the Connection header
    lists."""
    connection = headers.get("connection")
    if connection is not None:
        excluded_names = {
            *excluded_names,
            *(name.strip().lower() for name in connection.split(",")),
        }
    return ((name, value) for name, value in headers.items() if name not in excluded_names)


class BufferedBody:
    """An `UpstreamResponseBody` whose pieces are in memory."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)

    def __aiter__(self) -> "BufferedBody":
        return self

    async def __anext__(self) -> bytes:
        for piece in self._pieces:
            return piece
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Drop the unread pieces. Safe to call twice."""
        self._pieces = iter(())


def error_response(error: BackendError) -> UpstreamResponse:
    """Return the response of a backend that fails with this error."""
    headers = {name.lower(): value for name, value in error.headers.items()}
    return json_response(error.body(), status=error.status, headers=headers)


def json_response(
    value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> UpstreamResponse:
    """Return a response whose body is the value as JSON."""
    body = BufferedBody([json.dumps(value).encode()])
    return UpstreamResponse(status, {"content-type": "application/json", **(headers or {})}, body)


async def read_if_at_most(body: UpstreamResponseBody, max_bytes: int) -> bytes | None:
    """Read a body to its end and close it. Return None if it is longer than `max_bytes`. Raises
    BackendError."""
    content = bytearray()
    async with aclosing(body):
        async for piece in body:
            content += piece
            if len(content) > max_bytes:
                return None
    return bytes(content)
