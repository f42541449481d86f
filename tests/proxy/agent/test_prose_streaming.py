"""Streaming of prose: shown early, without calls written as text or the proxy's own texts."""

import json
from collections.abc import Mapping
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.answer_form import ANY_OBJECT
from policies.limits import StopReason
from proxy.agent.events import (
    AnswerDelta,
    AnswerRestarted,
    Event,
    ModelDelta,
    OnDelta,
    TextDelta,
    ToolCallStarted,
)
from proxy.agent.model import Completion, CompletionStopped
from proxy.agent.prose import HOLD_CHARS, Prose, ProseRules
from proxy.models.scripted import call, text_reply, tool_reply
from sandbox_runtime.errors import SandboxLostError
from tests.proxy.agent.runs import SUBMIT, Events, Run, SequentialModel, bash

ESSAY = "Sandboxes are older than models, and older than computers. " * 8
STEPS = tool_reply(bash("ls"))


class HaltingModel(SequentialModel):
    """A model whose last reply pauses after `halts_after` characters until a part of the answer is
    emitted."""

    def __init__(self, replies: list[dict[str, Any]], halts_after: int) -> None:
        super().__init__(replies)
        self._replies_left = len(replies)
        self._halts_after = halts_after
        self.seen = anyio.Event()

    async def on_event(self, event: Event) -> None:
        """Continue the reply once a part of the answer was emitted."""
        if isinstance(event, AnswerDelta):
            self.seen.set()

    async def complete(self, body: Mapping[str, Any], on_delta: OnDelta | None) -> Completion:
        self._replies_left -= 1
        written = 0

        async def pass_on(delta: ModelDelta) -> None:
            nonlocal written
            assert on_delta is not None
            await on_delta(delta)
            if isinstance(delta, TextDelta):
                written += len(delta.text)
            if self._replies_left == 0 and written >= self._halts_after:
                await self.seen.wait()

        return await super().complete(body, pass_on)


@pytest.mark.parametrize("before", [[], [STEPS]], ids=["first turn", "after a tool"])
@pytest.mark.parametrize("halts_after", [HOLD_CHARS + 8, 24], ids=["by length", "by time"])
async def test_prose_is_streamed_while_the_model_writes(
    before: list[dict[str, Any]], halts_after: int
) -> None:
    model = HaltingModel([*before, text_reply(ESSAY)], halts_after)
    run = Run(model, events=Events(model.on_event))
    with anyio.fail_after(20):
        result = await run.go(stream=True)
    assert result.answer == run.events.answer
    assert result.answer.strip() == ESSAY.strip()
    assert len([event for event in run.events if isinstance(event, AnswerDelta)]) > 2


async def test_exception_in_the_delayed_emission_of_prose_fails_the_run() -> None:
    model = HaltingModel([text_reply(ESSAY)], 24)

    async def fail_at_the_first_piece(event: Event) -> None:
        is_first = isinstance(event, AnswerDelta) and not model.seen.is_set()
        await model.on_event(event)
        if is_first:
            raise SandboxLostError("gone while links were looked for")

    with anyio.fail_after(20), pytest.raises(SandboxLostError):
        await Run(model, events=Events(fail_at_the_first_piece)).go(stream=True)


async def test_short_prose_before_a_call_is_reasoning() -> None:
    run = Run(SequentialModel([{**STEPS, "content": "I look first."}, SUBMIT]))
    await run.go(stream=True)
    assert (run.events.answer, run.events.reasoning) == ("42", "I look first.")


async def test_long_prose_before_a_call_is_separated_from_the_answer() -> None:
    run = Run(SequentialModel([{**STEPS, "content": ESSAY}, SUBMIT]))
    result = await run.go(stream=True)
    assert run.events.answer == f"{ESSAY}\n\n42"
    assert (result.answer, result.answer_offset) == ("42", len(ESSAY) + 2)
    at = [type(event) for event in run.events].index(AnswerRestarted)
    assert isinstance(run.events[at + 1], ToolCallStarted)


async def test_narration_set_to_reasoning_keeps_prose_before_calls_out_of_the_answer() -> None:
    run = Run(
        SequentialModel([{**STEPS, "content": ESSAY}, {**STEPS, "content": ESSAY * 3}, SUBMIT])
    )
    result = await run.go(stream=True, narration="reasoning")
    assert (result.answer, run.events.answer) == ("42", "42")
    assert run.events.reasoning == ESSAY * 4


