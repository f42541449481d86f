"""GET /metrics: the backend's, with ours below as `sandbox_*`."""

import asyncio
from contextlib import aclosing
from dataclasses import asdict

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from proxy.agent.model import Passage, Passing
from proxy.api.connection import model, require_operator, services, while_connected
from proxy.errors import ProxyError
from proxy.services import Services
from proxy.wire.prometheus import (
    MEDIA_TYPE,
    efficiency_metrics,
    pool_metrics,
    run_metrics,
    watch_metrics,
)

router = APIRouter()

BACKEND_PATIENCE_S = 5.0
"""Prometheus gives up after 10 s by default."""
MAX_BACKEND_BYTES = 16 << 20


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    require_operator(request)
    parts = services(request)
    text = await while_connected(request, _backends(model(request).passage))
    return Response(text + _ours(parts), media_type=MEDIA_TYPE)


def _ours(parts: Services) -> bytes:
    counts, ledger = parts.runs.counts, parts.runs.ledger
    text = run_metrics(counts.in_flight, counts.ended) + efficiency_metrics(counts.spent)
    text += watch_metrics(counts.rules, ledger.failures if ledger else 0)
    if parts.pool_stats:
        text += pool_metrics(asdict(parts.pool_stats()))
    return text.encode()


async def _backends(passage: Passage | None) -> bytes:
    """The backend's, whole lines only; none where it has none, or none in time."""
    if passage is None:
        return b""
    try:
        async with asyncio.timeout(BACKEND_PATIENCE_S):
            return await _read(passage)
    except (ProxyError, TimeoutError):
        return b""


async def _read(passage: Passage) -> bytes:
    # Asked for no other format, so that ours can follow.
    asked = Passing("GET", "/metrics", {"accept": "text/plain; version=0.0.4"}, None)
    relayed = await passage.pass_on(asked)
    text = bytearray()
    async with aclosing(relayed.body):
        async for piece in relayed.body:
            text += piece
            if len(text) > MAX_BACKEND_BYTES:
                return b""
    is_text = relayed.headers.get("content-type", "").startswith("text/plain")
    if relayed.status != 200 or not is_text:
        return b""
    return bytes(text if text.endswith(b"\n") else text + b"\n")
