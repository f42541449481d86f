"""Responses of `:plain` models, which the backend keeps: each is its client's alone."""

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial, wraps
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from policies.budgets import DailyBudget
from proxy.agent.model import Relayed, RelayedBody
from proxy.api.dependencies import credentials, owner, services, wait_for_disconnect
from proxy.api.passing import pass_on, pass_plain, passage_of
from proxy.errors import NotFoundError
from proxy.store.responses import ResponseShelf
from proxy.wire.plain import kept_names

MAX_SEARCHED_BYTES = 64 << 10
"""How much of an answer is looked through for its id, which stands at its beginning."""
_ID = re.compile(rb'"id"\s*:\s*"(resp[\w.+/=-]{1,1000})"')
"""Proxies before a backend put more into it, in base64."""

Answer = Callable[[Request, str], Awaitable[Response]]


async def create(request: Request, asked: Mapping[str, Any], day: DailyBudget) -> Response:
    """The backend's own answer, whose id is noted as its client's. Raises as `require_own` and
    `pass_plain` do."""
    await require_own(request, asked)
    shelf, whose = services(request).store.responses, owner(request)
    if asked.get("store") is False:
        return await pass_plain(request, asked, day)
    return await pass_plain(request, asked, day, partial(_noted, shelf, whose))


async def require_own(request: Request, asked: Mapping[str, Any]) -> None:
    """Raise NotFoundError for a request that goes on from what the backend may keep for another
    client."""
    if credentials(request) is not None:
        return  # the backend itself knows whose it is
    before = asked.get("previous_response_id")
    shelf = services(request).store.responses
    if before and not await shelf.is_the_backends(owner(request), str(before)):
        raise NotFoundError(
            f"Previous response with id {str(before)!r} not found.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    if not services(request).keyring.has_many or services(request).passthrough == "all":
        return
    if named := kept_names(asked):
        raise NotFoundError(
            f"Invalid '{named}': what the backend keeps cannot be named here, because the backend"
            " does not tell one client of this server from another. Send the items themselves, or"
            " previous_response_id. The operator allows it with backend.passthrough: all.",
            param=named,
        )


def or_the_backends(answer: Answer) -> Answer:
    """Answer for a response that is kept here; of one that the backend keeps, it answers."""

    @wraps(answer)
    async def answered(request: Request, response_id: str) -> Response:
        try:
            return await answer(request, response_id)
        except NotFoundError:
            shelf = services(request).store.responses
            if not await shelf.is_the_backends(owner(request), response_id):
                raise
        return await pass_on(
            request, passage_of(request), None, partial(wait_for_disconnect, request)
        )

    return answered


def _noted(shelf: ResponseShelf, whose: str, relayed: Relayed) -> Relayed:
    if relayed.status >= 400:
        return relayed
    return replace(relayed, body=_Noted(relayed.body, partial(shelf.note_the_backends, whose)))


class _Noted:
    """A body on its way; the response is its client's before the client knows its id."""

    def __init__(self, body: RelayedBody, note: Callable[[str], Awaitable[None]]) -> None:
        self._body = body
        self._pieces: AsyncIterator[bytes] = aiter(body)
        self._note = note
        self._searched = b""
        self._is_done = False

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        piece = await anext(self._pieces)
        if not self._is_done:
            self._searched += piece
            found = _ID.search(self._searched)
            self._is_done = bool(found) or len(self._searched) > MAX_SEARCHED_BYTES
            if found:
                await self._note(found[1].decode())
        return piece

    async def aclose(self) -> None:
        """See RelayedBody."""
        await self._body.aclose()
