"""The plain turn: until a tool has run, a run answers like the model without tools."""

from collections.abc import Mapping
from typing import Any

import anyio
import pytest

from policies.limits import Limits, StopReason
from policies.prompts import NUDGE, final_answer_request, system_prompt
from proxy.agent.events import (
    ModelCallFailed,
    ModelDelta,
    OnDelta,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
)
from proxy.agent.model import Completion, StopRetryingError
from proxy.errors import ContextOverflowError, OutOfTimeError, ToolsRefusedError
from proxy.models.scripted import ScriptedModel, call, text_reply, tool_reply
from tests.proxy.agent.runs import LOOKUP, OVERFLOW, SUBMIT, USER, Run, SequentialModel, bash

PLAIN = {"model": "m", "messages": [USER]}
TRUNCATED = {"content": "There are for", "finish_reason": "length"}
MALFORMED = tool_reply({"name": "execute_bash", "arguments": '{"command": '})
UNKNOWN = tool_reply(call("search", query="how many"))


# The plain turn


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tools", [[], [LOOKUP]])
async def test_plain_turn_ends_the_run_even_if_it_contains_an_unknown_call(
    tools: list[dict[str, Any]], stream: bool
) -> None:
    with_text = {**UNKNOWN, "content": "There are 42."}
    model = SequentialModel([UNKNOWN, UNKNOWN, with_text, *[UNKNOWN] * 20])
    run = Run(model)
    result = await run.go(client_tools=tools, stream=stream)
    assert (result.answer, result.stop_reason) == ("There are 42.", StopReason.ANSWERED)
    assert (run.events.answer, result.finish_reason) == ("There are 42.", "stop")
    assert len(model.requests) == 3


@pytest.mark.parametrize(("spent", "left"), [(0, 100), (20, 80), (70, 50), (900, 50)])
async def test_plain_turn_gets_the_unspent_tokens_of_the_clients_limit_but_at_least_half_of_it(
    spent: int, left: int
) -> None:
    empty = {**text_reply(""), "usage": {"completion_tokens": spent}}
    model = SequentialModel([empty, text_reply("There are 42.")])
    result = await Run(model).go(token_limits={"max_tokens": 100, "max_completion_tokens": 100})
    assert result.answer == "There are 42."
    assert model.requests[1] == {**PLAIN, "max_tokens": left, "max_completion_tokens": left}


async def test_plain_turn_keeps_only_client_tool_calls() -> None:
    both = tool_reply(call("execute_bash", command="ls"), call("lookup"))
    model = SequentialModel([UNKNOWN, UNKNOWN, both, text_reply("Done.")])
    run = Run(model)
    result = await run.go(client_tools=[LOOKUP])
    assert [tool_call["function"]["name"] for tool_call in result.client_calls] == ["lookup"]
    assert len(run.events.observations) == 2  # for the calls of an unknown tool
    assert result.suspended_run is not None
    (last,) = result.suspended_run.messages[-1:]
    assert [tool_call["function"]["name"] for tool_call in last["tool_calls"]] == ["lookup"]


# Truncated answers


async def test_truncated_first_answer_is_returned_without_compaction() -> None:
    model = SequentialModel([TRUNCATED])
    result = await Run(model).go(token_limits={"max_tokens": 5000})
    assert (result.answer, result.finish_reason) == ("There are for", "length")
    assert (len(model.requests), list(result.compactions)) == (1, [])


