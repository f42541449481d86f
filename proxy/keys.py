"""API keys: those that the operator issued, and clients' own keys for the backend.

`Keyring` has the keys of the configuration. `ClientKeyVerifier` verifies a client's own key with
the backend, and caches the result by the key's digest.
"""

import asyncio
import hashlib
import json
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from weakref import WeakValueDictionary

from proxy.agent.model import Credentials, Model, UpstreamRequest, UpstreamResponse
from proxy.errors import BackendError, UnauthorizedError
from proxy.models.backend_errors import backend_error_from_response, timeout_error

CACHE_S = 300.0
"""Seconds that the verification of a key is cached."""
MAX_CACHED_KEYS = 10_000
"""Maximum number of cached keys. The oldest is evicted first."""
MAX_CHECKS = 16
"""Maximum number of concurrent verifications."""
MAX_KEY_CHARS = 4096
CHECK_S = 10.0
"""Timeout for the verification of a key, including its time in the queue."""
_MAX_ERROR_BYTES = 64 * 1024
_JSON_HEADERS = {"content-type": "application/json"}
_REFUSED_STATUSES = frozenset({400, 401})
_UNDECIDED_STATUSES = frozenset({403, 404, 405})
"""Statuses of a model list that leave the key undecided: it may be valid for completions only, or
the server lists no models."""
_NOT_ALLOWED_STATUSES = frozenset({401, 403})
_INVALID_BODY_STATUSES = frozenset({400, 422})
"""Statuses with which a backend that has accepted the key rejects an invalid request."""
_ANY_KEY_MESSAGE = (
    "The backend accepts any key, so it cannot tell clients apart: configure keys on the backend,"
    " or set backend.forward_client_key to false."
)
ANYONE = "anyone"
"""The key name of all clients of a server without keys."""


@dataclass(frozen=True, slots=True)
class Key:
    """The permissions of a client's key. On a server without keys, all clients share one `Key`."""

    name: str = ANYONE
    profiles: tuple[str, ...] = ()
    """The profiles that the configuration lists for the key. The first is the default."""
    policy: Mapping[str, Any] = field(default_factory=dict)
    """Settings that restrict the profile."""


_SHARED_KEY = Key()


class Keyring:
    """The keys that the operator issued. Without keys, the server is open to everyone, unless the
    backend verifies the clients' own keys."""

    def __init__(
        self,
        keys: Iterable[tuple[str, Key]] = (),
        *,
        is_closed: bool = False,
        operator_secret: str | None = None,
    ) -> None:
        """`keys` are pairs of a secret and its Key. `is_closed` is True if the backend verifies the
        clients' keys: the server is then not open, although it has no keys. `is_operator` accepts
        `operator_secret`."""
        self._is_closed = is_closed
        self._keys = {_digest(secret): key for secret, key in keys}
        self._operator_digest = None if operator_secret is None else _digest(operator_secret)

    @property
    def is_open(self) -> bool:
        """True if the server requires no key."""
        return not self._keys and not self._is_closed

    @property
    def has_many_keys(self) -> bool:
        """True if clients may have different keys."""
        return self._is_closed or len(self._keys) > 1

    def find(self, secret: str) -> Key | None:
        """Return the key of a secret, or None. On an open server, all secrets have the same key."""
        # Looked up by digest, so that the time of a comparison reveals nothing about a key.
        return _SHARED_KEY if self.is_open else self._keys.get(_digest(secret))

    def is_operator(self, secret: str) -> bool:
        """Return True for the operator's secret. If the operator has no secret, return True for the
        only key of a server with one key, and for any key on an open server."""
        if self._operator_digest is not None:
            return _digest(secret) == self._operator_digest
        return self.is_open or (len(self._keys) == 1 and self.find(secret) is not None)


