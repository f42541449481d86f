"""What models cost: as the operator says, else as litellm's table has it."""

import asyncio
from collections.abc import Mapping

from policies.prices import Price, Tariff
from proxy.models.litellm_prices import read_tariffs


class Prices:
    """Looks models up; the table is read once, and only where somebody must know."""

    def __init__(self, own: Mapping[str, Price] | None = None) -> None:
        self._own: dict[str, Tariff] = {name: ((0, price),) for name, price in (own or {}).items()}
        self._table: dict[str, Tariff] | None = None
        self._reading = asyncio.Lock()

    def own(self, model: str) -> Tariff | None:
        """What the operator says."""
        return self._own.get(model)

    async def find(self, model: str) -> Tariff | None:
        """That, else what the table says; None where neither knows."""
        if own := self._own.get(model):
            return own
        async with self._reading:
            if self._table is None:
                self._table = await asyncio.to_thread(read_tariffs)
        return self._table.get(model)
