"""Functions that all routes use: for the server's services, the client's key, the JSON body and the
memory for it, error responses, request ids, and disconnected clients."""

import asyncio
import hashlib
import json
import math
import os
import re
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from starlette import responses
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Scope, Send

from policies.headers import RequestHeader, ResponseHeader
from policies.json_bounds import (
    SMALL_BYTES,
    JSONBoundsCheck,
    TooMuchJSONError,
    decode_json,
    has_non_finite,
    is_small,
)
from policies.passthrough import PassthroughSetting
from policies.profile import Profile
from policies.sessions import FileLimits
from policies.steps import NarrationSetting, StepsSetting
from proxy.agent.model import Credentials, Model
from proxy.available_memory import AvailableMemory
from proxy.body_memory import BodyMemory, BodyReservation, size_of_copies
from proxy.errors import (
    BadRequestError,
    BodyTooLargeError,
    ForbiddenError,
    ProxyError,
    UnauthorizedError,
    anthropic_error_body,
    request_id,
)
from proxy.inputs import InputLoader
from proxy.keys import ClientKeyVerifier, Key, Keyring
from proxy.models.prices import Prices
from proxy.profiles import Profiles
from proxy.schemas.request_options import OnDisconnect
from proxy.schemas.validation import check_request_body, check_text
from proxy.stepwise import LARGE_CHARS, decode_large

if TYPE_CHECKING:  # these import the agent, the database and the sandbox runtime
    from proxy.files import FileStore
    from proxy.models.tool_support import ToolVerdicts
    from proxy.runs.manager import RunManager
    from proxy.store.store import Store
    from proxy.workspaces import Workspaces

T = TypeVar("T")
Disconnect = Callable[[], Coroutine[Any, Any, None]]
"""A function that waits until the client has disconnected."""
_SERVICES = "sandbox_proxy.services"
_KEY = "sandbox_proxy.key"
_SENT_KEY = "sandbox_proxy.key_sent"
_CREDENTIALS = "sandbox_proxy.credentials"
_RUN_ID = "sandbox_proxy.run"
_BODY = "sandbox_proxy.body"
"""The scope's key for the BodyReservation of the request."""
_RANDOM_ID = "sandbox_proxy.no_run"
"""The scope's key for the random id of a request without a run."""
_SENT_REQUEST_ID = RequestHeader.REQUEST_ID.encode()
_REQUEST_ID = ResponseHeader.REQUEST_ID.encode()
_PRINTABLE_ID = re.compile(rb"[!-~]{1,128}")
"""Matches a client's request id that may be sent back: up to 128 printable ASCII characters, no
spaces."""
SLOW_BYTES = LARGE_CHARS
"""Size in bytes above which a body is handled in steps."""
YIELD_S = 0.005
"""Seconds to pause after each slow step with a body above `SLOW_BYTES`. In the pause, the
event loop can answer `/health`."""
MAX_JSON_BYTES = 1 << 20
"""Maximum size of a request body without files, in bytes."""
MAX_CONVERSIONS = 2
"""Maximum number of trajectories that are converted to JSON at once."""
_MESSAGES_PATH = "/v1/messages"


