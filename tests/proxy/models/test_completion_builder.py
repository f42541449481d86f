"""Completions that are built from streamed chunks."""

from typing import Any

import pytest

from proxy.agent.events import ModelDelta, ReasoningDelta, TextDelta, ToolCallDelta
from proxy.agent.history import completion_deltas
from proxy.agent.model import Completion
from proxy.errors import BackendError
from proxy.models.completion_builder import CompletionBuilder, parse_completion


def assembled(*deltas: dict[str, Any]) -> tuple[list[ModelDelta], Completion]:
    """Return the emitted deltas and the completion of a stream with these deltas."""
    builder = CompletionBuilder()
    emitted = [
        event
        for delta in deltas
        for event in builder.add({"choices": [{"index": 0, "delta": delta}]})
    ]
    return emitted, builder.build()


def calls_in(*deltas: list[dict[str, Any]]) -> list[tuple[str | None, str, str]]:
    """Return the id, name and arguments of each call that consists of these pieces."""
    _, completion = assembled(*({"tool_calls": pieces} for pieces in deltas))
    return [
        (call.get("id"), call["function"]["name"], call["function"]["arguments"])
        for call in completion.message["tool_calls"]
    ]


def piece(**fields: Any) -> dict[str, Any]:
    """Return a piece of a call. `name` and `arguments` belong to its function."""
    function = {key: fields.pop(key) for key in ("name", "arguments") if key in fields}
    return {**fields, "function": function}


def test_text_pieces_are_joined_and_the_role_is_kept() -> None:
    deltas, completion = assembled(
        {"role": "assistant", "content": ""}, {"content": "4"}, {"content": "2"}
    )
    assert deltas == [TextDelta("4"), TextDelta("2")]
    assert completion.message == {"role": "assistant", "content": "42"}
    assert completion.finish_reason == "stop"


def test_each_tool_call_delta_contains_the_name_of_its_tool() -> None:
    deltas, completion = assembled(
        {"content": None, "tool_calls": [piece(index=0, id="a", name="bash", arguments="")]},
        {"tool_calls": [piece(index=0, arguments='{"x"')]},
        {"tool_calls": [piece(index=0, arguments=": 1}")]},
    )
    assert deltas == [
        ToolCallDelta(0, "bash", ""),
        ToolCallDelta(0, "bash", '{"x"'),
        ToolCallDelta(0, "bash", ": 1}"),
    ]
    call = {"type": "function", "id": "a", "function": {"name": "bash", "arguments": '{"x": 1}'}}
    assert completion.message == {"role": "assistant", "content": None, "tool_calls": [call]}
    assert completion.finish_reason == "tool_calls"


def test_calls_are_separated_by_index() -> None:
    opened = [piece(index=0, id="a", name="f"), piece(index=1, id="b", name="g")]
    filled = [piece(index=1, arguments="1"), piece(index=0, arguments="0")]
    assert calls_in(opened, filled) == [("a", "f", "0"), ("b", "g", "1")]


def test_calls_without_index_are_separated_by_id() -> None:
    assert calls_in(
        [piece(id="a", name="f", arguments="0")],
        [piece(arguments="0")],
        [piece(id="b", name="f", arguments="1")],
    ) == [("a", "f", "00"), ("b", "f", "1")]


def test_piece_with_a_name_but_no_index_or_id_begins_a_new_tool_call() -> None:
    first, second = piece(name="f", arguments="0"), piece(name="f", arguments="1")
    assert calls_in([first, second]) == [(None, "f", "0"), (None, "f", "1")]


def test_parallel_calls_that_all_have_index_0_are_separated_by_id() -> None:
    first = piece(index=0, id="a", name="f", arguments="0")
    second = piece(index=0, id="b", name="f", arguments="1")
    assert calls_in([first], [second]) == [("a", "f", "0"), ("b", "f", "1")]


def test_repeated_name_is_ignored_and_split_name_is_joined() -> None:
    again = [piece(index=0, id="a", name="bash", arguments=part) for part in ("{", "}")]
    pieces = [piece(index=0, id="a", name="ba"), piece(index=0, name="sh", arguments="{}")]
    assert calls_in(*([part] for part in again)) == [("a", "bash", "{}")]
    assert calls_in(*([part] for part in pieces)) == [("a", "bash", "{}")]


def test_new_id_in_every_piece_of_a_call_is_ignored() -> None:
    opened = piece(index=0, id="a", name="f", arguments="0")
    assert calls_in([opened], [piece(index=0, id="b", arguments="1")]) == [("a", "f", "01")]


def test_unknown_fields_of_a_call_are_preserved() -> None:
    signature = {"google": {"thought_signature": "abc"}}
    opened = {**piece(index=0, id="a", name="f", arguments="{}"), "extra_content": signature}
    _, completion = assembled({"tool_calls": [opened]})
    assert completion.message["tool_calls"][0]["extra_content"] == signature


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_reasoning_keeps_its_field_name(field: str) -> None:
    deltas, completion = assembled({field: "six "}, {field: "sevens"}, {"content": "42"})
    assert deltas == [ReasoningDelta("six "), ReasoningDelta("sevens"), TextDelta("42")]
    assert completion.message == {"role": "assistant", "content": "42", field: "six sevens"}


