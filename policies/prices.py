"""The cost of model calls, by the tokens that the backend has counted."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

CHARS_PER_TOKEN = 4
"""For estimates: usual for English, too few tokens for code and most other languages."""
_MILLION = 1_000_000
_BEYOND_ANY = 1e15
"""Larger numbers, infinity among them, are not counts."""


@dataclass(frozen=True, slots=True)
class Price:
    """US dollars for a million tokens."""

    input_per_mtok: float
    output_per_mtok: float
    cached_per_mtok: float | None = None
    """For prompt tokens from a cache; null: as the rest."""
    cache_write_per_mtok: float | None = None
    """For prompt tokens that were written to a cache; null: as the rest."""
    reasoning_per_mtok: float | None = None
    """For completion tokens that were thinking; null: as the rest."""


Tariff = tuple[tuple[int, Price], ...]
"""The prices of one model, each for prompts of more than so many tokens, shortest first."""


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """The token counts of a usage report, of any API."""

    prompt: int = 0
    """All of it."""
    completion: int = 0
    cached: int = 0
    cache_written: int = 0
    reasoning: int = 0
    reported_usd: float | None = None
    """The cost that the backend reports, as OpenRouter does."""

    @property
    def total(self) -> int:
        return self.prompt + self.completion


def parse_usage(usage: Mapping[str, Any]) -> TokenUsage:
    """Read a `usage` of Chat Completions, Responses or Anthropic's API."""
    inside = _details(usage, "prompt_tokens_details", "input_tokens_details")
    made = _details(usage, "completion_tokens_details", "output_tokens_details")
    cached = _first(inside, "cached_tokens") or _first(
        usage, "cache_read_input_tokens", "prompt_cache_hit_tokens"
    )
    written = _first(inside, "cache_creation_tokens") or _first(
        usage, "cache_creation_input_tokens"
    )
    prompt = _first(usage, "prompt_tokens", "input_tokens")
    if "prompt_tokens" not in usage and not inside:  # Anthropic counts what no cache had
        prompt += cached + written
    completion = _first(usage, "completion_tokens", "output_tokens")
    cached = min(cached, prompt)
    cost = usage.get("cost")
    return TokenUsage(
        prompt=prompt,
        completion=completion,
        cached=cached,
        cache_written=min(written, prompt - cached),
        reasoning=min(_first(made, "reasoning_tokens"), completion),
        reported_usd=float(cost) if _is_amount(cost) else None,
    )


def cost_usd(tariff: Tariff | None, tokens: TokenUsage) -> float | None:
    """Return the cost of a call: the backend's report, else by the tariff; None if neither is
    known."""
    if tokens.reported_usd is not None:
        return tokens.reported_usd
    if not tariff:
        return None
    price = _price(tariff, tokens.prompt)
    fresh = tokens.prompt - tokens.cached - tokens.cache_written
    said = tokens.completion - tokens.reasoning
    micro_usd = (
        fresh * price.input_per_mtok
        + tokens.cached * _or(price.cached_per_mtok, price.input_per_mtok)
        + tokens.cache_written * _or(price.cache_write_per_mtok, price.input_per_mtok)
        + said * price.output_per_mtok
        + tokens.reasoning * _or(price.reasoning_per_mtok, price.output_per_mtok)
    )
    return micro_usd / _MILLION


def _price(tariff: Tariff, prompt_tokens: int) -> Price:
    found = tariff[0][1]
    for more_than, price in tariff:
        if prompt_tokens > more_than:
            found = price
    return found


def _or(price: float | None, usual: float) -> float:
    return usual if price is None else price


def _details(usage: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    for name in names:
        if isinstance(found := usage.get(name), Mapping):
            return found
    return {}


def _first(usage: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if _is_amount(found := usage.get(name)):
            return int(found)
    return 0


def _is_amount(value: Any) -> TypeGuard[float]:
    is_number = type(value) in (int, float)  # and not bool, which is an int too
    return is_number and 0 <= value < _BEYOND_ANY


def estimate_prompt_tokens(messages: Any) -> int:
    """Return an estimate of a prompt's tokens, before the backend has counted them."""
    return _chars(messages) // CHARS_PER_TOKEN + 1


def _chars(value: Any) -> int:
    if isinstance(value, str):
        return 0 if value.startswith("data:") else len(value)
    if isinstance(value, Mapping):
        return sum(_chars(each) for each in value.values())
    return sum(_chars(each) for each in value) if isinstance(value, list | tuple) else 0
