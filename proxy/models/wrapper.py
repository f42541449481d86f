"""The base of models that change how another model answers."""

import copy
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Self

from proxy.agent.model import Credentials, Model, Upstream, UpstreamResponse


class ModelWrapper:
    """Forwards all calls of a `Model` except `complete`, which subclasses add."""

    def __init__(self, model: Model) -> None:
        self._model = model

    async def relay(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> UpstreamResponse:
        return await self._model.relay(body, headers)

    def for_client(self, credentials: Credentials) -> Self:
        return self._wrapping(self._model.for_client(credentials))

    def with_timeout(self, timeout_s: float) -> Self:
        return self._wrapping(self._model.with_timeout(timeout_s))

    async def count_tokens(self, model: str, text: str) -> int | None:
        return await self._model.count_tokens(model, text)

    @property
    def upstream(self) -> Upstream | None:
        return self._model.upstream

    def keep_warm(self) -> AbstractAsyncContextManager[None]:
        return self._model.keep_warm()

    async def models(self) -> list[dict[str, Any]]:
        return await self._model.models()

    async def aclose(self) -> None:
        await self._model.aclose()

    def _wrapping(self, model: Model) -> Self:
        other = copy.copy(self)
        other._model = model  # noqa: SLF001 - an instance of the same class
        return other