@dataclass(frozen=True, slots=True)
class Services:
    """The application services that routes use; `proxy.bootstrap` builds them."""

    model: Model
    runs: "RunManager"
    workspaces: "Workspaces"
    files: "FileStore"
    file_limits: FileLimits
    """Limits on uploads."""
    tool_verdicts: "ToolVerdicts"
    """The verdicts on the tool support of the models."""
    body_memory: BodyMemory = field(default_factory=BodyMemory)
    """Memory budget for the bodies of all requests."""
    available_memory: AvailableMemory = field(default_factory=partial(AvailableMemory, 0))
    """Refuses runs when little memory is available."""
    inputs: InputLoader = field(default_factory=InputLoader)
    profiles: Profiles = field(default_factory=partial(Profiles.only, Profile()))
    """Policies and prompts by profile name."""
    prices: Prices = field(default_factory=Prices)
    keyring: Keyring = field(default_factory=Keyring)
    """The API keys that the operator issued."""
    client_keys: ClientKeyVerifier | None = None
    """Verifies the backend keys of clients; None if the server has keys of its own."""
    passthrough: PassthroughSetting = "stateless"
    """The setting that decides which paths without a route are relayed to the backend."""
    upstreams: tuple[str, ...] = ()
    """The base URLs that a request may name in `sandbox.upstream`. A URL below one of them is
    allowed too."""
    public_url: str | None = None
    """Base URL of links to files, or None for the base URL of each request."""
    steps: StepsSetting = "auto"
    """Form in which a response shows the steps, unless the request sets it."""
    status_wait_s: float = 1.0
    """Maximum seconds before a stream sends its status 200, if no model call has failed."""
    status_hold_s: float = 10.0
    """Maximum seconds before a stream sends its status 200 while model calls are retried."""
    keep_alive_s: float = 10.0
    """Seconds between two keep-alives of a stream. Gateways close a silent connection after 50 to
    120 s."""
    nonstream_keep_alive_s: float | None = None
    """Seconds between two pieces of whitespace that a JSON response sends as keep-alives, or None
    to send none."""
    narration: NarrationSetting = "content"
    """Form of streamed prose before a tool call."""
    on_disconnect: OnDisconnect = "cancel"
    """Handling of a run whose client disconnects, unless the request sets it."""
    trajectory_conversions: asyncio.Semaphore = field(
        default_factory=partial(asyncio.Semaphore, MAX_CONVERSIONS)
    )
    """Limits the trajectories that are converted at once. Each may need hundreds of megabytes."""

    @property
    def store(self) -> "Store":
        """The database and the stored files."""
        return self.files.store


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRequest:
    """An HTTP request of a client with a valid key."""

    http: Request
    services: Services
    key: Key
    credentials: Credentials | None
    """The client's backend credentials, or None if the server uses its own."""

    @property
    def headers(self) -> Headers:
        return self.http.headers

    @property
    def owner(self) -> str:
        """The owner of the client's files, runs and conversations."""
        return get_owner(self.http)

    @property
    def model(self) -> Model:
        """The model. Its calls use the client's backend credentials, if there are any."""
        return get_model(self.http)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest(ClientRequest):
    """A client's request that names a model."""

    raw_body: bytes | bytearray
    """The body as received."""
    body: dict[str, Any]


def get_services(request: Request) -> Services:
    """Return the services of the application."""
    services: Services = request.scope[_SERVICES]
    return services


def set_services(scope: Scope, services: Services) -> None:
    """Store the services of the application in a request's scope."""
    scope[_SERVICES] = services


class JSONResponse(responses.JSONResponse):
    """A JSON response in ASCII: UTF-8 cannot encode a lone surrogate, which a model may write."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode()


def error_response(request: Request, error: ProxyError) -> Response:
    """Return an error as a response, in the format of the API that the request called."""
    path, run_id = request.url.path, run_id_of(request)
    headers = {**error.headers, ResponseHeader.RUN: run_id} if run_id else error.headers
    if path != _MESSAGES_PATH and not path.startswith(f"{_MESSAGES_PATH}/"):
        return JSONResponse(error.body(), error.status, headers)
    name = server_request_id(request.scope)
    headers = {**headers, ResponseHeader.MESSAGES_REQUEST_ID: name}
    return JSONResponse(anthropic_error_body(error, name), error.status, headers)


def has_valid_key(request: Request) -> bool:
    """Return True if the request has a valid key, or the server requires none."""
    return (
        _KEY in request.scope or get_services(request).keyring.find(sent_key(request)) is not None
    )


def get_owner(request: Request) -> str:
    """Return the owner of the client's files, runs and conversations: a digest of the key. On a
    server without keys, all clients have the same owner and share one quota."""
    return owner_of("" if get_services(request).keyring.is_open else sent_key(request))


def owner_of(key: str) -> str:
    """Return the owner of a key: 16 hex digits."""
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def sent_key(request: Request) -> str:
    """Return the key in the request's headers, or ""."""
    known: str | None = request.scope.get(_SENT_KEY)
    if known is None:
        scheme, _, known = request.headers.get(RequestHeader.AUTHORIZATION, "").partition(" ")
        if scheme.lower() != "bearer":
            known = request.headers.get(RequestHeader.API_KEY, "")  # Anthropic's clients
        known = request.scope[_SENT_KEY] = known.strip()
    return known


def authorize(request: Request) -> Key:
    """Return the client's key. Raises UnauthorizedError."""
    known = request.scope.get(_KEY)  # cached: the lookup takes a SHA-256
    if isinstance(known, Key):
        return known
    key = get_services(request).keyring.find(sent_key(request))
    if key is None:
        # litellm's clients report a 401 as a bad request if these four words are missing:
        # "Incorrect API key provided".
        what = "" if sent_key(request) else ": none"
        raise UnauthorizedError(
            f"Incorrect API key provided{what}. Send it as 'Authorization: Bearer' or 'x-api-key'."
        )
    request.scope[_KEY] = key
    return key


