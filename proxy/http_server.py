"""The HTTP server, whose clients hear of it when it stops."""

import asyncio
from socket import socket

import uvicorn

from proxy.runs.runs import Runs

PATIENCE_S = 3.0
"""How long runs may still go on: uvicorn cuts off after `timeout_graceful_shutdown`, 5 s."""


class HTTPServer(uvicorn.Server):
    """Ends the runs before their connections."""

    def __init__(self, config: uvicorn.Config, runs: Runs) -> None:
        super().__init__(config)
        self._runs = runs

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        """Take no one new, and let those who listen to a run hear its end."""
        stopping = asyncio.create_task(self._runs.stop(PATIENCE_S))
        await super().shutdown(sockets)
        await stopping
