"""The context window of each model: configured, listed by its server, or learnt from refusals."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard, TypeVar

from policies.context import ContextSizes
from proxy.agent.model import Model
from proxy.errors import BackendError

K = TypeVar("K")

LISTED_AS = ("max_model_len", "context_length", "context_window", "max_context_length")
"""The field of vLLM and SGLang; OpenRouter; Groq; Mistral. llama.cpp has it in `meta`."""
ASK_S = 5.0
"""How long a server may take to list its models: a run waits for it once."""
HOLDS_S = 600.0
"""After so long the server is asked again: another may have taken its place."""
MAX_LEARNT = 4096
"""The most names in each table: clients can make up names of models."""


class ContextWindows:
    """The windows of all models of one backend."""

    def __init__(self, configured: int | None = None) -> None:
        self._configured = configured
        self._known: dict[str, int] = {}
        """By model: as the server lists it."""
        self._refused: dict[tuple[str, str], int] = {}
        """By owner and model: as a refusal of the owner's request told it."""
        self._taken: dict[tuple[str, str], int] = {}
        """By owner and model: the most tokens of prompt and answer that a call of the owner's had
        since the last refusal: no window is smaller."""
        self._of_any: int | None = None
        """The window of a server that answers any name with its only model."""
        self._asked: float | None = None
        self._asking = asyncio.Lock()

    async def get(self, model: Model, owner: str, name: str) -> int | None:
        """Return the window, in tokens of prompt and answer together, or None if it is unknown.
        The server is asked unless the window is known or it was asked within HOLDS_S."""
        if self.known(owner, name) is None and not self._is_fresh():
            async with self._asking:
                if not self._is_fresh():
                    await self._ask(model)
        return self.known(owner, name) or self._not_outgrown(owner, name, self._of_any)

    async def get_without_refresh(self, model: Model, owner: str, name: str) -> int | None:
        """Return the window; ask the server only if it was never asked."""
        if self._asked is None:
            return await self.get(model, owner, name)
        return self.known(owner, name) or self._not_outgrown(owner, name, self._of_any)

    def record_listing(self, models: Sequence[Mapping[str, Any]]) -> None:
        """Note the models that the server has listed. If it lists another size than before, the
        sizes of earlier calls are forgotten."""
        self._asked = time.monotonic()
        for each in models:
            name = str(each.get("id"))
            if (tokens := _listed(each)) and tokens != self._known.get(name):
                self._known[name] = tokens
                self._taken = {key: n for key, n in self._taken.items() if key[1] != name}
        of_any = _served(models[0]) if len(models) == 1 else None
        if of_any != self._of_any:
            self._of_any = of_any
            self._taken.clear()

    def known(self, owner: str, name: str) -> int | None:
        """Return the window if it is known without asking the server. A refusal's size goes before
        the listed one."""
        if self._configured is not None:
            return self._configured
        refused = self._not_outgrown(owner, name, self._refused.get((owner, name)))
        return refused or self._not_outgrown(owner, name, self._known.get(name))

    def record_refusal(self, owner: str, name: str, sizes: ContextSizes) -> None:
        """Note the sizes in a refusal of a prompt that was too long. They hold for this owner
        alone: an owner that can word its refusals harms nobody else. If earlier calls had more
        tokens, another server has taken the place of theirs, and their sizes are forgotten."""
        if sizes.window is not None:
            _put(self._refused, (owner, name), sizes.window)
            if sizes.window < self._taken.get((owner, name), 0):
                del self._taken[owner, name]

    def record_usage(self, owner: str, name: str, tokens: int) -> None:
        """Note the tokens of prompt and answer of a call of this owner's: a smaller window is not
        believed."""
        if tokens > self._taken.get((owner, name), 0):
            _put(self._taken, (owner, name), tokens)

    def _not_outgrown(self, owner: str, name: str, window: int | None) -> int | None:
        taken = self._taken.get((owner, name), 0)
        return window if window is None or window >= taken else None

    def _is_fresh(self) -> bool:
        return self._asked is not None and time.monotonic() - self._asked < HOLDS_S

    async def _ask(self, model: Model) -> None:
        try:
            async with asyncio.timeout(ASK_S):
                self.record_listing(await model.models())
        except (BackendError, TimeoutError):
            return
        finally:
            self._asked = time.monotonic()


def _put(kept: dict[K, int], key: K, tokens: int) -> None:
    """Put a size in, and take the oldest out above MAX_LEARNT."""
    kept.pop(key, None)
    kept[key] = tokens
    if len(kept) > MAX_LEARNT:
        kept.pop(next(iter(kept)))


class ContextWindow:
    """The window of one model for one owner."""

    def __init__(self, windows: ContextWindows, model: Model, owner: str, name: str) -> None:
        self._windows = windows
        self._model = model
        self._owner = owner
        self._name = name

    async def tokens(self) -> int | None:
        """See `ContextWindows.get`."""
        return await self._windows.get(self._model, self._owner, self._name)

    @property
    def known(self) -> int | None:
        """See `Windows.known`."""
        return self._windows.known(self._owner, self._name)

    def record_refusal(self, sizes: ContextSizes) -> None:
        """See `Windows.refused`."""
        self._windows.record_refusal(self._owner, self._name, sizes)

    def record_usage(self, tokens: int) -> None:
        """See `Windows.taken`."""
        self._windows.record_usage(self._owner, self._name, tokens)


def _listed(entry: Mapping[str, Any]) -> int | None:
    found = (entry.get(field) for field in LISTED_AS)
    return next((each for each in found if _is_size(each)), None) or _served(entry)


def _served(entry: Mapping[str, Any]) -> int | None:
    """Return what llama.cpp gives to one request; the size the model was trained for differs."""
    meta = entry.get("meta")
    size = meta.get("n_ctx") if isinstance(meta, Mapping) else None
    return size if _is_size(size) else None


def _is_size(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
