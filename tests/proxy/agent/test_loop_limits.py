"""Limits: the run ends with one final-answer call and its stop reason."""

import anyio
import pytest

from policies.limits import Limits, StopReason
from policies.prompts import final_answer_request
from proxy.models.scripted import ScriptedModel, call, text_reply, tool_reply
from tests.proxy.agent.runs import FAILURE, SUBMIT, Run, bash, valid
from tests.proxy.agent.stuck_model import StuckModel

COUNTED = {"prompt_tokens": 600, "completion_tokens": 400, "total_tokens": 1000}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("limits", "stop"),
    [
        (Limits(max_turns=2), StopReason.MAX_TURNS),
        (Limits(max_total_tokens=2000), StopReason.TOKEN_BUDGET),
        (Limits(max_tool_output_chars=30), StopReason.TOOL_OUTPUT_BUDGET),
    ],
)
async def test_limit_ends_the_run_with_a_final_answer(
    limits: Limits, stop: StopReason, stream: bool
) -> None:
    step = {**tool_reply(bash("echo a")), "usage": COUNTED}
    model = ScriptedModel([step, step, text_reply("About 42.")])
    run = Run(model, limits=limits)
    result = await run.go(stream=stream)
    assert (result.answer, result.stop_reason, result.finish_reason) == ("About 42.", stop, "stop")
    assert run.events.answer == "About 42."
    assert [("tools" in request) for request in model.requests] == [True, True, False]
    last = model.requests[-1]
    assert last["messages"][-1] == {"role": "user", "content": final_answer_request(stop)}
    assert valid(last)


async def test_slow_model_gets_a_final_answer_request_at_the_time_limit() -> None:
    model = StuckModel([tool_reply(bash("ls")), text_reply("About 42.")], turns=1)
    run = Run(model, limits=Limits(max_run_seconds=0.2))
    with anyio.fail_after(5):
        result = await run.go()
    assert (result.answer, result.stop_reason) == ("About 42.", StopReason.WALL_TIME)


async def test_command_gets_no_more_time_than_the_run_has_left() -> None:
    run = Run(
        ScriptedModel([tool_reply(bash("echo a; sleep 100")), SUBMIT]),
        limits=Limits(max_run_seconds=50, command_timeout_s=120),
    )
    await run.go()
    assert "(timed out)" in run.events.observations[0]


async def test_every_call_of_the_last_allowed_turn_is_run_and_answered() -> None:
    model = ScriptedModel([tool_reply(bash("echo a"), bash("echo b")), text_reply("42")])
    await Run(model, limits=Limits(max_turns=1)).go()
    assert [m["content"] for m in model.requests[1]["messages"] if m["role"] == "tool"] == [
        "Exit code: 0\n[stdout]\na",
        "Exit code: 0\n[stdout]\nb",
    ]


async def test_answer_file_is_returned_if_the_final_reply_is_empty() -> None:
    steps = tool_reply(bash("echo 42 > output/answer.txt"))
    result = await Run(ScriptedModel([steps, text_reply("")]), limits=Limits(max_turns=1)).go()
    assert (result.answer, result.stop_reason) == ("42", StopReason.MAX_TURNS)


@pytest.mark.parametrize("stream", [False, True])
async def test_answer_file_is_returned_if_the_final_answer_call_fails(stream: bool) -> None:
    steps = tool_reply(bash("echo 42 > output/answer.txt"))
    model = ScriptedModel([steps, FAILURE, text_reply("too late")])
    result = await Run(model, limits=Limits(max_turns=1)).go(stream=stream)
    assert (result.answer, result.stop_reason) == ("42", StopReason.MAX_TURNS)


async def test_prose_beside_a_call_is_returned_if_there_is_no_other_answer() -> None:
    model = ScriptedModel([tool_reply(bash("ls"), content="I will count:"), text_reply("")])
    result = await Run(model, limits=Limits(max_turns=1)).go()
    assert (result.answer, result.stop_reason) == ("I will count:", StopReason.MAX_TURNS)


async def test_run_without_an_answer_has_finish_reason_length() -> None:
    model = ScriptedModel([tool_reply(bash("ls")), text_reply("")])
    result = await Run(model, limits=Limits(max_turns=1)).go()
    assert (result.answer, result.finish_reason) == ("", "length")


async def test_truncated_final_answer_has_finish_reason_length() -> None:
    truncated = {"content": "About for", "finish_reason": "length"}
    model = ScriptedModel([tool_reply(bash("ls")), truncated])
    result = await Run(model, limits=Limits(max_turns=1)).go()
    assert (result.answer, result.finish_reason) == ("About for", "length")


async def test_reasoning_of_the_final_answer_is_emitted() -> None:
    last = {"content": "42", "reasoning": "So, then."}
    for stream in (False, True):
        model = ScriptedModel([tool_reply(bash("ls")), last])
        run = Run(model, limits=Limits(max_turns=1))
        await run.go(stream=stream)
        assert run.events.reasoning == "So, then."


async def test_submit_in_the_last_turn_needs_no_final_call() -> None:
    model = ScriptedModel([tool_reply(call("submit", answer="42")), text_reply("never asked")])
    result = await Run(model, limits=Limits(max_turns=1)).go()
    assert (result.answer, result.stop_reason) == ("42", StopReason.SUBMITTED)
    assert len(model.requests) == 1
