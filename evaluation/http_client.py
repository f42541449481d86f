"""The HTTP client of `sandbox-eval run`, on aiohttp.

The runner must take little CPU time from the servers that it measures, which may be on the same
machine. With 64 requests at a time, a request takes 0.5 ms of CPU time. Through the OpenAI SDK it
would take 1.2 ms, and the import of the SDK 0.6 s.
"""

import json
import ssl
from collections.abc import Mapping
from functools import cached_property
from importlib.metadata import version
from types import MappingProxyType
from typing import Any
from urllib.request import getproxies, proxy_bypass

import aiohttp
from yarl import URL

KEEP_ALIVE_S = 4.0
"""Seconds for which an unused connection stays open. Less than uvicorn's 5 s, so that no request
uses a connection that the server is closing."""
CONNECTION_ERROR = "connection_error"
"""The code of a RequestError if there is no connection, or if it ends before the response does."""
NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class RequestError(Exception):
    """A request failed: no response, a status other than 2xx, or a body that is too large. The
    message is that of the server, if the response has one."""

    def __init__(
        self,
        code: str,
        message: str,
        status: int | None = None,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> None:
        """`code` is the code of the server's error, or `http_STATUS` if the error has no code.
        Without a complete response, `code` is `timeout`, `connection_error` or `too_large`."""
        super().__init__(message)
        self.code = code
        self.status = status
        """The HTTP status of a response that is not 2xx; None after other failures."""
        self.headers = headers
        """The headers of a response that is not 2xx; empty after other failures."""


class HTTPClient:
    """Sends requests to an API. Each request uses an idle connection, or a new one if none is idle,
    so the caller must limit the number of requests at a time.

    The environment variables for HTTP proxies, such as `HTTPS_PROXY`, and `SSL_CERT_FILE` apply.
    """

    def __init__(self, base_url: str, api_key: str, timeout_s: float) -> None:
        """`base_url` ends in /v1. `timeout_s` limits the time of a request, until the end of its
        response."""
        self.base_url = base_url.rstrip("/")
        self._headers = {
            "Accept": "application/json",
            "Authorization": f"Bearer {api_key}",
            "User-Agent": f"sandbox-eval/{version('llm-sandbox-proxy')}",
        }
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def __aenter__(self) -> "HTTPClient":
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=self._headers,
            timeout=self._timeout,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def get(self, path: str, max_bytes: int | None = None) -> bytes:
        """Return the body of a resource. Raises RequestError, also if the body is larger than
        `max_bytes`."""
        return await self._request("GET", path, max_bytes=max_bytes)

    async def post_json(self, path: str, body: Mapping[str, Any]) -> bytes:
        """Send an object in JSON, and return the body of the response. Raises RequestError."""
        headers = {"Content-Type": "application/json"}
        return await self._request("POST", path, data=json.dumps(body).encode(), headers=headers)

    async def _request(
        self, method: str, path: str, *, max_bytes: int | None = None, **options: Any
    ) -> bytes:
        try:
            url = URL(f"{self.base_url}{path}", encoded=True)
            options |= {"allow_redirects": False, **self._connection_options}
            async with self._session.request(method, url, **options) as response:
                body = await _read_body(response, max_bytes)
        except TimeoutError as error:
            raise RequestError("timeout", str(error) or "no response in time") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: a malformed URL
            raise RequestError(CONNECTION_ERROR, str(error) or type(error).__name__) from error
        if response.status // 100 != 2:
            raise _status_error(response, body)
        return body

    @cached_property
    def _connection_options(self) -> Mapping[str, Any]:
        """The options of aiohttp for the HTTP proxy and the certificates. Raises ValueError if the
        URL is malformed."""
        url = URL(self.base_url)
        return {"proxy": _proxy_url(url), "ssl": _ssl_context() if url.scheme == "https" else True}


async def _read_body(response: aiohttp.ClientResponse, max_bytes: int | None) -> bytes:
    if max_bytes is None:
        return await response.read()
    body = bytearray()
    async for part in response.content.iter_any():
        body += part
        if len(body) > max_bytes:
            raise RequestError("too_large", f"the response has more than {max_bytes} bytes")
    return bytes(body)


def _status_error(response: aiohttp.ClientResponse, body: bytes) -> RequestError:
    """Return the error of a response whose status is not 2xx. Its message is the whole body if that
    does not have the form of OpenAI's errors."""
    code, message = None, body.decode(errors="replace")
    try:
        error = json.loads(body)["error"]
        code, message = error.get("code"), str(error["message"])
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        pass
    code = str(code or f"http_{response.status}")
    return RequestError(code, message, response.status, response.headers)


def _ssl_context() -> ssl.SSLContext:
    """Return a TLS context with the certificates that httpx trusts. Reading them takes 30 ms."""
    import httpx

    return httpx.create_ssl_context()


def _proxy_url(url: URL) -> str | None:
    """Return the HTTP proxy that the environment sets for a URL, or None. aiohttp's `trust_env`
    would look it up in a thread for each request."""
    proxies = getproxies()
    found = proxies.get(url.scheme) or proxies.get("all")
    if not found or proxy_bypass(url.host or ""):
        return None
    return found if "://" in found else f"http://{found}"
