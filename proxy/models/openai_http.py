"""The client for servers with OpenAI's chat completions: vLLM, SGLang, llama.cpp, OpenAI."""

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from typing import Any

import aiohttp
from yarl import URL

from policies.json_bounds import encoded
from proxy.agent.events import CallAccepted, OnDelta
from proxy.agent.model import Credentials, Passing, Relayed, Reply
from proxy.errors import BackendError
from proxy.models.assembly import deltas_of, reply_of, reply_when_stopped
from proxy.models.backend_errors import backend_error, bad_response, is_error
from proxy.models.http_answer import TRANSLATED, HTTPAnswer
from proxy.models.keeping_warm import KeepingWarm
from proxy.models.relay import (
    end_to_end_headers,
    passed_response_headers,
    read_at_most,
    request_headers,
    response_headers,
)
from proxy.models.streamed_reply import StreamedReply, Streaming, refuses_streams
from proxy.models.tokenizing import (
    NOT_THERE,
    PATH,
    Tokenizer,
    count_in,
    question,
    tokens_in,
    wants_content,
)

_CONNECT_TIMEOUT_S = 10.0
MAX_TOKENIZED_BYTES = 32 << 20
"""Of the answer to one text: a server may send all its tokens."""
KEEP_ALIVE_S = 4.0
"""Below uvicorn's 5 s: a request must not go out on a connection that is just being closed."""
_PROBE_AT = 0.75
"""The share of that time after which an unused connection is used once."""
_PROBE_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
_MODELS = "/models"
_AT_ONCE_BYTES = 1 << 20
"""Longer bodies are sent in pieces."""
_PIECE_BYTES = 1 << 16
_VERSION = "/v1"
_AIOHTTPS_OWN_HEADERS = ("accept", "content-type", "user-agent")


