"""Downloads of the files that a request names by URL, and the check of URLs that the backend would
download.

Only public addresses are allowed. Downloads have limits on time and size.
"""

import asyncio
import ssl
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote, urljoin, urlsplit
from weakref import WeakValueDictionary

from policies.egress import Egress, EgressRules
from policies.hosts import Target, parse_authority
from proxy.body_memory import BodyReservation
from proxy.errors import BadRequestError, BodyTooLargeError, BusyError
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
    from proxy.ssrf_safe_get import StreamedResponse

FETCH_S = 20.0
"""Time limit for one file, including its redirects, in seconds."""
CONNECT_S = 5.0
"""Time limit for a DNS lookup, and for a connection attempt, in seconds."""
MAX_HOSTS = 32
"""Maximum number of different `host:port` pairs in the URLs that the backend downloads for one
request."""
MAX_CONCURRENT_CHECKS = 4
"""Maximum number of concurrent DNS lookups of one request."""
_MAX_REDIRECTS = 5
_DEFAULT_PORTS = {"http": 80, "https": 443}
_URL_CHARS = "/%:@!$&'()*+,;=~?"
_HEADERS = (
    ("Accept", "*/*"),
    ("Accept-Encoding", "identity"),
    ("User-Agent", "llm-sandbox-proxy"),
)


class FetchError(Exception):
    """A file cannot be downloaded. The message is the reason."""


@dataclass(frozen=True, slots=True)
class FetchedFile:
    """A downloaded file."""

    data: bytes
    mime_type: str
    """The server's Content-Type, or an empty string."""


class ParsedURL(NamedTuple):
    """The parts of a URL that a request needs."""

    scheme: str
    host: str
    port: int
    path: str
    """The path with the query."""


class ByteBudget:
    """The bytes that may still be downloaded for one request. Downloaded bytes also take memory of
    `reservation`."""

    def __init__(
        self, max_bytes: int, owner: str, reservation: BodyReservation | None = None
    ) -> None:
        self.owner = owner
        self._bytes_left = max_bytes
        self._reservation = reservation
        self._downloads: list[DownloadBudget] = []
        """The downloads in progress, earliest first."""

    @contextmanager
    def open_download_budget(self) -> Iterator["DownloadBudget"]:
        """Yield the budget of a new download. It is smaller than this budget by the bytes that
        earlier downloads still expect."""
        download = DownloadBudget(self)
        self._downloads.append(download)
        try:
            yield download
        finally:
            self._downloads.remove(download)

    def bytes_left_for(self, download: "DownloadBudget") -> int:
        """Return the number of bytes that a download may still take: all bytes that are left,
        except those that earlier downloads expect."""
        earlier = self._downloads[: self._downloads.index(download)]
        return self._bytes_left - sum(each.expected_bytes for each in earlier)

    def take(self, count: int) -> None:
        """Take bytes that have arrived, and memory for them. Raises FetchError if they exceed the
        memory for request bodies."""
        self._bytes_left -= count
        if self._reservation:
            try:
                self._reservation.take(count)
            except (BusyError, BodyTooLargeError) as error:
                raise FetchError(f"the server has no memory left for the file: {error}") from error


class DownloadBudget:
    """The part of a ByteBudget that one download may take."""

    def __init__(self, budget: ByteBudget) -> None:
        self.expected_bytes = 0
        """The rest of the declared size of the file: bytes that have not arrived."""
        self._budget = budget

    def expect(self, count: int) -> None:
        """Expect a file of `count` bytes. Raises FetchError if they exceed the budget."""
        self._require(count)
        self.expected_bytes = count

    def take(self, count: int) -> None:
        """Take bytes that have arrived. Raises FetchError if they, or the bytes that are expected,
        exceed the budget, and if they exceed the memory for request bodies."""
        self._require(max(count, self.expected_bytes))
        self.expected_bytes = max(0, self.expected_bytes - count)
        self._budget.take(count)

    def _require(self, count: int) -> None:
        if count > self._budget.bytes_left_for(self):
            raise FetchError("the request's files are too large together")


