"""Replies out of streamed chunks."""

from typing import Any

import pytest

from proxy.agent.events import ModelDelta, ReasoningDelta, TextDelta, ToolCallDelta
from proxy.agent.model import Completion
from proxy.errors import BackendError
from proxy.models.completion_builder import CompletionBuilder, completion_deltas, parse_completion


def assembled(*deltas: dict[str, Any]) -> tuple[list[ModelDelta], Completion]:
    """What a stream of these deltas gives on the way and in the end."""
    builder = CompletionBuilder()
    heard = [
        event
        for delta in deltas
        for event in builder.add({"choices": [{"index": 0, "delta": delta}]})
    ]
    return heard, builder.build()


def calls_in(*deltas: list[dict[str, Any]]) -> list[tuple[str | None, str, str]]:
    """(id, name, arguments) of the calls that these pieces make."""
    _, reply = assembled(*({"tool_calls": pieces} for pieces in deltas))
    return [
        (call.get("id"), call["function"]["name"], call["function"]["arguments"])
        for call in reply.message["tool_calls"]
    ]


def piece(**fields: Any) -> dict[str, Any]:
    """A piece of a call; `name` and `arguments` belong to its function."""
    function = {key: fields.pop(key) for key in ("name", "arguments") if key in fields}
    return {**fields, "function": function}


def test_text_goes_on_and_the_role_is_kept() -> None:
    heard, reply = assembled(
        {"role": "assistant", "content": ""}, {"content": "4"}, {"content": "2"}
    )
    assert heard == [TextDelta("4"), TextDelta("2")]
    assert reply.message == {"role": "assistant", "content": "42"}
    assert reply.finish_reason == "stop"


def test_a_call_is_heard_with_its_name_so_far() -> None:
    heard, reply = assembled(
        {"content": None, "tool_calls": [piece(index=0, id="a", name="bash", arguments="")]},
        {"tool_calls": [piece(index=0, arguments='{"x"')]},
        {"tool_calls": [piece(index=0, arguments=": 1}")]},
    )
    assert heard == [
        ToolCallDelta(0, "bash", ""),
        ToolCallDelta(0, "bash", '{"x"'),
        ToolCallDelta(0, "bash", ": 1}"),
    ]
    call = {"type": "function", "id": "a", "function": {"name": "bash", "arguments": '{"x": 1}'}}
    assert reply.message == {"role": "assistant", "content": None, "tool_calls": [call]}
    assert reply.finish_reason == "tool_calls"


def test_calls_are_told_apart_by_index() -> None:
    opened = [piece(index=0, id="a", name="f"), piece(index=1, id="b", name="g")]
    filled = [piece(index=1, arguments="1"), piece(index=0, arguments="0")]
    assert calls_in(opened, filled) == [("a", "f", "0"), ("b", "g", "1")]


def test_calls_without_index_are_told_apart_by_id() -> None:
    assert calls_in(
        [piece(id="a", name="f", arguments="0")],
        [piece(arguments="0")],
        [piece(id="b", name="f", arguments="1")],
    ) == [("a", "f", "00"), ("b", "f", "1")]


def test_whole_calls_without_index_and_id_are_told_apart_by_name() -> None:
    first, second = piece(name="f", arguments="0"), piece(name="f", arguments="1")
    assert calls_in([first, second]) == [(None, "f", "0"), (None, "f", "1")]


def test_parallel_calls_that_all_have_index_0_are_told_apart() -> None:
    first = piece(index=0, id="a", name="f", arguments="0")
    second = piece(index=0, id="b", name="f", arguments="1")
    assert calls_in([first], [second]) == [("a", "f", "0"), ("b", "f", "1")]


def test_a_name_said_again_is_not_doubled_and_a_name_in_pieces_goes_on() -> None:
    again = [piece(index=0, id="a", name="bash", arguments=part) for part in ("{", "}")]
    pieces = [piece(index=0, id="a", name="ba"), piece(index=0, name="sh", arguments="{}")]
    assert calls_in(*([part] for part in again)) == [("a", "bash", "{}")]
    assert calls_in(*([part] for part in pieces)) == [("a", "bash", "{}")]


def test_a_new_id_in_every_piece_changes_nothing() -> None:
    opened = piece(index=0, id="a", name="f", arguments="0")
    assert calls_in([opened], [piece(index=0, id="b", arguments="1")]) == [("a", "f", "01")]


def test_unknown_fields_of_a_call_are_kept() -> None:
    signature = {"google": {"thought_signature": "abc"}}
    opened = {**piece(index=0, id="a", name="f", arguments="{}"), "extra_content": signature}
    _, reply = assembled({"tool_calls": [opened]})
    assert reply.message["tool_calls"][0]["extra_content"] == signature


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_reasoning_is_read_under_both_names_and_kept_under_its_own(field: str) -> None:
    heard, reply = assembled({field: "six "}, {field: "sevens"}, {"content": "42"})
    assert heard == [ReasoningDelta("six "), ReasoningDelta("sevens"), TextDelta("42")]
    assert reply.message == {"role": "assistant", "content": "42", field: "six sevens"}


