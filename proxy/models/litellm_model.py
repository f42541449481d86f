"""The client for all providers that litellm supports.

The module contains the model, its streams, the translation between OpenAI's fields and litellm's,
and the translation of litellm's exceptions into BackendErrors.
"""

import asyncio
import copy
import importlib
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    aclosing,
    contextmanager,
    nullcontext,
)
from copy import deepcopy
from datetime import UTC, datetime
from typing import Any

import httpx

from proxy.agent.events import ModelCallAccepted, OnDelta
from proxy.agent.model import Completion, Credentials, UpstreamResponse
from proxy.errors import BackendError
from proxy.models.backend_errors import (
    backend_error,
    connection_lost_error,
    decode_error_body,
    is_transport_error,
    redact,
    retry_after_s,
    timeout_error,
    unreachable_error,
)
from proxy.models.completion_builder import (
    CompletionBuilder,
    attach_partial_completion,
    parse_completion,
)
from proxy.models.operator_proxies import add_to_no_proxy
from proxy.models.relay import error_response, json_response

_ENVIRONMENT = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # no download of prices at import
    "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS": "True",  # no download of headers at first use
    "LITELLM_MODE": "PRODUCTION",  # otherwise litellm reads .env files into the environment
}
_TRANSLATED_FIELDS = frozenset(
    {
        *("messages", "tools", "tool_choice", "parallel_tool_calls", "functions", "function_call"),
        *("temperature", "top_p", "top_k", "n", "seed", "stop", "logit_bias"),
        *("presence_penalty", "frequency_penalty", "logprobs", "top_logprobs"),
        *("max_tokens", "max_completion_tokens", "stream", "stream_options", "response_format"),
        *("reasoning_effort", "thinking", "verbosity", "modalities", "audio", "prediction"),
        *("web_search_options", "service_tier", "store", "prompt_cache_key"),
        *("safety_identifier", "user"),
    }
)
"""The request fields that litellm translates for each provider."""


class _Library:
    """The modules litellm and openai, which the first call imports. A model shares them with its
    copies."""

    litellm: Any = None
    openai: Any = None


