"""What every route needs of a request: the server's services, the client's key, the JSON body, the
request id, responses in JSON, and a way to stop work when the client disconnects."""

import asyncio
import hashlib
import json
import math
import os
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, TypeVar

from starlette import responses
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
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
from policies.passthrough import PassthroughSetting
from policies.profile import Profile
from policies.sessions import FileLimits
from policies.steps import NarrationSetting, StepsSetting
from proxy.agent.model import Credentials, Model
from proxy.body_memory import BodyMemory, BodyReservation, weight
from proxy.errors import (
    BadRequestError,
    BodyTooLargeError,
    ForbiddenError,
    ProxyError,
    UnauthorizedError,
    error_body,
    request_id,
)
from proxy.files import FileStore
from proxy.inputs import Inputs
from proxy.keys import ClientKeys, Key, Keyring
from proxy.models.prices import Prices
from proxy.models.tool_support import ToolVerdicts
from proxy.profiles import Profiles
from proxy.runs.manager import RunManager
from proxy.schemas.request_options import OnDisconnect
from proxy.schemas.validation import request_body, text
from proxy.store.store import Store
from proxy.workspaces import Workspaces

T = TypeVar("T")
Disconnect = Callable[[], Coroutine[Any, Any, None]]
"""Waits until the client has disconnected."""
_SERVICES = "sandbox_proxy.services"
_KEY = "sandbox_proxy.key"
_SENT = "sandbox_proxy.key_sent"
_CREDENTIALS = "sandbox_proxy.credentials"
_RUN = "sandbox_proxy.run"
_BODY = "sandbox_proxy.body"
"""The memory reserved for this request's body, as a BodyReservation."""
_NO_RUN = "sandbox_proxy.no_run"
"""The id of a request that no run answers."""
REQUEST_ID_HEADER = b"x-request-id"
_PRINTABLE_ID = re.compile(rb"[!-~]{1,128}")
"""A client's own request id that is sent back: no longer than that, without blanks."""
SLOW_BYTES = 4 << 20
"""Steps such as decoding take milliseconds for a body of this length."""
YIELD_S = 0.005
"""The pause between two steps of a slow body: long enough for `/health` to be answered."""
MAX_JSON_BYTES = 1 << 20
"""The longest body of a request that brings no files."""
_MESSAGES_PATH = "/v1/messages"


@dataclass(frozen=True, slots=True)
class Services:
    """The parts of the server that routes use, joined by __main__ or a test."""

    model: Model
    runs: RunManager
    workspaces: Workspaces
    files: FileStore
    file_limits: FileLimits
    """The limits on what clients upload."""
    body_memory: BodyMemory = field(default_factory=BodyMemory)
    """The memory that the bodies of all requests share."""
    inputs: Inputs = field(default_factory=Inputs)
    profiles: Profiles = field(default_factory=partial(Profiles.only, Profile()))
    """The policies and prompts of runs."""
    prices: Prices = field(default_factory=Prices)
    tool_verdicts: ToolVerdicts = field(default_factory=ToolVerdicts)
    """Which models are given tools."""
    keyring: Keyring = field(default_factory=Keyring)
    """The keys that clients may send."""
    client_keys: ClientKeys | None = None
    """Asks the backend whether it accepts a client's own key; None if the server has the keys."""
    passthrough: PassthroughSetting = "stateless"
    """Which of the backend's other paths are passed on."""
    public_url: str | None = None
    """The URL by which clients reach this server, for links; None takes it from each request."""
    steps: StepsSetting = "auto"
    """How steps are shown to clients that do not say."""
    status_wait_s: float = 1.0
    """How long a streamed response waits with its status for the backend's; then it is 200."""
    status_hold_s: float = 10.0
    """The same while attempts to reach the backend fail."""
    keep_alive_s: float = 10.0
    """Silence after which a stream sends a sign of life; gateways hang up after 50 to 120 s."""
    nonstream_keep_alive_s: float | None = None
    """The same for an answer in one piece, which then begins with blanks; None sends nothing."""
    narration: NarrationSetting = "content"
    """How prose before a tool call is streamed."""
    on_disconnect: OnDisconnect = "cancel"
    """What happens to a run when its client disconnects, unless the request says."""

    @property
    def store(self) -> Store:
        """The database and files that outlive a request."""
        return self.files.store


