"""A streamed answer of litellm, for reading and for relaying."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from proxy.errors import BackendError
from proxy.models.litellm_dialect import as_openai


class Chunks:
    """The chunks of one answer, in OpenAI's words. Closing it early ends the provider's work."""

    def __init__(
        self,
        stream: Any,
        openai_like: bool,
        translating: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._stream = stream
        self._openai_like = openai_like
        self._translating = translating

    def __aiter__(self) -> "Chunks":
        return self

    async def __anext__(self) -> dict[str, Any]:
        with self._translating():
            chunk = await anext(self._stream)
        return as_openai(chunk.model_dump(exclude_none=True), openai_like=self._openai_like)

    async def aclose(self) -> None:
        """End it. Safe to call twice."""
        await self._stream.aclose()


class Frames:
    """The same as server-sent events. What fails on the way is told in a frame of its own."""

    def __init__(self, first: dict[str, Any] | None, chunks: Chunks) -> None:
        self._first = first
        self._chunks = chunks
        self._over = first is None
        self._said_done = False

    def __aiter__(self) -> "Frames":
        return self

    async def __anext__(self) -> bytes:
        if self._first is not None:
            first, self._first = self._first, None
            return _frame(first)
        if not self._over:
            try:
                return _frame(await anext(self._chunks))
            except StopAsyncIteration:
                self._over = True
            except BackendError as error:
                self._over = True
                return _frame(error.body())
        if self._said_done:
            raise StopAsyncIteration
        self._said_done = True
        return b"data: [DONE]\n\n"

    async def aclose(self) -> None:
        """End it. Safe to call twice."""
        await self._chunks.aclose()


def _frame(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"
