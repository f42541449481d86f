"""The door to every provider that litellm knows."""

import asyncio
import copy
import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    aclosing,
    contextmanager,
    nullcontext,
)
from typing import Any

from proxy.agent.events import CallAccepted, OnDelta
from proxy.agent.model import Credentials, Relayed, Reply
from proxy.errors import BackendError
from proxy.models.assembly import Assembly, reply_of, reply_when_stopped
from proxy.models.backend_errors import cut_off, is_no_answer
from proxy.models.litellm_dialect import as_openai, call_arguments
from proxy.models.litellm_errors import translated
from proxy.models.litellm_stream import Chunks, Frames
from proxy.models.operator_proxies import exempt_in_environment
from proxy.models.relay import ready_json, refused

_ENVIRONMENT = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # no download of prices at import
    "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS": "True",  # nor of Anthropic's headers at first use
    "LITELLM_MODE": "PRODUCTION",  # or it reads .env files into our environment
}


class _Library:
    """What was imported at first use, by the model or a copy of it."""

    litellm: Any = None
    openai: Any = None


class LiteLLMModel:
    """Models by their litellm names, such as "anthropic/claude-sonnet-4-5".

    Without `api_key` and `api_base` litellm takes them from the provider's environment variables.
    It keeps its connections in one place per process: closing one door closes them for all. Proxies
    it takes from the environment, but not for this machine and an `api_base` in its network.
    """

    passage = None

    def __init__(
        self,
        names: Sequence[str],
        *,
        timeout_s: float,
        api_key: str | None = None,
        api_base: str | None = None,
    ) -> None:
        self._names = tuple(names)
        self._timeout_s = timeout_s
        self._api_key = api_key
        self._api_base = api_base
        self._library = _Library()

    async def complete(self, body: Mapping[str, Any], on_delta: OnDelta | None) -> Reply:
        """See Model."""
        if on_delta is None:
            return reply_of(await self._whole(body))
        options = {**(body.get("stream_options") or {}), "include_usage": True}
        assembly = Assembly()
        chunks = await self._streamed({**body, "stream": True, "stream_options": options})
        is_accepted = False
        async with aclosing(chunks):
            with reply_when_stopped(assembly.reply):
                async for chunk in chunks:
                    if not is_accepted:  # some providers are asked only when the first chunk is
                        is_accepted = True
                        await on_delta(CallAccepted())
                    for delta in assembly.add(chunk):
                        await on_delta(delta)
        if assembly.finish_reason is None:
            raise cut_off()
        return assembly.reply()

    async def relay(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Relayed:
        """See Model. No header is passed on: litellm makes a request of its own."""
        try:
            if not body.get("stream"):
                return ready_json(await self._whole(body))
            return await self._relay_stream(await self._streamed(body))
        except BackendError as error:
            if is_no_answer(error):
                raise
            return refused(error)

    def for_client(self, credentials: Credentials) -> "LiteLLMModel":
        """See Model."""
        other = copy.copy(self)
        other._api_key = credentials.key  # noqa: SLF001 - one of its own kind
        return other

    def with_timeout(self, timeout_s: float) -> "LiteLLMModel":
        """See Model."""
        other = copy.copy(self)
        other._timeout_s = timeout_s  # noqa: SLF001 - one of its own kind
        return other

    async def count_tokens(self, model: str, text: str) -> int | None:
        """See Model. By OpenAI's tokenizers, which litellm has with it, for every provider."""
        await self._import_litellm()
        bare = model.rpartition("/")[2]
        count: int = await asyncio.to_thread(self._library.litellm.token_counter, bare, text=text)
        return count

    def keep_warm(self) -> AbstractAsyncContextManager[None]:
        """See Model. litellm keeps its own connections for two minutes."""
        return nullcontext()

    async def models(self) -> list[dict[str, Any]]:
        """See Model. Those it was configured with, and, once litellm was needed, their contexts by
        its table."""
        return [
            {
                "id": name,
                "object": "model",
                "created": 0,
                "owned_by": name.split("/")[0],
                **self._size_of(name),
            }
            for name in self._names
        ]

    async def aclose(self) -> None:
        """See Model."""
        litellm = self._library.litellm
        if litellm is not None:
            await litellm.close_litellm_async_clients()
            litellm.in_memory_llm_clients_cache.flush_cache()  # closed ones stay in it

    async def _relay_stream(self, chunks: Chunks) -> Relayed:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(chunks.aclose)
            # Some providers are asked only now; before, a refusal's status is not known.
            first = await anext(chunks, None)
            stack.pop_all()
        return Relayed(200, {"content-type": "text/event-stream"}, Frames(first, chunks))

    async def _whole(self, body: Mapping[str, Any]) -> dict[str, Any]:
        name = self._name_of(body)
        answer = await self._ask(name, body)
        return as_openai(answer.model_dump(exclude_none=True), openai_like=self._like_openai(name))

    async def _streamed(self, body: Mapping[str, Any]) -> Chunks:
        name = self._name_of(body)
        stream = await self._ask(name, body)
        return Chunks(stream, self._like_openai(name), self._translating)

    async def _ask(self, name: str, body: Mapping[str, Any]) -> Any:
        await self._import_litellm()
        with self._translating():
            return await self._library.litellm.acompletion(
                **call_arguments(body),
                model=name,
                api_key=self._api_key,
                api_base=self._api_base,
                timeout=self._timeout_s,
                num_retries=0,
                max_retries=0,
                # litellm 1.106 imports `mcp`, which it does not require, for any call with tools.
                _skip_mcp_handler=True,
            )

    def _name_of(self, body: Mapping[str, Any]) -> str:
        """Only configured names: another could take a key from our environment to its provider."""
        name = body.get("model") or self._names[0]
        if name not in self._names:
            raise BackendError(
                f"the model {name!r} does not exist",
                status=404,
                type="invalid_request_error",
                code="model_not_found",
                param="model",
            )
        return str(name)

    def _size_of(self, name: str) -> dict[str, int]:
        """As vLLM lists it, where the table has it."""
        if self._library.litellm is None:
            return {}
        table = self._library.litellm.model_cost
        known = table.get(name) or table.get(name.partition("/")[2]) or {}
        tokens = known.get("max_input_tokens")
        return {"max_model_len": tokens} if isinstance(tokens, int) else {}

    def _like_openai(self, name: str) -> bool:
        provider = self._library.litellm.get_llm_provider(model=name, api_base=self._api_base)[1]
        return provider == "openai" or provider in self._library.litellm.openai_compatible_providers

    @contextmanager
    def _translating(self) -> Iterator[None]:
        try:
            yield
        except self._library.openai.APIError as error:  # litellm has no base class of its own
            overflows = isinstance(error, self._library.litellm.ContextWindowExceededError)
            raise translated(error, overflows=overflows, secret=self._api_key) from error

    async def _import_litellm(self) -> None:
        """At first use and in a thread: it takes seconds. Python's import lock makes it once."""
        if self._library.litellm is None:
            self._library.openai = await asyncio.to_thread(importlib.import_module, "openai")
            self._library.litellm = await asyncio.to_thread(_imported)
            exempt_in_environment(self._api_base)


def _imported() -> Any:
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    os.environ["AIOHTTP_TRUST_ENV"] = "False"  # or it reads a netrc file; proxies it finds without
    litellm: Any = importlib.import_module("litellm")
    litellm.disable_hf_tokenizer_download = True
    litellm.suppress_debug_info = True  # it prints advice to stdout on every error
    return litellm
