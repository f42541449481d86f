"""Retries calls of a model after failures that may pass."""

import asyncio
import copy
import logging
import random
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from proxy.agent.events import CallFailed, OnDelta
from proxy.agent.model import (
    Completion,
    Credentials,
    Model,
    StopRetryingError,
    Upstream,
    UpstreamResponse,
)
from proxy.errors import BackendError, ContextOverflowError, ToolsRefusedError

_LOG = logging.getLogger(__name__)
_PASSING_STATUSES = frozenset({408, 409, 429, *range(500, 600)})
"""The statuses that OpenAI's SDKs retry."""


class RetryingModel:
    """Asks a model up to `attempts` times, with exponential backoff and full jitter.

    A `Retry-After` is waited for; if it is longer than `max_delay_s`, the error is raised at once.
    `on_delta` gets a `CallFailed` for each failed attempt. It raises `StopRetryingError` to end the
    attempts if the client has already got a part of the reply.
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

    async def complete(self, body: Mapping[str, Any], on_delta: OnDelta | None) -> Completion:
        """See Model."""
        attempt = 1
        while True:
            try:
                return await self._model.complete(body, on_delta)
            except BackendError as error:
                if attempt > 1:  # a client's retries would multiply ours
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
                    except StopRetryingError:
                        raise error from None
            await self._sleep(delay_s)
            attempt += 1

    async def relay(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> UpstreamResponse:
        """See Model. There are no retries: the client sees every failure and retries itself."""
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
        """See Model. There are no retries: an estimate will do."""
        return await self._model.count_tokens(model, text)

    @property
    def upstream(self) -> Upstream | None:
        """See Model."""
        return self._model.upstream

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
