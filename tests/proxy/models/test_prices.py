"""The prices of models, from the configuration or from litellm's table."""

import subprocess
import sys
from typing import Any

import pytest

from policies.prices import Price, Tariff, cost_usd, parse_usage
from proxy.models.litellm_model import load_litellm
from proxy.models.prices import Prices, read_tariffs

OWN = Price(1.0, 2.0)


@pytest.fixture(scope="module")
def tariffs() -> dict[str, Tariff]:
    return read_tariffs()


@pytest.fixture(scope="module")
def litellm() -> Any:
    return load_litellm()


async def test_configured_prices_take_precedence_over_the_price_table() -> None:
    prices = Prices({"gpt-4o": OWN})
    assert prices.configured_tariff("gpt-4o") == await prices.find("gpt-4o") == ((0, OWN),)
    assert prices.configured_tariff("gpt-4o-mini") is None
    assert await prices.find("gpt-4o-mini") is not None


async def test_price_of_a_model_is_found_with_and_without_its_provider() -> None:
    prices = Prices()
    assert await prices.find("openai/gpt-4o") == await prices.find("gpt-4o") is not None
    assert await prices.find("anthropic/gpt-4o") is None
    assert await prices.find("sample_spec") is None
    assert await prices.find("my-own-model") is None


def test_price_table_is_read_without_importing_litellm() -> None:
    program = (
        "import sys; from proxy.models.prices import read_tariffs;"
        "assert len(read_tariffs()) > 1000; assert 'litellm' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize(
    "model",
    ["gpt-4o", "anthropic/claude-sonnet-4-5", "gemini/gemini-2.5-pro", "deepseek/deepseek-chat"],
)
@pytest.mark.parametrize("prompt", [1000, 300_000])
@pytest.mark.parametrize("cached", [0, 600])
def test_cost_of_a_call_is_the_same_as_in_litellm(
    litellm: Any, tariffs: dict[str, Tariff], model: str, prompt: int, cached: int
) -> None:
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": 100,
        "total_tokens": prompt + 100,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": 40},
    }
    litellm_cost = sum(
        litellm.cost_calculator.cost_per_token(model=model, usage_object=litellm.Usage(**usage))
    )
    assert cost_usd(tariffs[model], parse_usage(usage)) == pytest.approx(litellm_cost)
