"""Looks up what models cost: in the configuration, else in litellm's table, which is read from its
file, since importing litellm takes seconds."""

import asyncio
import importlib.util
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from policies.prices import Price, Tariff

_FILE = "model_prices_and_context_window_backup.json"
_MILLION = 1_000_000
_ABOVE = "input_cost_per_token_above_"


class Prices:
    """The prices of models. litellm's table is read once, for the first model that needs it."""

    def __init__(self, own: Mapping[str, Price] | None = None) -> None:
        self._own: dict[str, Tariff] = {name: ((0, price),) for name, price in (own or {}).items()}
        self._table: dict[str, Tariff] | None = None
        self._reading = asyncio.Lock()

    def configured(self, model: str) -> Tariff | None:
        """Return the configured price of a model, or None."""
        return self._own.get(model)

    async def find(self, model: str) -> Tariff | None:
        """Return the configured price of a model, else that of litellm's table, or None."""
        if own := self._own.get(model):
            return own
        async with self._reading:
            if self._table is None:
                self._table = await asyncio.to_thread(read_tariffs)
        return self._table.get(model)


def read_tariffs() -> dict[str, Tariff]:
    """Return the tariffs of all models with a price by the token, by name and by provider/name."""
    found = importlib.util.find_spec("litellm")
    assert found  # litellm is a dependency
    assert found.origin
    table = json.loads(Path(found.origin).with_name(_FILE).read_text(encoding="utf-8"))
    tariffs = {name: tariff for name, entry in table.items() if (tariff := _tariff(entry))}
    for name, tariff in list(tariffs.items()):
        tariffs.setdefault(f"{table[name].get('litellm_provider')}/{name}", tariff)
    return tariffs


def _tariff(entry: Mapping[str, Any]) -> Tariff | None:
    usual = _price(entry, "")
    if usual is None or entry.get("litellm_provider", "").startswith("one of"):  # the sample entry
        return None
    return ((0, usual), *sorted(_above(entry), key=lambda each: each[0]))


def _above(entry: Mapping[str, Any]) -> Iterator[tuple[int, Price]]:
    for key in entry:
        size = key.removeprefix(_ABOVE).removesuffix("k_tokens")
        if not key.startswith(_ABOVE) or not size.isdecimal():
            continue
        if price := _price(entry, f"_above_{size}k_tokens"):
            yield int(size) * 1000, price


def _price(entry: Mapping[str, Any], suffix: str) -> Price | None:
    def of(*names: str) -> float | None:
        keys = [*(name + suffix for name in names), *names]
        costs = (entry.get(key) for key in keys)
        cost = next((each for each in costs if isinstance(each, int | float)), None)
        return None if cost is None else cost * _MILLION

    given, made = of("input_cost_per_token"), of("output_cost_per_token")
    if given is None or made is None:
        return None
    return Price(
        input_per_mtok=given,
        output_per_mtok=made,
        cached_per_mtok=of("cache_read_input_token_cost", "input_cost_per_token_cache_hit"),
        cache_write_per_mtok=of("cache_creation_input_token_cost"),
        reasoning_per_mtok=of("output_cost_per_reasoning_token"),
    )