@pytest.mark.parametrize("space", ["", "\n\n", "  "])
async def test_submitted_answer_that_was_streamed_is_not_sent_again(space: str) -> None:
    submit = tool_reply(call("submit", answer=f"{ESSAY}{space}"), content=ESSAY)
    run = Run(SequentialModel([STEPS, submit]))
    result = await run.go(stream=True)
    assert result.answer == run.events.answer
    assert result.answer.split() == ESSAY.split()
    assert result.stop_reason is StopReason.SUBMITTED


async def test_submitted_answer_that_extends_the_streamed_prose_is_sent_in_full() -> None:
    submit = tool_reply(call("submit", answer=f"{ESSAY} So there."), content=ESSAY)
    run = Run(SequentialModel([submit]))
    result = await run.go(stream=True)
    assert result.answer == f"{ESSAY} So there."
    assert run.events.answer == f"{ESSAY}\n\n{ESSAY} So there."


CALL_AS_TEXT = json.dumps({"name": "execute_bash", "arguments": {"command": "echo " + "a" * 400}})


@pytest.mark.parametrize(
    "text",
    [
        CALL_AS_TEXT,
        f"<tool_call>{CALL_AS_TEXT}</tool_call>",
        f"{ESSAY}\n<tool_call>\n{CALL_AS_TEXT}\n</tool_call>",
        f'{ESSAY}\n<execute_bash>{{"command": "echo {ESSAY}"}}</execute_bash>',
        f"{ESSAY}\n<execute_bash>\n{CALL_AS_TEXT}\n" * 3,
        f"{ESSAY}\n```json\n{CALL_AS_TEXT}\n```",
    ],
)
async def test_tool_call_written_as_text_is_not_streamed_as_the_answer(text: str) -> None:
    run = Run(SequentialModel([text_reply(text), SUBMIT]))
    result = await run.go(stream=True)
    assert result.answer == "42"
    assert "execute_bash" not in run.events.answer


@pytest.mark.parametrize(
    "text",
    [
        "```python\nprint(1)\n```\n" + ESSAY,
        '```json\n{"city": "Paris", "people": 2}\n```\n' + ESSAY,
        '{"city": "Paris"}\n' + ESSAY,
        "[1, 2, 3]\n" + ESSAY,
        '{"name": "Bob", "age": 5}\n' + ESSAY,
        '```json\n{"type": "Feature", "id": 1}\n```\n' + ESSAY,
        "Type <submit> and <execute_bash> for it, or <str_replace_editor>{it}. " + ESSAY,
        '<str_replace_editor>\n{"name": "good morning", "arguments": {}}\n' + ESSAY,
        '{"type": "Feature", "id": 1}\n' + ESSAY,
        '```json\n{"name": "execute_bash"}\n```'.replace("execute_bash", "Bob") + ESSAY,
    ],
)
async def test_code_and_json_without_calls_are_streamed(text: str) -> None:
    model = HaltingModel([text_reply(text)], HOLD_CHARS + 60)
    run = Run(model, events=Events(model.on_event))
    with anyio.fail_after(20):
        result = await run.go(stream=True)
    assert result.answer == run.events.answer
    assert result.answer.strip() == text.strip()


# Parameters of the client


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_in_prose_ends_the_run_without_another_model_call(stream: bool) -> None:
    model = SequentialModel([text_reply(f"{ESSAY}END of it all, and then some.")])
    run = Run(model)
    result = await run.go(final={"stop": ["END of", "never"]}, stream=stream)
    assert (result.answer.strip(), result.finish_reason) == (ESSAY.strip(), "stop")
    assert run.events.answer == result.answer
    assert (len(model.requests), result.choice["stop_reason"]) == (1, "END of")


async def test_submitted_answer_ends_at_a_stop_string() -> None:
    model = SequentialModel([tool_reply(call("submit", answer="42. END of it"))])
    result = await Run(model).go(final={"stop": "END"}, stream=True)
    assert (result.answer, len(model.requests)) == ("42. ", 1)


