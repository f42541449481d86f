"""Fields of completions besides the answer: refusals, functions, warnings, further choices."""

from dataclasses import replace

import pytest

from policies.steps import STEPS_MODES, StepsMode
from proxy.agent.events import AnswerDelta, ChoiceEvent, ModelRefused, ReasoningDelta, ToolOutput
from proxy.agent.result import RunWarning
from proxy.schemas.chat_response import ChatCompletionBuilder, completion_head
from proxy.schemas.result_objects import usage
from tests.proxy.schemas.test_chat_response import (
    CALL,
    FINISHED,
    NOTHING,
    RESULT,
    STARTED,
    chunk,
    completion_of,
    data,
    frames,
    stream,
)


def test_completion_keeps_fields_that_only_the_backend_defines() -> None:
    choice = {"index": 3, "logprobs": None, "stop_reason": 7, "token_ids": [1], "other": None}
    response = {"id": "x", "model": "y", "prompt_token_ids": [2], "kv_transfer_params": None}
    completion = completion_of(replace(NOTHING, choice=choice, response=response))
    assert completion["choices"][0] | {"message": None} == {
        "index": 0,
        "message": None,
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": 7,
        "token_ids": [1],
    }
    assert (completion["id"], completion["model"]) == ("chatcmpl-r1", "qwen3")
    assert (completion["prompt_token_ids"], "kv_transfer_params" in completion) == ([2], False)


def test_completion_with_refusal_has_null_content() -> None:
    message = completion_of(replace(NOTHING, answer="", refusal="No."))["choices"][0]["message"]
    assert (message["content"], message["refusal"]) == (None, "No.")


def test_legacy_function_call_is_returned_in_the_field_function_call() -> None:
    result = replace(NOTHING, answer="", client_calls=[CALL], finish_reason="function_call")
    choice = completion_of(result)["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "function_call")
    assert choice["message"]["function_call"] == {"name": "lookup", "arguments": "{}"}
    assert "tool_calls" not in choice["message"]


def test_sandbox_object_has_the_warnings() -> None:
    result = replace(NOTHING, warnings=[RunWarning("response_format_violated", "It is not JSON.")])
    assert completion_of(result)["sandbox"]["warnings"] == [
        {"code": "response_format_violated", "message": "It is not JSON."}
    ]


def test_usage_is_summed_over_choices() -> None:
    other = replace(NOTHING, run_id="r2", answer="43", usage={"prompt_tokens": 5})
    builder = ChatCompletionBuilder(completion_head("r1", 7, "qwen3"), "r1", "reasoning")
    builder.add_event(ChoiceEvent(1, ReasoningDelta("$ ls\n")))
    completion = builder.finish(replace(RESULT, others=[other]))
    first, second = completion["choices"]
    assert (first["index"], second["index"]) == (0, 1)
    assert (second["message"]["content"], second["message"]["reasoning"]) == ("43", "$ ls\n")
    assert (completion["sandbox"]["run_id"], second["sandbox"]["run_id"]) == ("r1", "r2")
    assert completion["usage"]["prompt_tokens"] == 35
    stats = completion["usage"]["sandbox"]
    assert (stats["llm_calls"], stats["wall_ms"], stats["context_tokens"]) == (4, 1200, 18)


def test_legacy_function_call_is_streamed_in_the_field_function_call() -> None:
    result = replace(NOTHING, answer="", client_calls=[CALL], finish_reason="function_call")
    first, last = data(stream().finish(result))
    assert first == chunk({"function_call": {"name": "lookup", "arguments": "{}"}})
    assert last["choices"][0]["finish_reason"] == "function_call"


def test_refusal_is_streamed_in_the_field_refusal() -> None:
    assert frames(ModelRefused("No.")) == [[chunk({"refusal": "No."})]]


def test_choices_are_streamed_with_their_index() -> None:
    encoder = stream()
    events = [AnswerDelta("a"), ChoiceEvent(2, AnswerDelta("c")), ChoiceEvent(2, AnswerDelta("d"))]
    streamed = [part["choices"][0] for event in events for part in data(encoder.encode(event))]
    assert [(choice["index"], choice["delta"]) for choice in streamed] == [
        (0, {"content": "a"}),
        (2, {"role": "assistant", "content": "c"}),
        (2, {"content": "d"}),
    ]
    other = replace(NOTHING, run_id="r2")
    ends = data(encoder.finish(replace(NOTHING, others=[other, other])))
    assert [(end["choices"][0]["index"], end["sandbox"]["run_id"]) for end in ends] == [
        (0, "r1"),
        (1, "r2"),
        (2, "r2"),
    ]


def test_each_choice_has_its_own_reasoning() -> None:
    builder = ChatCompletionBuilder(completion_head("r1", 7, "m"), "r1", "reasoning")
    for event in (ReasoningDelta("a"), ChoiceEvent(1, ReasoningDelta("b")), ReasoningDelta("c")):
        builder.add_event(event)
    choices = builder.finish(replace(RESULT, others=[RESULT, RESULT]))["choices"]
    reasoning = [choice["message"].get("reasoning") for choice in choices]
    assert reasoning == ["ac", "b", None]


@pytest.mark.parametrize("steps", STEPS_MODES)
def test_completion_has_the_same_reasoning_as_the_stream(steps: StepsMode) -> None:
    output = ToolOutput(1, "stdout", "a\n")
    events = [ReasoningDelta("Hm."), STARTED, output, FINISHED, ReasoningDelta("So.")]
    builder = ChatCompletionBuilder(completion_head("r1", 7, "m"), "r1", steps)
    for event in events:
        builder.add_event(event)
    message = builder.finish(NOTHING)["choices"][0]["message"]
    deltas = [part["choices"][0]["delta"] for each in frames(*events, steps=steps) for part in each]
    assert message["reasoning"] == "".join(delta.get("reasoning", "") for delta in deltas)


@pytest.mark.parametrize(
    ("costs", "expected"), [((0.5, 0.25), 750_000), ((0.5, None), None), ((None, 0.5), None)]
)
def test_cost_is_reported_only_if_known_for_every_choice(
    costs: tuple[float | None, float | None], expected: int | None
) -> None:
    one, two = (replace(NOTHING, stats=replace(NOTHING.stats, cost_usd=cost)) for cost in costs)
    assert usage(replace(one, others=[two]))["sandbox"].get("cost_microusd") == expected
