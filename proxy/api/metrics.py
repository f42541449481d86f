"""GET /metrics: the backend's metrics, with the proxy's own below."""

import asyncio
from contextlib import aclosing

from fastapi import APIRouter
from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import Response

from proxy.agent.model import Passage, Passing
from proxy.api.connection import model, require_operator, services, while_connected
from proxy.errors import ProxyError

router = APIRouter()

BACKEND_PATIENCE_S = 5.0
"""Prometheus gives up after 10 s by default."""
MAX_BACKEND_BYTES = 16 << 20
TEXT, OPENMETRICS = "text/plain", "application/openmetrics-text"
ACCEPT = {
    TEXT: f"{TEXT}; version=0.0.4",
    OPENMETRICS: f"{OPENMETRICS}; version=1.0.0, {TEXT}; version=0.0.4; q=0.5",
}
"""What the backend is asked for, by the format that the client prefers."""
EOF = b"# EOF\n"
"""The last line of OpenMetrics."""


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    require_operator(request)
    wanted = _wanted(request.headers.get("accept", ""))
    theirs, written = await while_connected(request, _backends(model(request).passage, wanted))
    encode, media_type = choose_encoder(written)
    return Response(theirs + encode(services(request).runs.metrics), media_type=media_type)


def _wanted(accept: str) -> str:
    """Return the format to answer in. `choose_encoder` is given no header of a client's: it raises
    TypeError for a version that is no number, and promises any that is one."""
    named = {each.partition(";")[0].strip().lower() for each in accept.split(",")}
    return OPENMETRICS if OPENMETRICS in named else TEXT


async def _backends(passage: Passage | None, wanted: str) -> tuple[bytes, str]:
    """Return the backend's metrics in whole lines, and their format: text where the backend has no
    OpenMetrics. Without metrics of the backend's, or none in time, it is the format wanted."""
    if passage is None:
        return b"", wanted
    try:
        async with asyncio.timeout(BACKEND_PATIENCE_S):
            return await _read(passage, wanted)
    except (ProxyError, TimeoutError):
        return b"", wanted


async def _read(passage: Passage, wanted: str) -> tuple[bytes, str]:
    relayed = await passage.pass_on(Passing("GET", "/metrics", {"accept": ACCEPT[wanted]}, None))
    text = bytearray()
    async with aclosing(relayed.body):
        async for piece in relayed.body:
            text += piece
            if len(text) > MAX_BACKEND_BYTES:
                return b"", wanted
    written = relayed.headers.get("content-type", "").partition(";")[0]
    if relayed.status == 200 and written == TEXT:
        return bytes(text if text.endswith(b"\n") else text + b"\n"), TEXT
    if relayed.status == 200 and written == wanted and text.endswith(EOF):
        return bytes(text.removesuffix(EOF)), wanted
    return b"", wanted
