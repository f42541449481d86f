"""The client's end of a request: who it is, where it reaches us, whether it is still there."""

import asyncio
import hashlib
import hmac
import json
from collections.abc import Awaitable
from typing import Any, NoReturn, TypeVar

from starlette.requests import ClientDisconnect, Request

from proxy.errors import BadRequestError, UnauthorizedError
from proxy.services import Services

T = TypeVar("T")


def services(request: Request) -> Services:
    """The parts this server was made of."""
    found = request.app.state.services
    assert isinstance(found, Services)
    return found


def has_key(request: Request) -> bool:
    """Whether the client sent the key, where one is needed."""
    expected = services(request).api_key
    return expected is None or hmac.compare_digest(_key(request).encode(), expected.encode())


def owner(request: Request) -> str:
    """Whose files, runs and conversations these are: a digest of the key that was sent. Clients
    that send none, where none is needed, share theirs."""
    return hashlib.sha256(_key(request).encode()).hexdigest()[:16]


def _key(request: Request) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def authorize(request: Request) -> None:
    """Raises UnauthorizedError unless the client sent the key."""
    if not has_key(request):
        raise UnauthorizedError("Incorrect or missing API key. Send it as 'Authorization: Bearer'.")


def base_url(request: Request) -> str:
    """How this client reaches us."""
    return services(request).public_url or str(request.base_url)


async def json_body(request: Request) -> Any:
    """The request's JSON. Raises BadRequestError."""
    try:
        return json.loads(await request.body(), parse_constant=_no_json)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"The request body is not valid JSON: {error}.") from error


def _no_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """Do the work, or give it up as soon as the client leaves. Raises ClientDisconnect."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        leaving.cancel()
        working.cancel()
        await asyncio.wait({working, leaving})


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
