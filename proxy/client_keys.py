"""Clients that come with keys of the backend's: it says which it takes, and is asked again after a
while. A key is remembered by its digest alone."""

import asyncio
import hashlib
import json
import secrets
import time
from collections.abc import Callable
from contextlib import aclosing
from datetime import UTC, datetime
from weakref import WeakValueDictionary

from proxy.agent.model import Credentials, Model, Passing, Relayed
from proxy.errors import BackendError, UnauthorizedError
from proxy.models.backend_errors import backend_error_from_response, timed_out

REMEMBERED_S = 300.0
"""How long what the backend said of a key holds."""
MAX_REMEMBERED = 10_000
"""How many keys are remembered; beyond that the earliest check is forgotten."""
MAX_CHECKS = 16
"""How many keys the backend is asked about at a time."""
MAX_KEY_CHARS = 4096
CHECK_S = 10.0
"""How long the backend may take to say whether it accepts a key, its turn awaited."""
_MAX_ERROR_BYTES = 64 * 1024
_JSON = {"content-type": "application/json"}
_REFUSED = frozenset({400, 401})
_SAYS_NOTHING = frozenset({403, 404, 405})
"""A key may be good for completions alone, and a server may list no models."""
_NOT_ALLOWED = frozenset({401, 403})
_LOOKED_AT = frozenset({400, 422})
_ANY_KEY = (
    "The backend accepts any key, so it cannot tell clients apart: give it keys of its own, or set"
    " backend.forward_client_key to false."
)


class ClientKeys:
    """Reaches the backend with clients' own keys, once it has accepted them."""

    def __init__(
        self,
        model: Model,
        *,
        now: Callable[[], float] = time.monotonic,
        max_remembered: int = MAX_REMEMBERED,
    ) -> None:
        self._model = model
        self._now = now
        self._max_remembered = max_remembered
        self._tells = False
        """Whether the backend lists its models to none but those whose key it accepts."""
        self._told_until = -1.0
        """Until when that holds."""
        self._checking = asyncio.Semaphore(MAX_CHECKS)
        self._known: dict[bytes, tuple[bool, float]] = {}
        """Whether each key was accepted, and until when that holds; oldest first."""
        self._checks: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()

    async def require_accepted(self, credentials: Credentials) -> None:
        """Raise UnauthorizedError unless the backend takes the key; BackendError where it does not
        say."""
        key = credentials.key
        if len(key) > MAX_KEY_CHARS or not (key.isascii() and key.isprintable()):
            raise _refusal()  # no header can carry it
        digest = _digest(credentials)
        accepted = self._remembered(digest)
        if accepted is None:
            async with self._checks.setdefault(digest, asyncio.Lock()):
                accepted = self._remembered(digest)
                if accepted is None:
                    accepted = await self._checked(credentials)
                    self._remember(digest, accepted)
        if not accepted:
            raise _refusal()

    def _remembered(self, digest: bytes) -> bool | None:
        accepted, until = self._known.get(digest, (False, -1.0))
        return accepted if self._now() < until else None

    def _remember(self, digest: bytes, accepted: bool) -> None:
        self._known.pop(digest, None)
        while len(self._known) >= self._max_remembered:
            del self._known[next(iter(self._known))]
        self._known[digest] = accepted, self._now() + REMEMBERED_S

    async def _checked(self, credentials: Credentials) -> bool:
        try:
            async with asyncio.timeout(CHECK_S), self._checking:
                if await self._models_tell():
                    status = await self._listing_status(credentials)
                    if status not in _SAYS_NOTHING:
                        return status not in _REFUSED
                return await self._may_complete(credentials)
        except TimeoutError as error:
            raise timed_out("it does not say whether it accepts the key") from error

    async def _models_tell(self) -> bool:
        """Return whether the backend lists its models to nobody without a key that it accepts.
        Raises BackendError where it accepts any key at all."""
        if self._now() >= self._told_until:
            stranger = Credentials(f"sk-{secrets.token_hex(24)}")
            self._tells = await self._listing_status(stranger) in _REFUSED
            if not self._tells and await self._may_complete(stranger):
                raise BackendError(_ANY_KEY, status=502, code="backend_bad_response")
            self._told_until = self._now() + REMEMBERED_S
        return self._tells

    async def _listing_status(self, credentials: Credentials) -> int:
        model = self._model.for_client(credentials)
        return await _status(model, Passing("GET", "/v1/models", {}, None))

    async def _may_complete(self, credentials: Credentials) -> bool:
        """Return what the backend says to an empty request: who may not complete is refused before
        the request is looked at."""
        model = self._model.for_client(credentials)
        passing = Passing("POST", "/v1/chat/completions", _JSON, b"{}")
        return await _status(model, passing) not in _NOT_ALLOWED


def _digest(credentials: Credentials) -> bytes:
    """Of the key, and of the organization and project that it is sent with."""
    told = json.dumps([credentials.key, sorted(credentials.headers.items())])
    return hashlib.sha256(told.encode()).digest()


async def _status(model: Model, passing: Passing) -> int:
    """What the backend answers, where that says anything of the key. Raises BackendError."""
    passage = model.passage
    assert passage, "clients' keys are for a backend that is a server"
    relayed = await passage.pass_on(passing)
    async with aclosing(relayed.body):
        if 200 <= relayed.status < 300:
            return relayed.status
        says = _REFUSED | _SAYS_NOTHING if passing.body is None else _NOT_ALLOWED | _LOOKED_AT
        if relayed.status in says:
            return relayed.status
        raise await _error(relayed)


async def _error(relayed: Relayed) -> BackendError:
    body = bytearray()
    async for piece in relayed.body:
        body += piece
        if len(body) >= _MAX_ERROR_BYTES:
            break
    return backend_error_from_response(
        relayed.status, relayed.headers, bytes(body[:_MAX_ERROR_BYTES]), now=datetime.now(UTC)
    )


def _refusal() -> UnauthorizedError:
    return UnauthorizedError("Incorrect API key provided: the model backend does not accept it.")
