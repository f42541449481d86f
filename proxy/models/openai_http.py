"""The client for servers with OpenAI's chat completions: vLLM, SGLang, llama.cpp, OpenAI.

The module contains the model, its responses, the translation of aiohttp's errors, the probes that
keep a connection open, and the `/tokenize` endpoint of some of these servers.
"""

import asyncio
import copy
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import aiohttp
from yarl import URL

from policies.json_bounds import (
    SMALL_BYTES,
    JSONBoundsCheck,
    TooMuchJSONError,
    is_small,
)
from proxy import stepwise
from proxy.agent.events import ModelCallAccepted, OnDelta
from proxy.agent.history import completion_deltas
from proxy.agent.model import Completion, Credentials, UpstreamRequest, UpstreamResponse
from proxy.errors import AnswerTooLargeError, BackendError
from proxy.models.backend_errors import (
    backend_error,
    backend_error_from_response,
    bad_response_error,
    connection_lost_error,
    is_error,
    parse_json,
    timeout_error,
    unreachable_error,
)
from proxy.models.completion_builder import attach_partial_completion, parse_completion
from proxy.models.relay import (
    completion_request_headers,
    completion_response_headers,
    read_if_at_most,
    relayed_response_headers,
    upstream_request_headers,
)
from proxy.models.streaming import CompletionStream, StreamSupport, refuses_to_stream

_LOG = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 10.0
MAX_TOKENIZED_BYTES = 32 << 20
"""Maximum size of a response of `/tokenize`, which may list all tokens."""
KEEP_ALIVE_S = 4.0
"""Seconds for which an unused connection stays open. Less than uvicorn's 5 s, so that no request
uses a connection that the server is closing."""
_PROBE_AFTER_SHARE = 0.75
"""The share of the keep-alive time after which an unused connection is probed."""
_PROBE_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
_MODELS_PATH = "/models"
_MAX_UNSPLIT_BYTES = 1 << 20
"""Longer request bodies are sent in pieces."""
_PIECE_BYTES = 1 << 16
_VERSION_PREFIX = "/v1"
_SKIPPED_AUTO_HEADERS = ("accept", "content-type", "user-agent")
MAX_ERROR_BYTES = 64 * 1024
MAX_JSON_BYTES = 256 << 20
MAX_JSON_VALUES = 4_000_000
"""Maximum number of values in a completion: `prompt_logprobs` can have millions of numbers."""
_DRAIN_TIMEOUT_S = 0.5
"""Maximum seconds to wait for the end of a stream after its [DONE]."""
_MAX_PROBES = 100
"""Maximum number of probes in one `keep_warm` block. With the default keep-alive time, they last
for five minutes."""
_PROBE_END_TIMEOUT_S = 1.0
TOKENIZE_PATH = "/tokenize"
NO_ENDPOINT_STATUSES = (404, 405, 501)
"""Statuses of a server that lacks an endpoint."""
_TextField = Literal["prompt", "content"]
"""The field of a `/tokenize` request that contains the text: `content` for llama.cpp, else
`prompt`. llama.cpp responds with a list of the tokens, which is empty without `content`."""