def test_reasoning_in_both_reasoning_and_reasoning_content_yields_one_delta() -> None:
    deltas, completion = assembled(
        {"reasoning": "six", "reasoning_content": "six", "content": None}
    )
    assert deltas == [ReasoningDelta("six")]
    assert completion.message["reasoning"] == completion.message["reasoning_content"] == "six"


def test_thinking_parts_of_the_content_yield_reasoning_deltas() -> None:
    def thought(text: str) -> dict[str, Any]:
        return {"type": "thinking", "thinking": [{"type": "text", "text": text}]}

    deltas, completion = assembled(
        {"role": "assistant", "content": ""},
        {"content": [thought("Six ")]},
        {"content": [thought("sevens.")]},
        {"content": [{"type": "text", "text": "4"}]},
        {"content": "2"},
    )
    assert deltas == [
        *(ReasoningDelta("Six "), ReasoningDelta("sevens.")),
        *(TextDelta("4"), TextDelta("2")),
    ]
    parts = [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}]
    assert completion.message["content"] == [thought("Six "), thought("sevens."), *parts]


def test_unknown_message_fields_are_merged_by_type() -> None:
    _, completion = assembled(
        {"refusal": "I ", "annotations": [1], "audio": {"id": "a", "data": "AA"}, "score": 1},
        {"refusal": "won't", "annotations": [2], "audio": {"id": "a", "data": "BB"}, "score": 2},
        {"refusal": None, "annotations": None, "audio": None, "score": None},
    )
    assert completion.message == {
        "role": "assistant",
        "content": None,
        "refusal": "I won't",
        "annotations": [1, 2],
        "audio": {"id": "a", "data": "AABB"},
        "score": 2,
    }


def test_signed_thinking_is_joined_by_block() -> None:
    def thinking(text: str, signature: str | None = None) -> dict[str, Any]:
        block = {"type": "thinking", "thinking": text}
        return {"thinking_blocks": [{**block, "signature": signature} if signature else block]}

    _, completion = assembled(
        thinking("let "),
        thinking("me"),
        thinking("", "SIG1"),
        {"thinking_blocks": [{"type": "redacted_thinking", "data": "RED"}]},
        thinking("see", "SIG2"),
    )
    assert completion.message["thinking_blocks"] == [
        {"type": "thinking", "thinking": "let me", "signature": "SIG1"},
        {"type": "redacted_thinking", "data": "RED"},
        {"type": "thinking", "thinking": "see", "signature": "SIG2"},
    ]


def test_logprobs_of_a_partial_character_have_an_empty_text() -> None:
    logprobs = {"content": [{"token": "\\xe2", "logprob": -1.0}]}
    builder = CompletionBuilder()
    deltas = builder.add({"choices": [{"delta": {"content": ""}, "logprobs": logprobs}]})
    assert deltas == [TextDelta("", logprobs)]


def test_later_chunk_does_not_modify_earlier_delta() -> None:
    first = {"choices": [{"delta": {"content": "a"}, "logprobs": {"content": [1]}}]}
    second = {"choices": [{"delta": {"content": "b"}, "logprobs": {"content": [2]}}]}
    builder = CompletionBuilder()
    deltas = [*builder.add(first), *builder.add(second)]
    assert deltas == [TextDelta("a", {"content": [1]}), TextDelta("b", {"content": [2]})]
    assert builder.build().choice == {"logprobs": {"content": [1, 2]}}


def test_usage_and_response_fields_come_from_the_last_chunk_that_has_them() -> None:
    builder = CompletionBuilder()
    builder.add({"id": "x", "object": "chat.completion.chunk", "choices": [], "usage": None})
    builder.add({"id": "x", "choices": [], "usage": {"total_tokens": 1}})
    builder.add({"id": "x", "model": "m", "usage": {"total_tokens": 2}})
    completion = builder.build()
    assert completion.usage == {"total_tokens": 2}
    assert completion.response == {"id": "x", "object": "chat.completion", "model": "m"}


def test_choices_other_than_the_first_are_ignored() -> None:
    builder = CompletionBuilder()
    first = {"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}
    other = {"index": 1, "delta": {"content": "b"}, "finish_reason": "length"}
    assert builder.add({"choices": [other, first]}) == [TextDelta("a")]
    assert builder.build().finish_reason == "stop"


def test_completion_is_converted_to_deltas() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": "hi", "reasoning": "hm", "tool_calls": [call, call]}
    choice = {"index": 0, "message": message, "logprobs": {"content": []}}
    assert completion_deltas(parse_completion({"choices": [choice]})) == [
        ReasoningDelta("hm"),
        TextDelta("hi", {"content": []}),
        ToolCallDelta(0, "f", "{}"),
        ToolCallDelta(1, "f", "{}"),
    ]


@pytest.mark.parametrize("chunk", [None, [], "text", 7])
def test_chunk_that_is_not_an_object_is_an_error(chunk: Any) -> None:
    with pytest.raises(BackendError):
        CompletionBuilder().add(chunk)
