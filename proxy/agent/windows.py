"""How much each model's context takes: configured, listed by its server, learnt from refusals."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from policies.context import ContextSizes
from proxy.agent.model import Model
from proxy.errors import BackendError

LISTED_AS = ("max_model_len", "context_length", "context_window", "max_context_length")
"""By vLLM and SGLang; OpenRouter; Groq; Mistral."""
ASK_S = 5.0
"""How long a server may take to list its models: a run waits for it once."""
HOLDS_S = 600.0
"""After so long the server is asked again: another may have taken its place."""


class Windows:
    """Of all models behind one door."""

    def __init__(self, configured: int | None = None) -> None:
        self._configured = configured
        self._known: dict[str, int] = {}
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
        return self._known.get(name)

    def refused(self, name: str, sizes: ContextSizes) -> None:
        """A prompt was refused as too long, in words that may have told sizes."""
        if sizes.window is not None:
            self._known[name] = sizes.window

    def taken(self, name: str, tokens: int) -> None:
        """Prompt and answer have had so many tokens: a window said to be smaller is none."""
        if tokens > self._known.get(name, tokens):
            del self._known[name]

    def _is_fresh(self) -> bool:
        return self._asked is not None and time.monotonic() - self._asked < HOLDS_S

    async def _ask(self, model: Model) -> None:
        try:
            async with asyncio.timeout(ASK_S):
                listed = await model.models()
        except (BackendError, TimeoutError):
            return
        finally:
            self._asked = time.monotonic()
        for each in listed:
            if tokens := _listed(each):
                self._known[str(each.get("id"))] = tokens


class Window:
    """That of one model."""

    def __init__(self, windows: Windows, model: Model, name: str) -> None:
        self._windows = windows
        self._model = model
        self._name = name

    async def tokens(self) -> int | None:
        """See `Windows.of`."""
        return await self._windows.of(self._model, self._name)

    def refused(self, sizes: ContextSizes) -> None:
        """See `Windows.refused`."""
        self._windows.refused(self._name, sizes)

    def taken(self, tokens: int) -> None:
        """See `Windows.taken`."""
        self._windows.taken(self._name, tokens)


def _listed(entry: Mapping[str, Any]) -> int | None:
    found = (entry.get(field) for field in LISTED_AS)
    sizes = (each for each in found if isinstance(each, int) and not isinstance(each, bool))
    return next((each for each in sizes if each > 0), None)
