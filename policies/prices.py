"""The cost of model calls, computed from the token counts that the backend reports."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

CHARS_PER_TOKEN = 4
"""Characters per token in estimates. This suits English; code and most other languages have fewer
characters per token."""
_MILLION = 1_000_000
_MAX_COUNT = 1e15
"""Larger numbers, including infinity, are neither counts nor costs."""


@dataclass(frozen=True, slots=True)
class Price:
    """Prices in US dollars per million tokens."""

    input_per_mtok: float
    """Price of prompt tokens."""
    output_per_mtok: float
    """Price of completion tokens."""
    cached_per_mtok: float | None = None
    """Price of prompt tokens that are read from a cache. null: `input_per_mtok`."""
    cache_write_per_mtok: float | None = None
    """Price of prompt tokens that are written to a cache. null: `input_per_mtok`."""
    reasoning_per_mtok: float | None = None
    """Price of reasoning tokens. null: `output_per_mtok`."""


Tariff = tuple[tuple[int, Price], ...]
"""The prices of one model, each with the prompt size in tokens above which it applies, in ascending
order."""


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """The token counts of a usage report."""

    prompt: int = 0
    """All prompt tokens, including tokens that are read from or written to a cache."""
    completion: int = 0
    cached: int = 0
    cache_written: int = 0
    reasoning: int = 0
    reported_usd: float | None = None
    """The cost, if the backend reports it, as OpenRouter does."""

    @property
    def total(self) -> int:
        return self.prompt + self.completion


def parse_usage(usage: Mapping[str, Any]) -> TokenUsage:
    """Parse the `usage` of Chat Completions, Responses or Anthropic's API."""
    prompt_details = _first_details(usage, "prompt_tokens_details", "input_tokens_details")
    completion_details = _first_details(usage, "completion_tokens_details", "output_tokens_details")
    cached = _first_count(prompt_details, "cached_tokens") or _first_count(
        usage, "cache_read_input_tokens", "prompt_cache_hit_tokens"
    )
    written = _first_count(prompt_details, "cache_creation_tokens") or _first_count(
        usage, "cache_creation_input_tokens"
    )
    prompt = _first_count(usage, "prompt_tokens", "input_tokens")
    if "prompt_tokens" not in usage and not prompt_details:  # Anthropic leaves cached tokens out
        prompt += cached + written
    completion = _first_count(usage, "completion_tokens", "output_tokens")
    cached = min(cached, prompt)
    cost = usage.get("cost")
    return TokenUsage(
        prompt=prompt,
        completion=completion,
        cached=cached,
        cache_written=min(written, prompt - cached),
        reasoning=min(_first_count(completion_details, "reasoning_tokens"), completion),
        reported_usd=float(cost) if _is_amount(cost) else None,
    )


def cost_usd(tariff: Tariff | None, tokens: TokenUsage) -> float | None:
    """Return the cost of a model call: the cost that the backend reports, else the cost by the
    tariff; None if neither is known."""
    if tokens.reported_usd is not None:
        return tokens.reported_usd
    if not tariff:
        return None
    price = _price_for(tariff, tokens.prompt)
    uncached = tokens.prompt - tokens.cached - tokens.cache_written
    visible = tokens.completion - tokens.reasoning
    micro_usd = (
        uncached * price.input_per_mtok
        + tokens.cached * _or_default(price.cached_per_mtok, price.input_per_mtok)
        + tokens.cache_written * _or_default(price.cache_write_per_mtok, price.input_per_mtok)
        + visible * price.output_per_mtok
        + tokens.reasoning * _or_default(price.reasoning_per_mtok, price.output_per_mtok)
    )
    return micro_usd / _MILLION


def _price_for(tariff: Tariff, prompt_tokens: int) -> Price:
    applicable = tariff[0][1]
    for min_tokens, price in tariff:
        if prompt_tokens > min_tokens:
            applicable = price
    return applicable


def _or_default(price: float | None, default: float) -> float:
    return default if price is None else price


def _first_details(usage: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    for name in names:
        if isinstance(details := usage.get(name), Mapping):
            return details
    return {}


def _first_count(usage: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if _is_amount(count := usage.get(name)):
            return int(count)
    return 0


def _is_amount(value: Any) -> TypeGuard[float]:
    is_number = type(value) in (int, float)  # not isinstance: bool is a subclass of int
    return is_number and 0 <= value < _MAX_COUNT


def estimate_prompt_tokens(messages: Any) -> int:
    """Return an estimate of a prompt's tokens for budgets, before the backend has counted them."""
    return _count_chars(messages) // CHARS_PER_TOKEN + 1


def _count_chars(value: Any) -> int:
    if isinstance(value, str):
        return 0 if value.startswith("data:") else len(value)
    if isinstance(value, Mapping):
        return sum(map(_count_chars, value.values()))
    return sum(map(_count_chars, value)) if isinstance(value, list | tuple) else 0