def get_services(request: Request) -> Services:
    """Return the parts of the server that answers the request."""
    # Kept in the scope: each request asks several times, and `app.state` takes longer to look up.
    found: Services | None = request.scope.get(_SERVICES)
    if found is None:
        found = request.scope[_SERVICES] = request.app.state.services
        assert isinstance(found, Services)
    return found


class JSONResponse(responses.JSONResponse):
    """JSON in plain ASCII, so that half a surrogate pair from a model is no reason to fail."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode()


def error_response(request: Request, error: ProxyError) -> Response:
    """Return the error as a response, in the format of the API that was called."""
    path, run_id = request.url.path, run_id_of(request)
    headers = {**error.headers, "X-Sandbox-Run": run_id} if run_id else error.headers
    if path != _MESSAGES_PATH and not path.startswith(f"{_MESSAGES_PATH}/"):
        return JSONResponse(error.body(), error.status, headers)
    name = server_request_id(request.scope)
    return JSONResponse(error_body(error, name), error.status, {**headers, "request-id": name})


def has_valid_key(request: Request) -> bool:
    """Return True if the client sent a valid key, or none is needed."""
    return (
        _KEY in request.scope or get_services(request).keyring.find(sent_key(request)) is not None
    )


def get_owner(request: Request) -> str:
    """Return the owner of the client's files, runs and conversations: a digest of the key that was
    sent. On a server without keys all clients are one owner, whatever key they make up, so that
    its quotas bound them all."""
    return owner_of("" if get_services(request).keyring.is_open else sent_key(request))


def owner_of(key: str) -> str:
    """Return the owner that a key stands for."""
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def sent_key(request: Request) -> str:
    """Return the key that the request brings, or ""."""
    known: str | None = request.scope.get(_SENT)
    if known is None:
        scheme, _, known = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            known = request.headers.get("x-api-key", "")  # Anthropic's clients
        known = request.scope[_SENT] = known.strip()
    return known


def authorize(request: Request) -> Key:
    """Return the key that the client sent. Raises UnauthorizedError."""
    known = request.scope.get(_KEY)  # asked for more than once, and to find it takes its time
    if isinstance(known, Key):
        return known
    key = get_services(request).keyring.find(sent_key(request))
    if key is None:
        # litellm's clients take a 401 without the first four words for a bad request.
        what = "" if sent_key(request) else ": none"
        raise UnauthorizedError(
            f"Incorrect API key provided{what}. Send it as 'Authorization: Bearer' or 'x-api-key'."
        )
    request.scope[_KEY] = key
    return key


def is_operator(request: Request) -> bool:
    """Return True if the request comes with the operator's key."""
    return get_services(request).keyring.is_operator(sent_key(request))


def require_operator(request: Request) -> None:
    """Raises UnauthorizedError, ForbiddenError."""
    if not is_operator(request):
        authorize(request)
        raise ForbiddenError(
            f"{request.method} {request.url.path} is for the operator, whose key this is not"
            " (server.operator_key_env)."
        )


def set_client_credentials(request: Request, key: Key, credentials: Credentials) -> None:
    """Note that the backend accepts the client's own key."""
    request.scope[_KEY] = key
    request.scope[_CREDENTIALS] = credentials


def get_credentials(request: Request) -> Credentials | None:
    """Return the client's own credentials with the backend, or None if the server has its own."""
    found = request.scope.get(_CREDENTIALS)
    return found if isinstance(found, Credentials) else None


def get_model(request: Request) -> Model:
    """Return the model, called with the client's own credentials if it brings such."""
    own = get_credentials(request)
    door = get_services(request).model
    return door if own is None else door.for_client(own)


def base_url(request: Request) -> str:
    """Return the URL by which the client reaches this server."""
    return get_services(request).public_url or str(request.base_url)


def set_run_id(request: Request, run_id: str) -> None:
    """Note which run answers the request, so that the request's id is the one in the log."""
    request.scope[_RUN] = run_id


def run_id_of(request: Request) -> str | None:
    """Return the id of the run that answers the request, if one does."""
    run_id: str | None = request.scope.get(_RUN)
    return run_id


