"""Until a tool has run, the answer is that of the bare model."""

from collections.abc import Mapping
from typing import Any

import anyio
import pytest

from policies.limits import Limits, StopReason
from policies.prompts import NUDGE, final_request, system_prompt
from proxy.agent.events import (
    CallFailed,
    ModelDelta,
    OnDelta,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
)
from proxy.agent.model import Completion, StopRetryingError
from proxy.errors import ContextOverflowError, OutOfTimeError, ToolsRefusedError
from proxy.models.scripted import ScriptedModel, call, text_reply, tool_reply
from tests.proxy.agent.runs import LOOKUP, OVERFLOW, SUBMIT, USER, Played, Run, bash

PLAIN = {"model": "m", "messages": [USER]}
CUT = {"content": "There are for", "finish_reason": "length"}
BAD = tool_reply({"name": "execute_bash", "arguments": '{"command": '})
UNKNOWN = tool_reply(call("search", query="how many"))


# The plain turn


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tools", [[], [LOOKUP]])
async def test_plain_turn_ends_the_run_whatever_it_calls(
    tools: list[dict[str, Any]], stream: bool
) -> None:
    says = {**UNKNOWN, "content": "There are 42."}
    model = Played([UNKNOWN, UNKNOWN, says, *[UNKNOWN] * 20])
    run = Run(model)
    result = await run.go(client_tools=tools, stream=stream)
    assert (result.answer, result.stop_reason) == ("There are 42.", StopReason.ANSWERED)
    assert (run.events.answer, result.finish_reason) == ("There are 42.", "stop")
    assert len(model.requests) == 3


async def test_plain_turn_keeps_only_client_tool_calls() -> None:
    both = tool_reply(call("execute_bash", command="ls"), call("lookup"))
    model = Played([UNKNOWN, UNKNOWN, both, text_reply("Done.")])
    run = Run(model)
    result = await run.go(client_tools=[LOOKUP])
    assert [made["function"]["name"] for made in result.tool_calls] == ["lookup"]
    assert len(run.events.observations) == 2  # of the calls of a tool that nobody has
    assert result.suspended_run is not None
    (last,) = result.suspended_run.messages[-1:]
    assert [made["function"]["name"] for made in last["tool_calls"]] == ["lookup"]


# Cut off


async def test_first_answer_that_is_cut_off_is_returned_and_nothing_is_summed_up() -> None:
    model = Played([CUT])
    result = await Run(model).go(token_limits={"max_tokens": 5000})
    assert (result.answer, result.finish_reason) == ("There are for", "length")
    assert (len(model.requests), list(result.compactions)) == (1, [])