def is_operator(request: Request) -> bool:
    """Return True if the request has the operator's key."""
    return get_services(request).keyring.is_operator(sent_key(request))


def require_operator(request: Request) -> None:
    """Raise UnauthorizedError or ForbiddenError unless the request has the operator's key."""
    if not is_operator(request):
        authorize(request)
        raise ForbiddenError(
            f"{request.method} {request.url.path} requires the operator's key"
            " (server.operator_key_env)."
        )


def set_client_credentials(request: Request, key: Key, credentials: Credentials) -> None:
    """Store the key and the backend credentials of a client whose key the backend accepts."""
    request.scope[_KEY] = key
    request.scope[_CREDENTIALS] = credentials


def get_model(request: Request) -> Model:
    """Return the model. Its calls use the client's backend credentials, if there are any."""
    credentials: Credentials | None = request.scope.get(_CREDENTIALS)
    model = get_services(request).model
    return model if credentials is None else model.with_credentials(credentials)


def base_url(request: Request) -> str:
    """Return the base URL of this server, as the client sees it."""
    return get_services(request).public_url or str(request.base_url)


def set_run_id(request: Request, run_id: str) -> None:
    """Store the id of the request's run, from which the request id is made."""
    request.scope[_RUN_ID] = run_id


def run_id_of(request: Request) -> str | None:
    """Return the id of the request's run, or None."""
    run_id: str | None = request.scope.get(_RUN_ID)
    return run_id


def server_request_id(scope: Scope) -> str:
    """Return the request id that the server assigns: made from the run's id if the request has a
    run, else random."""
    if found := scope.get(_RUN_ID) or scope.get(_RANDOM_ID):
        return request_id(found)
    scope[_RANDOM_ID] = os.urandom(16).hex()
    return request_id(scope[_RANDOM_ID])


