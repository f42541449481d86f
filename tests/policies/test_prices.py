"""Cost of model calls, by usage and prices."""

from typing import Any

import pytest

from policies.prices import Price, TokenUsage, cost_usd, estimate_prompt_tokens, parse_usage

PRICE = Price(1.0, 10.0, cached_per_mtok=0.1, cache_write_per_mtok=2.0, reasoning_per_mtok=20.0)
CHAT = {
    "prompt_tokens": 1000,
    "completion_tokens": 100,
    "prompt_tokens_details": {"cached_tokens": 600, "cache_creation_tokens": 100},
    "completion_tokens_details": {"reasoning_tokens": 40},
}
SAME = TokenUsage(prompt=1000, completion=100, cached=600, cache_written=100, reasoning=40)


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (CHAT, SAME),
        (
            {
                "input_tokens": 1000,
                "output_tokens": 100,
                "input_tokens_details": {"cached_tokens": 600, "cache_creation_tokens": 100},
                "output_tokens_details": {"reasoning_tokens": 40},
            },
            SAME,
        ),
        (
            {
                "input_tokens": 300,
                "cache_read_input_tokens": 600,
                "cache_creation_input_tokens": 100,
                "output_tokens": 100,
            },
            TokenUsage(prompt=1000, completion=100, cached=600, cache_written=100),
        ),
        (
            {"prompt_tokens": 1000, "completion_tokens": 1, "prompt_cache_hit_tokens": 600},
            TokenUsage(prompt=1000, completion=1, cached=600),
        ),
        ({"prompt_tokens": 10, "total_tokens": 10}, TokenUsage(prompt=10)),
        ({"cost": 0.25, "prompt_tokens": 3}, TokenUsage(prompt=3, reported_usd=0.25)),
        ({}, TokenUsage()),
        ({"prompt_tokens": "many", "completion_tokens": -5, "cost": True}, TokenUsage()),
        ({"prompt_tokens": float("inf"), "prompt_tokens_details": 7}, TokenUsage()),
        (
            {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 9}},
            TokenUsage(prompt=5, cached=5),
        ),
    ],
)
def test_usage_of_each_api_is_parsed(usage: dict[str, Any], expected: TokenUsage) -> None:
    assert parse_usage(usage) == expected


def test_cache_reads_and_cache_writes_and_reasoning_tokens_have_their_own_prices() -> None:
    micro_usd = 300 * 1 + 600 * 0.1 + 100 * 2 + 60 * 10 + 40 * 20
    assert cost_usd(((0, PRICE),), SAME) == pytest.approx(micro_usd / 1e6)


def test_tokens_without_their_own_price_cost_the_basic_price() -> None:
    assert cost_usd(((0, Price(1.0, 10.0)),), SAME) == pytest.approx(2000 / 1e6)


def test_price_of_zero_is_not_treated_as_a_missing_price() -> None:
    assert cost_usd(((0, Price(1.0, 10.0, cached_per_mtok=0.0)),), TokenUsage(5, 0, 5)) == 0


def test_price_depends_on_the_prompt_length() -> None:
    tariff = ((0, Price(1.0, 1.0)), (200, Price(2.0, 3.0)))
    assert cost_usd(tariff, TokenUsage(prompt=200, completion=10)) == pytest.approx(210 / 1e6)
    assert cost_usd(tariff, TokenUsage(prompt=201, completion=10)) == pytest.approx(432 / 1e6)


def test_cost_that_the_backend_reports_takes_precedence_over_prices() -> None:
    assert cost_usd(((0, PRICE),), TokenUsage(prompt=9, reported_usd=0.5)) == 0.5
    assert cost_usd(None, TokenUsage(prompt=9, reported_usd=0.5)) == 0.5


def test_cost_of_a_model_without_a_price_is_unknown() -> None:
    assert cost_usd(None, SAME) is None


def test_prompt_tokens_are_estimated_by_text_without_images() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 4000}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "x" * 400}, picture]}]
    assert 100 <= estimate_prompt_tokens(messages) <= 110
