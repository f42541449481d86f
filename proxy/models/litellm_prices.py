"""litellm's table of prices, read from its file: importing the package takes seconds."""

import importlib.util
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from policies.prices import Price, Tariff

_FILE = "model_prices_and_context_window_backup.json"
_MILLION = 1_000_000
_ABOVE = "input_cost_per_token_above_"


def read_tariffs() -> dict[str, Tariff]:
    """All models that have a price by the token, by their names, and by those with the provider
    before them."""
    found = importlib.util.find_spec("litellm")
    assert found  # a dependency of ours
    assert found.origin
    table = json.loads(Path(found.origin).with_name(_FILE).read_text(encoding="utf-8"))
    tariffs = {name: tariff for name, entry in table.items() if (tariff := _tariff(entry))}
    for name, tariff in list(tariffs.items()):
        tariffs.setdefault(f"{table[name].get('litellm_provider')}/{name}", tariff)
    return tariffs


def _tariff(entry: Mapping[str, Any]) -> Tariff | None:
    usual = _price(entry, "")
    if usual is None or entry.get("litellm_provider", "").startswith("one of"):  # the specimen
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
