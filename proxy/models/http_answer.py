"""A backend's HTTP answer, read piece by piece, its failures in our words."""

import asyncio
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import aiohttp

from policies.json_bounds import JSONBounds, TooMuchJSONError
from proxy.errors import BackendError
from proxy.models.backend_errors import (
    backend_error_from_response,
    bad_response,
    cut_off,
    parsed,
    timed_out,
    unreachable,
)

MAX_ERROR_BYTES = 64 * 1024
MAX_JSON_BYTES = 256 << 20
MAX_JSON_VALUES = 4_000_000
"""Of an answer in one piece: with `prompt_logprobs`, a long prompt has millions of numbers."""
_DRAIN_TIMEOUT_S = 0.5
"""For the end of a stream that has said [DONE]."""


class _Translated:
    """Turns aiohttp's failures into ours."""

    def __enter__(self) -> None:
        """All that fails inside."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        match error:
            case None:
                return
            case aiohttp.ClientHttpProxyError(status=status, message=message):
                # Its own text has the proxy's URL, with the password in it.
                raise unreachable(f"the proxy refused with {status} {message}") from error
            case aiohttp.ClientPayloadError():
                raise cut_off() from error
            case TimeoutError():
                raise timed_out(_reason(error)) from error
            case aiohttp.ClientError() | OSError():
                raise unreachable(_reason(error)) from error


TRANSLATED = _Translated()


class HTTPAnswer:
    """The bytes of an answer as they arrive. Closing it early ends the backend's work."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.headers.items()}
        self._response = response

    def __aiter__(self) -> "HTTPAnswer":
        return self

    async def __anext__(self) -> bytes:
        try:
            with TRANSLATED:
                piece = await self._response.content.readany()
        except BackendError:
            self._response.close()
            raise
        if not piece:
            raise StopAsyncIteration
        return piece

    async def aclose(self) -> None:
        """Give the connection back if the answer was read to its end, else close it. Safe to call
        twice."""
        self._response.close()

    @property
    def is_json(self) -> bool:
        """Whether it calls itself JSON."""
        return self.headers.get("content-type", "").lower().startswith("application/json")

    async def json(self) -> Any:
        """The whole answer, decoded. Raises BackendError."""
        body, bounds = bytearray(), JSONBounds(MAX_JSON_VALUES)
        async for piece in self:
            body += piece
            if len(body) > MAX_JSON_BYTES:
                raise bad_response(f"it is longer than {MAX_JSON_BYTES >> 20} MiB")
            try:
                bounds.check(piece)
            except TooMuchJSONError as error:
                raise bad_response(f"it has more than {error}") from error
        return parsed(bytes(body))

    async def raise_for_error(self, secret: str | None) -> None:
        """Raise the BackendError that any status but 2xx means."""
        if 200 <= self.status < 300:
            return
        body = bytearray()
        async for piece in self:
            body += piece
            if len(body) >= MAX_ERROR_BYTES:
                break
        raise backend_error_from_response(
            self.status,
            self.headers,
            bytes(body[:MAX_ERROR_BYTES]),
            now=datetime.now(UTC),
            secret=secret,
        )

    async def drain(self) -> None:
        """Read what is left, so that the connection can be used again, but do not wait for it."""
        with suppress(BackendError, TimeoutError):
            async with asyncio.timeout(_DRAIN_TIMEOUT_S):
                async for _ in self:
                    pass


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