def server_request_id(scope: Scope) -> str:
    """Return the server's own id of a request, always the same: that of its run, if it has one."""
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
    answered.append((REQUEST_ID_HEADER, _id_sent(scope) or server_request_id(scope).encode()))
    return answered


def _id_sent(scope: Scope) -> bytes | None:
    """Return the client's own id of the request, if it can be sent back."""
    for name, value in scope["headers"]:
        if name == REQUEST_ID_HEADER:
            return value if _PRINTABLE_ID.fullmatch(value) else None
    return None


def reserve_memory(request: Request, count: int) -> None:
    """Reserve bytes for a body in the memory that all requests share. Raises BusyError."""
    body_reservation(request).take(count)


def body_reservation(request: Request) -> BodyReservation:
    """Return the memory that is reserved for the request's body."""
    held: BodyReservation | None = request.scope.get(_BODY)
    if held is None:
        held = request.scope[_BODY] = BodyReservation(
            get_services(request).body_memory, get_owner(request)
        )
    return held


def release_body_memory(scope: Scope) -> None:
    """Release the memory of a request's body, once the request has been answered."""
    if _BODY in scope:
        scope.pop(_BODY).release()


async def read_body(request: Request, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Return the request's body, which is checked as JSON while it arrives, but not decoded.
    Raises BodyTooLargeError, BusyError."""
    body, bounds = bytearray(), None
    async for piece in request.stream():
        body += piece
        if len(body) > max_bytes:
            raise BodyTooLargeError(f"{max_bytes >> 20} MiB")
        if bounds is not None:
            reserve_memory(request, len(piece))
            _check(bounds, piece)
        elif len(body) > SMALL_BYTES:
            reserve_memory(request, len(body))
            _check(bounds := JSONBounds(), bytes(body))
    if bounds is None and not is_small(body):
        _check(JSONBounds(), bytes(body))
    read = bytes(body)
    await _yield_to_event_loop(read)
    return read


def _check(bounds: JSONBounds, piece: bytes) -> None:
    try:
        bounds.check(piece)
    except TooMuchJSONError as error:
        raise BodyTooLargeError(str(error)) from error


async def read_model_request(request: Request) -> tuple[bytes, dict[str, Any]]:
    """Return the body of a request to a model, as it was written and as it was decoded.

    Raises UnauthorizedError, BodyTooLargeError, BusyError, BadRequestError.
    """
    authorize(request)
    written = await read_body(request, get_services(request).inputs.max_body_bytes)
    return written, request_body(await decode_body(request, written), model=text)


async def read_json_object(request: Request) -> dict[str, Any]:
    """Return the fields of the request's JSON. Raises BadRequestError, BodyTooLargeError,
    BusyError."""
    return request_body(await decode_body(request, await read_body(request)))


async def decode_body(request: Request, written: bytes) -> Any:
    """Decode JSON, and reserve the memory that it takes beside the body. Raises BadRequestError,
    BusyError, BodyTooLargeError."""
    value = parse_json(written)
    if len(written) > SMALL_BYTES:
        reserve_memory(request, weight(written, value))
    await _yield_to_event_loop(written)
    return value


async def _yield_to_event_loop(body: bytes) -> None:
    """Let the event loop answer other requests before the next step that takes long, as each step
    does for a body of tens of megabytes."""
    if len(body) > SLOW_BYTES:
        await asyncio.sleep(YIELD_S)


def parse_json(body: bytes) -> Any:
    """Decode JSON. Raises BadRequestError."""
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
    """Do the work, or cancel it as soon as the client disconnects. Raises ClientDisconnect."""
    return await cancel_on_disconnect(partial(wait_for_disconnect, request), work)


async def cancel_on_disconnect(
    disconnect: Disconnect, work: Awaitable[T], *, look_after_s: float = 0.0
) -> T:
    """Do the work, or cancel it as soon as `disconnect` returns, which is called only after
    `look_after_s` seconds. Raises ClientDisconnect."""
    # In this task, as asyncio.timeout does it: one more for the work was a third of a relay's cost.
    doing = asyncio.current_task()
    assert doing is not None
    watching: asyncio.Task[None] | None = None
    given_up = is_over = False

    def watch() -> None:
        nonlocal watching
        watching = asyncio.create_task(disconnect())
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


async def wait_for_disconnect(request: Request) -> None:
    """Wait until the client has disconnected. The request's body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