class Fetcher:
    """Downloads files by GET.

    Each host name, even that of a redirect, is resolved once. The resolved address is checked and
    then connected to, so that a second DNS answer cannot replace it. `forbidden_addresses` are the
    addresses of the proxy itself and of its backend.
    """

    def __init__(
        self,
        *,
        forbidden_addresses: Collection[Endpoint] = (),
        resolve: Resolve | None = None,
        connect: Connect = open_connection,
        tls: ssl.SSLContext | None = None,
        timeout_s: float = FETCH_S,
        connect_timeout_s: float = CONNECT_S,
    ) -> None:
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._forbidden_addresses = forbidden_addresses
        self._resolve = resolve or SystemResolver()
        self._connect = connect
        self._tls = tls
        self._dialers: WeakValueDictionary[str, Dialer] = WeakValueDictionary()

    async def fetch(self, url: str, *, max_bytes: int, budget: ByteBudget) -> FetchedFile:
        """Download a file. Of downloads with the same `budget`, those that began earlier may use it
        first. Raises FetchError."""
        dialer = self._dialers.setdefault(budget.owner, self._new_dialer())
        try:
            async with asyncio.timeout(self._timeout_s):
                with budget.open_download_budget() as download:
                    return await self._follow_redirects(url, dialer, max_bytes, download)
        except TimeoutError as error:
            raise FetchError(f"it took longer than {self._timeout_s:g} s") from error
        except EgressError as error:
            raise FetchError(str(error)) from error
        except ssl.SSLError as error:
            raise FetchError(f"TLS failed: {error.reason or error}") from error
        except OSError as error:
            raise FetchError(f"the connection failed: {error}") from error

    async def check(self, url: str, owner: str) -> None:
        """Raise FetchError if the URL is malformed or its host has no public address."""
        dialer = self._dialers.setdefault(owner, self._new_dialer())
        target = _parse_target(url)
        try:
            await dialer.check(target)
        except EgressError as error:
            raise FetchError(str(error)) from error

    def _new_dialer(self) -> Dialer:
        """Return a dialer for one owner, so that its slow DNS lookups do not delay other owners."""
        rules = EgressRules(Egress(mode="open"))
        return Dialer(
            rules, self._forbidden_addresses, self._resolve, self._connect, self._connect_timeout_s
        )

    async def _follow_redirects(
        self, url: str, dialer: Dialer, max_bytes: int, budget: DownloadBudget
    ) -> FetchedFile:
        from proxy.ssrf_safe_get import ssrf_safe_get  # noqa: PLC0415 - imports httpcore: 70 ms

        tls = self._tls = self._tls or ssl.create_default_context()  # loads the CA certificates
        for _ in range(_MAX_REDIRECTS + 1):
            host, request = _parse_url(url)
            headers = [("Host", host), *_HEADERS]
            async with ssrf_safe_get(request, headers, dialer, tls) as response:
                is_redirect = 300 <= response.status < 400
                location = response.headers.get("location") if is_redirect else None
                if location is None:
                    return await _read_file(response, max_bytes, budget)
            try:
                url = urljoin(url, location)
            except ValueError as error:
                raise FetchError("it was redirected to a malformed URL") from error
        raise FetchError(f"it was redirected more than {_MAX_REDIRECTS} times")


async def refuse_private_urls(fetcher: Fetcher, urls: Sequence[str], owner: str) -> None:
    """Check URLs that the backend is to download, once for each host and port.

    Raises BadRequestError for a malformed URL, for a private address, for a host name that cannot
    be resolved, and for more than `MAX_HOSTS` hosts.
    """
    by_target: dict[Target, str] = {}
    for url in urls:
        try:
            by_target.setdefault(_parse_target(url), url)
        except FetchError as error:
            raise _url_not_allowed_error(url, error) from error
    if len(by_target) > MAX_HOSTS:
        raise BadRequestError(
            f"The request names URLs of more than {MAX_HOSTS} hosts, the maximum. Name fewer, or"
            " send the files as data URLs.",
            code="too_many_urls",
        )
    semaphore = asyncio.Semaphore(MAX_CONCURRENT_CHECKS)

    async def check(url: str) -> FetchError | None:
        try:
            async with semaphore:
                await fetcher.check(url, owner)
        except FetchError as error:
            return error
        return None

    async with asyncio.TaskGroup() as group:
        tasks = {url: group.create_task(check(url)) for url in by_target.values()}
    for url, task in tasks.items():
        if fault := task.result():
            raise _url_not_allowed_error(url, fault) from fault


def _url_not_allowed_error(url: str, error: FetchError) -> BadRequestError:
    return BadRequestError(
        f"Invalid URL {url[:200]!r}: the backend would fetch it from inside its network, and"
        f" {error}. The operator allows it with backend.fetches_urls.",
        code="url_not_allowed",
    )


def _parse_target(url: str) -> Target:
    _, parsed = _parse_url(url)
    return Target(parsed.host, parsed.port)


def _parse_url(url: str) -> tuple[str, ParsedURL]:
    """Return a URL's Host header and its parts. No other code parses the URL, so the checked host
    is the host that is connected to. Raises FetchError."""
    try:
        split = urlsplit(url)
        if split.scheme not in _DEFAULT_PORTS:
            raise FetchError("only http and https URLs are fetched")
        target = parse_authority(split.netloc, _DEFAULT_PORTS[split.scheme])
        query = f"?{split.query}" if split.query else ""
        path = quote((split.path or "/") + query, safe=_URL_CHARS)
    except ValueError as error:  # includes UnicodeEncodeError, for a lone surrogate
        raise FetchError(f"its URL is malformed: {error}") from error
    host = str(target).removesuffix(f":{_DEFAULT_PORTS[split.scheme]}")
    return host, ParsedURL(split.scheme, target.host, target.port, path)


async def _read_file(
    response: "StreamedResponse", max_bytes: int, budget: DownloadBudget
) -> FetchedFile:
    if response.status != 200:
        raise FetchError(f"its server answered {response.status}")
    if response.headers.get("content-encoding", "identity") != "identity":
        raise FetchError("its server sent a compressed body, which was not requested")
    # The whole size is expected before the first byte: of two files that are downloaded at the same
    # time and are too large together, only one fails.
    expected = _declared_bytes(response)
    too_large = FetchError(f"it is larger than {max_bytes >> 20} MiB")
    if expected > max_bytes:
        raise too_large
    budget.expect(expected)
    data = bytearray()
    async for piece in response.pieces:
        data += piece
        if len(data) > max_bytes:
            raise too_large
        budget.take(len(piece))
    return FetchedFile(bytes(data), response.headers.get("content-type", ""))


def _declared_bytes(response: "StreamedResponse") -> int:
    """Return the size of the body from the Content-Length, or 0 if the response has none."""
    length = response.headers.get("content-length", "")
    is_number = length.isascii() and length.isdigit() and len(length) < 20
    return int(length) if is_number else 0
