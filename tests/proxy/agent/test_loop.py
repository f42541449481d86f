"""The agent loop without failures: model call, tool calls, observations, answer."""

import hashlib
import itertools
import json

import pytest

from policies.limits import StopReason
from policies.prompts import NUDGE, system_prompt
from proxy.agent.events import (
    AnswerDelta,
    FileProduced,
    ModelCallAccepted,
    Narration,
    ReasoningDelta,
    RunFinished,
    RunStarted,
    ToolCallFinished,
    ToolCallStarted,
    ToolOutput,
    TurnStarted,
)
from proxy.models.scripted import ScriptedModel, call, text_reply, tool_reply
from sandbox_runtime.tools import make_tools
from tests.proxy.agent.runs import LOOKUP, SUBMIT, USER, Run, SequentialModel, answered, bash, valid


async def test_submit_ends_the_run_with_its_answer() -> None:
    model = ScriptedModel([SUBMIT, text_reply("never asked for")])
    result = await Run(model).go()
    assert (result.answer, result.stop_reason, result.finish_reason) == (
        "42",
        StopReason.SUBMITTED,
        "stop",
    )
    assert len(model.requests) == 1


def prompt_hash(model: ScriptedModel) -> str:
    """Return the SHA-256 of the system prompt."""
    return hashlib.sha256(model.requests[0]["messages"][0]["content"].encode()).hexdigest()


async def test_events_of_a_run_are_in_order() -> None:
    steps = tool_reply(bash("echo 1 > output/a.csv; echo done"), content="Counting.")
    submit = tool_reply(call("submit", answer="See /testbed/output/a.csv.\n"))
    model = ScriptedModel([{**steps, "reasoning": "Hm."}, submit])
    run = Run(model)
    await run.go()
    assert run.events == [
        RunStarted("r1", prompt_hash(model)),
        TurnStarted(1),
        ModelCallAccepted(),
        ReasoningDelta("Hm."),
        Narration("Counting."),
        ToolCallStarted(
            1, "call_0_0", "execute_bash", {"command": "echo 1 > output/a.csv; echo done"}
        ),
        ToolOutput(1, "stdout", "done\n"),
        ToolCallFinished(
            step=1,
            call_id="call_0_0",
            name="execute_bash",
            observation="Exit code: 0\n[stdout]\ndone",
            exit_code=0,
            output_lines=1,
            duration_s=0.0,
        ),
        TurnStarted(2),
        ToolCallStarted(2, "call_1_0", "submit", {"answer": "See /testbed/output/a.csv.\n"}),
        ToolCallFinished(
            step=2,
            call_id="call_1_0",
            name="submit",
            observation="Submitted.",
            exit_code=None,
            output_lines=None,
            duration_s=0.0,
        ),
        AnswerDelta("See [a.csv](https://files.test/a.csv).\n"),
        FileProduced("cfile_1", "/testbed/output/a.csv", 2),
        RunFinished(StopReason.SUBMITTED, {}),
    ]


async def test_several_calls_of_one_turn_run_in_order_and_are_all_answered() -> None:
    turn = tool_reply(bash("echo one > a"), bash("cat a; echo two >> a"), bash("cat a"))
    model = ScriptedModel([turn, SUBMIT])
    await Run(model).go()
    assert model.requests[1]["messages"][-3:] == [
        {"role": "tool", "tool_call_id": "call_0_0", "content": "Exit code: 0\n(no output)"},
        {"role": "tool", "tool_call_id": "call_0_1", "content": "Exit code: 0\n[stdout]\none"},
        {"role": "tool", "tool_call_id": "call_0_2", "content": "Exit code: 0\n[stdout]\none\ntwo"},
    ]


async def test_calls_after_submit_are_not_run() -> None:
    run = Run(ScriptedModel([tool_reply(call("submit", answer="42"), bash("echo x > output/x"))]))
    result = await run.go()
    assert (result.answer, list(result.artifacts)) == ("42", [])


async def test_model_message_is_sent_back_with_all_its_fields() -> None:
    message = {
        "role": "assistant",
        "content": "Counting.",
        "reasoning": "Hm.",
        "reasoning_content": "Hm.",
        "thinking_blocks": [{"type": "thinking", "signature": "abc"}],
        "provider_specific_fields": {"index": 0},
        "refusal": None,
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "execute_bash", "arguments": '{ "command" :"ls" }'},
                "extra_content": {"google": {"thought_signature": "xyz"}},
            }
        ],
    }
    model = ScriptedModel([{"message": message}, SUBMIT])
    await Run(model).go()
    assert json.dumps(model.requests[1]["messages"][-2]) == json.dumps(message)


@pytest.mark.parametrize("stream", [False, True])
async def test_each_request_of_a_run_extends_the_messages_of_the_previous_one_with_equal_tools(
    stream: bool,
) -> None:
    model = ScriptedModel(
        [
            tool_reply(
                bash("ls"),
                bash("false"),
                content="Looking.",
            ),
            tool_reply({"name": "execute_bash", "arguments": '{"broken'}),
            text_reply("Let me think:"),
            text_reply('<tool_call>{"name": "execute_bash", "command": "pwd"}</tool_call>'),
            tool_reply(call("nonsense")),
            SUBMIT,
            text_reply('{"n": 42}'),
        ]
    )
    await Run(model).go(
        stream=stream,
        client_tools=[LOOKUP],
        final={"response_format": {"type": "json_object"}},
    )
    requests = model.requests
    assert len(requests) == 7
    for earlier, later in itertools.pairwise(requests):
        before = [json.dumps(message) for message in earlier["messages"]]
        after = [json.dumps(message) for message in later["messages"]]
        assert after[: len(before)] == before
        assert len(after) > len(before)
    assert all(valid(request) for request in requests)
    tools = [*(tool.schema for tool in make_tools()), LOOKUP]
    assert [json.dumps(request["tools"]) for request in requests[:-1]] == [json.dumps(tools)] * 6
    names = [tool["function"]["name"] for tool in tools]
    assert names == ["str_replace_editor", "execute_bash", "submit", "lookup"]


