"""Requests that go straight to the backend: bytes there, bytes back."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from policies.budgets import DailyBudget
from proxy.agent.model import Relayed
from proxy.api import spending
from proxy.api.dependencies import Disconnect, cancel_on_disconnect, model, wait_for_disconnect
from proxy.errors import BackendError

log = logging.getLogger(__name__)

LOOK_AFTER_S = 0.1
"""How long an answer may take before anybody looks whether its client is still there: to look costs
an eighth of a short one."""
MAX_WHOLE_BYTES = 256 << 10
"""An answer up to this length is sent in one piece."""


async def relay(
    request: Request, body: Mapping[str, Any], told: Mapping[str, str], day: DailyBudget
) -> Response:
    """Pass a request on; its client is told what these headers say. Raises BudgetError,
    BackendError when the backend cannot be reached."""
    work = _relayed(request, body, told, day)
    return await cancel_on_disconnect(
        partial(wait_for_disconnect, request), work, look_after_s=LOOK_AFTER_S
    )


async def _relayed(
    request: Request, body: Mapping[str, Any], told: Mapping[str, str], day: DailyBudget
) -> Response:
    ask = partial(model(request).relay, body, request.headers)
    relayed = await spending.relayed(request, day, body, ask) if day.is_set else await ask()
    # Here, for a response's own headers are a list that is searched.
    headers = {**relayed.headers, **told}
    relayed = Relayed(relayed.status, headers, relayed.body)
    if is_stream(relayed):
        return RelayResponse(relayed, partial(wait_for_disconnect, request))
    return await whole(relayed, partial(wait_for_disconnect, request))


def is_stream(relayed: Relayed) -> bool:
    """Whether an answer is server-sent events."""
    return relayed.headers.get("content-type", "").startswith("text/event-stream")


async def whole(relayed: Relayed, gone: Disconnect) -> Response:
    """Return an answer read to its end: to stream it costs as much again as the rest of the way.
    What is longer than `MAX_WHOLE_BYTES` is streamed."""
    pieces: list[bytes] = []
    size = 0
    try:
        async for piece in relayed.body:
            pieces.append(piece)
            size += len(piece)
            if size > MAX_WHOLE_BYTES:
                return RelayResponse(relayed, gone, pieces)
    except BaseException:
        await relayed.body.aclose()
        raise
    await relayed.body.aclose()
    return Response(b"".join(pieces), relayed.status, relayed.headers)


class RelayResponse(Response):
    """A backend's answer piece by piece, ended at the backend too when the client has left."""

    def __init__(self, relayed: Relayed, gone: Disconnect, read: Sequence[bytes] = ()) -> None:
        """`read` are the answer's first pieces, where they have been read."""
        self.status_code = relayed.status
        self.background = None
        self._read = read
        self._body = relayed.body
        self._gone = gone
        self.init_headers(relayed.headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._body):
            try:
                await cancel_on_disconnect(self._gone, self._send(send), look_after_s=LOOK_AFTER_S)
            except ClientDisconnect:
                pass
            except BackendError as error:
                # Half an answer: the server hangs up, so that the client takes it for no more.
                log.warning("a relayed answer broke off: %s", error)

    async def _send(self, send: Send) -> None:
        headers = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **headers})
        for piece in self._read:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        self._read = ()
        async for piece in self._body:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