class ClientKeyVerifier:
    """Verifies clients' own keys for the backend, and caches the results."""

    def __init__(
        self,
        model: Model,
        *,
        now: Callable[[], float] = time.monotonic,
        max_cached: int = MAX_CACHED_KEYS,
    ) -> None:
        self._model = model
        self._now = now
        self._max_cached = max_cached
        self._listing_needs_key = False
        """True if the backend lists its models only to clients whose key it accepts."""
        self._listing_checked_until = -1.0
        """Expiry of `_listing_needs_key`."""
        self._check_slots = asyncio.Semaphore(MAX_CHECKS)
        self._results: dict[bytes, tuple[bool, float]] = {}
        """The cached results by the digest of the key, oldest first: True if the key was accepted,
        and the expiry of the result."""
        self._locks: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()

    async def require_accepted(self, credentials: Credentials) -> None:
        """Raise UnauthorizedError if the key is malformed or too long, or the backend refuses it.

        Raises BackendError if the backend fails, is too slow, or accepts any key.
        """
        key = credentials.key
        if len(key) > MAX_KEY_CHARS or not (key.isascii() and key.isprintable()):
            raise _key_refused_error()  # not a valid header value
        sent_with_key = sorted(credentials.headers.items())  # the organization and the project
        digest = _digest(json.dumps([key, sent_with_key]))
        accepted = self._cached_result(digest)
        if accepted is None:
            async with self._locks.setdefault(digest, asyncio.Lock()):
                accepted = self._cached_result(digest)
                if accepted is None:
                    accepted = await self._is_accepted(credentials)
                    self._cache_result(digest, accepted)
        if not accepted:
            raise _key_refused_error()

    def _cached_result(self, digest: bytes) -> bool | None:
        accepted, until = self._results.get(digest, (False, -1.0))
        return accepted if self._now() < until else None

    def _cache_result(self, digest: bytes, is_accepted: bool) -> None:
        self._results.pop(digest, None)
        while len(self._results) >= self._max_cached:
            del self._results[next(iter(self._results))]
        self._results[digest] = is_accepted, self._now() + CACHE_S

    async def _is_accepted(self, credentials: Credentials) -> bool:
        try:
            async with asyncio.timeout(CHECK_S), self._check_slots:
                if await self._model_list_needs_key():
                    status = await self._listing_status(credentials)
                    if status not in _UNDECIDED_STATUSES:
                        return status not in _REFUSED_STATUSES
                return await self._may_request_completion(credentials)
        except TimeoutError as error:
            raise timeout_error("it does not say whether it accepts the key") from error

    async def _model_list_needs_key(self) -> bool:
        """Return True if the backend lists its models only for valid keys. A request with a random
        key tests this, and the result is cached. Raises BackendError if the backend accepts any
        key."""
        if self._now() >= self._listing_checked_until:
            random_key = Credentials(f"sk-{secrets.token_hex(24)}")
            self._listing_needs_key = await self._listing_status(random_key) in _REFUSED_STATUSES
            if not self._listing_needs_key and await self._may_request_completion(random_key):
                raise BackendError(_ANY_KEY_MESSAGE, status=502, code="backend_bad_response")
            self._listing_checked_until = self._now() + CACHE_S
        return self._listing_needs_key

    async def _listing_status(self, credentials: Credentials) -> int:
        model = self._model.with_credentials(credentials)
        return await _response_status(model, UpstreamRequest("GET", "/v1/models", {}, None))

    async def _may_request_completion(self, credentials: Credentials) -> bool:
        """Return True if the backend lets the key request completions. The request is invalid on
        purpose: a backend checks the key before it validates the body."""
        model = self._model.with_credentials(credentials)
        sent_request = UpstreamRequest("POST", "/v1/chat/completions", _JSON_HEADERS, b"{}")
        return await _response_status(model, sent_request) not in _NOT_ALLOWED_STATUSES


async def _response_status(model: Model, sent_request: UpstreamRequest) -> int:
    """Return the status of the response. Raises BackendError for a status that does not depend on
    the key."""
    upstream = model.upstream
    assert upstream, "only a backend that is a server has client keys"
    response = await upstream.send(sent_request)
    async with aclosing(response.body):
        if 200 <= response.status < 300:
            return response.status
        is_listing = sent_request.body is None
        expected = (
            _REFUSED_STATUSES | _UNDECIDED_STATUSES
            if is_listing
            else _NOT_ALLOWED_STATUSES | _INVALID_BODY_STATUSES
        )
        if response.status in expected:
            return response.status
        raise await _backend_error(response)


async def _backend_error(response: UpstreamResponse) -> BackendError:
    body = bytearray()
    async for piece in response.body:
        body += piece
        if len(body) >= _MAX_ERROR_BYTES:
            break
    return backend_error_from_response(
        response.status, response.headers, bytes(body[:_MAX_ERROR_BYTES]), now=datetime.now(UTC)
    )


def _key_refused_error() -> UnauthorizedError:
    return UnauthorizedError("Incorrect API key provided: the model backend does not accept it.")


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
