"""Requests that go straight to the backend: bytes there, bytes back."""

from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from proxy.agent.model import Relayed
from proxy.api.connection import services, while_connected


async def relay(request: Request, body: Mapping[str, Any]) -> Response:
    """Pass a request on. Raises BackendError when the backend cannot be reached."""
    return await while_connected(request, _relayed(request, body))


async def _relayed(request: Request, body: Mapping[str, Any]) -> Response:
    relayed = await services(request).model.relay(body, request.headers)
    if relayed.headers.get("content-type", "").startswith("text/event-stream"):
        return RelayResponse(relayed)
    # Read to its end here: a streaming response costs as much again as the rest of the way.
    async with aclosing(relayed.body):
        whole = b"".join([piece async for piece in relayed.body])
    return Response(whole, relayed.status, relayed.headers)


class RelayResponse(StreamingResponse):
    """A backend's stream, ended at the backend too when the client leaves."""

    def __init__(self, relayed: Relayed) -> None:
        super().__init__(relayed.body, status_code=relayed.status, headers=relayed.headers)
        self._body = relayed.body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._body.aclose()
