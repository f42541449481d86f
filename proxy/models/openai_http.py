"""The client for servers with OpenAI's chat completions: vLLM, SGLang, llama.cpp, OpenAI.

It contains the model, the reading of a response's bytes with aiohttp's failures translated, the
probes that keep a connection open, and the `/tokenize` endpoint that some of these servers have.
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

from policies.json_bounds import JSONBounds, TooMuchJSONError, encode_json
from proxy.agent.events import CallAccepted, OnDelta
from proxy.agent.model import Completion, Credentials, UpstreamRequest, UpstreamResponse
from proxy.errors import BackendError
from proxy.models.assembly import deltas_of, reply_of, reply_when_stopped
from proxy.models.backend_errors import (
    backend_error,
    backend_error_from_response,
    bad_response,
    cut_off,
    is_error,
    parsed,
    timed_out,
    unreachable,
)
from proxy.models.relay import (
    end_to_end_headers,
    passed_response_headers,
    read_at_most,
    request_headers,
    response_headers,
)
from proxy.models.streamed_reply import CompletionStream, StreamSupport, refuses_streams

_LOG = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 10.0
MAX_TOKENIZED_BYTES = 32 << 20
"""The longest answer of a tokenizer, which may list every token."""
KEEP_ALIVE_S = 4.0
"""Below uvicorn's 5 s, so that no request goes out on a connection that the server is closing."""
_PROBE_AT = 0.75
"""The share of the keep-alive time after which an unused connection is probed."""
_PROBE_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
_MODELS = "/models"
_AT_ONCE_BYTES = 1 << 20
"""Longer request bodies are sent in pieces."""
_PIECE_BYTES = 1 << 16
_VERSION = "/v1"
_AIOHTTPS_OWN_HEADERS = ("accept", "content-type", "user-agent")
MAX_ERROR_BYTES = 64 * 1024
MAX_JSON_BYTES = 256 << 20
MAX_JSON_VALUES = 4_000_000
"""The most values in a completion: `prompt_logprobs` of a long prompt has millions of numbers."""
_DRAIN_TIMEOUT_S = 0.5
"""How long to wait for the end of a stream after its [DONE]."""
_MAX_PROBES = 100
"""The most probes in one `keep_warm` block: five minutes with the default keep-alive time."""
_PROBE_END_S = 1.0
TOKENIZE_PATH = "/tokenize"
NOT_THERE = (404, 405, 501)
"""Statuses of a server that does not have an endpoint."""
_Dialect = Literal["prompt", "content"]
"""The field that `/tokenize` takes the text in. With `content`, llama.cpp lists the tokens; without
it, llama.cpp answers that there are none."""