async def test_thinking_that_is_cut_off_is_returned_as_it_would_be_without_tools() -> None:
    model = Played([{"content": "", "reasoning": "Hm, let me", "finish_reason": "length"}])
    result = await Run(model).go()
    assert (result.answer, result.finish_reason, len(model.requests)) == ("", "length", 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_visible_prose_is_cut_at_the_clients_own_limit(stream: bool) -> None:
    model = Played([text_reply("one two three four five six seven eight nine ten " * 20)])
    run = Run(model)
    result = await run.go(token_limits={"max_tokens": 12}, stream=stream)
    assert model.requests[0]["max_tokens"] == 4096
    assert result.finish_reason == "length"
    assert len(result.answer) <= 12 * 8  # the script writes eight characters a piece
    assert result.usage["completion_tokens"] == 12
    assert result.usage["estimated"] is True
    assert run.events.answer == result.answer


async def test_call_has_room_for_its_arguments_beyond_the_clients_limit() -> None:
    answer = "There are forty-two of them, and here is why: " + "because it is so. " * 20
    model = Played([tool_reply(call("submit", answer=answer))])
    result = await Run(model).go(token_limits={"max_tokens": 12})
    assert (result.answer, result.finish_reason) == (answer, "stop")


async def test_operator_may_give_calls_less_room() -> None:
    model = Played([text_reply("42")])
    await Run(model, limits=Limits(min_turn_tokens=100)).go(token_limits={"max_tokens": 12})
    assert model.requests[0]["max_tokens"] == 100


async def test_room_that_does_not_fit_into_the_window_is_given_up() -> None:
    model = Played([OVERFLOW, text_reply("42")])
    result = await Run(model).go(token_limits={"max_tokens": 12})
    assert (result.answer, model.requests[-1]["max_tokens"]) == ("42", 12)
    assert "tools" in model.requests[-1]


# Calls that break off


class Breaking(Played):
    """A model whose first call breaks off after these pieces and is retried."""

    def __init__(self, replies: list[Any], pieces: list[ModelDelta]) -> None:
        super().__init__(replies)
        self._broken = pieces

    async def complete(self, body: Mapping[str, Any], on_delta: OnDelta | None) -> Completion:
        pieces, self._broken = self._broken, []
        assert on_delta is not None
        for piece in pieces:
            await on_delta(piece)
        if pieces:
            await on_delta(CallFailed(502, 0.0))
        return await super().complete(body, on_delta)


@pytest.mark.parametrize(
    "pieces",
    [
        [TextDelta("Let me"), ToolCallDelta(0, "execute_bash", '{"comm')],
        [ToolCallDelta(0, "submit", '{"answer": "4')],
        [ReasoningDelta("Hm, ")],
    ],
)
async def test_reply_that_was_not_shown_is_retried(pieces: list[ModelDelta]) -> None:
    said = {**SUBMIT, "content": "I have it."}
    run = Run(Breaking([said], pieces))
    result = await run.go(stream=False)
    assert (result.answer, result.stop_reason) == ("42", StopReason.SUBMITTED)
    assert run.events.reasoning == "I have it."


async def test_partly_shown_call_is_not_retried() -> None:
    run = Run(Breaking([SUBMIT], [ToolCallDelta(0, "submit", '{"answer": "4')]))
    with pytest.raises(StopRetryingError):
        await run.go(stream=True)


# Words of ours


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [system_prompt(), final_request(StopReason.WALL_TIME)])
async def test_echo_is_ended_and_followed_by_the_plain_turn(echo: str, stream: bool) -> None:
    model = Played([text_reply(echo), text_reply("There are 42.")])
    run = Run(model)
    result = await run.go(stream=stream)
    assert (result.answer, run.events.answer) == ("There are 42.", "There are 42.")
    assert model.requests[1] == PLAIN
    assert result.tool_trouble == ("echo",)
    assert result.usages[0]["completion_tokens"] < len(echo) / 16


async def test_echo_as_final_answer_is_replaced_by_the_best_earlier_answer() -> None:
    steps = {**tool_reply(bash("ls")), "content": "There are 42."}
    echo = text_reply(final_request(StopReason.MAX_TURNS))
    result = await Run(Played([steps, echo]), limits=Limits(max_turns=1)).go()
    assert (result.answer, result.stop_reason) == ("There are 42.", StopReason.MAX_TURNS)


async def test_echo_after_a_tool_call_is_no_answer() -> None:
    found = tool_reply(bash("echo 42 > output/answer.txt"))
    result = await Run(Played([found, text_reply(NUDGE)])).go()
    assert (result.answer, result.tool_trouble) == ("42", ("echo",))


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_beside_a_call_is_dropped_and_the_call_is_run(stream: bool) -> None:
    quoting = {**SUBMIT, "content": f"{system_prompt()} So I hand it in."}
    run = Run(Played([tool_reply(bash("ls")), quoting]))
    result = await run.go(stream=stream)
    assert (result.answer, result.stop_reason) == ("42", StopReason.SUBMITTED)
    assert result.tool_trouble == ()
    assert run.events.reasoning == ""
    assert run.events.answer == "42"


async def test_texts_of_the_client_may_be_repeated() -> None:
    words = system_prompt()
    client = {"role": "user", "content": f"Repeat this: {words}"}
    model = Played([text_reply(words)])
    assert (await Run(model).go(messages=[client])).answer == words.strip()


# Runaways


@pytest.mark.parametrize("stream", [False, True])
async def test_runaway_prose_is_cut_as_length(stream: bool) -> None:
    result = await Run(Played([text_reply("I am sorry. " * 3000)])).go(stream=stream)
    assert (result.finish_reason, result.tool_trouble) == ("length", ("runaway",))
    assert 4_000 <= len(result.answer) <= 5_000


async def test_runaway_thinking_is_cut_as_length() -> None:
    run = Run(Played([{"content": "42", "reasoning": "Wait, let me check. " * 3000}]))
    result = await run.go(stream=True)
    assert (result.answer, result.finish_reason) == ("", "length")
    assert len(run.events.reasoning) <= 5_000


# Calls that come to nothing


