"""A scripted backend: a real HTTP server for chat completions.

    async with scripted_backend([tool_reply(call("submit")), text_reply("done")]) as backend:
        model = OpenAIHTTPModel(backend.base_url, api_key="sk-test", timeout_s=5)
        ...
    assert backend.requests[0].body["messages"] == [...]

Each request takes the next item of the script, in order of arrival:
a scripted reply (a dict as `proxy.models.scripted` reads it), or one of the items below.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from aiohttp import web

from proxy.models.scripted import (
    ScriptedError,
    ScriptedReply,
    build_completion,
    completion_chunks,
    encode_sse,
)
from tests.fakes.tokens import add_tokens

Style = Literal["vllm", "sglang", "llama.cpp"]


@dataclass(frozen=True)
class Refusal:
    """An HTTP error with a body in the style of the backend."""

    status: int
    message: str = "refused"
    type: str = "BadRequestError"
    code: str | int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    beside: Mapping[str, Any] = field(default_factory=dict)
    """Additional fields of the error."""


@dataclass(frozen=True)
class Raw:
    """A literal HTTP response, text/plain unless `headers` have a content-type."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Frames:
    """Literal server-sent events; each piece is one write."""

    pieces: Sequence[bytes]
    cut: bool = False
    """True if the connection is closed afterwards without the end that HTTP requires."""


@dataclass(frozen=True)
class Held:
    """A reply that waits for `until`, before it begins or after its first `after_pieces` pieces."""

    reply: Mapping[str, Any] | Frames | Refusal
    until: asyncio.Event
    after_pieces: int = 0


Item = Mapping[str, Any] | Refusal | Raw | Frames | Held


@dataclass
class SeenRequest:
    """One received request and its outcome."""

    headers: Mapping[str, str]
    """Headers by lower-case name."""
    body: dict[str, Any]
    peer: tuple[str, int]
    """The client's end of the connection."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the client disconnected before the response was complete."""
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the response is complete."""


class ScriptedBackend:
    """The running server."""

    def __init__(self, style: Style, model: str, *, has_tokens: bool = False) -> None:
        self.base_url = ""
        """The base URL for SDKs, with /v1."""
        self.requests: list[SeenRequest] = []
        """The chat completion requests so far."""
        self.probes: list[tuple[str, int]] = []
        """The client's end of the connection, for each HEAD request for the models."""
        self.listings: list[Mapping[str, str]] = []
        """The headers of each request for the list of models, by lower-case name."""
        self.style = style
        self.model = model
        self.has_tokens = has_tokens
        """True if replies that are not streamed have token ids, for requests that ask for them."""
        self._arrival = asyncio.Condition()

    async def arrived(self, count: int) -> SeenRequest:
        """Wait for request number `count` (from 1) and return it."""
        async with self._arrival:
            await self._arrival.wait_for(lambda: len(self.requests) >= count)
        return self.requests[count - 1]

    async def probed(self, count: int) -> None:
        """Wait until `count` HEAD requests for the models have arrived."""
        async with self._arrival:
            await self._arrival.wait_for(lambda: len(self.probes) >= count)

    async def note_probe(self, peer: tuple[str, int]) -> None:
        """Record a HEAD request."""
        async with self._arrival:
            self.probes.append(peer)
            self._arrival.notify_all()

    async def note(self, seen: SeenRequest) -> int:
        """Record a request; return its number from 0."""
        async with self._arrival:
            self.requests.append(seen)
            self._arrival.notify_all()
        return len(self.requests) - 1


@asynccontextmanager
async def scripted_backend(
    script: Sequence[Item] | Callable[[dict[str, Any]], Item],
    *,
    style: Style = "vllm",
    model: str = "fake-model",
    window: int | None = 1_000_000,
    elsewhere: "Handler | None" = None,
    let_in: "LetIn | None" = None,
    has_tokens: bool = False,
) -> AsyncIterator[ScriptedBackend]:
    """Serve a script on a free port of this loop.

    A function in place of a list chooses each item by the request's body (see `by_history`).
    `window` is the window that the model list contains. `elsewhere` serves all other paths.
    `let_in` checks every request first and may refuse it. With `has_tokens`, replies have token ids
    (see `tests.fakes.tokens`).
    """
    backend = ScriptedBackend(style, model, has_tokens=has_tokens)
    middlewares = [] if let_in is None else [_middleware(let_in)]
    app = web.Application(client_max_size=64 * 2**20, middlewares=middlewares)
    app.router.add_post("/v1/chat/completions", _chat_handler(backend, script))
    app.router.add_get("/v1/models", _models_handler(backend, window))
    if elsewhere is not None:
        app.router.add_route("*", "/{path:.*}", elsewhere)
    # With handler_cancellation, a disconnect cancels the handler, as in vLLM.
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        backend.base_url = f"http://{host}:{port}/v1"
        yield backend
    finally:
        await runner.cleanup()


def by_history(replies: Sequence[Item]) -> Callable[[dict[str, Any]], Item]:
    """Choose the reply by the number of assistant messages, for concurrent conversations."""

    def choose(body: dict[str, Any]) -> Item:
        return _nth(replies, sum(said["role"] == "assistant" for said in body["messages"]))

    return choose


Handler = Callable[[web.Request], Any]
LetIn = Callable[[web.Request], web.Response | None]


