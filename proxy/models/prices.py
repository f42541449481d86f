"""The prices of models: from the configuration, else from litellm's table.

The table is read from its file, because importing litellm takes seconds.
"""

import asyncio
import importlib.util
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from policies.prices import Price, Tariff

_TABLE_FILE = "model_prices_and_context_window_backup.json"
_MILLION = 1_000_000
_LONG_PROMPT_PREFIX = "input_cost_per_token_above_"


class Prices:
    """The prices of models. litellm's table is read once, for the first model that needs it."""

    def __init__(self, configured_prices: Mapping[str, Price] | None = None) -> None:
        prices = configured_prices or {}
        self._configured_tariffs: dict[str, Tariff] = {
            name: ((0, prices[name]),) for name in prices
        }
        self._table: dict[str, Tariff] | None = None
        self._read_lock = asyncio.Lock()

    def configured_tariff(self, model: str) -> Tariff | None:
        """Return the configured price of a model, or None."""
        return self._configured_tariffs.get(model)

    async def find(self, model: str) -> Tariff | None:
        """Return the configured price of a model, else the price in litellm's table, or None."""
        if tariff := self._configured_tariffs.get(model):
            return tariff
        async with self._read_lock:
            if self._table is None:
                self._table = await asyncio.to_thread(read_tariffs)
        return self._table.get(model)


def read_tariffs() -> dict[str, Tariff]:
    """Return litellm's tariffs of all models with a price per token, by name and by
    provider/name."""
    spec = importlib.util.find_spec("litellm")
    assert spec  # litellm is a dependency
    assert spec.origin
    table = json.loads(Path(spec.origin).with_name(_TABLE_FILE).read_text(encoding="utf-8"))
    tariffs = {name: tariff for name, entry in table.items() if (tariff := _tariff(entry))}
    for name, tariff in list(tariffs.items()):
        tariffs.setdefault(f"{table[name].get('litellm_provider')}/{name}", tariff)
    return tariffs


def _tariff(entry: Mapping[str, Any]) -> Tariff | None:
    base = _price(entry, "")
    if base is None or entry.get("litellm_provider", "").startswith("one of"):  # the sample entry
        return None
    return ((0, base), *sorted(_long_prompt_prices(entry), key=lambda tier: tier[0]))


def _long_prompt_prices(entry: Mapping[str, Any]) -> Iterator[tuple[int, Price]]:
    """Yield the prices for long prompts in an entry of litellm's table. Each item is a number of
    prompt tokens, and the price of requests whose prompt has more tokens than that."""
    for key in entry:
        size = key.removeprefix(_LONG_PROMPT_PREFIX).removesuffix("k_tokens")
        if not key.startswith(_LONG_PROMPT_PREFIX) or not size.isdecimal():
            continue
        if price := _price(entry, f"_above_{size}k_tokens"):
            yield int(size) * 1000, price


def _price(entry: Mapping[str, Any], suffix: str) -> Price | None:
    def per_mtok(*names: str) -> float | None:
        keys = [*(name + suffix for name in names), *names]
        costs = (entry.get(key) for key in keys)
        cost = next((cost for cost in costs if isinstance(cost, int | float)), None)
        return None if cost is None else cost * _MILLION

    input_cost, output_cost = per_mtok("input_cost_per_token"), per_mtok("output_cost_per_token")
    if input_cost is None or output_cost is None:
        return None
    return Price(
        input_per_mtok=input_cost,
        output_per_mtok=output_cost,
        cached_per_mtok=per_mtok("cache_read_input_token_cost", "input_cost_per_token_cache_hit"),
        cache_write_per_mtok=per_mtok("cache_creation_input_token_cost"),
        reasoning_per_mtok=per_mtok("output_cost_per_reasoning_token"),
    )