async def test_truncated_reasoning_ends_the_run_without_another_model_call() -> None:
    model = SequentialModel([{"content": "", "reasoning": "Hm, let me", "finish_reason": "length"}])
    result = await Run(model).go()
    assert (result.answer, result.finish_reason, len(model.requests)) == ("", "length", 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_prose_is_truncated_at_the_clients_token_limit(stream: bool) -> None:
    model = SequentialModel([text_reply("one two three four five six seven eight nine ten " * 20)])
    run = Run(model)
    result = await run.go(token_limits={"max_tokens": 12}, stream=stream)
    assert model.requests[0]["max_tokens"] == 4096
    assert result.finish_reason == "length"
    assert len(result.answer) <= 12 * 8  # the script writes eight characters a piece
    assert result.usage["completion_tokens"] == 12
    assert result.usage["estimated"] is True
    assert run.events.answer == result.answer


@pytest.mark.parametrize("call_like", ["```python\n", "```\n", "<tool_", "`", "<execute_bash"])
async def test_client_token_limit_applies_to_prose_that_looks_like_the_start_of_a_call(
    call_like: str,
) -> None:
    before = ("There are many of them. " * 20)[: 60 * 8 - len(call_like[:3])]
    text = f"{before}{call_like}print(42) " + "and so on " * 50
    result = await Run(SequentialModel([text_reply(text)])).go(token_limits={"max_tokens": 60})
    assert result.finish_reason == "length"
    assert 60 <= result.usage["completion_tokens"] <= 63


async def test_tool_call_may_take_more_tokens_than_the_clients_limit() -> None:
    answer = "There are forty-two of them, and here is why: " + "because it is so. " * 20
    model = SequentialModel([tool_reply(call("submit", answer=answer))])
    result = await Run(model).go(token_limits={"max_tokens": 12})
    assert (result.answer, result.finish_reason) == (answer, "stop")


async def test_min_turn_tokens_is_configurable() -> None:
    model = SequentialModel([text_reply("42")])
    await Run(model, limits=Limits(min_turn_tokens=100)).go(token_limits={"max_tokens": 12})
    assert model.requests[0]["max_tokens"] == 100


async def test_model_call_after_a_context_overflow_has_the_clients_own_max_tokens() -> None:
    model = SequentialModel([OVERFLOW, text_reply("42")])
    result = await Run(model).go(token_limits={"max_tokens": 12})
    assert (result.answer, model.requests[-1]["max_tokens"]) == ("42", 12)
    assert "tools" in model.requests[-1]


# Interrupted calls


class FailingOnceModel(SequentialModel):
    """A model whose first call fails after these pieces and is retried."""

    def __init__(self, replies: list[Any], pieces: list[ModelDelta]) -> None:
        super().__init__(replies)
        self._broken = pieces

    async def complete(self, body: Mapping[str, Any], on_delta: OnDelta | None) -> Completion:
        pieces, self._broken = self._broken, []
        assert on_delta is not None
        for piece in pieces:
            await on_delta(piece)
        if pieces:
            await on_delta(ModelCallFailed(502, 0.0))
        return await super().complete(body, on_delta)


@pytest.mark.parametrize(
    "pieces",
    [
        [TextDelta("Let me"), ToolCallDelta(0, "execute_bash", '{"comm')],
        [ToolCallDelta(0, "submit", '{"answer": "4')],
        [ReasoningDelta("Hm, ")],
    ],
)
async def test_failed_reply_is_retried_if_none_of_its_pieces_were_emitted(
    pieces: list[ModelDelta],
) -> None:
    reply = {**SUBMIT, "content": "I have it."}
    run = Run(FailingOnceModel([reply], pieces))
    result = await run.go(stream=False)
    assert (result.answer, result.stop_reason) == ("42", StopReason.SUBMITTED)
    assert run.events.reasoning == "I have it."


async def test_failed_submit_call_is_not_retried_if_part_of_its_answer_was_streamed() -> None:
    run = Run(FailingOnceModel([SUBMIT], [ToolCallDelta(0, "submit", '{"answer": "4')]))
    with pytest.raises(StopRetryingError):
        await run.go(stream=True)


# Echoes of the proxy's texts


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [system_prompt(), final_answer_request(StopReason.WALL_TIME)])
async def test_reply_that_echoes_the_proxys_prompts_is_stopped_and_followed_by_the_plain_turn(
    echo: str, stream: bool
) -> None:
    model = SequentialModel([text_reply(echo), text_reply("There are 42.")])
    run = Run(model)
    result = await run.go(stream=stream)
    assert (result.answer, run.events.answer) == ("There are 42.", "There are 42.")
    assert model.requests[1] == PLAIN
    assert result.tool_trouble == ("echo",)
    assert result.usages[0]["completion_tokens"] < len(echo) / 16


async def test_final_answer_that_echoes_a_prompt_is_replaced_by_the_best_earlier_answer() -> None:
    steps = {**tool_reply(bash("ls")), "content": "There are 42."}
    echo = text_reply(final_answer_request(StopReason.MAX_TURNS))
    result = await Run(SequentialModel([steps, echo]), limits=Limits(max_turns=1)).go()
    assert (result.answer, result.stop_reason) == ("There are 42.", StopReason.MAX_TURNS)


async def test_reply_that_echoes_a_prompt_after_a_tool_call_is_no_answer() -> None:
    found = tool_reply(bash("echo 42 > output/answer.txt"))
    result = await Run(SequentialModel([found, text_reply(NUDGE)])).go()
    assert (result.answer, result.tool_trouble) == ("42", ("echo",))


