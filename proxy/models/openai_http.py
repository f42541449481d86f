"""The door to any server that speaks OpenAI's chat completions: vLLM, SGLang, OpenAI itself."""

import io
import json
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

import aiohttp
from yarl import URL

from proxy.agent.events import OnDelta
from proxy.agent.model import Passing, Relayed, Reply
from proxy.errors import BackendError
from proxy.models.assembly import deltas_of, reply_of
from proxy.models.backend_errors import backend_error, bad_response, is_error
from proxy.models.http_answer import TRANSLATED, HTTPAnswer
from proxy.models.relay import (
    end_to_end_headers,
    passed_response_headers,
    request_headers,
    response_headers,
)
from proxy.models.streamed_reply import StreamedReply
from proxy.models.tokenizing import NOT_THERE, PATH, count_in

_CONNECT_TIMEOUT_S = 10.0
_KEEPALIVE_TIMEOUT_S = 4.0
"""Below uvicorn's 5 s: a request must not go out on a connection that is just being closed."""
_AT_ONCE_BYTES = 1 << 20
"""More than this, such as images, is written in pieces: aiohttp warns of it else."""
_VERSION = "/v1"
_AIOHTTPS_OWN_HEADERS = ("accept", "content-type", "user-agent")


class OpenAIHTTPModel:
    """A model behind an OpenAI-compatible `base_url` (the one that SDKs are given, with /v1).

    `timeout_s` bounds every wait for the next byte of an answer, not the answer.
    """

    def __init__(self, base_url: str, *, api_key: str | None, timeout_s: float) -> None:
        self._base_url = base_url.rstrip("/")
        self._root_url = self._base_url.removesuffix(_VERSION)
        self._api_key = api_key
        self._timeout = aiohttp.ClientTimeout(
            total=None, connect=_CONNECT_TIMEOUT_S, sock_read=timeout_s
        )
        self._session: aiohttp.ClientSession | None = None
        self._tokenizes = True

    async def complete(self, body: Mapping[str, Any], on_delta: OnDelta | None) -> Reply:
        """See Model."""
        if on_delta is None:
            return await self._complete_whole(body)
        options = {**(body.get("stream_options") or {}), "include_usage": True}
        answer = await self._ask({**body, "stream": True, "stream_options": options})
        async with aclosing(answer):
            await answer.raise_for_error(self._api_key)
            if answer.is_json:
                return await self._pass_on_whole(answer, on_delta)
            return await self._pass_on_stream(answer, on_delta)

    async def relay(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Relayed:
        """See Model."""
        answer = await self._ask(body, request_headers(headers))
        return Relayed(answer.status, response_headers(answer.headers), answer)

    async def count_tokens(self, model: str, text: str) -> int | None:
        """See Model. A server that has no /tokenize is not asked again."""
        if not self._tokenizes:
            return None
        asked = {"model": model, "prompt": text, "add_special_tokens": False}
        headers = {"content-type": "application/json"}
        passing = Passing("POST", PATH, headers, json.dumps(asked).encode())
        try:
            relayed = await self.pass_on(passing)
            async with aclosing(relayed.body):
                answer = b"".join([piece async for piece in relayed.body])
        except BackendError:
            return None
        self._tokenizes = relayed.status not in NOT_THERE
        return count_in(answer) if relayed.status == 200 else None

    @property
    def passage(self) -> "OpenAIHTTPModel":
        """See Model."""
        return self

    async def pass_on(self, passing: Passing) -> Relayed:
        """See Passage. What is below /v1 goes to `base_url`, all else beside it."""
        is_below = passing.path.startswith((f"{_VERSION}/", f"{_VERSION}?"))
        base = self._base_url if is_below else self._root_url
        path = passing.path.removeprefix(_VERSION) if is_below else passing.path
        body = passing.body
        with TRANSLATED:
            response = await self._connections().request(
                passing.method,
                URL(base + path, encoded=True),
                headers=self._with_key(end_to_end_headers(passing.headers)),
                data=io.BytesIO(body) if isinstance(body, bytes) else body,
                allow_redirects=False,
                auto_decompress=False,
                skip_auto_headers=_AIOHTTPS_OWN_HEADERS,
            )
        headers = passed_response_headers(response.headers, self._root_url)
        return Relayed(response.status, headers, HTTPAnswer(response))

    async def models(self) -> list[dict[str, Any]]:
        """See Model."""
        answer = await self._send("GET", "/models", headers={})
        async with aclosing(answer):
            await answer.raise_for_error(self._api_key)
            listing = await answer.json()
        models = listing.get("data") if isinstance(listing, dict) else None
        if not isinstance(models, list):
            raise bad_response("it lists no models")
        return [
            each for each in models if isinstance(each, dict) and isinstance(each.get("id"), str)
        ]

    async def aclose(self) -> None:
        """See Model. The next call would open new connections."""
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    async def _complete_whole(self, body: Mapping[str, Any]) -> Reply:
        answer = await self._ask(body)
        async with aclosing(answer):
            await answer.raise_for_error(self._api_key)
            return self._reply_in(await answer.json())

    async def _pass_on_whole(self, answer: HTTPAnswer, on_delta: OnDelta) -> Reply:
        reply = self._reply_in(await answer.json())
        for delta in deltas_of(reply):
            await on_delta(delta)
        return reply

    async def _pass_on_stream(self, answer: HTTPAnswer, on_delta: OnDelta) -> Reply:
        stream = StreamedReply(secret=self._api_key)
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
        written = json.dumps(body).encode()
        return await self._send(
            "POST",
            "/chat/completions",
            headers={**(headers or {}), "content-type": "application/json"},
            data=written if len(written) <= _AT_ONCE_BYTES else io.BytesIO(written),
        )

    async def _send(
        self,
        method: str,
        path: str,
        *,
        headers: dict[str, str],
        data: bytes | io.BytesIO | None = None,
    ) -> HTTPAnswer:
        with TRANSLATED:
            response = await self._connections().request(
                method,
                self._base_url + path,
                headers=self._with_key(headers),
                data=data,
                allow_redirects=False,
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
        return headers if key is None else {**headers, "authorization": f"Bearer {key}"}

    def _connections(self) -> aiohttp.ClientSession:
        """The one session, made in the loop that uses it."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=self._timeout,
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_TIMEOUT_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"accept-encoding": "identity"},
            )
        return self._session
