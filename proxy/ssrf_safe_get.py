"""An HTTP GET that reaches allowed addresses only: an egress dialer opens its connections.

`proxy.fetch` imports this module at the first download, because httpcore takes 70 ms and 4 MiB.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpcore

from policies.hosts import Target, parse_host
from sandbox_runtime.egress.dialer import Dialer


@dataclass(frozen=True, slots=True)
class StreamedResponse:
    """An HTTP response with an unread body."""

    status: int
    headers: Mapping[str, str]
    """The names are in lower case."""
    pieces: AsyncIterator[bytes]


@asynccontextmanager
async def ssrf_safe_get(
    url: tuple[str, str, int, str],
    headers: Sequence[tuple[str, str]],
    dialer: Dialer,
    tls: ssl.SSLContext,
) -> AsyncIterator[StreamedResponse]:
    """Send a GET request, and yield the response. `url` is a tuple of scheme, host, port and path.
    Raises EgressError, OSError."""
    scheme, host, port, path = url
    target = httpcore.URL(scheme=scheme, host=host, port=port, target=path)
    try:
        async with (
            httpcore.AsyncConnectionPool(tls, network_backend=_Network(dialer)) as pool,
            pool.stream("GET", target, headers=headers) as response,
        ):
            received = {
                name.decode("latin-1").lower(): value.decode("latin-1")
                for name, value in response.headers
            }
            yield StreamedResponse(response.status, received, response.aiter_stream())
    except (httpcore.NetworkError, httpcore.ProtocolError) as error:
        raise ConnectionError(str(error)) from error


class _Network(httpcore.AsyncNetworkBackend):
    """A network backend of httpcore that connects through an egress dialer."""

    def __init__(self, dialer: Dialer) -> None:
        self._dialer = dialer

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore's own signature
        local_address: str | None = None,
        socket_options: Iterable[object] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        return _Stream(*await self._dialer.dial(Target(parse_host(host), port)))


class _Stream(httpcore.AsyncNetworkStream):
    """A connection that the dialer has opened. Timeouts are ignored, because `Fetcher.fetch` has
    one for the whole download."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def read(
        self,
        max_bytes: int,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore's own signature
    ) -> bytes:
        return await self._reader.read(max_bytes)

    async def write(
        self,
        buffer: bytes,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore's own signature
    ) -> None:
        self._writer.write(buffer)
        await self._writer.drain()

    async def aclose(self) -> None:
        self._writer.transport.abort()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore's own signature
    ) -> httpcore.AsyncNetworkStream:
        await self._writer.start_tls(ssl_context, server_hostname=server_hostname)
        return self