class OpenAIHTTPModel:
    """A model behind an OpenAI-compatible `base_url` (the one that SDKs are given, with /v1).

    `timeout_s` bounds every wait for the next byte of an answer, not the answer. `proxy` is the URL
    of a forward proxy to go through; `keep_alive_s` is how long an unused connection stays open.
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
        self._streaming = Streaming()
        self._tokenizer = Tokenizer()

    async def complete(self, body: Mapping[str, Any], on_delta: OnDelta | None) -> Reply:
        """See Model. A server that refuses to stream a model is asked for the whole, for a
        while."""
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
            await _pass_on(reply, on_delta)
        return reply

    async def _complete_streamed(self, body: Mapping[str, Any], on_delta: OnDelta) -> Reply:
        answer = await self._ask(self._streaming.request(body))
        async with aclosing(answer):
            await answer.raise_for_error(self._api_key)
            await on_delta(CallAccepted())
            if answer.is_json:
                reply = self._reply_in(await answer.json())
                await _pass_on(reply, on_delta)
                return reply
            return await self._pass_on_stream(answer, on_delta)

    async def relay(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Relayed:
        """See Model."""
        answer = await self._ask(body, request_headers(headers))
        return Relayed(answer.status, response_headers(answer.headers), answer)

    def for_client(self, credentials: Credentials) -> "OpenAIHTTPModel":
        """See Model. Connections, and what is known of the server, are the same."""
        other = copy.copy(self)
        other._api_key = credentials.key  # noqa: SLF001 - one of its own kind
        other._account_headers = credentials.headers  # noqa: SLF001 - as above
        return other

    def with_timeout(self, timeout_s: float) -> "OpenAIHTTPModel":
        """See Model. Connections, and what is known of the server, are the same."""
        other = copy.copy(self)
        other._timeout = _timeout(timeout_s)  # noqa: SLF001 - one of its own kind
        return other

    async def count_tokens(self, model: str, text: str) -> int | None:
        """See Model. A server that has no /tokenize is not asked again."""
        if not self._tokenizer.is_there:
            return None
        dialect = self._tokenizer.dialect
        answer = await self._tokenized(question(dialect, model, text))
        if answer is not None and dialect == "prompt" and wants_content(answer):
            self._tokenizer.dialect = dialect = "content"
            answer = await self._tokenized(question(dialect, model, text))
        if answer is None:
            return None
        return count_in(answer) if dialect == "prompt" else tokens_in(answer)

    async def _tokenized(self, asked: Mapping[str, Any]) -> bytes | None:
        headers = {"content-type": "application/json"}
        passing = Passing("POST", PATH, headers, json.dumps(asked).encode())
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

    async def pass_on(self, passing: Passing) -> Relayed:
        """See Passage. What is below /v1 goes to `base_url`, all else beside it."""
        is_below = passing.path.startswith((f"{_VERSION}/", f"{_VERSION}?"))
        base = self._base_url if is_below else self._root_url
        path = passing.path.removeprefix(_VERSION) if is_below else passing.path
        headers = end_to_end_headers(passing.headers)
        if isinstance(passing.body, bytes):
            headers["content-length"] = str(len(passing.body))
        with TRANSLATED:
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
        return Relayed(response.status, headers, HTTPAnswer(response))

    def keep_warm(self) -> AbstractAsyncContextManager[None]:
        """See Model. A HEAD request over the connection, before it would be closed as unused, keeps
        it open on both sides; whatever its status."""
        return KeepingWarm(self._connections.keep_alive_s * _PROBE_AT, self._probe)

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
        """See Model. The next call would open new connections."""
        await self._connections.aclose()

    async def _complete_whole(self, body: Mapping[str, Any]) -> Reply:
        answer = await self._ask(body)
        async with aclosing(answer):
            await answer.raise_for_error(self._api_key)
            return self._reply_in(await answer.json())

    async def _pass_on_stream(self, answer: HTTPAnswer, on_delta: OnDelta) -> Reply:
        stream = StreamedReply(secret=self._api_key)
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

    def _reply_in(self, completion: Any) -> Reply:
        if is_error(completion):
            raise backend_error(completion, status=None, secret=self._api_key)
        return reply_of(completion)

    async def _ask(
        self, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> HTTPAnswer:
        written = encoded(body)
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
    ) -> HTTPAnswer:
        with TRANSLATED:
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
        return HTTPAnswer(response)

    def _with_key(self, headers: dict[str, str]) -> dict[str, str]:
        key = self._api_key
        if key is None:
            return headers
        return {**headers, **self._account_headers, "authorization": f"Bearer {key}"}


def _sent(body: bytes) -> bytes | AsyncIterator[bytes]:
    """Return a body as it is sent, beside a header with its length."""
    return body if len(body) <= _AT_ONCE_BYTES else _pieces(body)


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), _PIECE_BYTES):
        yield body[start : start + _PIECE_BYTES]
        await asyncio.sleep(0)  # others are answered meanwhile


async def _pass_on(reply: Reply, on_delta: OnDelta) -> None:
    with reply_when_stopped(lambda: reply):
        for delta in deltas_of(reply):
            await on_delta(delta)


class Connections:
    """The open connections to one backend, whoever's key goes over them."""

    def __init__(self, proxy: str | None, keep_alive_s: float) -> None:
        self._proxy = proxy
        self.keep_alive_s = keep_alive_s
        self._session: aiohttp.ClientSession | None = None

    def session(self) -> aiohttp.ClientSession:
        """The one session, made in the loop that uses it."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=self.keep_alive_s),
                cookie_jar=aiohttp.DummyCookieJar(),
                proxy=self._proxy,  # not trust_env, which reads a netrc file too
                headers={"accept-encoding": "identity"},
            )
        return self._session

    async def aclose(self) -> None:
        """Close the session; the next call opens another."""
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()


def _timeout(timeout_s: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=None, connect=_CONNECT_TIMEOUT_S, sock_read=timeout_s)
