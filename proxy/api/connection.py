"""The client's end of a request: who it is, where it reaches us, whether it is still there."""

import asyncio
import hashlib
import json
import math
import os
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import partial
from typing import Any, NoReturn, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Scope, Send

from policies.json_bounds import (
    LARGE_BYTES,
    SMALL_BYTES,
    JSONBounds,
    TooMuchJSONError,
    decoded,
    has_infinity,
    is_small,
)
from proxy.agent.model import Credentials, Model
from proxy.body_memory import HeldBody, weight
from proxy.errors import (
    BadRequestError,
    BodyTooLargeError,
    ForbiddenError,
    UnauthorizedError,
    request_id,
)
from proxy.keys import Key
from proxy.services import Services
from proxy.wire.validation import request_body, text

T = TypeVar("T")
Gone = Callable[[], Coroutine[Any, Any, None]]
"""Waits until the client has left."""
_SERVICES = "sandbox_proxy.services"
_KEY = "sandbox_proxy.key"
_SENT = "sandbox_proxy.key_sent"
_CREDENTIALS = "sandbox_proxy.credentials"
_RUN = "sandbox_proxy.run"
_HELD = "sandbox_proxy.held"
"""Bytes of this request's body that are counted in BodyMemory, as a HeldBody."""
_NO_RUN = "sandbox_proxy.no_run"
"""What names a request that no run answers."""
REQUEST_ID_HEADER = b"x-request-id"
_PRINTABLE_ID = re.compile(rb"[!-~]{1,128}")
"""A client's own id of a request that is given back: no longer than that, without blanks."""
SLOW_BYTES = 4 << 20
"""Steps such as decoding take milliseconds for a body of this length."""
OTHERS_TURN_S = 0.005
"""Between two steps of a slow body: long enough for `/health` to be asked and answered."""
MAX_JSON_BYTES = 1 << 20
"""Of requests that bring no files."""


def services(request: Request) -> Services:
    """The parts this server was made of."""
    # Kept in the scope: each request asks several times, and `app.state` takes longer to look up.
    found: Services | None = request.scope.get(_SERVICES)
    if found is None:
        found = request.scope[_SERVICES] = request.app.state.services
        assert isinstance(found, Services)
    return found


def has_key(request: Request) -> bool:
    """Whether the client sent a key, where one is needed."""
    return _KEY in request.scope or services(request).keyring.find(key_sent(request)) is not None


def owner(request: Request) -> str:
    """Whose files, runs and conversations these are: a digest of the key that was sent. Where none
    is needed, all clients are one owner, whatever key they make up: its quotas bound them all."""
    return owner_of("" if services(request).keyring.is_open else key_sent(request))


def owner_of(key: str) -> str:
    """Who comes with that key."""
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def key_sent(request: Request) -> str:
    """The key that a request brings, or nothing."""
    known: str | None = request.scope.get(_SENT)
    if known is None:
        scheme, _, known = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            known = request.headers.get("x-api-key", "")  # Anthropic's clients
        known = request.scope[_SENT] = known.strip()
    return known


def authorize(request: Request) -> Key:
    """The key that the client sent. Raises UnauthorizedError."""
    known = request.scope.get(_KEY)  # asked for more than once, and to find it takes its time
    if isinstance(known, Key):
        return known
    key = services(request).keyring.find(key_sent(request))
    if key is None:
        # litellm's clients take a 401 without the first four words for a bad request.
        what = "" if key_sent(request) else ": none"
        raise UnauthorizedError(
            f"Incorrect API key provided{what}. Send it as 'Authorization: Bearer' or 'x-api-key'."
        )
    request.scope[_KEY] = key
    return key


def is_operator(request: Request) -> bool:
    """Return True if the request comes with the operator's key."""
    return services(request).keyring.is_operator(key_sent(request))


def require_operator(request: Request) -> None:
    """Raises UnauthorizedError, ForbiddenError."""
    if not is_operator(request):
        authorize(request)
        raise ForbiddenError(
            f"{request.method} {request.url.path} is for the operator, whose key this is not"
            " (server.operator_key_env)."
        )


def take_client(request: Request, key: Key, credentials: Credentials) -> None:
    """Note that the backend accepts the client's own key."""
    request.scope[_KEY] = key
    request.scope[_CREDENTIALS] = credentials


def credentials(request: Request) -> Credentials | None:
    """The client's own with the backend, where it is reached with those."""
    found = request.scope.get(_CREDENTIALS)
    return found if isinstance(found, Credentials) else None


def model(request: Request) -> Model:
    """The door to the model for this client."""
    own = credentials(request)
    door = services(request).model
    return door if own is None else door.for_client(own)