class OpenAIHTTPModel:
    """A model behind an OpenAI-compatible `base_url`, which includes the /v1 as in OpenAI's SDKs.

    `timeout_s` bounds every wait for the next byte of an answer, not the whole answer. `proxy` is
    the URL of a forward proxy; an unused connection stays open for `keep_alive_s` seconds.
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
        self._root_url = self._base_url.removesuffix(_VERSION)
        self._api_key = api_key
        self._account_headers: Mapping[str, str] = {}
        self._timeout = _timeout(timeout_s)
        self._connections = Connections(proxy, keep_alive_s)
        self._streaming = StreamSupport()
        self._tokenizer = _Tokenizer()

    async def complete(self, body: Mapping[str, Any], on_delta: OnDelta | None) -> Completion:
        """See Model. After the server has refused to stream a model, replies are asked for whole
        for a while."""
        model = str(body.get("model"))
        if on_delta is not None and self._streaming.is_supported(model):
            try:
                return await self._complete_streamed(body, on_delta)
            except BackendError as error:
                if not refuses_streams(error):
                    raise
                self._streaming.note_refusal(model, error)
        reply = await self._complete_whole(body)
        if on_delta is not None:
            await on_delta(CallAccepted())
            await _emit_deltas(reply, on_delta)
        return reply

    async def _complete_streamed(self, body: Mapping[str, Any], on_delta: OnDelta) -> Completion:
        answer = await self._ask(self._streaming.request(body))
        async with aclosing(answer):
            await answer.raise_for_error(self._api_key)
            await on_delta(CallAccepted())
            if answer.is_json:
                reply = self._reply_in(await answer.json())
                await _emit_deltas(reply, on_delta)
                return reply
            return await self._read_stream(answer, on_delta)

    async def relay(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> UpstreamResponse:
        """See Model."""
        answer = await self._ask(body, request_headers(headers))
        return UpstreamResponse(answer.status, response_headers(answer.headers), answer)

    def for_client(self, credentials: Credentials) -> "OpenAIHTTPModel":
        """See Model. The copy shares the connections and the knowledge of the server."""
        other = copy.copy(self)
        other._api_key = credentials.key  # noqa: SLF001 - one of its own kind
        other._account_headers = credentials.headers  # noqa: SLF001 - as above
        return other

    def with_timeout(self, timeout_s: float) -> "OpenAIHTTPModel":
        """See Model. The copy shares the connections and the knowledge of the server."""
        other = copy.copy(self)
        other._timeout = _timeout(timeout_s)  # noqa: SLF001 - one of its own kind
        return other

    async def count_tokens(self, model: str, text: str) -> int | None:
        """See Model. A server without /tokenize is asked only once."""
        if not self._tokenizer.is_there:
            return None
        dialect = self._tokenizer.dialect
        answer = await self._tokenized(_tokenize_body(dialect, model, text))
        if answer is not None and dialect == "prompt" and _wants_content(answer):
            self._tokenizer.dialect = dialect = "content"
            answer = await self._tokenized(_tokenize_body(dialect, model, text))
        if answer is None:
            return None
        return count_in(answer) if dialect == "prompt" else _tokens_in(answer)

    async def _tokenized(self, asked: Mapping[str, Any]) -> bytes | None:
        headers = {"content-type": "application/json"}
        passing = UpstreamRequest("POST", TOKENIZE_PATH, headers, json.dumps(asked).encode())
        try:
            relayed = await self.pass_on(passing)
            answer = await read_at_most(relayed.body, MAX_TOKENIZED_BYTES)
        except BackendError:
            return None
        self._tokenizer.is_there = relayed.status not in NOT_THERE
        return answer if relayed.status == 200 else None

    @property
    def passage(self) -> "OpenAIHTTPModel":
        """See Model."""
        return self

    async def pass_on(self, passing: UpstreamRequest) -> UpstreamResponse:
        """See Passage. Paths below /v1 go to `base_url`, all others to its root."""
        is_below = passing.path.startswith((f"{_VERSION}/", f"{_VERSION}?"))
        base = self._base_url if is_below else self._root_url
        path = passing.path.removeprefix(_VERSION) if is_below else passing.path
        headers = end_to_end_headers(passing.headers)
        if isinstance(passing.body, bytes):
            headers["content-length"] = str(len(passing.body))
        with _MAP_CLIENT_ERRORS:
            response = await self._connections.session().request(
                passing.method,
                URL(base + path, encoded=True),
                headers=self._with_key(headers),
                data=_sent(passing.body) if isinstance(passing.body, bytes) else passing.body,
                allow_redirects=False,
                timeout=self._timeout,
                auto_decompress=False,
                skip_auto_headers=_AIOHTTPS_OWN_HEADERS,
            )
        headers = passed_response_headers(response.headers, self._root_url)
        return UpstreamResponse(response.status, headers, BackendResponse(response))

    def keep_warm(self) -> AbstractAsyncContextManager[None]:
        """See Model. A HEAD request, whatever its status, keeps the connection open on both sides
        before it would be closed as unused."""
        return _KeepAlive(self._connections.keep_alive_s * _PROBE_AT, self._probe)

    async def _probe(self) -> None:
        with suppress(aiohttp.ClientError, OSError):
            async with self._connections.session().head(
                self._base_url + _MODELS,
                headers=self._with_key({}),
                timeout=_PROBE_TIMEOUT,
                allow_redirects=False,
            ):
                pass

    async def models(self) -> list[dict[str, Any]]:
        """See Model."""
        answer = await self._send("GET", _MODELS, headers={})
        async with aclosing(answer):
            await answer.raise_for_error(self._api_key)
            listing = await answer.json()
        models = listing.get("data") if isinstance(listing, dict) else None
        if not isinstance(models, list):
            raise bad_response("it lists no models")
        listed = [
            each for each in models if isinstance(each, dict) and isinstance(each.get("id"), str)
        ]
        self._streaming.learn(listed)
        return listed

    async def aclose(self) -> None:
        """See Model. A later call opens new connections."""
        await self._connections.aclose()

    async def _complete_whole(self, body: Mapping[str, Any]) -> Completion:
        answer = await self._ask(body)
        async with aclosing(answer):
            await answer.raise_for_error(self._api_key)
            return self._reply_in(await answer.json())

    async def _read_stream(self, answer: "BackendResponse", on_delta: OnDelta) -> Completion:
        stream = CompletionStream(secret=self._api_key)
        with reply_when_stopped(stream.reply):
            async for piece in answer:
                for delta in stream.feed(piece):
                    await on_delta(delta)
                if stream.done:
                    await answer.drain()
                    break
            for delta in stream.end():
                await on_delta(delta)
        return stream.reply()

    def _reply_in(self, completion: Any) -> Completion:
        if is_error(completion):
            raise backend_error(completion, status=None, secret=self._api_key)
        return reply_of(completion)

    async def _ask(
        self, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> "BackendResponse":
        written = encode_json(body)
        described = {"content-type": "application/json", "content-length": str(len(written))}
        return await self._send(
            "POST",
            "/chat/completions",
            headers={**(headers or {}), **described},
            data=_sent(written),
        )

    async def _send(
        self,
        method: str,
        path: str,
        *,
        headers: dict[str, str],
        data: bytes | AsyncIterator[bytes] | None = None,
    ) -> "BackendResponse":
        with _MAP_CLIENT_ERRORS:
            response = await self._connections.session().request(
                method,
                self._base_url + path,
                headers=self._with_key(headers),
                data=data,
                allow_redirects=False,
                timeout=self._timeout,
            )
        if not 200 <= response.status < 300 and not 400 <= response.status < 600:
            response.close()
            where = response.headers.get("location")
            raise bad_response(
                f"it redirects to {where}: correct backend.base_url"
                if where
                else f"its status is {response.status}"
            )
        return BackendResponse(response)

    def _with_key(self, headers: dict[str, str]) -> dict[str, str]:
        key = self._api_key
        if key is None:
            return headers
        return {**headers, **self._account_headers, "authorization": f"Bearer {key}"}


def _sent(body: bytes) -> bytes | AsyncIterator[bytes]:
    """Return the body as aiohttp is to send it; the headers have its length."""
    return body if len(body) <= _AT_ONCE_BYTES else _pieces(body)


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), _PIECE_BYTES):
        yield body[start : start + _PIECE_BYTES]
        await asyncio.sleep(0)  # lets other requests run


async def _emit_deltas(reply: Completion, on_delta: OnDelta) -> None:
    with reply_when_stopped(lambda: reply):
        for delta in deltas_of(reply):
            await on_delta(delta)


class Connections:
    """The open connections to one backend, for all keys."""

    def __init__(self, proxy: str | None, keep_alive_s: float) -> None:
        self._proxy = proxy
        self.keep_alive_s = keep_alive_s
        self._session: aiohttp.ClientSession | None = None

    def session(self) -> aiohttp.ClientSession:
        """Return the one session, which is created in the loop that uses it."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=self.keep_alive_s),
                cookie_jar=aiohttp.DummyCookieJar(),
                proxy=self._proxy,  # not trust_env, which reads a netrc file too
                headers={"accept-encoding": "identity"},
            )
        return self._session

    async def aclose(self) -> None:
        """Close the session. The next call opens another."""
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()