def _middleware(let_in: LetIn) -> Any:
    @web.middleware
    async def first(request: web.Request, handler: Handler) -> Any:
        return let_in(request) or await handler(request)

    return first


def _chat_handler(
    backend: ScriptedBackend, script: Sequence[Item] | Callable[[dict[str, Any]], Item]
) -> Handler:
    async def chat(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        seen = SeenRequest(
            headers=_lower(request.headers),
            body=await request.json(),
            peer=request.transport.get_extra_info("peername"),
        )
        number = await backend.note(seen)
        item = script(seen.body) if callable(script) else _nth(script, number)
        try:
            response = await _Exchange(request, backend, seen.body, number).answer(item)
        except (asyncio.CancelledError, ConnectionError):
            seen.gone.set()
            raise
        seen.answered.set()
        return response

    return chat


def _models_handler(backend: ScriptedBackend, window: int | None) -> Handler:
    async def models(request: web.Request) -> web.Response:
        if request.method == "HEAD":
            assert request.transport is not None
            await backend.note_probe(request.transport.get_extra_info("peername"))
        backend.listings.append(_lower(request.headers))
        entry = {"id": backend.model, "object": "model", "created": 0, "owned_by": backend.style}
        window_fields: dict[str, Any] = {"max_model_len": window}
        if backend.style == "llama.cpp":
            window_fields = {"meta": {"n_ctx": window, "n_ctx_train": 1_000_000}}
        size = {} if window is None else window_fields
        return web.json_response({"object": "list", "data": [{**entry, **size}]})

    return models


def _nth(script: Sequence[Item], number: int) -> Item:
    return script[number] if number < len(script) else Refusal(500, "the script has no more")


class _Exchange:
    """One request and its response."""

    def __init__(
        self, request: web.Request, backend: ScriptedBackend, body: Mapping[str, Any], number: int
    ) -> None:
        self._request = request
        self._backend = backend
        self._body = body
        self._number = number

    async def answer(self, item: Item) -> web.StreamResponse:
        match item:
            case Held(held, until, after_pieces):
                if after_pieces > 0:
                    return await self._stream(self._pieces(held), until, after_pieces)
                await until.wait()
                return await self.answer(held)
            case Refusal():
                return _refusal(item, self._backend.style)
            case Raw(status, body, headers):
                headers = {"content-type": "text/plain", **_lower(headers)}
                return web.Response(status=status, headers=headers, body=body)
            case Frames(pieces, cut):
                return await self._stream(pieces, cut=cut)
        reply = ScriptedReply.model_validate(item)
        if reply.error is not None:
            return _refusal(_as_refusal(reply.error), self._backend.style)
        if self._body.get("stream"):
            return await self._stream(self._pieces(item))
        return web.json_response(self._with_tokens(self._completion(reply)))

    def _pieces(self, item: Mapping[str, Any] | Frames) -> Iterable[bytes]:
        if isinstance(item, Frames):
            return item.pieces
        include_usage = bool((self._body.get("stream_options") or {}).get("include_usage"))
        completion = self._completion(ScriptedReply.model_validate(item))
        return encode_sse(completion_chunks(completion, include_usage=include_usage))

    def _with_tokens(self, completion: dict[str, Any]) -> dict[str, Any]:
        if self._backend.has_tokens:
            add_tokens(completion, self._body, self._backend.style)
        return completion

    def _completion(self, reply: ScriptedReply) -> dict[str, Any]:
        return build_completion(
            reply,
            model=self._body.get("model", self._backend.model),
            position=self._number,
            reasoning_field="reasoning" if self._backend.style == "vllm" else "reasoning_content",
        )

    async def _stream(
        self,
        pieces: Iterable[bytes],
        until: asyncio.Event | None = None,
        after_pieces: int = 0,
        cut: bool = False,
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(self._request)
        for number, piece in enumerate(pieces):
            if until is not None and number == after_pieces:
                await until.wait()
            await response.write(piece)
        if cut and self._request.transport is not None:
            self._request.transport.close()
            return response
        await response.write_eof()
        return response


def _lower(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def _as_refusal(error: ScriptedError) -> Refusal:
    wait_s = error.retry_after_s
    headers = {} if wait_s is None else {"Retry-After": f"{wait_s:g}"}
    kind = error.type or "BadRequestError"
    return Refusal(error.status, error.message, kind, error.code, headers)


def _refusal(item: Refusal, style: Style) -> web.Response:
    fields = {
        "message": item.message,
        "type": item.type,
        "param": None,
        "code": item.status if item.code is None else item.code,
        **item.beside,
    }
    body = {"object": "error", **fields} if style == "sglang" else {"error": fields}
    return web.json_response(body, status=item.status, headers=item.headers)


def frames(*values: Any) -> list[bytes]:
    """Encode values as server-sent events; a str is sent as it is, such as "[DONE]"."""
    texts = (value if isinstance(value, str) else json.dumps(value) for value in values)
    return [b"data: " + text.encode() + b"\n\n" for text in texts]


def chunk(
    delta: Mapping[str, Any], finish_reason: str | None = None, **choice: Any
) -> dict[str, Any]:
    """Return one streamed chunk of a chat completion."""
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 0,
        "model": "fake-model",
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason, **choice}],
    }
