"""The context window of each model: configured, listed by the model server, or learnt from
refusals."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard, TypeVar

from policies.context import ContextSizes
from proxy.agent.model import Model
from proxy.errors import BackendError

K = TypeVar("K")

WINDOW_FIELDS = ("max_model_len", "context_length", "context_window", "max_context_length")
"""The fields in which servers list a model's window: the first is that of vLLM and SGLang, the
second of OpenRouter, the third of Groq, the last of Mistral. llama.cpp has a field in `meta`
instead."""
LISTING_TIMEOUT_S = 5.0
"""Timeout of listing the server's models, in seconds."""
REFRESH_S = 600.0
"""Maximum age of a listing, in seconds. The server may have been replaced meanwhile."""
MAX_LEARNT = 4096
"""Maximum number of windows learnt from refusals, and of recorded usages. Clients can invent model
names, so both tables need a limit."""


class ContextWindows:
    """The context windows of all models of one backend, in tokens of prompt and answer together."""

    def __init__(self, configured_window: int | None = None) -> None:
        self._configured_window = configured_window
        self._listed_windows: dict[str, int] = {}
        """Windows that the server lists, by model."""
        self._windows_from_refusals: dict[tuple[str, str], int] = {}
        """Windows that the backend named when it refused requests, by owner and model."""
        self._max_used_tokens: dict[tuple[str, str], int] = {}
        """Most tokens of prompt and answer in one call since the last refusal, by owner and model:
        the window cannot be smaller."""
        self._default_window: int | None = None
        """Window of a server that answers any model name with its only model."""
        self._listed_at: float | None = None
        self._listing_lock = asyncio.Lock()

    async def get(self, model: Model, owner: str, model_name: str) -> int | None:
        """Return the window, or None if it is unknown. List the server's models if the window is
        unknown and the last listing is older than REFRESH_S."""
        if self.known_window(owner, model_name) is None and not self._is_listing_fresh():
            async with self._listing_lock:
                if not self._is_listing_fresh():
                    await self._list_models(model)
        return self.known_window(owner, model_name) or self._first_possible_window(
            owner, model_name, self._default_window
        )

    async def get_without_refresh(self, model: Model, owner: str, model_name: str) -> int | None:
        """Return the window, or None. List the server's models only if they were never listed
        before."""
        if self._listed_at is None:
            return await self.get(model, owner, model_name)
        return self.known_window(owner, model_name) or self._first_possible_window(
            owner, model_name, self._default_window
        )

    def record_listing(self, models: Sequence[Mapping[str, Any]]) -> None:
        """Record the models that the server lists. If a window has changed, forget the usage of
        earlier calls."""
        self._listed_at = time.monotonic()
        for entry in models:
            model_name = str(entry.get("id"))
            if (tokens := _listed_window(entry)) and tokens != self._listed_windows.get(model_name):
                self._listed_windows[model_name] = tokens
                self._max_used_tokens = {
                    key: n for key, n in self._max_used_tokens.items() if key[1] != model_name
                }
        default = _llama_cpp_window(models[0]) if len(models) == 1 else None
        if default != self._default_window:
            self._default_window = default
            self._max_used_tokens.clear()

    def known_window(self, owner: str, model_name: str) -> int | None:
        """Return the window if it is known without asking the server. A refusal takes precedence
        over the listing."""
        if self._configured_window is not None:
            return self._configured_window
        refused, listed = (
            self._windows_from_refusals.get((owner, model_name)),
            self._listed_windows.get(model_name),
        )
        return self._first_possible_window(owner, model_name, refused, listed)

    def record_refusal(self, owner: str, model_name: str, sizes: ContextSizes) -> None:
        """Record the window that the backend names when it refuses a prompt as too long. The window
        applies to this owner only, because a client may be able to forge refusals. If an earlier
        call had more tokens than the window, the server is assumed to have been replaced since
        then, and the usage of earlier calls is forgotten."""
        if sizes.window is not None:
            _put_and_drop_oldest(self._windows_from_refusals, (owner, model_name), sizes.window)
            if sizes.window < self._max_used_tokens.get((owner, model_name), 0):
                del self._max_used_tokens[owner, model_name]

    def record_usage(self, owner: str, model_name: str, tokens: int) -> None:
        """Record the tokens of prompt and answer of a call. Smaller windows that were recorded
        before are then ignored."""
        if tokens > self._max_used_tokens.get((owner, model_name), 0):
            _put_and_drop_oldest(self._max_used_tokens, (owner, model_name), tokens)

    def _first_possible_window(
        self, owner: str, model_name: str, *windows: int | None
    ) -> int | None:
        """Return the first known window that no earlier call exceeded, or None."""
        used = self._max_used_tokens.get((owner, model_name), 0)
        for window in windows:
            if window and window >= used:
                return window
        return None

    def _is_listing_fresh(self) -> bool:
        return self._listed_at is not None and time.monotonic() - self._listed_at < REFRESH_S

    async def _list_models(self, model: Model) -> None:
        try:
            async with asyncio.timeout(LISTING_TIMEOUT_S):
                self.record_listing(await model.models())
        except (BackendError, TimeoutError):
            return
        finally:
            self._listed_at = time.monotonic()


def _put_and_drop_oldest(sizes: dict[K, int], key: K, tokens: int) -> None:
    """Add a size, and drop the oldest beyond MAX_LEARNT."""
    sizes.pop(key, None)
    sizes[key] = tokens
    if len(sizes) > MAX_LEARNT:
        sizes.pop(next(iter(sizes)))


class ContextWindow:
    """The context window of one model for one owner. See the methods of ContextWindows."""

    def __init__(self, windows: ContextWindows, model: Model, owner: str, model_name: str) -> None:
        self._windows = windows
        self._model = model
        self._owner = owner
        self._model_name = model_name

    async def tokens(self) -> int | None:
        return await self._windows.get(self._model, self._owner, self._model_name)

    @property
    def known_tokens(self) -> int | None:
        return self._windows.known_window(self._owner, self._model_name)

    def record_refusal(self, sizes: ContextSizes) -> None:
        self._windows.record_refusal(self._owner, self._model_name, sizes)

    def record_usage(self, tokens: int) -> None:
        self._windows.record_usage(self._owner, self._model_name, tokens)


def _listed_window(entry: Mapping[str, Any]) -> int | None:
    found = (entry.get(field) for field in WINDOW_FIELDS)
    return next((size for size in found if _is_size(size)), None) or _llama_cpp_window(entry)


def _llama_cpp_window(entry: Mapping[str, Any]) -> int | None:
    """Return the window that llama.cpp gives to one request, which may be smaller than the size
    that the model was trained for."""
    meta = entry.get("meta")
    size = meta.get("n_ctx") if isinstance(meta, Mapping) else None
    return size if _is_size(size) else None


def _is_size(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
