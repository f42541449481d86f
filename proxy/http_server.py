"""The HTTP server, whose clients hear of it when it stops."""

import asyncio
import logging
from collections.abc import Awaitable
from socket import socket

import uvicorn
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from proxy.api.dependencies import told, with_request_id
from proxy.errors import ServerStopsError
from proxy.http_protocol import HTTPProtocol, OpenConnections
from proxy.runs.runs import Runs

log = logging.getLogger(__name__)

RUNS_PATIENCE_S = 3.0
"""How long runs may still go on."""
PATIENCE_S = 4.5
"""How long any request may still take, those that tell of a run's end among them."""
CUT_OFF_S = 5
"""When uvicorn hangs up on all who are left."""
TICKS_A_LOOK = 10
"""Every second, connections are looked at whose clients have let their time pass."""


class HTTPServer(uvicorn.Server):
    """Ends what its requests wait for before their connections, and closes those that nothing
    comes from."""

    server_state: OpenConnections

    def __init__(self, app: ASGIApp, runs: Runs, connections: OpenConnections) -> None:
        self._app = _Forsaking(app)
        super().__init__(
            uvicorn.Config(
                self._app,
                http=HTTPProtocol,
                log_config=None,
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=CUT_OFF_S,
            )
        )
        self.server_state = connections
        self._runs = runs

    async def on_tick(self, counter: int) -> bool:
        """See uvicorn, which calls this ten times a second."""
        if counter % TICKS_A_LOOK == 0:
            self.server_state.close_expired()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        """Take no one new, and let those who are here hear of the end."""
        giving_up = asyncio.get_running_loop().call_later(PATIENCE_S, self._give_up)
        stopping = asyncio.create_task(self._runs.stop(RUNS_PATIENCE_S))
        await super().shutdown(sockets)
        giving_up.cancel()
        await stopping

    def _give_up(self) -> None:
        log.warning("the server stops: %d requests are given up", len(self.server_state.tasks))
        self._app.stops = True
        for request in self.server_state.tasks:
            request.cancel()


class _Forsaking:
    """An application whose clients are told when the server stops before it has answered them."""

    def __init__(self, app: ASGIApp) -> None:
        self.stops = False
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        def say(message: Message) -> Awaitable[None]:
            nonlocal has_begun
            has_begun = True
            return send(message)

        try:
            await self._app(scope, receive, say)
        except asyncio.CancelledError:
            if not self.stops:
                raise
            # Of half an answer the rest is never said, and uvicorn hangs up.
            if not has_begun:
                response = told(Request(scope), ServerStopsError())
                await response(scope, receive, with_request_id(scope, send))
