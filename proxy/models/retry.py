"""Retries model calls after temporary failures."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from policies.headers import ResponseHeader
from proxy.agent.events import ModelCallFailed, OnDelta
from proxy.agent.model import Completion, Model, ModelWrapper, StopRetryingError
from proxy.errors import AnswerTooLargeError, BackendError, ContextOverflowError, ToolsRefusedError

_LOG = logging.getLogger(__name__)
_RETRYABLE_STATUSES = frozenset({408, 409, 429, *range(500, 600)})
"""The statuses that OpenAI's SDKs retry."""


class RetryingModel(ModelWrapper):
    """Calls a model up to `attempts` times, with exponential backoff and full jitter.

    Errors with other statuses than `_RETRYABLE_STATUSES` are raised without a retry, as are
    ContextOverflowError, ToolsRefusedError and AnswerTooLargeError. The delay is at least the
    backend's `Retry-After`; if `Retry-After` exceeds `max_delay_s`, there is no retry. Before each
    retry, `on_delta` gets a `ModelCallFailed`. `on_delta` can raise `StopRetryingError` to prevent
    the retry, for example because the client has already received a part of the completion. Relayed
    calls are not retried: the client sees every failure and can retry.
    """

    def __init__(
        self,
        model: Model,
        attempts: int = 5,
        base_delay_s: float = 0.5,
        max_delay_s: float = 30.0,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        super().__init__(model)
        self._attempts = attempts
        self._base_delay_s = base_delay_s
        self._max_delay_s = max_delay_s
        self._sleep = sleep

    async def complete(self, body: Mapping[str, Any], on_delta: OnDelta | None) -> Completion:
        attempt = 1
        while True:
            try:
                return await self._model.complete(body, on_delta)
            except BackendError as error:
                if attempt > 1:  # the client's retries must not multiply the proxy's retries
                    error.headers[ResponseHeader.SHOULD_RETRY] = "false"
                if attempt >= self._attempts or not self._is_retryable(error):
                    raise
                delay_s = self._delay_s(attempt, error)
                _LOG.warning(
                    "backend failed with %s (%s), attempt %d of %d, retry in %.1f s",
                    error.status,
                    error.code,
                    attempt,
                    self._attempts,
                    delay_s,
                )
                if on_delta is not None:
                    try:
                        await on_delta(ModelCallFailed(error.status, delay_s))
                    except StopRetryingError:
                        raise error from None
            await self._sleep(delay_s)
            attempt += 1

    def _is_retryable(self, error: BackendError) -> bool:
        is_final = isinstance(error, ContextOverflowError | ToolsRefusedError | AnswerTooLargeError)
        if is_final or error.status not in _RETRYABLE_STATUSES:
            return False
        return error.retry_after_s is None or error.retry_after_s <= self._max_delay_s

    def _delay_s(self, attempt: int, error: BackendError) -> float:
        ceiling_s = min(self._max_delay_s, self._base_delay_s * 2 ** (attempt - 1))
        return max(error.retry_after_s or 0.0, random.uniform(0.0, ceiling_s))
