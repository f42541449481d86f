"""Small requests to a small model, plain and through the agent loop: the loop does no harm."""

import pytest

from tests.engines.conftest import Served
from tests.engines.engine import Body
from tests.engines.measured_requests import TEMPERATURE, MeasuredAnswer, ask, request
from tests.engines.prompts import OURS, PROMPTS

pytestmark = pytest.mark.engine
SEEDS = range(5)
MAX_TOKENS = 100
MOST_GENERATED = 1.05 * MAX_TOKENS
ATTEMPTS = 10


def body(prompt: str, seed: int) -> Body:
    return request(prompt, seed=seed, max_tokens=MAX_TOKENS, temperature=TEMPERATURE)


@pytest.mark.parametrize("prompt", PROMPTS)
async def test_answer_contains_no_text_of_the_proxy_and_reports_no_more_tokens_than_were_sampled(
    prompt: str, served: Served
) -> None:
    answer = await ask(served.url, served.server, body(prompt, 0))
    assert (answer.status, bool(answer.text)) == (200, True), answer.body
    assert answer.finish_reason in {"stop", "length"}
    assert not OURS.search(answer.text)
    assert answer.usage.completion <= answer.counted.completion


@pytest.mark.alone
async def test_proxied_answers_without_tool_calls_cost_at_most_a_tenth_more_tokens_than_direct_ones(
    served: Served,
) -> None:
    asks = [body(prompt, seed) for prompt in PROMPTS for seed in SEEDS]
    plain = [await ask(served.server.url, served.server, each) for each in asks]
    proxied = [await ask_again_if_cut_late(served, each) for each in asks]
    without_tools = [n for n, each in enumerate(proxied) if not each.steps]
    assert generated(proxied, without_tools) <= 1.1 * generated(plain, without_tools)
    too_long = [n for n in without_tools if proxied[n].counted.completion > MOST_GENERATED]
    assert [(asks[n], proxied[n]) for n in too_long] == []


async def ask_again_if_cut_late(served: Served, asked: Body) -> MeasuredAnswer:
    """Send a request until the engine notices the cut in time, but at most `ATTEMPTS` times: on a
    busy machine an engine can notice it late."""
    for _ in range(ATTEMPTS):
        answer = await ask(served.url, served.server, asked)
        if answer.steps or answer.counted.completion <= MOST_GENERATED:
            break
    return answer


def generated(answers: list[MeasuredAnswer], which: list[int]) -> int:
    return sum(answers[n].counted.completion for n in which)