class LiteLLMModel:
    """A `Model` for models with litellm names, such as "anthropic/claude-sonnet-4-5".

    Without `api_key` and `api_base`, litellm takes them from the provider's environment variables.
    litellm has one connection pool per process: `aclose` closes the connections of all models.
    litellm uses the forward proxies of the environment, except for this machine and for an
    `api_base` that `operator_proxies.is_exempt` accepts.
    """

    upstream = None

    def __init__(
        self,
        model_names: Sequence[str],
        *,
        timeout_s: float,
        api_key: str | None = None,
        api_base: str | None = None,
    ) -> None:
        self._model_names = tuple(model_names)
        self._timeout_s = timeout_s
        self._api_key = api_key
        self._api_base = api_base
        self._library = _Library()

    async def complete(self, body: Mapping[str, Any], on_delta: OnDelta | None) -> Completion:
        if on_delta is None:
            return parse_completion(await self._complete(body))
        options = {**(body.get("stream_options") or {}), "include_usage": True}
        builder = CompletionBuilder()
        chunks = await self._stream({**body, "stream": True, "stream_options": options})
        is_accepted = False
        async with aclosing(chunks):
            with attach_partial_completion(builder.build):
                async for chunk in chunks:
                    if not is_accepted:  # litellm may call the provider only here
                        is_accepted = True
                        await on_delta(ModelCallAccepted())
                    for delta in builder.add(chunk):
                        await on_delta(delta)
        if builder.finish_reason is None:
            raise connection_lost_error()
        return builder.build()

    async def relay(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> UpstreamResponse:
        """See Model. No header is relayed: litellm sends its own request."""
        try:
            if not body.get("stream"):
                return json_response(await self._complete(body))
            return await self._relay_stream(await self._stream(body))
        except BackendError as error:
            if is_transport_error(error):
                raise
            return error_response(error)

    def with_credentials(self, credentials: Credentials) -> "LiteLLMModel":
        other = copy.copy(self)
        other._api_key = credentials.key  # noqa: SLF001 - an instance of the same class
        return other

    def with_timeout(self, timeout_s: float) -> "LiteLLMModel":
        other = copy.copy(self)
        other._timeout_s = timeout_s  # noqa: SLF001 - an instance of the same class
        return other

    def with_upstream(self, url: str) -> "LiteLLMModel":
        """See Model. The configuration refuses upstreams for litellm."""
        raise NotImplementedError("backend.upstreams needs backend.provider openai")

    async def count_tokens(self, model: str, text: str) -> int | None:
        """See Model. The tokens are counted with litellm's copy of OpenAI's tokenizers, for every
        provider."""
        await self._import_litellm()
        name = model.rpartition("/")[2]
        count: int = await asyncio.to_thread(self._library.litellm.token_counter, name, text=text)
        return count

    async def tokenize_prompt(self, model: str, prompt: str) -> list[int] | None:
        """See Model. litellm has no access to the provider's tokenizer."""
        return None

    def keep_warm(self) -> AbstractAsyncContextManager[None]:
        """See Model. litellm keeps unused connections open for two minutes."""
        return nullcontext()

    async def models(self) -> list[dict[str, Any]]:
        """See Model. The list contains the configured models. Once litellm is imported, the entries
        contain the context lengths in litellm's table."""
        return [
            {
                "id": name,
                "object": "model",
                "created": 0,
                "owned_by": name.split("/")[0],
                **self._max_model_len_field(name),
            }
            for name in self._model_names
        ]

    async def aclose(self) -> None:
        litellm = self._library.litellm
        if litellm is not None:
            await litellm.close_litellm_async_clients()
            litellm.in_memory_llm_clients_cache.flush_cache()  # it contains the closed clients

    async def _relay_stream(self, chunks: "_ChunkStream") -> UpstreamResponse:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(chunks.aclose)
            # litellm may not have called the provider before. An error of the call still becomes
            # an HTTP status, because no part of the response was sent.
            first = await anext(chunks, None)
            stack.pop_all()
        return UpstreamResponse(200, {"content-type": "text/event-stream"}, _SSEBody(first, chunks))

    async def _complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        name = self._model_name(body)
        response = await self._call_litellm(name, body)
        dumped = response.model_dump(exclude_none=True)
        return to_openai_format(dumped, is_openai_like=self._is_openai_like(name))

    async def _stream(self, body: Mapping[str, Any]) -> "_ChunkStream":
        name = self._model_name(body)
        stream = await self._call_litellm(name, body)
        return _ChunkStream(stream, self._is_openai_like(name), self._map_errors)

    async def _call_litellm(self, name: str, body: Mapping[str, Any]) -> Any:
        await self._import_litellm()
        with self._map_errors():
            return await self._library.litellm.acompletion(
                **acompletion_arguments(body),
                model=name,
                api_key=self._api_key,
                api_base=self._api_base,
                timeout=self._timeout_s,
                num_retries=0,
                max_retries=0,
                # For a call with tools, litellm 1.106 imports `mcp`, which may not be installed.
                _skip_mcp_handler=True,
            )

    def _model_name(self, body: Mapping[str, Any]) -> str:
        """Return the model's name. Raises BackendError if the model is not configured: litellm
        could send a key from the proxy's environment to the provider of any model."""
        name = body.get("model") or self._model_names[0]
        if name not in self._model_names:
            raise BackendError(
                f"the model {name!r} does not exist",
                status=404,
                type="invalid_request_error",
                code="model_not_found",
                param="model",
            )
        return str(name)

    def _max_model_len_field(self, name: str) -> dict[str, int]:
        """Return the model's context length in vLLM's format, if litellm's table contains it."""
        if self._library.litellm is None:
            return {}
        table = self._library.litellm.model_cost
        entry = table.get(name) or table.get(name.partition("/")[2]) or {}
        tokens = entry.get("max_input_tokens")
        return {"max_model_len": tokens} if isinstance(tokens, int) else {}

    def _is_openai_like(self, name: str) -> bool:
        provider = self._library.litellm.get_llm_provider(model=name, api_base=self._api_base)[1]
        return provider == "openai" or provider in self._library.litellm.openai_compatible_providers

    @contextmanager
    def _map_errors(self) -> Iterator[None]:
        try:
            yield
        except self._library.openai.APIError as error:  # the base class of litellm's exceptions
            overflows = isinstance(error, self._library.litellm.ContextWindowExceededError)
            raise _backend_error(error, overflows=overflows, secret=self._api_key) from error

    async def _import_litellm(self) -> None:
        """Import litellm in a thread, at the first call: the import takes seconds."""
        if self._library.litellm is None:
            self._library.openai = await asyncio.to_thread(importlib.import_module, "openai")
            self._library.litellm = await asyncio.to_thread(load_litellm)
            add_to_no_proxy(self._api_base)


def load_litellm() -> Any:
    """Set the environment variables that litellm reads at import, import litellm and return it."""
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    # Otherwise litellm reads a netrc file. It uses the environment's proxies all the same.
    os.environ["AIOHTTP_TRUST_ENV"] = "False"
    litellm: Any = importlib.import_module("litellm")
    litellm.disable_hf_tokenizer_download = True
    litellm.suppress_debug_info = True  # litellm prints advice to stdout on every error
    return litellm


class _ChunkStream:
    """The chunks of one streamed response, in OpenAI's format. Closing the stream early ends the
    provider's work."""

    def __init__(
        self,
        stream: Any,
        is_openai_like: bool,
        map_errors: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._stream = stream
        self._is_openai_like = is_openai_like
        self._map_errors = map_errors

    def __aiter__(self) -> "_ChunkStream":
        return self

    async def __anext__(self) -> dict[str, Any]:
        with self._map_errors():
            chunk = await anext(self._stream)
        return to_openai_format(
            chunk.model_dump(exclude_none=True), is_openai_like=self._is_openai_like
        )

    async def aclose(self) -> None:
        """End the stream. Safe to call twice."""
        await self._stream.aclose()


class _SSEBody:
    """Chunks encoded as server-sent events. An error in the stream becomes an event."""

    def __init__(self, first_chunk: dict[str, Any] | None, chunks: _ChunkStream) -> None:
        self._chunks = chunks
        self._events = self._encode(first_chunk)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._events

    async def _encode(self, first_chunk: dict[str, Any] | None) -> AsyncGenerator[bytes, None]:
        try:
            if first_chunk is not None:
                yield _sse_event(first_chunk)
                async for chunk in self._chunks:
                    yield _sse_event(chunk)
        except BackendError as error:
            yield _sse_event(error.body())
        yield b"data: [DONE]\n\n"

    async def aclose(self) -> None:
        """End the stream. Safe to call twice."""
        await self._events.aclose()
        await self._chunks.aclose()


def _sse_event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def acompletion_arguments(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `acompletion` for a request body.

    Fields that litellm does not translate are in `extra_body`. If they were arguments themselves, a
    client could set `api_base` or `vertex_credentials`, and so have the proxy's key sent to a
    server of its choice. The arguments are deep copies because litellm modifies tools and messages
    in place.
    """
    fields = {key: deepcopy(value) for key, value in body.items() if key != "model"}
    arguments = {key: fields[key] for key in fields if key in _TRANSLATED_FIELDS}
    extra = {key: fields[key] for key in fields if key not in _TRANSLATED_FIELDS}
    return {**arguments, "extra_body": extra} if extra else arguments


def to_openai_format(response: Mapping[str, Any], *, is_openai_like: bool) -> dict[str, Any]:
    """Return a completion or chunk, dumped from litellm's object, in OpenAI's format.

    litellm moves unknown fields to `provider_specific_fields`. If the provider `is_openai_like`,
    this function moves them back. For other providers they stay, without duplicates of other
    fields, because litellm reads some of them in the next request (Gemini's signatures).
    """
    choices = [
        _choice_to_openai(choice, is_openai_like) for choice in response.get("choices") or []
    ]
    return {**response, "choices": choices}


def _choice_to_openai(choice: Mapping[str, Any], is_openai_like: bool) -> dict[str, Any]:
    choice = _restore_moved_fields(choice, is_openai_like)
    if "delta" in choice:
        choice["delta"] = _restore_moved_fields(choice["delta"], is_openai_like)
    if "message" in choice:
        choice["message"] = {
            "content": None,
            **_restore_moved_fields(choice["message"], is_openai_like),
        }
    return choice


def _restore_moved_fields(fields: Mapping[str, Any], is_openai_like: bool) -> dict[str, Any]:
    known = {key: value for key, value in fields.items() if key != "provider_specific_fields"}
    moved = {
        key: value
        for key, value in (fields.get("provider_specific_fields") or {}).items()
        if value is not None and key not in known
    }
    if is_openai_like:
        return {**known, **moved}
    return {**known, "provider_specific_fields": moved} if moved else known


def _backend_error(error: Exception, *, overflows: bool, secret: str | None) -> BackendError:
    """Return the BackendError for an exception of litellm. If a cause of the exception contains the
    provider's response, the error is built from this response.

    `overflows` is True if litellm itself finds that the conversation is too long.
    """
    for cause in _causes(error):
        if isinstance(cause, httpx.TransportError):
            return _connection_error(cause, secret)
        if isinstance(cause, httpx.HTTPStatusError):
            return _response_error(cause.response, error, overflows, secret)
    status = getattr(error, "status_code", None)
    return backend_error(
        _error_fields(error),
        status=status if isinstance(status, int) else None,
        overflows=overflows,
        secret=secret,
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _connection_error(cause: httpx.TransportError, secret: str | None) -> BackendError:
    if isinstance(cause, httpx.TimeoutException):
        return timeout_error(type(cause).__name__)
    if isinstance(cause, httpx.ReadError | httpx.RemoteProtocolError):
        return connection_lost_error()
    return unreachable_error(redact(str(cause), secret))


def _response_error(
    response: httpx.Response, error: Exception, overflows: bool, secret: str | None
) -> BackendError:
    try:
        payload = decode_error_body(response.content)
    except httpx.ResponseNotRead:
        payload = None
    headers = {name.lower(): value for name, value in response.headers.items()}
    return backend_error(
        payload or _error_fields(error),
        status=response.status_code,
        retry_after_s=retry_after_s(headers, datetime.now(UTC)),
        overflows=overflows,
        secret=secret,
    )


def _error_fields(error: Exception) -> dict[str, Any]:
    fields = {name: getattr(error, name, None) for name in ("type", "code", "param")}
    return {"message": str(error).split("\n", 1)[0], **fields}