def _timeout(timeout_s: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=None, connect=_CONNECT_TIMEOUT_S, sock_read=timeout_s)


class _MapClientErrors:
    """Raises aiohttp's failures inside its block as BackendErrors."""

    def __enter__(self) -> None:
        """Do nothing: `__exit__` gets the failure."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        match error:
            case None:
                return
            case aiohttp.ClientHttpProxyError(status=status, message=message):
                # The error's own text contains the proxy's URL with its password.
                raise unreachable(f"the proxy refused with {status} {message}") from error
            case aiohttp.ClientPayloadError():
                raise cut_off() from error
            case TimeoutError():
                raise timed_out(_reason(error)) from error
            case aiohttp.ClientError() | OSError():
                raise unreachable(_reason(error)) from error


_MAP_CLIENT_ERRORS = _MapClientErrors()


class BackendResponse:
    """The bytes of a response as they arrive. To close it early ends the backend's work."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.headers.items()}
        self._response = response

    def __aiter__(self) -> "BackendResponse":
        return self

    async def __anext__(self) -> bytes:
        try:
            with _MAP_CLIENT_ERRORS:
                piece = await self._response.content.readany()
        except BackendError:
            self._response.close()
            raise
        if not piece:
            raise StopAsyncIteration
        return piece

    async def aclose(self) -> None:
        """Release the connection if the response was read to its end, else close it. Safe to call
        twice."""
        self._response.close()

    @property
    def is_json(self) -> bool:
        """True if the response's content type is JSON."""
        return self.headers.get("content-type", "").lower().startswith("application/json")

    async def json(self) -> Any:
        """Read and decode the whole response. Raises BackendError."""
        body, bounds = bytearray(), JSONBounds(MAX_JSON_VALUES)
        async for piece in self:
            body += piece
            if len(body) > MAX_JSON_BYTES:
                raise bad_response(f"it is longer than {MAX_JSON_BYTES >> 20} MiB")
            try:
                bounds.check(piece)
            except TooMuchJSONError as error:
                raise bad_response(f"it has more than {error}") from error
        return parsed(bytes(body))

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
        """Read the rest if it is there, so that the connection can be used again."""
        with suppress(BackendError, TimeoutError):
            async with asyncio.timeout(_DRAIN_TIMEOUT_S):
                async for _ in self:
                    pass


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


