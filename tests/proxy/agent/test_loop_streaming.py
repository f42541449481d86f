"""Streaming of the agent loop's answer while the model writes it."""

import json
from collections.abc import Mapping
from typing import Any

import anyio
import pytest

from policies.limits import Limits, StopReason
from proxy.agent.events import (
    AnswerDelta,
    Event,
    ModelCallAccepted,
    ModelDelta,
    OnDelta,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallFinished,
)
from proxy.agent.model import Completion
from proxy.models.scripted import ScriptedModel, call, text_reply, tool_reply
from tests.proxy.agent.runs import SUBMIT, Events, Run, bash

STEPS = tool_reply(bash("echo 1 > output/plot.png; echo 2 > 'output/a b.csv'"))
PROSE = (
    "See ![plot](sandbox:/mnt/data/plot.png), `/testbed/output/a b.csv` and"
    " /testbed/output/plot.png. Not /testbed/output/plot.png.gz. \N{PARTY POPPER}"
)
LINKED = (
    "See ![plot](https://files.test/plot.png), [a b.csv](https://files.test/a b.csv) and"
    " [plot.png](https://files.test/plot.png). Not /testbed/output/plot.png.gz. \N{PARTY POPPER}"
)


class HaltingModel(ScriptedModel):
    """A model that writes half of the arguments of its call, then waits for `may_continue`."""

    def __init__(self, replies: list[dict[str, Any]]) -> None:
        super().__init__(replies)
        self.may_continue = anyio.Event()

    async def complete(self, body: Mapping[str, Any], on_delta: OnDelta | None) -> Completion:
        reply = await super().complete(body, None)
        function = reply.message["tool_calls"][0]["function"]
        half = len(function["arguments"]) // 2
        assert on_delta is not None
        await on_delta(ToolCallDelta(0, function["name"], function["arguments"][:half]))
        await self.may_continue.wait()
        await on_delta(ToolCallDelta(0, function["name"], function["arguments"][half:]))
        return reply


async def test_submitted_answer_is_streamed() -> None:
    model = HaltingModel([tool_reply(call("submit", answer="There are forty-two of them."))])

    async def allow(event: Event) -> None:
        if isinstance(event, AnswerDelta):
            model.may_continue.set()

    run = Run(model, events=Events(allow))
    with anyio.fail_after(5):
        result = await run.go(stream=True)
    pieces = [event.text for event in run.events if isinstance(event, AnswerDelta)]
    assert len(pieces) == 2
    assert "".join(pieces) == result.answer == "There are forty-two of them."


async def test_reasoning_is_streamed_and_prose_before_a_call_is_emitted_as_reasoning() -> None:
    steps = {**tool_reply(bash("ls"), content="I look first."), "reasoning": "Hm, let me see."}
    run = Run(ScriptedModel([steps, SUBMIT]))
    result = await run.go(stream=True)
    before = run.events[: next(i for i, e in enumerate(run.events) if isinstance(e, AnswerDelta))]
    thoughts = [event.text for event in before if isinstance(event, ReasoningDelta)]
    assert len(thoughts) > 2
    assert "".join(thoughts) == "Hm, let me see.I look first."
    assert (result.answer, run.events.answer) == ("42", "42")


@pytest.mark.parametrize(
    "last",
    [tool_reply(call("submit", answer=PROSE)), text_reply(PROSE)],
    ids=["submit", "prose"],
)
async def test_streamed_answer_equals_the_unstreamed_answer(last: dict[str, Any]) -> None:
    unstreamed, streamed = Run(ScriptedModel([STEPS, last])), Run(ScriptedModel([STEPS, last]))
    result = await unstreamed.go()
    assert result.answer == LINKED
    assert (await streamed.go(stream=True)).answer == LINKED
    assert unstreamed.events.answer == streamed.events.answer == LINKED


async def test_paths_in_a_streamed_final_answer_become_links() -> None:
    run = Run(ScriptedModel([STEPS, text_reply(PROSE)]), limits=Limits(max_turns=1))
    assert (await run.go(stream=True)).answer == LINKED
    pieces = [event for event in run.events if isinstance(event, AnswerDelta)]
    assert len(pieces) > 5


async def test_streamed_final_answer_that_consists_of_one_path_is_sent_once() -> None:
    path = "/testbed/output/plot.png"
    run = Run(ScriptedModel([STEPS, text_reply(path)]), limits=Limits(max_turns=1))
    await run.go(stream=True)
    assert run.events.answer == "[plot.png](https://files.test/plot.png)"


async def test_number_submitted_as_the_answer_becomes_a_string() -> None:
    run = Run(ScriptedModel([tool_reply(call("submit", answer=42))]))
    assert (await run.go(stream=True)).answer == "42"
    assert run.events.answer == "42"


async def test_answer_submitted_after_another_call_is_sent_when_that_call_has_run() -> None:
    model = ScriptedModel([tool_reply(bash("echo 7 > x"), call("submit", answer="42"))])
    run = Run(model)
    assert (await run.go(stream=True)).answer == "42"
    assert run.events.answer == "42"
    ran = next(at for at, event in enumerate(run.events) if isinstance(event, ToolCallFinished))
    answered = [at for at, event in enumerate(run.events) if isinstance(event, AnswerDelta)]
    assert answered[0] > ran


