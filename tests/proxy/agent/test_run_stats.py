"""Statistics of a run: usage, times and capabilities."""

from typing import Any

import pytest

from policies.limits import Limits
from proxy.agent.result import RunStats, Stopwatch, run_times
from proxy.models.scripted import ScriptedModel, call, text_reply, tool_reply
from tests.fakes.manual_clock import ManualClock
from tests.proxy.agent.runs import LOOKUP, SUBMIT, Run, answered, bash

SUM, LOOK, FETCH = bash("python3 -c 'print(2**64)'"), bash("ls"), bash("curl https://example.org")


def usage(prompt: int, completion: int, *, cached: int = 0, reasoning: int = 0) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }


async def test_turn_counts_once_for_each_capability_that_its_calls_use() -> None:
    result = await answered(
        [
            tool_reply(LOOK, LOOK, bash("cat a.txt")),
            tool_reply(LOOK, SUM, FETCH),
            tool_reply(bash("true")),
            tool_reply(call("str_replace_editor", command="view", path="/testbed")),
            SUBMIT,
        ]
    )
    assert (result.stats.turns, result.stats.capability_turns) == (
        5,
        {"external_resources": 1, "file_management": 3, "computation": 1},
    )


async def test_only_executed_calls_of_sandbox_tools_count_for_capabilities() -> None:
    renamed = {**LOOKUP, "function": {**LOOKUP["function"], "name": "execute_bash"}}
    client_call = await answered([tool_reply(FETCH), SUBMIT], client_tools=[renamed])
    sandbox_call = call("sandbox_execute_bash", command="ls")
    mixed = await answered([tool_reply(sandbox_call, FETCH)], client_tools=[renamed])
    after_submit = await answered([tool_reply(call("submit", answer="1"), FETCH)])
    beyond_limit = await answered([tool_reply(LOOK, FETCH), SUBMIT], max_tool_calls=1)
    broken = {"name": "execute_bash", "arguments": '{"command": "ls'}
    malformed = await answered([tool_reply(broken), SUBMIT])
    counted = [
        each.stats.capability_turns
        for each in (client_call, mixed, after_submit, beyond_limit, malformed)
    ]
    assert [(turns["external_resources"], turns["file_management"]) for turns in counted] == [
        (0, 0),
        (0, 1),
        (0, 0),
        (0, 1),
        (0, 0),
    ]


async def test_stats_sum_the_tokens_of_all_calls_but_the_trajectory_counts_each_token_once() -> (
    None
):
    result = await answered(
        [
            {**tool_reply(LOOK), "usage": usage(100, 10, reasoning=4)},
            {**tool_reply(LOOK), "usage": usage(150, 20, cached=110)},
            {**SUBMIT, "usage": usage(200, 5, cached=170, reasoning=1)},
        ],
        usage_scope="last_call",
    )
    stats = result.stats
    assert (stats.prompt_tokens, stats.completion_tokens) == (450, 35)
    assert (stats.cached_tokens, stats.reasoning_tokens) == (280, 5)
    assert stats.env_tokens == 40 + 30
    assert stats.trajectory_tokens == 200 + 5 == 100 + 35 + stats.env_tokens


async def test_run_without_tool_calls_has_no_env_tokens() -> None:
    result = await answered(
        [
            {**text_reply("42"), "usage": usage(100, 10)},
            {**text_reply('{"n": 42}'), "usage": usage(143, 10)},
        ],
        final={"response_format": {"type": "json_object"}},
    )
    stats = result.stats
    assert (stats.llm_calls, stats.tool_calls, stats.env_tokens) == (2, 0, 0)
    assert stats.trajectory_tokens == 143 + 10


async def test_final_answer_request_does_not_count_as_env_tokens() -> None:
    replies = [
        {**tool_reply(LOOK), "usage": usage(100, 10)},
        {**text_reply("42"), "usage": usage(200, 10)},
    ]
    result = await Run(ScriptedModel(replies), limits=Limits(max_turns=1)).go()
    assert 0 < result.stats.env_tokens < 90


async def test_final_answer_call_does_not_count_as_a_turn() -> None:
    run = Run(ScriptedModel([tool_reply(LOOK), text_reply("42")]), limits=Limits(max_turns=1))
    result = await run.go()
    assert (result.stats.turns, result.stats.llm_calls) == (1, 2)


async def test_run_without_tool_calls_counts_one_turn_and_no_capability() -> None:
    result = await answered([text_reply("42")])
    assert (result.stats.turns, set(result.stats.capability_turns.values())) == (1, {0})


def test_proxys_own_time_excludes_model_and_sandbox_time() -> None:
    stats = RunStats(**run_times(wall_s=2.0, model_s=1.25, sandbox_s=0.5))
    assert stats == RunStats(wall_ms=2000, model_ms=1250, sandbox_ms=500, own_ms=250)


@pytest.mark.parametrize("stream", [False, True])
async def test_wall_time_is_the_sum_of_proxy_time_and_model_time_and_sandbox_time(
    stream: bool,
) -> None:
    result = await answered([tool_reply(SUM), SUBMIT], stream=stream)
    stats = result.stats
    assert stats.wall_ms == stats.model_ms + stats.sandbox_ms + stats.own_ms


async def test_stopwatch_is_paused_during_wrapped_callbacks() -> None:
    clock = ManualClock()
    watch = Stopwatch(clock.time)

    async def work(seconds: float) -> None:
        clock.advance(seconds)

    with watch:
        clock.advance(2)
        await watch.pause_during(work)(5)
        clock.advance(1)
    clock.advance(10)
    assert watch.spent_s == 3


async def test_stopwatch_counts_the_time_of_blocks_that_raise() -> None:
    clock = ManualClock()
    watch = Stopwatch(clock.time)

    async def fail(seconds: float) -> None:
        clock.advance(seconds)
        raise TimeoutError

    with pytest.raises(TimeoutError), watch:
        await fail(4)
    with pytest.raises(TimeoutError):
        await watch.pause_during(fail)(1)
    assert watch.spent_s == 4 - 1