@pytest.mark.parametrize("stream", [False, True])
async def test_prose_that_echoes_a_prompt_beside_a_call_is_dropped_and_the_call_is_run(
    stream: bool,
) -> None:
    quoting = {**SUBMIT, "content": f"{system_prompt()} So I hand it in."}
    run = Run(SequentialModel([tool_reply(bash("ls")), quoting]))
    result = await run.go(stream=stream)
    assert (result.answer, result.stop_reason) == ("42", StopReason.SUBMITTED)
    assert result.tool_trouble == ()
    assert run.events.reasoning == ""
    assert run.events.answer == "42"


async def test_reply_that_repeats_a_text_of_the_client_is_no_echo() -> None:
    prompt = system_prompt()
    client = {"role": "user", "content": f"Repeat this: {prompt}"}
    model = SequentialModel([text_reply(prompt)])
    assert (await Run(model).go(messages=[client])).answer == prompt.strip()


# Runaways


@pytest.mark.parametrize("stream", [False, True])
async def test_runaway_prose_is_truncated_with_finish_reason_length(stream: bool) -> None:
    result = await Run(SequentialModel([text_reply("I am sorry. " * 3000)])).go(stream=stream)
    assert (result.finish_reason, result.tool_trouble) == ("length", ("runaway",))
    assert 4_000 <= len(result.answer) <= 5_000


async def test_runaway_reasoning_is_truncated_with_finish_reason_length() -> None:
    run = Run(SequentialModel([{"content": "42", "reasoning": "Wait, let me check. " * 3000}]))
    result = await run.go(stream=True)
    assert (result.answer, result.finish_reason) == ("", "length")
    assert len(run.events.reasoning) <= 5_000


# Missing and malformed calls


async def test_prose_in_place_of_the_announced_tool_call_is_cut_after_a_few_tokens() -> None:
    long = "I would begin by looking at the directory, and then go on from there. " * 50
    model = SequentialModel([text_reply("Let me check:"), text_reply(long)])
    result = await Run(model).go()
    assert (result.answer, result.finish_reason) == ("Let me check:", "stop")
    assert result.usages[1]["completion_tokens"] <= 48


