"""Parameters of each model call of a run, and client tool calls."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from policies.limits import Limits, StopReason
from policies.prompts import NOT_RUN
from proxy.agent.events import OnDelta
from proxy.agent.model import Completion
from proxy.models.scripted import ScriptedModel, call, text_reply, tool_reply
from tests.proxy.agent.runs import LOOKUP, SUBMIT, Run, bash, valid


async def sent_params(**fields: Any) -> list[dict[str, Any]]:
    """Return the requests of a run with two turns and a final call, without their messages."""
    model = ScriptedModel([tool_reply(bash("ls")), tool_reply(bash("ls")), text_reply("42")])
    await Run(model, limits=Limits(max_turns=2)).go(**fields)
    return [
        {key: value for key, value in request.items() if key not in ("messages", "tools", "model")}
        for request in model.requests
    ]


async def test_request_parameters_are_sent_with_each_model_call() -> None:
    params = {"temperature": 0.7, "seed": 1, "chat_template_kwargs": {"thinking": True}}
    assert await sent_params(base=params) == [params] * 3


async def test_parameters_of_the_final_answer_are_sent_with_the_final_call_only() -> None:
    params = {"response_format": {"type": "json_object"}, "stop": ["\n"], "logit_bias": {"1": 1}}
    assert await sent_params(final=params) == [{}, {}, params]


async def test_logprobs_are_requested_in_every_model_call() -> None:
    params = {"logprobs": True, "top_logprobs": 2}
    assert await sent_params(final=params) == [params] * 3


async def test_client_max_tokens_is_raised_to_at_least_4096_in_each_model_call() -> None:
    assert await sent_params(token_limits={"max_tokens": 5}) == [{"max_tokens": 4096}] * 3
    assert await sent_params(token_limits={"max_tokens": 9000}) == [{"max_tokens": 9000}] * 3


async def test_forced_tool_choice_is_sent_with_the_first_turn_only() -> None:
    choice = {"type": "function", "function": {"name": "lookup"}}
    assert await sent_params(tool_choice=choice) == [{"tool_choice": choice}, {}, {}]


async def test_parallel_tool_calls_is_sent_with_the_tools() -> None:
    params = {"parallel_tool_calls": False}
    assert await sent_params(parallel_tool_calls=False) == [params, params, {}]


async def test_model_name_is_sent_in_every_call() -> None:
    model = ScriptedModel([tool_reply(bash("ls")), SUBMIT])
    await Run(model).go(model="qwen3")
    assert [request["model"] for request in model.requests] == ["qwen3", "qwen3"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reply", [SUBMIT, text_reply("There are 42.")])
async def test_answer_with_a_response_format_is_requested_in_a_call_without_tools(
    reply: dict[str, Any], stream: bool
) -> None:
    form = {"response_format": {"type": "json_object"}}
    model = ScriptedModel([reply, text_reply('{"n": 42}')])
    run = Run(model)
    result = await run.go(final=form, stream=stream)
    assert (result.answer, run.events.answer) == ('{"n": 42}', '{"n": 42}')
    first, last = model.requests
    assert ("tools" in first, "tools" in last) == (True, False)
    assert ("response_format" in first, last["response_format"]) == (False, form["response_format"])
    assert valid(last)


async def test_logprobs_of_the_answer_are_in_the_result() -> None:
    class WithLogprobs(ScriptedModel):
        async def complete(self, body: Mapping[str, Any], on_delta: OnDelta | None) -> Completion:
            reply = await super().complete(body, on_delta)
            return replace(reply, choice={"logprobs": {"content": [{"token": "42"}]}})

    result = await Run(WithLogprobs([SUBMIT, text_reply("42")])).go(final={"logprobs": True})
    assert result.choice["logprobs"] == {"content": [{"token": "42"}]}


# Client tools


async def test_client_tool_calls_are_returned_to_the_client() -> None:
    run = Run(ScriptedModel([tool_reply(call("lookup", key="x"), content="I will look.")]))
    result = await run.go(client_tools=[LOOKUP])
    assert (result.answer, result.stop_reason, result.finish_reason) == (
        "",
        StopReason.CLIENT_TOOL_CALLS,
        "tool_calls",
    )
    assert result.client_calls == [
        {
            "id": "call_r1_1",
            "type": "function",
            "function": {"name": "lookup", "arguments": '{"key": "x"}'},
        }
    ]
    assert run.events.answer == ""
    assert run.events.reasoning == "I will look."


async def test_turn_with_both_kinds_of_calls_runs_proxy_calls_and_returns_client_calls() -> None:
    client_call = {
        "id": "t1",
        "type": "function",
        "function": {"name": "lookup", "arguments": '{ "key" : "x" }'},
        "extra_content": {"signature": "abc"},
    }
    proxy_call = {
        "id": "o1",
        "type": "function",
        "function": {"name": "execute_bash", "arguments": '{"command": "echo 1 > output/a"}'},
    }
    message = {"role": "assistant", "content": None, "tool_calls": [client_call, proxy_call]}
    run = Run(ScriptedModel([{"message": message}]))
    result = await run.go(client_tools=[LOOKUP])
    assert result.client_calls == [{**client_call, "id": "call_r1_1"}]
    assert (run.events.observations, list(run.artifact_store.saved)) == (
        ["Exit code: 0\n(no output)"],
        ["/testbed/output/a"],
    )


async def test_malformed_arguments_of_a_client_tool_call_are_returned_unchanged() -> None:
    malformed = tool_reply({"name": "lookup", "arguments": '{"key": '})
    result = await Run(ScriptedModel([malformed])).go(client_tools=[LOOKUP])
    assert result.client_calls[0]["function"] == {"name": "lookup", "arguments": '{"key": '}


async def test_client_tool_call_written_as_text_is_returned_as_a_tool_call() -> None:
    text = '<tool_call>{"name": "lookup", "arguments": {"key": "x"}}</tool_call>'
    result = await Run(ScriptedModel([text_reply(text)])).go(client_tools=[LOOKUP])
    assert result.finish_reason == "tool_calls"
    assert result.client_calls == [
        {
            "id": "call_r1_1",
            "type": "function",
            "function": {"name": "lookup", "arguments": '{"key": "x"}'},
        }
    ]


@pytest.mark.parametrize("submit_first", [False, True])
async def test_submit_beside_a_client_call_ends_the_run(submit_first: bool) -> None:
    calls = [call("lookup", key="x"), call("submit", answer="42")]
    if submit_first:
        calls.reverse()
    model = ScriptedModel([tool_reply(*calls), text_reply('{"n": 42}')])
    result = await Run(model).go(client_tools=[LOOKUP], final={"logit_bias": {"1": 1}})
    assert (result.stop_reason, result.finish_reason) == (StopReason.SUBMITTED, "stop")
    assert (result.answer, list(result.client_calls)) == ('{"n": 42}', [])
    assert valid(model.requests[1])
    assert NOT_RUN in [message["content"] for message in model.requests[1]["messages"]]
