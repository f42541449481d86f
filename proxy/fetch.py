"""Files on the web, fetched for a request by the host: from public addresses only, bounded in time
and size."""

import asyncio
import ssl
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote, urljoin, urlsplit
from weakref import WeakValueDictionary

from policies.egress import Egress, Rules
from policies.hosts import Target, parse_authority
from proxy.body_memory import HeldBody
from proxy.errors import BodyTooLargeError, BusyError
from sandbox_runtime.egress.decision import EgressError
from sandbox_runtime.egress.dialer import (
    Connect,
    Dialer,
    Endpoint,
    Resolve,
    SystemResolver,
    open_connection,
)

if TYPE_CHECKING:
    from proxy.guarded_get import Answer

FETCH_S = 20.0
"""For one file, its redirects included."""
CONNECT_S = 5.0
"""For one lookup, and for one connection."""
_MAX_REDIRECTS = 5
_PORTS = {"http": 80, "https": 443}
_URL_CHARS = "/%:@!$&'()*+,;=~?"
_HEADERS = (
    ("Accept", "*/*"),
    ("Accept-Encoding", "identity"),
    ("User-Agent", "llm-sandbox-proxy"),
)


class FetchError(Exception):
    """The file cannot be had; the text says why."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """A file as it came."""

    data: bytes
    mime_type: str
    """As its server calls it; empty where it says nothing."""


class Place(NamedTuple):
    """A URL as it is asked for."""

    scheme: str
    host: str
    port: int
    path: str
    """The query included."""


class Room:
    """The bytes that may still be fetched for one request of an owner, counted in `body`."""

    def __init__(self, bytes: int, owner: str, body: HeldBody | None = None) -> None:
        self.owner = owner
        self._left = bytes
        self._body = body

    def take(self, bytes: int) -> None:
        """Raises FetchError where no room is left."""
        self._left -= bytes
        if self._left < 0:
            raise FetchError("the request's files are too large together")
        if self._body:
            try:
                self._body.take(bytes)
            except (BusyError, BodyTooLargeError) as error:
                raise FetchError(f"the server has no memory for it: {error}") from error


class Fetcher:
    """Fetches by GET.

    A name is resolved once, and only an address that was checked is dialed; so it is for each
    redirect. `forbidden` are the proxy's own and its backend's addresses.
    """

    def __init__(
        self,
        *,
        forbidden: Collection[Endpoint] = (),
        resolve: Resolve | None = None,
        connect: Connect = open_connection,
        tls: ssl.SSLContext | None = None,
        timeout_s: float = FETCH_S,
        connect_timeout_s: float = CONNECT_S,
    ) -> None:
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._forbidden = forbidden
        self._resolve = resolve or SystemResolver()
        self._connect = connect
        self._tls = tls
        self._dialers: WeakValueDictionary[str, Dialer] = WeakValueDictionary()

    async def fetch(self, url: str, *, max_bytes: int, room: Room) -> Fetched:
        """The file behind a URL. Raises FetchError."""
        dialer = self._dialers.setdefault(room.owner, self._new_dialer())
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._follow(url, dialer, max_bytes, room)
        except TimeoutError as error:
            raise FetchError(f"it took longer than {self._timeout_s:g} s") from error
        except EgressError as error:
            raise FetchError(str(error)) from error
        except ssl.SSLError as error:
            raise FetchError(f"TLS failed: {error.reason or error}") from error
        except OSError as error:
            raise FetchError(f"the connection failed: {error}") from error

    async def check(self, url: str, owner: str) -> None:
        """Raises FetchError for a URL that `fetch` would not ask for: malformed, or of no public
        address."""
        dialer = self._dialers.setdefault(owner, self._new_dialer())
        target = target_of(url)
        try:
            await dialer.check(target)
        except EgressError as error:
            raise FetchError(str(error)) from error

    def _new_dialer(self) -> Dialer:
        """One for each owner: the slow names of one do not hold up another's."""
        rules = Rules(Egress(mode="open"))
        return Dialer(rules, self._forbidden, self._resolve, self._connect, self._connect_timeout_s)

    async def _follow(self, url: str, dialer: Dialer, max_bytes: int, room: Room) -> Fetched:
        from proxy.guarded_get import get  # noqa: PLC0415 - slow to import, and rarely needed

        tls = self._tls = self._tls or ssl.create_default_context()  # slow, and seldom needed
        for _ in range(_MAX_REDIRECTS + 1):
            host, request = _parsed(url)
            async with get(request, [("Host", host), *_HEADERS], dialer, tls) as answer:
                location = answer.headers.get("location") if 300 <= answer.status < 400 else None
                if location is None:
                    return await _body(answer, max_bytes, room)
            url = _joined(url, location)
        raise FetchError(f"it was redirected more than {_MAX_REDIRECTS} times")


def target_of(url: str) -> Target:
    """Return the host and port that a URL is asked of. Raises FetchError."""
    _, place = _parsed(url)
    return Target(place.host, place.port)


def _parsed(url: str) -> tuple[str, Place]:
    """A URL's Host header and the URL, read once: what is checked is what is asked for. Raises
    FetchError."""
    try:
        split = urlsplit(url)
        if split.scheme not in _PORTS:
            raise FetchError("only http and https URLs are fetched")
        target = parse_authority(split.netloc, _PORTS[split.scheme])
        query = f"?{split.query}" if split.query else ""
        path = quote((split.path or "/") + query, safe=_URL_CHARS)
    except ValueError as error:  # half a surrogate pair, too
        raise FetchError(f"its URL is malformed: {error}") from error
    host = str(target).removesuffix(f":{_PORTS[split.scheme]}")
    return host, Place(split.scheme, target.host, target.port, path)


def _joined(url: str, location: str) -> str:
    try:
        return urljoin(url, location)
    except ValueError as error:
        raise FetchError("it was redirected to a malformed URL") from error


async def _body(answer: "Answer", max_bytes: int, room: Room) -> Fetched:
    if answer.status != 200:
        raise FetchError(f"its server answered {answer.status}")
    if answer.headers.get("content-encoding", "identity") != "identity":
        raise FetchError("its server sent it compressed, unasked")
    data = bytearray()
    async for piece in answer.pieces:
        data += piece
        if len(data) > max_bytes:
            raise FetchError(f"it is larger than {max_bytes >> 20} MiB")
        room.take(len(piece))
    return Fetched(bytes(data), answer.headers.get("content-type", ""))
