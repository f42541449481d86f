"""A Docker engine's API over asyncio: the calls that every container's life is made of.

Through the SDK each of them took a thread and several times the processor time.
"""

import io
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any
from urllib.parse import quote, urlsplit

import aiohttp
from yarl import URL

from sandbox_runtime.backends.docker_attach import tls_context

Facts = Mapping[str, Any]
"""What the engine says, in its own names."""


class RefusedError(Exception):
    """The engine says no, and why."""


class MissingError(RefusedError):
    """It knows no such container, image or volume."""


class ConflictError(RefusedError):
    """It is at it already."""


API_ERRORS = (RefusedError, aiohttp.ClientError)


class DockerAPI:
    """Connections to the engine at one address, opened in the loop that calls first.

    `timeout_s` bounds every wait for the engine's next words.
    """

    def __init__(self, url: str, version: str, *, timeout_s: float) -> None:
        base, self._connect = _door(url)
        self._root = f"{base}/v{version}"
        self._timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=timeout_s, sock_read=timeout_s
        )
        self._session: aiohttp.ClientSession | None = None

    async def call(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Facts | None = None,
        data: bytes | None = None,
    ) -> Facts:
        """Ask for something; returns what the engine says of it, which may be nothing.

        Raises one of API_ERRORS.
        """
        sent = io.BytesIO(data) if data is not None else None  # aiohttp would warn of large bytes
        async with self._asked(method, path, params, json=body, data=sent) as answer:
            said = await answer.read()
        _raise_refusal(answer, said)
        return _facts(said) if said else {}

    async def read(self, path: str, *, params: Mapping[str, str], max_bytes: int) -> bytes:
        """Return what it sends, or the beginning of that: at least `max_bytes` where it sends more.

        Raises one of API_ERRORS.
        """
        said = bytearray()
        async with self._asked("GET", path, params) as answer:
            async for piece in answer.content.iter_any():
                said += piece
                if len(said) >= max_bytes:
                    break
        _raise_refusal(answer, bytes(said))
        return bytes(said)

    async def aclose(self) -> None:
        """Close all connections; the next call would open new ones."""
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    def _asked(
        self, method: str, path: str, params: Mapping[str, str] | None, **body: Any
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        url = URL(f"{self._root}/{quote(path, safe='/:')}", encoded=True).with_query(params)
        return self._opened().request(method, url, **body)

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=self._timeout,
                connector=self._connect(),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session


def _door(engine_url: str) -> tuple[str, Callable[[], aiohttp.BaseConnector]]:
    """What its URLs begin with, and what connects to it."""
    address = urlsplit(engine_url)
    match address.scheme:
        case "unix" | "http+docker":
            # A socket of this host is opened in no time, so none is kept.
            return "http://docker", partial(aiohttp.UnixConnector, address.path, force_close=True)
        case "https":
            return f"https://{address.netloc}", lambda: aiohttp.TCPConnector(ssl=tls_context())
    return f"http://{address.netloc}", aiohttp.TCPConnector


def _facts(said: bytes) -> Facts:
    try:
        facts: Facts = json.loads(said)
    except ValueError as error:
        raise RefusedError(f"it answers with what is no JSON: {error}") from error
    return facts


def _raise_refusal(answer: aiohttp.ClientResponse, said: bytes) -> None:
    if answer.status < 400:
        return
    try:
        why = str(json.loads(said)["message"])
    except (ValueError, KeyError, TypeError):
        why = said.decode(errors="replace").strip() or f"its status is {answer.status}"
    kinds: dict[int, type[RefusedError]] = {404: MissingError, 409: ConflictError}
    raise kinds.get(answer.status, RefusedError)(why)