def with_request_id(scope: Scope, send: Send) -> Send:
    """Return a `send` that adds `x-request-id` to a response without one: the client's id if it is
    printable, else the server's."""

    def send_with_id(message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            headers = message.get("headers", ())
            if _REQUEST_ID not in dict(headers):
                message["headers"] = [*headers, (_REQUEST_ID, _response_request_id(scope))]
        return send(message)

    return send_with_id


def _response_request_id(scope: Scope) -> bytes:
    client_id: bytes = dict(scope["headers"]).get(_SENT_REQUEST_ID, b"")
    is_printable = _PRINTABLE_ID.fullmatch(client_id)
    return client_id if is_printable else server_request_id(scope).encode()


def body_reservation(request: Request) -> BodyReservation:
    """Return the request's reservation in the body memory; it is created at the first call."""
    reservation: BodyReservation | None = request.scope.get(_BODY)
    if reservation is None:
        reservation = BodyReservation(get_services(request).body_memory, get_owner(request))
        request.scope[_BODY] = reservation
    return reservation


def release_body_memory(scope: Scope) -> None:
    """Release the request's reservation in the body memory."""
    if _BODY in scope:
        scope.pop(_BODY).release()


async def read_body(request: Request, max_bytes: int = MAX_JSON_BYTES) -> bytes | bytearray:
    """Return the raw body: a large body as a bytearray, because a copy of 100 MB takes 0.1 s. While
    the body arrives, its JSON is checked against limits but not decoded.

    Raises BodyTooLargeError, BusyError.
    """
    received, bounds = bytearray(), None
    async for piece in request.stream():
        received += piece
        if len(received) > max_bytes:
            raise BodyTooLargeError(f"{max_bytes >> 20} MiB")
        if bounds is not None:
            body_reservation(request).take(len(piece))
            _check_bounds(bounds, piece)
        elif len(received) > SMALL_BYTES:
            body_reservation(request).take(len(received))
            _check_bounds(bounds := JSONBoundsCheck(), bytes(received))
    if bounds is None and not is_small(received):
        _check_bounds(JSONBoundsCheck(), bytes(received))
    if len(received) <= SLOW_BYTES:
        return bytes(received)
    await pause_if_large(received)
    return received


async def pause_if_large(raw_body: bytes | bytearray) -> None:
    """Pause after a step that takes milliseconds if the body is large, so that the event loop can
    run other tasks."""
    if len(raw_body) > SLOW_BYTES:
        await asyncio.sleep(YIELD_S)


def _check_bounds(bounds: JSONBoundsCheck, piece: bytes) -> None:
    try:
        bounds.check(piece)
    except TooMuchJSONError as error:
        raise BodyTooLargeError(str(error)) from error


def authenticate(request: Request) -> ClientRequest:
    """Return the request with the client's key and backend credentials. Raises
    UnauthorizedError."""
    key = authorize(request)
    return ClientRequest(
        http=request,
        services=get_services(request),
        key=key,
        credentials=request.scope.get(_CREDENTIALS),
    )


async def read_model_request(request: Request) -> ModelRequest:
    """Return a request that names a model, with its body decoded.

    Raises UnauthorizedError, BodyTooLargeError, BusyError, BadRequestError.
    """
    key, services = authorize(request), get_services(request)
    raw_body = await read_body(request, services.inputs.max_body_bytes)
    body = check_request_body(await decode_body(request, raw_body), model=check_text)
    return ModelRequest(
        http=request,
        services=services,
        key=key,
        credentials=request.scope.get(_CREDENTIALS),
        raw_body=raw_body,
        body=body,
    )


async def read_json_object(request: Request) -> dict[str, Any]:
    """Return the JSON object in the request's body. Raises BadRequestError, BodyTooLargeError,
    BusyError."""
    return check_request_body(await decode_body(request, await read_body(request)))


async def decode_body(request: Request, raw_body: bytes | bytearray) -> Any:
    """Return the decoded JSON, and reserve memory for it. A large body is decoded in steps, one
    body at a time.

    Raises BadRequestError, BusyError, BodyTooLargeError.
    """
    try:
        if isinstance(raw_body, bytes) and len(raw_body) <= SLOW_BYTES:
            if len(raw_body) <= SMALL_BYTES or has_non_finite(value := decode_json(raw_body)):
                encoding = json.detect_encoding(raw_body)
                value = _DECODER.decode(raw_body.decode(encoding, "surrogatepass"))
            if len(raw_body) > SMALL_BYTES:
                body_reservation(request).take(size_of_copies(raw_body, value))
            return value
        async with get_services(request).body_memory.decoding:
            decoded = await decode_large(raw_body)
    except TooMuchJSONError as error:
        raise BodyTooLargeError(str(error)) from error
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"The request body is not valid JSON: {error}.") from error
    body_reservation(request).take(decoded.memory_bytes)
    return decoded.value


def _parse_finite(number: str) -> float:
    value = float(number)
    return value if math.isfinite(value) else _raise_invalid_number(number)


def _raise_invalid_number(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not valid in JSON")


_DECODER = json.JSONDecoder(parse_constant=_raise_invalid_number, parse_float=_parse_finite)


async def run_while_connected(request: Request, work: Awaitable[T]) -> T:
    """Return the result of `work`, which is cancelled when the client disconnects. Raises
    ClientDisconnect."""
    return await cancel_on_disconnect(partial(wait_for_disconnect, request), work)


async def cancel_on_disconnect(
    disconnect: Disconnect, work: Awaitable[T], *, watch_after_s: float = 0.0
) -> T:
    """Return the result of `work`, which is cancelled when `disconnect` returns. `disconnect` is
    first called after `watch_after_s` seconds. Raises ClientDisconnect."""
    # `work` runs in this task, as in asyncio.timeout: a task of its own was a third of the cost of
    # a relayed request (`bench/relay.py`).
    worker = asyncio.current_task()
    assert worker is not None
    watcher: asyncio.Task[None] | None = None
    has_cancelled = is_done = False

    def watch() -> None:
        nonlocal watcher
        watcher = asyncio.create_task(disconnect())
        watcher.add_done_callback(cancel)

    def cancel(watcher: asyncio.Task[None]) -> None:
        nonlocal has_cancelled
        if not watcher.cancelled() and not is_done:
            has_cancelled = True
            worker.cancel()

    timer = asyncio.get_running_loop().call_later(watch_after_s, watch)
    try:
        return await work
    except asyncio.CancelledError:
        if has_cancelled and worker.uncancel() == 0:
            raise ClientDisconnect from None
        raise
    finally:
        is_done = True
        timer.cancel()
        if watcher is not None:
            watcher.cancel()


async def wait_for_disconnect(request: Request) -> None:
    """Wait until the client has disconnected. The request's body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
