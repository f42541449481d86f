"""What of an exchange is passed on when a request is relayed."""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import aclosing
from typing import Any

from proxy.agent.model import Relayed, RelayedBody
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
"""The client's with us."""
_OF_THE_BODY = frozenset({"accept-encoding", "content-encoding", "content-length", "content-type"})
_OURS_PREFIX = "x-sandbox-"
_ANSWERED = frozenset(
    {"content-type", "retry-after", "retry-after-ms", "x-request-id", "x-should-retry"}
)
_ANSWERED_PREFIXES = ("openai-", "x-ratelimit-")
_OF_THE_SERVER = frozenset({"alt-svc", "date", "server", "set-cookie", "strict-transport-security"})
"""What an answer says of the host it comes from."""
_OF_PAGES_PREFIX = "access-control-"
"""Which web pages may read an answer of ours is ours to say."""
_NOT_PASSED = _OF_THE_CONNECTION | _OF_THE_ACCOUNT
_NOT_BESIDE_OUR_BODY = _NOT_PASSED | _OF_THE_BODY
_NOT_ANSWERED = _OF_THE_CONNECTION | _OF_THE_SERVER


def request_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The client's headers that the backend may see beside a body of ours."""
    return _passed(headers, _NOT_BESIDE_OUR_BODY)


def end_to_end_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The client's headers that the backend may see: none of its connection, none of its keys."""
    return _passed(headers, _NOT_PASSED)


def _passed(headers: Mapping[str, str], but: Collection[str]) -> dict[str, str]:
    return {
        name: value
        for name, value in _without_connection(_joined(headers), but)
        if not name.startswith(_OURS_PREFIX)
    }


def response_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The backend's headers that mean something to the client beside a chat completion."""
    named = ((name.lower(), value) for name, value in headers.items())
    return {
        name: value
        for name, value in named
        if name in _ANSWERED or name.startswith(_ANSWERED_PREFIXES)
    }


def passed_response_headers(headers: Mapping[str, str], server: str) -> dict[str, str]:
    """All the backend's headers but those of its connection and its host; a redirect within the
    server (of that address) is one within ours."""
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
    """By lower-case name; what was said in several lines in one."""
    named: dict[str, str] = {}
    for name, value in headers.items():  # of a multi-mapping: every line
        key = name.lower()
        named[key] = f"{named[key]}, {value}" if key in named else value
    return named


def _without_connection(
    named: Mapping[str, str], but: Collection[str]
) -> Iterator[tuple[str, str]]:
    """What is none of `but`, nor of what the connection's own header names."""
    connection = named.get("connection")
    if connection is not None:
        but = {*but, *(name.strip().lower() for name in connection.split(","))}
    return ((name, value) for name, value in named.items() if name not in but)


class ReadyBody:
    """A relayed body whose pieces are there already."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)

    def __aiter__(self) -> "ReadyBody":
        return self

    async def __anext__(self) -> bytes:
        for piece in self._pieces:
            return piece
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Forget the pieces not yet read. Safe to call twice."""
        self._pieces = iter(())


def refused(error: BackendError) -> Relayed:
    """The answer of a backend that says this error."""
    headers = {name.lower(): value for name, value in error.headers.items()}
    return ready_json(error.body(), status=error.status, headers=headers)


def ready_json(
    value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Relayed:
    """A JSON answer that is there already."""
    body = ReadyBody([json.dumps(value).encode()])
    return Relayed(status, {"content-type": "application/json", **(headers or {})}, body)


async def read_at_most(body: RelayedBody, max_bytes: int) -> bytes | None:
    """Read a body to its end and close it; None where it is longer. Raises BackendError."""
    read = bytearray()
    async with aclosing(body):
        async for piece in body:
            read += piece
            if len(read) > max_bytes:
                return None
    return bytes(read)
