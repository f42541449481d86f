"""Requests that go straight to the backend: bytes there, bytes back."""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from proxy.agent.model import Relayed
from proxy.api.connection import services, while_connected


async def relay(request: Request, body: Mapping[str, Any]) -> "RelayResponse":
    """Pass a request on. Raises BackendError when the backend cannot be reached."""
    model = services(request).model
    return RelayResponse(await while_connected(request, model.relay(body, request.headers)))


class RelayResponse(StreamingResponse):
    """A backend's response, ended at the backend too when the client leaves."""

    def __init__(self, relayed: Relayed) -> None:
        super().__init__(relayed.body, status_code=relayed.status, headers=relayed.headers)
        self._body = relayed.body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._body.aclose()
