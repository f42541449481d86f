"""A minimal relay of chat completions, on the libraries of the proxy.

`python -m bench.peers.relay PORT BASE_URL`
"""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route


def create_app(base_url: str) -> Starlette:
    """Return an application that relays requests unchanged."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            app.state.session = session
            yield

    async def chat(request: Request) -> Response:
        session: aiohttp.ClientSession = request.app.state.session
        answer = await session.post(
            f"{base_url}/chat/completions",
            data=await request.body(),
            headers={"content-type": "application/json"},
        )
        if answer.content_type == "application/json":
            return Response(await answer.read(), answer.status, media_type=answer.content_type)
        return StreamingResponse(
            answer.content.iter_any(), answer.status, media_type=answer.content_type
        )

    async def health(request: Request) -> Response:
        return PlainTextResponse("ok")

    routes = [Route("/v1/chat/completions", chat, methods=["POST"]), Route("/health", health)]
    return Starlette(routes=routes, lifespan=lifespan)


if __name__ == "__main__":
    uvicorn.run(create_app(sys.argv[2]), host="127.0.0.1", port=int(sys.argv[1]), access_log=False)