class OpenAIHTTPModel:
    """A model behind an OpenAI-compatible `base_url`, which ends in /v1 as in OpenAI's SDKs.

    `timeout_s` limits each wait for the next byte of a response, not the time of a call. `proxy` is
    the URL of a forward proxy. An unused connection stays open for `keep_alive_s` seconds.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None,
        timeout_s: float,
        proxy: str | None = None,
        keep_alive_s: float = KEEP_ALIVE_S,
    ) -> None:
        self._base_url = base_url.rstrip("/")
        self._root_url = self._base_url.removesuffix(_VERSION_PREFIX)
        self._completions_base_url = self._base_url
        self._api_key = api_key
        self._account_headers: Mapping[str, str] = {}
        self._timeout = _client_timeout(timeout_s)
        self._connections = Connections(proxy, keep_alive_s)
        self._stream_support = StreamSupport()
        self._tokenizer = _TokenizeEndpoint()

    async def complete(self, body: Mapping[str, Any], on_delta: OnDelta | None) -> Completion:
        """See Model. After the server has refused to stream a model, completions of that model are
        not streamed for some minutes."""
        model = str(body.get("model"))
        if on_delta is not None and self._stream_support.is_supported(model):
            try:
                return await self._complete_streamed(body, on_delta)
            except BackendError as error:
                if not refuses_to_stream(error):
                    raise
                self._stream_support.note_refusal(model, error)
        response = await self._post_completion(body)
        async with aclosing(response):
            await response.raise_for_error(self._api_key)
            completion = self._parse(await response.json())
        if on_delta is not None:
            await on_delta(ModelCallAccepted())
            await _emit_deltas(completion, on_delta)
        return completion

    async def _complete_streamed(self, body: Mapping[str, Any], on_delta: OnDelta) -> Completion:
        response = await self._post_completion(self._stream_support.request_body(body))
        async with aclosing(response):
            await response.raise_for_error(self._api_key)
            await on_delta(ModelCallAccepted())
            if response.is_json:
                completion = self._parse(await response.json())
                await _emit_deltas(completion, on_delta)
                return completion
            return await self._read_stream(response, on_delta)

    async def relay(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> UpstreamResponse:
        response = await self._post_completion(body, completion_request_headers(headers))
        selected = completion_response_headers(response.headers)
        return UpstreamResponse(response.status, selected, response)

    def with_credentials(self, credentials: Credentials) -> "OpenAIHTTPModel":
        """See Model. The copy shares the connections and the record of the server's features."""
        other = copy.copy(self)
        other._api_key = credentials.key  # noqa: SLF001 - an instance of the same class
        other._account_headers = credentials.headers  # noqa: SLF001 - as above
        return other

    def with_timeout(self, timeout_s: float) -> "OpenAIHTTPModel":
        """See Model. The copy shares the connections and the record of the server's features."""
        other = copy.copy(self)
        other._timeout = _client_timeout(timeout_s)  # noqa: SLF001 - an instance of the same class
        return other

    def with_upstream(self, url: str) -> "OpenAIHTTPModel":
        """See Model. The copy shares the connections. The copy has its own record of the models
        that the server refuses to stream."""
        other = copy.copy(self)
        other._completions_base_url = url.rstrip("/")  # noqa: SLF001 - an instance of the same class
        other._stream_support = StreamSupport()  # noqa: SLF001 - as above
        return other

    async def count_tokens(self, model: str, text: str) -> int | None:
        """See Model. A server that lacks /tokenize gets only one request to this path."""
        if not self._tokenizer.is_available:
            return None
        field = self._tokenizer.text_field
        answer = await self._tokenize(_tokenize_body(field, model, text))
        if answer is not None and field == "prompt" and _reads_content_field(answer):
            self._tokenizer.text_field = field = "content"
            answer = await self._tokenize(_tokenize_body(field, model, text))
        if answer is None:
            return None
        return parse_token_count(answer) if field == "prompt" else _count_listed_tokens(answer)

    async def tokenize_prompt(self, model: str, prompt: str) -> list[int] | None:
        """See Model. Only llama.cpp's /tokenize reads the text from `content`. `add_special` and
        `parse_special` make the server tokenize the text like the prompts of its completions."""
        if not self._tokenizer.is_available:
            return None
        body = {"model": model, "content": prompt, "add_special": True, "parse_special": True}
        answer = await self._tokenize(body)
        tokens = None if answer is None else _json_object(answer).get("tokens")
        is_list = isinstance(tokens, list) and set(map(type, tokens)) <= {int}
        return tokens if is_list else None

    async def _tokenize(self, body: Mapping[str, Any]) -> bytes | None:
        headers = {"content-type": "application/json"}
        request = UpstreamRequest("POST", TOKENIZE_PATH, headers, json.dumps(body).encode())
        try:
            response = await self.send(request)
            answer = await read_if_at_most(response.body, MAX_TOKENIZED_BYTES)
        except BackendError:
            return None
        self._tokenizer.is_available = response.status not in NO_ENDPOINT_STATUSES
        return answer if response.status == 200 else None

    @property
    def upstream(self) -> "OpenAIHTTPModel":
        return self

    async def send(self, request: UpstreamRequest) -> UpstreamResponse:
        """See Upstream. Paths below /v1 are relative to `base_url`, other paths to `base_url`
        without its /v1."""
        is_versioned = request.path.startswith((f"{_VERSION_PREFIX}/", f"{_VERSION_PREFIX}?"))
        base = self._base_url if is_versioned else self._root_url
        path = request.path.removeprefix(_VERSION_PREFIX) if is_versioned else request.path
        headers = upstream_request_headers(request.headers)
        if isinstance(request.body, bytes | bytearray):
            headers["content-length"] = str(len(request.body))
        response = await self._request(
            request.method,
            URL(base + path, encoded=True),
            headers,
            _split_if_long(request.body)
            if isinstance(request.body, bytes | bytearray)
            else request.body,
            auto_decompress=False,
            skip_auto_headers=_SKIPPED_AUTO_HEADERS,
        )
        headers = relayed_response_headers(response.headers, self._root_url)
        return UpstreamResponse(response.status, headers, BackendResponse(response))

    def keep_warm(self) -> AbstractAsyncContextManager[None]:
        """See Model. A HEAD request before the keep-alive time ends keeps the connection open on
        both sides, whatever the status of its response."""
        return _KeepAlive(self._connections.keep_alive_s * _PROBE_AFTER_SHARE, self._probe)

    async def _probe(self) -> None:
        with suppress(aiohttp.ClientError, OSError):
            async with self._connections.session().head(
                self._completions_base_url + _MODELS_PATH,
                headers=self._with_auth({}),
                timeout=_PROBE_TIMEOUT,
                allow_redirects=False,
            ):
                pass

    async def models(self) -> list[dict[str, Any]]:
        response = await self._send("GET", self._base_url + _MODELS_PATH, headers={})
        async with aclosing(response):
            await response.raise_for_error(self._api_key)
            listing = await response.json()
        data = listing.get("data") if isinstance(listing, dict) else None
        if not isinstance(data, list):
            raise bad_response_error("it lists no models")
        models = [
            model for model in data if isinstance(model, dict) and isinstance(model.get("id"), str)
        ]
        self._stream_support.note_server_kind(models)
        return models

    async def aclose(self) -> None:
        """See Model. A later call opens new connections."""
        await self._connections.aclose()

    async def _read_stream(self, response: "BackendResponse", on_delta: OnDelta) -> Completion:
        stream = CompletionStream(secret=self._api_key)
        with attach_partial_completion(stream.build):
            async for piece in response:
                for delta in stream.feed(piece):
                    await on_delta(delta)
                if stream.is_done:
                    await response.drain()
                    break
            for delta in stream.end():
                await on_delta(delta)
        return stream.build()

    def _parse(self, payload: Any) -> Completion:
        if is_error(payload):
            raise backend_error(payload, status=None, secret=self._api_key)
        return parse_completion(payload)

    async def _post_completion(
        self, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> "BackendResponse":
        data = await stepwise.encode(body)
        added = {"content-type": "application/json", "content-length": str(len(data))}
        return await self._send(
            "POST",
            f"{self._completions_base_url}/chat/completions",
            headers={**(headers or {}), **added},
            data=_split_if_long(data),
        )

    async def _send(
        self,
        method: str,
        url: str,
        *,
        headers: dict[str, str],
        data: bytes | bytearray | AsyncIterator[bytes | bytearray] | None = None,
    ) -> "BackendResponse":
        response = await self._request(method, url, headers, data)
        if not 200 <= response.status < 300 and not 400 <= response.status < 600:
            response.close()
            location = response.headers.get("location")
            raise bad_response_error(
                f"it redirects to {location}; change backend.base_url accordingly"
                if location
                else f"its status is {response.status}"
            )
        return BackendResponse(response)

    async def _request(
        self, method: str, url: str | URL, headers: dict[str, str], data: Any, **options: Any
    ) -> aiohttp.ClientResponse:
        try:
            return await self._connections.session().request(
                method,
                url,
                headers=self._with_auth(headers),
                data=data,
                allow_redirects=False,
                timeout=self._timeout,
                **options,
            )
        except (aiohttp.ClientError, OSError) as error:
            raise _transport_error(error) from error

    def _with_auth(self, headers: dict[str, str]) -> dict[str, str]:
        key = self._api_key
        if key is None:
            return headers
        return {**headers, **self._account_headers, "authorization": f"Bearer {key}"}


def _split_if_long(
    body: bytes | bytearray,
) -> bytes | bytearray | AsyncIterator[bytes | bytearray]:
    """Return a long body in pieces, a short body unchanged. The caller sets the content-length."""
    return body if len(body) <= _MAX_UNSPLIT_BYTES else _pieces(body)


async def _pieces(body: bytes | bytearray) -> AsyncIterator[bytes | bytearray]:
    for start in range(0, len(body), _PIECE_BYTES):
        yield body[start : start + _PIECE_BYTES]
        await asyncio.sleep(0)  # lets other tasks run


async def _emit_deltas(completion: Completion, on_delta: OnDelta) -> None:
    with attach_partial_completion(lambda: completion):
        for delta in completion_deltas(completion):
            await on_delta(delta)


class Connections:
    """The open connections to one backend. Calls with different API keys share them."""

    def __init__(self, proxy: str | None, keep_alive_s: float) -> None:
        self._proxy = proxy
        self.keep_alive_s = keep_alive_s
        self._session: aiohttp.ClientSession | None = None

    def session(self) -> aiohttp.ClientSession:
        """Return the session. The first call creates it, in the running event loop."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=self.keep_alive_s),
                cookie_jar=aiohttp.DummyCookieJar(),
                proxy=self._proxy,  # trust_env would also read a netrc file
                headers={"accept-encoding": "identity"},
            )
        return self._session

    async def aclose(self) -> None:
        """Close the session. A later call opens a new session."""
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()


def _client_timeout(timeout_s: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=None, connect=_CONNECT_TIMEOUT_S, sock_read=timeout_s)


def _transport_error(error: Exception) -> BackendError:
    """Return the BackendError for an exception of aiohttp."""
    match error:
        case aiohttp.ClientHttpProxyError(status=status, message=message):
            # The text of the exception contains the proxy's URL with its password.
            return unreachable_error(f"the proxy refused with {status} {message}")
        case aiohttp.ClientPayloadError():
            return connection_lost_error()
    reason = str(error) or type(error).__name__
    return timeout_error(reason) if isinstance(error, TimeoutError) else unreachable_error(reason)


class BackendResponse:
    """A response whose bytes are read as they arrive. Closing it early ends the backend's work."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.headers.items()}
        self._response = response

    def __aiter__(self) -> "BackendResponse":
        return self

    async def __anext__(self) -> bytes:
        try:
            piece = await self._response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            self._response.close()
            raise _transport_error(error) from error
        if not piece:
            raise StopAsyncIteration
        return piece

    async def aclose(self) -> None:
        """Release the connection if the response was read to its end, else close the connection.
        Safe to call twice."""
        self._response.close()

    @property
    def is_json(self) -> bool:
        """True if the response's content type is JSON."""
        return self.headers.get("content-type", "").lower().startswith("application/json")

    async def json(self) -> Any:
        """Read the response to its end and decode it. Raises BackendError."""
        body, bounds, checked = bytearray(), JSONBoundsCheck(MAX_JSON_VALUES), 0
        async for piece in self:
            body += piece
            if len(body) > MAX_JSON_BYTES:
                raise AnswerTooLargeError(f"it is longer than {MAX_JSON_BYTES >> 20} MiB")
            if len(body) > SMALL_BYTES:
                _check_bounds(bounds, bytes(body[checked:]))
                checked = len(body)
        if not checked and not is_small(body):
            _check_bounds(bounds, bytes(body))
        return parse_json(bytes(body))

    async def raise_for_error(self, secret: str | None) -> None:
        """Raise a BackendError if the status is not 2xx."""
        if 200 <= self.status < 300:
            return
        body = bytearray()
        async for piece in self:
            body += piece
            if len(body) >= MAX_ERROR_BYTES:
                break
        raise backend_error_from_response(
            self.status,
            self.headers,
            bytes(body[:MAX_ERROR_BYTES]),
            now=datetime.now(UTC),
            secret=secret,
        )

    async def drain(self) -> None:
        """Read the rest of the response if it arrives soon: the connection can then be reused."""
        with suppress(BackendError, TimeoutError):
            async with asyncio.timeout(_DRAIN_TIMEOUT_S):
                async for _ in self:
                    pass


class _KeepAlive:
    """A context manager that calls `probe` every `interval_s` seconds. A block that is shorter than
    `interval_s` costs only one timer."""

    def __init__(self, interval_s: float, probe: Callable[[], Awaitable[None]]) -> None:
        self._interval_s = interval_s
        self._probe = probe
        self._probe_count = 0
        self._timer: asyncio.TimerHandle | None = None
        self._probe_task: asyncio.Future[None] | None = None

    async def __aenter__(self) -> None:
        self._schedule()

    def _schedule(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._start_probe)

    def _start_probe(self) -> None:
        self._probe_count += 1
        self._probe_task = asyncio.ensure_future(self._probe())
        self._probe_task.add_done_callback(self._on_probe_done)

    def _on_probe_done(self, probe_task: asyncio.Future[None]) -> None:
        if not probe_task.cancelled() and (error := probe_task.exception()):
            _LOG.warning("the probe that keeps the backend's connection open failed: %r", error)
        elif self._timer is not None and self._probe_count < _MAX_PROBES:
            self._schedule()

    async def __aexit__(self, *_: object) -> None:
        """Wait up to `_PROBE_END_TIMEOUT_S` seconds for the end of a running probe, so that the
        next call can use the probe's connection."""
        assert self._timer is not None
        self._timer.cancel()
        self._timer = None
        if self._probe_task is not None and not self._probe_task.done():
            await asyncio.wait({self._probe_task}, timeout=_PROBE_END_TIMEOUT_S)
            self._probe_task.cancel()


@dataclass(slots=True)
class _TokenizeEndpoint:
    """The properties of the server's `/tokenize`, learnt from its responses."""

    is_available: bool = True
    text_field: _TextField = "prompt"


def _tokenize_body(field: _TextField, model: str, text: str) -> dict[str, Any]:
    if field == "content":
        return {"model": model, "content": text, "add_special": False}
    return {"model": model, "prompt": text, "add_special_tokens": False}


def _reads_content_field(response_body: bytes) -> bool:
    """Return True if this answer of `/tokenize` shows that the server reads the text from the field
    `content`, not `prompt`."""
    fields = _json_object(response_body)
    return "count" not in fields and isinstance(fields.get("tokens"), list)


def _count_listed_tokens(response_body: bytes) -> int | None:
    """Return the number of tokens that llama.cpp lists, or None."""
    tokens = _json_object(response_body).get("tokens")
    return len(tokens) if isinstance(tokens, list) else None


def parse_token_count(response_body: bytes) -> int | None:
    """Return the token count in a response of `/tokenize`, or None."""
    count = _json_object(response_body).get("count")
    return count if isinstance(count, int) else None


def _json_object(response_body: bytes) -> Mapping[str, Any]:
    try:
        value = parse_json(response_body)
    except BackendError:
        return {}
    return value if isinstance(value, dict) else {}


def _check_bounds(bounds: JSONBoundsCheck, part: bytes) -> None:
    """Check the next part of a JSON response against the limits of `bounds`, such as the number of
    values. Raises AnswerTooLargeError if a limit is exceeded."""
    try:
        bounds.check(part)
    except TooMuchJSONError as error:
        raise AnswerTooLargeError(f"it has more than {error}") from error