async def test_system_prompt_precedes_that_of_the_client() -> None:
    model = ScriptedModel([text_reply("Ahoy.")])
    run = Run(model)
    await run.go(messages=[{"role": "system", "content": "Be a pirate."}, USER])
    prompt = system_prompt(run.profile)
    assert model.requests[0]["messages"] == [
        {"role": "system", "content": f"{prompt}\n\nBe a pirate."},
        USER,
    ]


async def test_final_prose_is_the_answer() -> None:
    model = ScriptedModel([text_reply("\nThere are 42.\n")])
    run = Run(model)
    result = await run.go()
    assert (result.answer, result.stop_reason) == ("There are 42.", StopReason.ANSWERED)
    assert run.events == [
        RunStarted("r1", prompt_hash(model)),
        TurnStarted(1),
        ModelCallAccepted(),
        AnswerDelta("There are 42."),
        RunFinished(StopReason.ANSWERED, {}),
    ]


async def test_prose_that_announces_a_call_is_the_answer_if_the_model_still_makes_no_call() -> None:
    model = ScriptedModel([text_reply("Let me check:"), text_reply("Let me check again:")])
    run = Run(model)
    result = await run.go()
    assert model.requests[1]["messages"][-1] == {"role": "user", "content": NUDGE}
    assert (result.answer, result.stop_reason) == ("Let me check:", StopReason.ANSWERED)
    assert len(model.requests) == 2


async def test_announcement_after_a_tool_call_leads_to_a_second_reminder() -> None:
    model = ScriptedModel(
        [
            text_reply("Let me check:"),
            tool_reply(bash("ls")),
            text_reply("Now let me count:"),
            text_reply("42"),
        ]
    )
    assert (await Run(model).go()).answer == "42"


async def test_truncated_first_answer_has_finish_reason_length() -> None:
    model = ScriptedModel([{"content": "There are for", "finish_reason": "length"}])
    result = await Run(model).go()
    assert (result.answer, result.finish_reason) == ("There are for", "length")
    assert len(model.requests) == 1


async def test_filtered_answer_has_finish_reason_content_filter() -> None:
    result = await answered([{"content": "There are", "finish_reason": "content_filter"}])
    assert (result.answer, result.finish_reason) == ("There are", "content_filter")


async def test_after_an_empty_first_reply_the_clients_request_is_sent_without_tools() -> None:
    model = SequentialModel([text_reply(""), text_reply("42")])
    result = await Run(model).go()
    assert result.answer == "42"
    assert model.requests[1] == {"model": "m", "messages": [USER]}


async def test_empty_answer_has_finish_reason_stop() -> None:
    result = await Run(SequentialModel([text_reply(""), text_reply("")])).go()
    assert (result.answer, result.finish_reason) == ("", "stop")


async def test_exit_code_124_of_a_program_is_not_reported_as_a_timeout() -> None:
    run = Run(ScriptedModel([tool_reply(bash("echo partly; exit 124")), SUBMIT]))
    await run.go()
    assert run.events.observations[0] == "Exit code: 124\n[stdout]\npartly"


async def test_timed_out_command_keeps_its_partial_output() -> None:
    run = Run(ScriptedModel([tool_reply(bash("echo partly; sleep 1000")), SUBMIT]))
    await run.go()
    assert "partly\n[timed out after 120 s" in run.events.observations[0]


async def test_observation_of_a_300_kilobyte_line_is_clipped() -> None:
    command = "head -c 300000 /dev/zero | tr '\\0' x"
    run = Run(ScriptedModel([tool_reply(bash(command)), SUBMIT]))
    await run.go()
    assert "left out" in run.events.observations[0]
    assert len(run.events.observations[0]) < 31_000


async def test_usage_is_summed_with_its_details() -> None:
    def usage(prompt: int, completion: int, cached: int) -> dict[str, object]:
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached, "audio_tokens": None},
            "completion_tokens_details": {"reasoning_tokens": 2},
            "is_byok": False,
        }

    result = await answered(
        [
            {**tool_reply(bash("ls"), bash("ls")), "usage": usage(100, 10, 0)},
            {**tool_reply(bash("ls")), "usage": usage(150, 20, 110)},
            {**SUBMIT, "usage": usage(200, 5, 170)},
        ]
    )
    assert result.usage == {
        "prompt_tokens": 450,
        "completion_tokens": 35,
        "total_tokens": 485,
        "prompt_tokens_details": {"cached_tokens": 280},
        "completion_tokens_details": {"reasoning_tokens": 6},
        "is_byok": False,
    }
    assert result.usage["is_byok"] is False
    stats = result.stats
    assert (stats.llm_calls, stats.tool_calls, stats.context_tokens) == (3, 4, 200)
    assert stats.env_tokens == (150 - 110) + (200 - 170)


async def test_usage_and_token_counts_are_empty_if_the_backend_reports_no_usage() -> None:
    result = await answered([tool_reply(bash("ls")), SUBMIT])
    assert (result.usage, result.stats.context_tokens, result.stats.env_tokens) == ({}, 0, 0)