async def test_logprobs_of_the_prose_answer_need_no_further_model_call() -> None:
    class WithLogprobs(SequentialModel):
        async def complete(self, body: Mapping[str, Any], on_delta: OnDelta | None) -> Completion:
            reply = await super().complete(body, on_delta)
            logprobs = {"logprobs": {"content": [{"token": "42"}]}}
            return Completion(reply.message, reply.finish_reason, reply.usage, logprobs)

    model = WithLogprobs([text_reply("42")])
    result = await Run(model).go(final={"logprobs": True})
    assert (result.choice["logprobs"], len(model.requests)) == ({"content": [{"token": "42"}]}, 1)
    assert model.requests[0]["logprobs"] is True


async def test_logprobs_that_are_refused_with_tools_are_requested_in_the_final_call() -> None:
    refused = {"error": {"status": 400, "message": "logprobs is not supported with tools"}}
    model = SequentialModel([refused, text_reply("42"), text_reply("42")])
    assert (await Run(model).go(final={"logprobs": True})).answer == "42"
    assert [request.get("logprobs") for request in model.requests] == [True, None, True]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reply", [text_reply('{"n": 42}'), text_reply('```json\n{"n": 42}\n```')])
async def test_prose_in_the_response_format_needs_no_further_model_call(
    reply: dict[str, Any], stream: bool
) -> None:
    model = SequentialModel([reply])
    form = {"response_format": {"type": "json_object"}}
    run = Run(model)
    result = await run.go(final=form, answer_form=ANY_OBJECT, stream=stream)
    assert (result.answer, run.events.answer) == ('{"n": 42}', '{"n": 42}')
    assert (result.finish_reason, len(model.requests)) == ("stop", 1)


@pytest.mark.parametrize("beginning", ['{"id": "', '```json\n{"type": "', '[{"function": "'])
def test_long_text_that_may_be_a_call_is_parsed_in_linear_time(beginning: str) -> None:
    prose = Prose(ProseRules(max_tokens=1, tool_names=["execute_bash"]))
    prose.add(TextDelta(beginning))
    for number in range(200_000):  # takes a second; hours if it is parsed at each piece
        prose.add(TextDelta(f"{number}, "))
        assert prose.take_ready_deltas(is_hold_over=True) == []
    assert len(prose.take_remaining_deltas()) == 200_001


CALL_PARTS = (
    *("```", "`", "json", "python", "\n", " ", "{", "}", "[", '"name"', ":", '"submit"', ","),
    *('"arguments"', "<tool_call>", "<tool", "<submit>", "</", "text "),
)


@given(st.lists(st.sampled_from(CALL_PARTS), max_size=14).map("".join))
def test_prose_taken_piece_by_piece_is_a_prefix_of_the_prose_taken_at_once(
    text: str,
) -> None:
    pieces = Prose(ProseRules(tool_names=["submit"]))
    whole = Prose(ProseRules(tool_names=["submit"]))
    shown = ""
    for character in text:
        pieces.add(TextDelta(character))
        whole.add(TextDelta(character))
        shown += "".join(piece.text for piece in pieces.take_ready_deltas(is_hold_over=True))
    at_once = "".join(piece.text for piece in whole.take_ready_deltas(is_hold_over=True))
    assert at_once.startswith(shown)


def test_stop_string_of_any_length_is_found() -> None:
    stop = "".join(f"{number}, " for number in range(100_000))
    prose = Prose(ProseRules(stop_strings=(stop,)))
    prose.add(TextDelta(f"{ESSAY}{stop[:1000]}"))
    for number in range(2000):  # takes a second; minutes if each prefix is compared
        prose.add(TextDelta(f"{number}; "))
        prose.take_ready_deltas(is_hold_over=True)
    with pytest.raises(CompletionStopped):
        prose.add(TextDelta(stop))
    assert not prose.text.endswith(stop)


def test_partial_stop_string_is_held_back() -> None:
    prose = Prose(ProseRules(stop_strings=("END of",)))
    prose.add(TextDelta(ESSAY))
    prose.add(TextDelta(" EN"))
    prose.add(TextDelta("D"))
    shown = "".join(piece.text for piece in prose.take_ready_deltas(is_hold_over=True))
    assert shown == ESSAY