async def test_call_that_a_reply_only_announces_is_not_requested_if_too_few_tokens_are_left() -> (
    None
):
    model = SequentialModel([{**text_reply("Let me check:"), "usage": {"completion_tokens": 40}}])
    result = await Run(model).go(token_limits={"max_tokens": 60})
    assert (result.answer, len(model.requests)) == ("Let me check:", 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_run_continues_if_the_model_makes_the_announced_call_on_request(stream: bool) -> None:
    model = SequentialModel([text_reply("Let me check:"), tool_reply(bash("ls")), SUBMIT])
    run = Run(model)
    result = await run.go(stream=stream)
    assert (result.answer, result.stop_reason) == ("42", StopReason.SUBMITTED)
    assert "Let me check:" in (run.events.answer if stream else run.events.reasoning)


@pytest.mark.parametrize("invalid_call", [MALFORMED, UNKNOWN], ids=["malformed", "unknown"])
async def test_plain_turn_follows_repeated_malformed_calls(invalid_call: dict[str, Any]) -> None:
    model = SequentialModel([invalid_call, invalid_call, text_reply("There are 42.")])
    result = await Run(model).go()
    assert (result.answer, result.tool_trouble) == ("There are 42.", ("malformed_call",))
    assert model.requests[2] == PLAIN


async def test_model_can_correct_a_malformed_call_in_the_next_turn() -> None:
    result = await Run(SequentialModel([MALFORMED, tool_reply(bash("ls")), SUBMIT])).go()
    assert (result.answer, result.stop_reason) == ("42", StopReason.SUBMITTED)


@pytest.mark.parametrize("answer", [{"n": 42}, [42]])
async def test_submit_with_an_object_or_list_as_answer_is_refused(answer: Any) -> None:
    model = SequentialModel([tool_reply(call("submit", answer=answer)), SUBMIT])
    result = await Run(model).go()
    assert (result.answer, len(model.requests)) == ("42", 2)


async def test_plain_request_has_all_parameters_and_tools_of_the_client() -> None:
    fields = {
        "base": {"temperature": 0.5},
        "final": {"logit_bias": {"1": 1}},
        "token_limits": {"max_tokens": 7},
        "client_tools": [LOOKUP],
        "tool_choice": "auto",
        "plain_messages": [{"role": "user", "content": "How many, in full?"}],
    }
    model = SequentialModel([text_reply(""), text_reply("42")])
    assert (await Run(model).go(**fields)).answer == "42"
    assert model.requests[1] == {
        "model": "m",
        "messages": [{"role": "user", "content": "How many, in full?"}],
        "temperature": 0.5,
        "logit_bias": {"1": 1},
        "max_tokens": 7,
        "tools": [LOOKUP],
        "tool_choice": "auto",
    }


async def test_plain_turn_may_end_the_run_with_a_client_tool_call() -> None:
    model = SequentialModel([text_reply(""), tool_reply(call("lookup", key="x"))])
    result = await Run(model).go(client_tools=[LOOKUP])
    assert (result.stop_reason, result.finish_reason) == (
        StopReason.CLIENT_TOOL_CALLS,
        "tool_calls",
    )


# Backends


class Refusing(SequentialModel):
    """A backend that refuses tools."""

    error: Exception = ToolsRefusedError("no tools here", status=400)

    async def complete(self, body: Mapping[str, Any], on_delta: OnDelta | None) -> Completion:
        if any(tool["function"]["name"] == "execute_bash" for tool in body.get("tools", ())):
            raise self.error
        return await super().complete(body, on_delta)


class TooLong(Refusing):
    """A backend whose context window is too small for the proxy's prompt and tools."""

    error = ContextOverflowError("too long", status=400)


@pytest.mark.parametrize("kind", [Refusing, TooLong])
async def test_plain_turn_follows_if_the_backend_refuses_tools_or_they_overflow_its_context(
    kind: type[Refusing],
) -> None:
    model = kind([text_reply("There are 42.")])
    assert (await Run(model).go()).answer == "There are 42."
    assert model.requests == [PLAIN]


@pytest.mark.parametrize(
    "limits", [Limits(max_turns=0), Limits(max_total_tokens=0), Limits(max_commands=0)]
)
async def test_run_with_no_turns_or_tokens_or_commands_left_begins_with_a_plain_turn_without_tools(
    limits: Limits,
) -> None:
    model = SequentialModel([text_reply("There are 42.")])
    result = await Run(model, limits=limits).go()
    assert (result.answer, model.requests) == ("There are 42.", [PLAIN])


# Time


class Pausing(ScriptedModel):
    """A model that sends its text and never returns."""

    async def complete(self, body: Mapping[str, Any], on_delta: OnDelta | None) -> Completion:
        await super().complete(body, on_delta)
        await anyio.sleep_forever()
        raise AssertionError


@pytest.mark.parametrize("stream", [False, True])
async def test_partial_text_at_the_deadline_is_returned_and_counted(stream: bool) -> None:
    run = Run(Pausing([text_reply("There are forty-two of them, as far as")]))
    with anyio.fail_after(20):
        result = await run.go(deadline_s=1, stream=stream)
    assert (result.answer, result.finish_reason) == (
        "There are forty-two of them, as far as",
        "length",
    )
    assert result.stop_reason is StopReason.DEADLINE
    assert result.usage["completion_tokens"] == 5
    assert run.events.answer == result.answer


async def test_run_without_any_text_at_the_deadline_is_an_error() -> None:
    with anyio.fail_after(20), pytest.raises(OutOfTimeError):
        await Run(Pausing([text_reply("")])).go(deadline_s=0.2)


async def test_usage_of_a_turn_that_a_time_limit_cuts_off_is_estimated() -> None:
    class PausingOnce(SequentialModel):
        async def complete(self, body: Mapping[str, Any], on_delta: OnDelta | None) -> Completion:
            reply = await super().complete(body, on_delta)
            if "tools" in body and len(body["messages"]) > 2:
                await anyio.sleep_forever()
            return reply

    counted = {"prompt_tokens": 100, "completion_tokens": 5, "total_tokens": 105}
    steps = {**tool_reply(bash("ls")), "usage": counted}
    last = {**text_reply("About 42."), "usage": counted}
    model = PausingOnce([steps, text_reply("Let me think about this for a while"), last])
    run = Run(model)
    with anyio.fail_after(20):
        result = await run.go(deadline_s=2)
    assert result.stop_reason is StopReason.DEADLINE
    assert [usage["completion_tokens"] for usage in result.usages] == [5, 5, 5]
    assert [usage.get("estimated") for usage in result.usages] == [None, True, None]


@pytest.mark.parametrize("stream", [False, True])
async def test_final_answer_truncated_by_the_deadline_is_returned(stream: bool) -> None:
    class PausingAtLast(SequentialModel):
        async def complete(self, body: Mapping[str, Any], on_delta: OnDelta | None) -> Completion:
            reply = await super().complete(body, on_delta)
            if "tools" not in body:
                await anyio.sleep_forever()
            return reply

    model = PausingAtLast([tool_reply(bash("ls")), text_reply("There are about forty")])
    run = Run(model, limits=Limits(max_turns=1))
    with anyio.fail_after(20):
        result = await run.go(deadline_s=2.0, stream=stream)
    assert (result.answer, result.finish_reason) == ("There are about forty", "length")