class _KeepAlive:
    """Calls `probe` every `every_s` seconds while its block runs. A shorter block costs one
    timer."""

    def __init__(self, every_s: float, probe: Callable[[], Awaitable[None]]) -> None:
        self._every_s = every_s
        self._probe = probe
        self._probes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._probing: asyncio.Future[None] | None = None

    async def __aenter__(self) -> None:
        self._schedule()

    def _schedule(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._every_s, self._start_probe)

    def _start_probe(self) -> None:
        self._probes += 1
        self._probing = asyncio.ensure_future(self._probe())
        self._probing.add_done_callback(self._done)

    def _done(self, probing: asyncio.Future[None]) -> None:
        if not probing.cancelled() and (error := probing.exception()):
            _LOG.warning("keeping the backend's connection open failed: %r", error)
        elif self._timer is not None and self._probes < _MAX_PROBES:
            self._schedule()

    async def __aexit__(self, *_: object) -> None:
        """Wait a moment for a running probe: the next call needs its connection."""
        assert self._timer is not None
        self._timer.cancel()
        self._timer = None
        if self._probing is not None and not self._probing.done():
            await asyncio.wait({self._probing}, timeout=_PROBE_END_S)
            self._probing.cancel()


@dataclass(slots=True)
class _Tokenizer:
    """How far the server's `/tokenize` is known."""

    is_there: bool = True
    dialect: _Dialect = "prompt"


def _tokenize_body(dialect: _Dialect, model: str, text: str) -> dict[str, Any]:
    if dialect == "content":
        return {"model": model, "content": text, "add_special": False}
    return {"model": model, "prompt": text, "add_special_tokens": False}


def _wants_content(answer: bytes) -> bool:
    """Return True if the answer to a `prompt` shows a server that takes `content`."""
    fields = _json_object(answer)
    return "count" not in fields and isinstance(fields.get("tokens"), list)


def _tokens_in(answer: bytes) -> int | None:
    """Return how many tokens llama.cpp lists, or None."""
    tokens = _json_object(answer).get("tokens")
    return len(tokens) if isinstance(tokens, list) else None


def count_in(answer: bytes) -> int | None:
    """Return the token count in the answer of a `/tokenize`, or None."""
    count = _json_object(answer).get("count")
    return count if isinstance(count, int) else None


def _json_object(answer: bytes) -> Mapping[str, Any]:
    try:
        value = parsed(answer)
    except BackendError:
        return {}
    return value if isinstance(value, dict) else {}