def test_the_same_reasoning_under_both_names_is_heard_once() -> None:
    heard, reply = assembled({"reasoning": "six", "reasoning_content": "six", "content": None})
    assert heard == [ReasoningDelta("six")]
    assert reply.message["reasoning"] == reply.message["reasoning_content"] == "six"


def test_thinking_in_parts_of_the_content_is_heard_as_thinking_and_kept_as_it_came() -> None:
    def thought(text: str) -> dict[str, Any]:
        return {"type": "thinking", "thinking": [{"type": "text", "text": text}]}

    heard, reply = assembled(
        {"role": "assistant", "content": ""},
        {"content": [thought("Six ")]},
        {"content": [thought("sevens.")]},
        {"content": [{"type": "text", "text": "4"}]},
        {"content": "2"},
    )
    assert heard == [
        *(ReasoningDelta("Six "), ReasoningDelta("sevens.")),
        *(TextDelta("4"), TextDelta("2")),
    ]
    parts = [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}]
    assert reply.message["content"] == [thought("Six "), thought("sevens."), *parts]


def test_unknown_fields_go_on_or_are_replaced_by_their_kind() -> None:
    _, reply = assembled(
        {"refusal": "I ", "annotations": [1], "audio": {"id": "a", "data": "AA"}, "score": 1},
        {"refusal": "won't", "annotations": [2], "audio": {"id": "a", "data": "BB"}, "score": 2},
        {"refusal": None, "annotations": None, "audio": None, "score": None},
    )
    assert reply.message == {
        "role": "assistant",
        "content": None,
        "refusal": "I won't",
        "annotations": [1, 2],
        "audio": {"id": "a", "data": "AABB"},
        "score": 2,
    }


def test_signed_thinking_is_put_together_block_by_block() -> None:
    def thinking(text: str, signature: str | None = None) -> dict[str, Any]:
        block = {"type": "thinking", "thinking": text}
        return {"thinking_blocks": [{**block, "signature": signature} if signature else block]}

    _, reply = assembled(
        thinking("let "),
        thinking("me"),
        thinking("", "SIG1"),
        {"thinking_blocks": [{"type": "redacted_thinking", "data": "RED"}]},
        thinking("see", "SIG2"),
    )
    assert reply.message["thinking_blocks"] == [
        {"type": "thinking", "thinking": "let me", "signature": "SIG1"},
        {"type": "redacted_thinking", "data": "RED"},
        {"type": "thinking", "thinking": "see", "signature": "SIG2"},
    ]


def test_log_probabilities_of_half_a_character_are_heard_with_an_empty_text() -> None:
    logprobs = {"content": [{"token": "\\xe2", "logprob": -1.0}]}
    builder = CompletionBuilder()
    heard = builder.add({"choices": [{"delta": {"content": ""}, "logprobs": logprobs}]})
    assert heard == [TextDelta("", logprobs)]


def test_a_chunk_is_not_changed_by_what_comes_after_it() -> None:
    first = {"choices": [{"delta": {"content": "a"}, "logprobs": {"content": [1]}}]}
    second = {"choices": [{"delta": {"content": "b"}, "logprobs": {"content": [2]}}]}
    builder = CompletionBuilder()
    heard = [*builder.add(first), *builder.add(second)]
    assert heard == [TextDelta("a", {"content": [1]}), TextDelta("b", {"content": [2]})]
    assert builder.build().choice == {"logprobs": {"content": [1, 2]}}


def test_usage_and_the_responses_fields_are_the_last_seen() -> None:
    builder = CompletionBuilder()
    builder.add({"id": "x", "object": "chat.completion.chunk", "choices": [], "usage": None})
    builder.add({"id": "x", "choices": [], "usage": {"total_tokens": 1}})
    builder.add({"id": "x", "model": "m", "usage": {"total_tokens": 2}})
    reply = builder.build()
    assert reply.usage == {"total_tokens": 2}
    assert reply.response == {"id": "x", "object": "chat.completion", "model": "m"}


def test_only_the_first_choice_is_the_reply() -> None:
    builder = CompletionBuilder()
    first = {"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}
    other = {"index": 1, "delta": {"content": "b"}, "finish_reason": "length"}
    assert builder.add({"choices": [other, first]}) == [TextDelta("a")]
    assert builder.build().finish_reason == "stop"


def test_a_whole_reply_is_taken_apart_into_the_same_pieces() -> None:
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
def test_a_chunk_that_is_no_object_is_an_error(chunk: Any) -> None:
    with pytest.raises(BackendError):
        CompletionBuilder().add(chunk)
