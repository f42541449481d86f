"""What of an exchange is passed on when a request is relayed. Pure."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from proxy.agent.model import Relayed
from proxy.errors import BackendError

_CLIENTS_OWN = frozenset(
    {
        # of the client's connection to us
        *("connection", "content-encoding", "content-length", "content-type", "expect", "host"),
        *("accept-encoding", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"),
        *("proxy-authenticate", "proxy-authorization", "proxy-connection"),
        # of the client's account with us
        *("authorization", "api-key", "x-api-key", "x-goog-api-key", "cookie"),
        *("openai-organization", "openai-project", "x-sandbox-steps"),
    }
)
_ANSWERED = frozenset(
    {"content-type", "retry-after", "retry-after-ms", "x-request-id", "x-should-retry"}
)
_ANSWERED_PREFIXES = ("openai-", "x-ratelimit-")


def request_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The client's headers that the backend may see: none of its connection, none of its keys."""
    named = {name.lower(): value for name, value in headers.items()}
    per_connection = {name.strip().lower() for name in named.get("connection", "").split(",")}
    return {
        name: value
        for name, value in named.items()
        if name not in _CLIENTS_OWN and name not in per_connection
    }


def response_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The backend's headers that mean something to the client."""
    named = ((name.lower(), value) for name, value in headers.items())
    return {
        name: value
        for name, value in named
        if name in _ANSWERED or name.startswith(_ANSWERED_PREFIXES)
    }


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
