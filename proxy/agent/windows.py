"""How much each model's context takes: configured, listed by its server, learnt from refusals."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from policies.context import ContextSizes
from proxy.agent.model import Model
from proxy.errors import BackendError

LISTED_AS = ("max_model_len", "context_length", "context_window", "max_context_length")
"""By vLLM and SGLang; OpenRouter; Groq; Mistral. llama.cpp has it in `meta`."""
ASK_S = 5.0
"""How long a server may take to list its models: a run waits for it once."""
HOLDS_S = 600.0
"""After so long the server is asked again: another may have taken its place."""


class Windows:
    """Of all models behind one door."""

    def __init__(self, configured: int | None = None) -> None:
        self._configured = configured
        self._known: dict[str, int] = {}
        self._of_any: int | None = None
        """Of a server with one model that it gives to whatever name is asked for."""
        self._asked: float | None = None
        self._asking = asyncio.Lock()

    async def of(self, model: Model, name: str) -> int | None:
        """Tokens of prompt and answer together; None where nobody has told."""
        if self._configured is not None:
            return self._configured
        if name not in self._known and not self._is_fresh():
            async with self._asking:
                if not self._is_fresh():
                    await self._ask(model)
        return self._known.get(name, self._of_any)

    async def of_first_asked(self, model: Model, name: str) -> int | None:
        """The same for who should not wait: the server is asked only if it never was."""
        if self._asked is None:
            return await self.of(model, name)
        return self._configured or self._known.get(name, self._of_any)

    def listed(self, models: Sequence[Mapping[str, Any]]) -> None:
        """The server has listed its models."""
        self._asked = time.monotonic()
        for each in models:
            if tokens := _listed(each):
                self._known[str(each.get("id"))] = tokens
        self._of_any = _served(models[0]) if len(models) == 1 else None

    def known(self, name: str) -> int | None:
        """The same, if it is known by now."""
        return self._configured if self._configured is not None else self._known.get(name)

    def refused(self, name: str, sizes: ContextSizes) -> None:
        """A prompt was refused as too long, in words that may have told sizes."""
        if sizes.window is not None:
            self._known[name] = sizes.window

    def taken(self, name: str, tokens: int) -> None:
        """Prompt and answer have had so many tokens: a window said to be smaller is none."""
        if tokens > self._known.get(name, tokens):
            del self._known[name]
        elif name not in self._known and self._of_any is not None and tokens > self._of_any:
            self._of_any = None

    def _is_fresh(self) -> bool:
        return self._asked is not None and time.monotonic() - self._asked < HOLDS_S

    async def _ask(self, model: Model) -> None:
        try:
            async with asyncio.timeout(ASK_S):
                self.listed(await model.models())
        except (BackendError, TimeoutError):
            return
        finally:
            self._asked = time.monotonic()


class Window:
    """That of one model."""

    def __init__(self, windows: Windows, model: Model, name: str) -> None:
        self._windows = windows
        self._model = model
        self._name = name

    async def tokens(self) -> int | None:
        """See `Windows.of`."""
        return await self._windows.of(self._model, self._name)

    @property
    def known(self) -> int | None:
        """See `Windows.known`."""
        return self._windows.known(self._name)

    def refused(self, sizes: ContextSizes) -> None:
        """See `Windows.refused`."""
        self._windows.refused(self._name, sizes)

    def taken(self, tokens: int) -> None:
        """See `Windows.taken`."""
        self._windows.taken(self._name, tokens)


def _listed(entry: Mapping[str, Any]) -> int | None:
    found = (entry.get(field) for field in LISTED_AS)
    return next((each for each in found if _is_size(each)), None) or _served(entry)


def _served(entry: Mapping[str, Any]) -> int | None:
    """What llama.cpp gives to one request; what the model was trained for is another number."""
    meta = entry.get("meta")
    size = meta.get("n_ctx") if isinstance(meta, Mapping) else None
    return size if _is_size(size) else None


def _is_size(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