async def test_streamed_answer_of_an_invalid_submit_is_followed_by_the_corrected_answer() -> None:
    refused = tool_reply(call("submit", answer="About \ud800 41."))
    run = Run(ScriptedModel([refused, tool_reply(call("submit", answer="There are 42."))]))
    result = await run.go(stream=True)
    assert run.events.answer == "About ? 41.\n\nThere are 42."
    assert (result.answer, result.answer_offset) == ("There are 42.", len("About ? 41.\n\n"))


ESSAY = "\n\n" + "Sandboxes are older than models. " * 60 + "\n"


class HaltingProseModel(ScriptedModel):
    """A model that writes its prose except the end, then waits for `may_continue`."""

    def __init__(self, replies: list[dict[str, Any]]) -> None:
        super().__init__(replies)
        self.may_continue = anyio.Event()

    async def complete(self, body: Mapping[str, Any], on_delta: OnDelta | None) -> Completion:
        async def pass_on(delta: ModelDelta) -> None:
            assert on_delta is not None
            if isinstance(delta, TextDelta):
                self.written += len(delta.text)
                if self.written > len(ESSAY) - 20:
                    await self.may_continue.wait()
            await on_delta(delta)

        self.written = 0
        return await super().complete(body, pass_on)


async def test_long_prose_is_streamed_before_the_reply_is_complete() -> None:
    model = HaltingProseModel([text_reply(ESSAY)])

    async def allow(event: Event) -> None:
        if isinstance(event, AnswerDelta):
            model.may_continue.set()

    run = Run(model, events=Events(allow))
    with anyio.fail_after(5):
        result = await run.go(stream=True)
    assert result.answer == run.events.answer
    assert result.answer.strip() == ESSAY.strip()


async def test_long_prose_before_a_call_is_separated_from_the_answer() -> None:
    planning = {**tool_reply(bash("ls")), "content": ESSAY}
    model = ScriptedModel([planning, tool_reply(call("submit", answer="42."))])
    run = Run(model)
    result = await run.go(stream=True)
    assert (result.answer, run.events.answer) == ("42.", ESSAY.lstrip() + "\n\n42.")


async def test_answer_file_is_sent_after_streamed_prose() -> None:
    to_file = tool_reply(bash("echo better > output/answer.txt"))
    run = Run(ScriptedModel([to_file, text_reply(ESSAY)]))
    result = await run.go(stream=True)
    assert result.answer == "better"
    assert run.events.answer.split() == [*ESSAY.split(), "better"]


async def test_long_tool_call_written_as_text_is_not_streamed() -> None:
    call_as_text = json.dumps(
        {"name": "execute_bash", "arguments": {"command": "echo " + "a" * 2000}}
    )
    model = ScriptedModel([text_reply(call_as_text), tool_reply(call("submit", answer="42."))])
    run = Run(model)
    assert (await run.go(stream=True)).answer == run.events.answer == "42."


async def test_answer_interrupted_by_the_time_limit_is_followed_by_the_final_answer() -> None:
    class Slow(HaltingModel):
        async def complete(self, body: Mapping[str, Any], on_delta: OnDelta | None) -> Completion:
            if len(body["messages"]) == 2:
                steps = ScriptedModel([tool_reply(bash("ls"))])
                return await steps.complete({"messages": []}, on_delta)
            if "tools" in body:
                return await super().complete({**body, "messages": []}, on_delta)
            return await ScriptedModel([text_reply("So: 42.")]).complete({"messages": []}, on_delta)

    model = Slow([tool_reply(call("submit", answer="There are forty-two of them."))])
    run = Run(model, limits=Limits(max_run_seconds=0.5))
    with anyio.fail_after(5):
        result = await run.go(stream=True)
    assert result.stop_reason == StopReason.WALL_TIME
    assert result.answer == "So: 42."
    assert run.events.answer.endswith("\n\nSo: 42.")


async def test_streamed_and_unstreamed_runs_emit_the_same_events_except_for_deltas() -> None:
    script = [
        {**tool_reply(bash("echo 1 > output/a"), content="Counting."), "reasoning": "Hm."},
        text_reply("Let me check:"),
        tool_reply(call("submit", answer="There are 42.")),
    ]
    unstreamed, streamed = Run(ScriptedModel(script)), Run(ScriptedModel(script))
    first, second = await unstreamed.go(), await streamed.go(stream=True, narration="reasoning")
    pieces = (AnswerDelta, ModelCallAccepted, ReasoningDelta)
    assert [event for event in streamed.events if not isinstance(event, pieces)] == [
        event for event in unstreamed.events if not isinstance(event, pieces)
    ]
    assert streamed.events.reasoning == unstreamed.events.reasoning
    assert (second.answer, second.stop_reason) == (first.answer, first.stop_reason)
