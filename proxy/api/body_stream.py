"""A request's body on its way from the client."""

import asyncio
from collections.abc import AsyncIterator, Callable

from starlette.requests import Request

from policies.json_bounds import SMALL_BYTES, JSONBounds
from proxy.api.dependencies import reserve_memory, wait_for_disconnect
from proxy.errors import ProxyError

Check = Callable[[bytes], None]
"""Looks at a piece that is about to be passed on. Raises ProxyError."""


class BodyStream:
    """The body, passed on piece by piece to whoever reads it, once."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._stream = request.stream()
        self._ready: list[bytes] = []
        self._over = asyncio.Event()
        self._check: Check | None = None
        self.refusal: ProxyError | None = None
        """Why the rest was not passed on, if it was not."""

    def check_with(self, check: Check) -> None:
        """Have each piece checked; the first that is refused ends the body."""
        self._check = check

    async def read(self, limit: int) -> bytes | None:
        """The whole of it. None if it is longer than the limit, or more JSON than is read at once:
        then it can still be passed on. Raises ClientDisconnect, BusyError."""
        size, counted, bounds = 0, 0, JSONBounds()
        async for piece in self._stream:
            self._ready.append(piece)
            size += len(piece)
            if size > SMALL_BYTES:
                reserve_memory(self._request, size - counted)
                counted = size
            if size > limit or not bounds.has_room_for(piece):
                return None
        if counted:
            reserve_memory(self._request, size)  # for what is read of it
        self._over.set()
        whole = b"".join(self._ready)
        self._ready.clear()
        return whole

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """What is left of it. Raises ClientDisconnect, and ProxyError for a piece that is
        refused."""
        try:
            while self._ready:
                yield self._checked(self._ready.pop(0))
            async for piece in self._stream:
                yield self._checked(piece)
        finally:
            self._over.set()

    def _checked(self, piece: bytes) -> bytes:
        if self._check is not None:
            try:
                self._check(piece)
            except ProxyError as error:
                self.refusal = error
                raise
        return piece

    async def left(self) -> None:
        """Wait until the client is gone; while it still sends, whoever reads hears of it first."""
        await self._over.wait()
        await wait_for_disconnect(self._request)
