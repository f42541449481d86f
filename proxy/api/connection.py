"""The client's end of a request: who it is, where it reaches us, whether it is still there."""

import asyncio
import hashlib
import json
import math
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, NoReturn, TypeVar

from starlette.requests import ClientDisconnect, Request

from proxy.errors import BadRequestError, BodyTooLargeError, UnauthorizedError
from proxy.keys import Key
from proxy.services import Services
from proxy.wire.shapes import request_body, text

T = TypeVar("T")
Gone = Callable[[], Coroutine[Any, Any, None]]
"""Waits until the client has left."""
_KEY = "sandbox_proxy.key"
MAX_JSON_BYTES = 1 << 20
"""Of requests that bring no files."""


def services(request: Request) -> Services:
    """The parts this server was made of."""
    found = request.app.state.services
    assert isinstance(found, Services)
    return found


def has_key(request: Request) -> bool:
    """Whether the client sent a key, where one is needed."""
    return services(request).keyring.find(_key(request)) is not None


def owner(request: Request) -> str:
    """Whose files, runs and conversations these are: a digest of the key that was sent. Clients
    that send none, where none is needed, share theirs."""
    return owner_of(_key(request))


def owner_of(key: str) -> str:
    """Who comes with that key."""
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def _key(request: Request) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        key = request.headers.get("x-api-key", "")  # Anthropic's clients
    return key.strip()


def authorize(request: Request) -> Key:
    """The key that the client sent. Raises UnauthorizedError."""
    known = request.scope.get(_KEY)  # asked for more than once, and to find it takes its time
    if isinstance(known, Key):
        return known
    key = services(request).keyring.find(_key(request))
    if key is None:
        raise UnauthorizedError(
            "Incorrect or missing API key. Send it as 'Authorization: Bearer' or 'x-api-key'."
        )
    request.scope[_KEY] = key
    return key


def base_url(request: Request) -> str:
    """How this client reaches us."""
    return services(request).public_url or str(request.base_url)


async def read_body(request: Request, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """The request's body. Raises BodyTooLargeError."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > max_bytes:
            raise BodyTooLargeError(max_bytes)
    return bytes(body)


async def model_request(request: Request) -> tuple[bytes, dict[str, Any]]:
    """What is asked of a model: as it was written, and as it reads.

    Raises UnauthorizedError, BodyTooLargeError, BadRequestError.
    """
    authorize(request)
    written = await read_body(request, services(request).inputs.max_body_bytes)
    return written, request_body(parsed(written), model=text)


async def json_body(request: Request) -> dict[str, Any]:
    """The fields of the request's JSON. Raises BadRequestError, BodyTooLargeError."""
    return request_body(parsed(await read_body(request)))


def parsed(body: bytes) -> Any:
    """JSON. Raises BadRequestError."""
    try:
        return _DECODER.decode(body.decode(json.detect_encoding(body), "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"The request body is not valid JSON: {error}.") from error


def _finite(number: str) -> float:
    value = float(number)
    return value if math.isfinite(value) else _no_json(number)


def _no_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_json, parse_float=_finite)


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """Do the work, or give it up as soon as the client leaves. Raises ClientDisconnect."""
    return await unless(partial(left, request), work)


async def unless(gone: Gone, work: Awaitable[T], *, look_after_s: float = 0.0) -> T:
    """Do the work, or give it up as soon as that has come about; nobody looks before so many
    seconds. Raises ClientDisconnect."""
    # In this task, as asyncio.timeout does it: one more for the work was a third of a relay's cost.
    doing = asyncio.current_task()
    assert doing is not None
    watching: asyncio.Task[None] | None = None
    given_up = is_over = False

    def watch() -> None:
        nonlocal watching
        watching = asyncio.create_task(gone())
        watching.add_done_callback(give_up)

    def give_up(watching: asyncio.Task[None]) -> None:
        nonlocal given_up
        if not watching.cancelled() and not is_over:
            given_up = True
            doing.cancel()

    looking = asyncio.get_running_loop().call_later(look_after_s, watch)
    try:
        return await work
    except asyncio.CancelledError:
        if given_up and doing.uncancel() == 0:
            raise ClientDisconnect from None
        raise
    finally:
        is_over = True
        looking.cancel()
        if watching is not None:
            watching.cancel()


async def left(request: Request) -> None:
    """Wait until the client is gone. The request's body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
