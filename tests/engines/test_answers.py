"""Ten small requests to a small model, plain and through the loop: the loop does no harm."""

import pytest

from tests.engines.asking import TEMPERATURE, Asked, asked, request
from tests.engines.conftest import Served
from tests.engines.prompts import OURS, PROMPTS

pytestmark = pytest.mark.engine
SEEDS = range(5)
MAX_TOKENS = 100


def body(prompt: str, seed: int) -> dict[str, object]:
    return request(prompt, seed=seed, max_tokens=MAX_TOKENS, temperature=TEMPERATURE)


@pytest.mark.parametrize("prompt", PROMPTS)
async def test_an_answer_is_the_models_and_what_it_cost_is_told(
    prompt: str, served: Served
) -> None:
    answer = await asked(served.url, served.server, body(prompt, 0))
    assert (answer.status, bool(answer.text)) == (200, True), answer.body
    assert answer.finish_reason in {"stop", "length"}
    assert not OURS.search(answer.text)
    assert answer.usage.completion <= answer.counted.completion


async def test_no_tokens_are_spent_that_the_model_alone_would_not_spend(served: Served) -> None:
    asks = [body(prompt, seed) for prompt in PROMPTS for seed in SEEDS]
    plain = [await asked(served.server.url, served.server, each) for each in asks]
    through = [await asked(served.url, served.server, each) for each in asks]
    without_tools = [n for n, each in enumerate(through) if not each.steps]
    assert generated(through, without_tools) <= 1.1 * generated(plain, without_tools)
    assert all(through[n].counted.completion <= 1.05 * MAX_TOKENS for n in without_tools)


def generated(answers: list[Asked], which: list[int]) -> int:
    return sum(answers[n].counted.completion for n in which)
