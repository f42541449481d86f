"""Asking again when a backend fails for the moment."""

import asyncio
import copy
import logging
import random
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from proxy.agent.events import CallFailed, OnDelta
from proxy.agent.model import Credentials, Model, NoMoreAttempts, Passage, Relayed, Reply
from proxy.errors import BackendError, ContextOverflowError, ToolsRefusedError

_LOG = logging.getLogger(__name__)
_PASSING_STATUSES = frozenset({408, 409, 429, *range(500, 600)})
"""Those that OpenAI's SDKs try again."""


class RetryingModel:
    """A model asked up to `attempts` times, with exponential backoff and full jitter between.

    A `Retry-After` is waited for, or the error raised at once where it is beyond `max_delay_s`.
    The listener hears of each attempt that failed (`CallFailed`) and ends them (`NoMoreAttempts`)
    where it has shown pieces of the reply that broke off.
    """

    def __init__(
        self,
        model: Model,
        attempts: int = 5,
        base_delay_s: float = 0.5,
        max_delay_s: float = 30.0,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._model = model
        self._attempts = attempts
        self._base_delay_s = base_delay_s
        self._max_delay_s = max_delay_s
        self._sleep = sleep

    async def complete(self, body: Mapping[str, Any], on_delta: OnDelta | None) -> Reply:
        """See Model."""
        attempt = 1
        while True:
            try:
                return await self._model.complete(body, on_delta)
            except BackendError as error:
                if attempt > 1:  # a client that tries again would multiply the attempts
                    error.headers["x-should-retry"] = "false"
                if attempt >= self._attempts or not self._may_pass(error):
                    raise
                delay_s = self._delay_s(attempt, error)
                _LOG.warning(
                    "backend failed with %s (%s), attempt %d of %d, next in %.1f s",
                    error.status,
                    error.code,
                    attempt,
                    self._attempts,
                    delay_s,
                )
                if on_delta is not None:
                    try:
                        await on_delta(CallFailed(error.status, delay_s))
                    except NoMoreAttempts:
                        raise error from None
            await self._sleep(delay_s)
            attempt += 1

    async def relay(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Relayed:
        """See Model. The client sees every failure and asks again itself."""
        return await self._model.relay(body, headers)

    def for_client(self, credentials: Credentials) -> "RetryingModel":
        """See Model."""
        other = copy.copy(self)
        other._model = self._model.for_client(credentials)  # noqa: SLF001 - one of its own kind
        return other

    def with_timeout(self, timeout_s: float) -> "RetryingModel":
        """See Model."""
        other = copy.copy(self)
        other._model = self._model.with_timeout(timeout_s)  # noqa: SLF001 - one of its own kind
        return other

    async def count_tokens(self, model: str, text: str) -> int | None:
        """See Model. Once: an estimate will do."""
        return await self._model.count_tokens(model, text)

    @property
    def passage(self) -> Passage | None:
        """See Model."""
        return self._model.passage

    def keep_warm(self) -> AbstractAsyncContextManager[None]:
        """See Model."""
        return self._model.keep_warm()

    async def models(self) -> list[dict[str, Any]]:
        """See Model."""
        return await self._model.models()

    async def aclose(self) -> None:
        """See Model."""
        await self._model.aclose()

    def _may_pass(self, error: BackendError) -> bool:
        is_final = isinstance(error, ContextOverflowError | ToolsRefusedError)
        if is_final or error.status not in _PASSING_STATUSES:
            return False
        return error.retry_after_s is None or error.retry_after_s <= self._max_delay_s

    def _delay_s(self, attempt: int, error: BackendError) -> float:
        ceiling_s = min(self._max_delay_s, self._base_delay_s * 2 ** (attempt - 1))
        return max(error.retry_after_s or 0.0, random.uniform(0.0, ceiling_s))