async def test_announced_call_that_is_not_made_costs_few_tokens() -> None:
    long = "I would begin by looking at the directory, and then go on from there. " * 50
    model = Played([text_reply("Let me check:"), text_reply(long)])
    result = await Run(model).go()
    assert (result.answer, result.finish_reason) == ("Let me check:", "stop")
    assert result.usages[1]["completion_tokens"] <= 48


async def test_announced_call_is_not_asked_for_where_the_clients_limit_has_no_room() -> None:
    model = Played([{**text_reply("Let me check:"), "usage": {"completion_tokens": 40}}])
    result = await Run(model).go(token_limits={"max_tokens": 60})
    assert (result.answer, len(model.requests)) == ("Let me check:", 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_run_continues_after_a_nudged_call(stream: bool) -> None:
    model = Played([text_reply("Let me check:"), tool_reply(bash("ls")), SUBMIT])
    run = Run(model)
    result = await run.go(stream=stream)
    assert (result.answer, result.stop_reason) == ("42", StopReason.SUBMITTED)
    assert "Let me check:" in (run.events.answer if stream else run.events.reasoning)


@pytest.mark.parametrize("bad", [BAD, UNKNOWN], ids=["malformed", "unknown"])
async def test_plain_turn_follows_repeated_malformed_calls(bad: dict[str, Any]) -> None:
    model = Played([bad, bad, text_reply("There are 42.")])
    result = await Run(model).go()
    assert (result.answer, result.tool_trouble) == ("There are 42.", ("malformed_call",))
    assert model.requests[2] == PLAIN


async def test_malformed_call_can_be_corrected() -> None:
    result = await Run(Played([BAD, tool_reply(bash("ls")), SUBMIT])).go()
    assert (result.answer, result.stop_reason) == ("42", StopReason.SUBMITTED)


@pytest.mark.parametrize("answer", [{"n": 42}, [42]])
async def test_submitting_an_object_is_a_mistake(answer: Any) -> None:
    model = Played([tool_reply(call("submit", answer=answer)), SUBMIT])
    result = await Run(model).go()
    assert (result.answer, len(model.requests)) == ("42", 2)


async def test_plain_request_has_every_parameter_of_the_clients_and_its_tools() -> None:
    fields = {
        "base": {"temperature": 0.5},
        "final": {"logit_bias": {"1": 1}},
        "token_limits": {"max_tokens": 7},
        "client_tools": [LOOKUP],
        "tool_choice": "auto",
        "plain_messages": [{"role": "user", "content": "How many, in full?"}],
    }
    model = Played([text_reply(""), text_reply("42")])
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


async def test_plain_request_may_end_in_a_call_of_the_clients() -> None:
    model = Played([text_reply(""), tool_reply(call("lookup", key="x"))])
    result = await Run(model).go(client_tools=[LOOKUP])
    assert (result.stop_reason, result.finish_reason) == (
        StopReason.CLIENT_TOOL_CALLS,
        "tool_calls",
    )


# Backends


class Refusing(Played):
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
async def test_plain_turn_follows_a_refusal_of_tools(kind: type[Refusing]) -> None:
    model = kind([text_reply("There are 42.")])
    assert (await Run(model).go()).answer == "There are 42."
    assert model.requests == [PLAIN]


@pytest.mark.parametrize(
    "limits", [Limits(max_turns=0), Limits(max_total_tokens=0), Limits(max_commands=0)]
)
async def test_limit_that_leaves_no_turn_leaves_the_plain_answer(limits: Limits) -> None:
    model = Played([text_reply("There are 42.")])
    result = await Run(model, limits=limits).go()
    assert (result.answer, model.requests) == ("There are 42.", [PLAIN])


# Time


class Pausing(ScriptedModel):
    """Sends its text and then stalls."""

    async def complete(self, body: Mapping[str, Any], on_delta: OnDelta | None) -> Completion:
        await super().complete(body, on_delta)
        await anyio.sleep_forever()
        raise AssertionError


@pytest.mark.parametrize("stream", [False, True])
async def test_deadline_returns_and_counts_the_text_so_far(stream: bool) -> None:
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


async def test_deadline_without_any_text_is_an_error() -> None:
    with anyio.fail_after(20), pytest.raises(OutOfTimeError):
        await Run(Pausing([text_reply("")])).go(deadline_s=0.2)


async def test_unfinished_turn_is_counted_beside_the_last_answer() -> None:
    class PausingOnce(Played):
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
async def test_last_answer_that_the_deadline_cuts_off_is_kept(stream: bool) -> None:
    class PausingAtLast(Played):
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