def note_run(request: Request, run_id: str) -> None:
    """Note which run answers the request, so that the request's id is the one in the log."""
    request.scope[_RUN] = run_id


def noted_run(request: Request) -> str | None:
    """Return the id of the run that answers the request, if one does."""
    run_id: str | None = request.scope.get(_RUN)
    return run_id


def own_request_id(scope: Scope) -> str:
    """Return the server's own name for a request, always the same: that of its run, if it has
    one."""
    if found := scope.get(_RUN) or scope.get(_NO_RUN):
        return request_id(found)
    scope[_NO_RUN] = os.urandom(16).hex()
    return request_id(scope[_NO_RUN])


def with_request_id(scope: Scope, send: Send) -> Send:
    """Return `send` with an `x-request-id` in the head of the response: the backend's where the
    response has one, else the client's where it can be printed, else the server's own."""

    def sending(message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            message = {**message, "headers": _with_request_id(scope, message["headers"])}
        return send(message)

    return sending


def _with_request_id(scope: Scope, headers: Iterable[tuple[bytes, bytes]]) -> list[Any]:
    answered = list(headers)
    for name, _ in answered:
        if name == REQUEST_ID_HEADER:
            return answered
    answered.append((REQUEST_ID_HEADER, _id_sent(scope) or own_request_id(scope).encode()))
    return answered


def _id_sent(scope: Scope) -> bytes | None:
    """Return the client's own id of the request, if it can be given back."""
    for name, value in scope["headers"]:
        if name == REQUEST_ID_HEADER:
            return value if _PRINTABLE_ID.fullmatch(value) else None
    return None


def base_url(request: Request) -> str:
    """How this client reaches us."""
    return services(request).public_url or str(request.base_url)


def hold(request: Request, count: int) -> None:
    """Count bytes of a body in the memory that all requests share. Raises BusyError."""
    held_body(request).take(count)


def held_body(request: Request) -> HeldBody:
    """Return what the request holds of the memory for bodies."""
    held: HeldBody | None = request.scope.get(_HELD)
    if held is None:
        held = request.scope[_HELD] = HeldBody(services(request).body_memory, owner(request))
    return held


def release(scope: Scope) -> None:
    """Let go of a request's body, once the request has been answered."""
    if _HELD in scope:
        scope.pop(_HELD).release()


async def read_body(request: Request, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """The request's body, JSON as it seems. Raises BodyTooLargeError, BusyError."""
    body, bounds = bytearray(), None
    async for piece in request.stream():
        body += piece
        if len(body) > max_bytes:
            raise BodyTooLargeError(f"{max_bytes >> 20} MiB")
        if bounds is not None:
            hold(request, len(piece))
            _check(bounds, piece)
        elif len(body) > SMALL_BYTES:
            hold(request, len(body))
            _check(bounds := JSONBounds(), bytes(body))
    if bounds is None and not is_small(body):
        _check(JSONBounds(), bytes(body))
    read = bytes(body)
    await _others_turn(read)
    return read


def _check(bounds: JSONBounds, piece: bytes) -> None:
    try:
        bounds.check(piece)
    except TooMuchJSONError as error:
        raise BodyTooLargeError(str(error)) from error


async def model_request(request: Request) -> tuple[bytes, dict[str, Any]]:
    """What is asked of a model: as it was written, and as it reads.

    Raises UnauthorizedError, BodyTooLargeError, BusyError, BadRequestError.
    """
    authorize(request)
    written = await read_body(request, services(request).inputs.max_body_bytes)
    return written, request_body(await held_json(request, written), model=text)


async def json_body(request: Request) -> dict[str, Any]:
    """The fields of the request's JSON. Raises BadRequestError, BodyTooLargeError, BusyError."""
    return request_body(await held_json(request, await read_body(request)))


async def held_json(request: Request, written: bytes) -> Any:
    """JSON, counted with what it takes beside the body. Raises BadRequestError, BusyError,
    BodyTooLargeError."""
    value = parsed(written)
    if len(written) > SMALL_BYTES:
        hold(request, weight(written, value))
    await _others_turn(written)
    return value


async def _others_turn(body: bytes) -> None:
    """Let the event loop answer other requests before the next step that takes long, as each step
    does for a body of tens of megabytes."""
    if len(body) > SLOW_BYTES:
        await asyncio.sleep(OTHERS_TURN_S)


def parsed(body: bytes) -> Any:
    """JSON. Raises BadRequestError."""
    try:
        if len(body) > LARGE_BYTES and not has_infinity(value := decoded(body)):
            return value
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
