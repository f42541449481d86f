"""How many tokens texts have, counted where the model's own tokenizer can be asked."""

import asyncio
import hashlib
from collections.abc import Iterable

from proxy.agent.model import Credentials, Model

COUNT_S = 2.0
"""How long a request waits for that; then estimates hold."""
MAX_COUNTED = 8
"""How many texts of one request are counted."""
_MAX_KNOWN = 1000


class TextLengths:
    """Counts each text once: a conversation is sent anew for each turn."""

    def __init__(self, model: Model, patience_s: float = COUNT_S) -> None:
        self._model = model
        self._patience_s = patience_s
        self._known: dict[tuple[str, bytes], int] = {}

    async def counted(
        self, model: str, texts: Iterable[str], credentials: Credentials | None = None
    ) -> dict[str, int]:
        """Their lengths for a model, as far as they can be known in time; the client's own
        `credentials` are used where it has some."""
        door = self._model.for_client(credentials) if credentials else self._model
        found: dict[str, int] = {}
        unknown: dict[str, tuple[str, bytes]] = {}
        for text in dict.fromkeys(texts):
            key = (model, hashlib.sha256(text.encode(errors="surrogatepass")).digest())
            if (count := self._known.get(key)) is None:
                unknown[text] = key
            else:
                found[text] = count
        try:
            async with asyncio.timeout(self._patience_s):
                for text in list(unknown)[:MAX_COUNTED]:
                    count = await door.count_tokens(model, text)
                    if count is not None:
                        found[text] = self._remember(unknown[text], count)
        except TimeoutError:
            pass  # an estimate is no worse than a client that waits
        return found

    def _remember(self, key: tuple[str, bytes], count: int) -> int:
        while len(self._known) >= _MAX_KNOWN:
            del self._known[next(iter(self._known))]
        self._known[key] = count
        return count
