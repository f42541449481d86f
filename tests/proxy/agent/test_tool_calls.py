"""Parsing of tool calls. Well-formed calls are unchanged, byte for byte."""

import itertools
import json
import random
from typing import Any

import pytest

from proxy.agent.model import MAX_CALLS
from proxy.agent.tool_calls import ToolCall, Turn, parse_turn

NAMES = ["str_replace_editor", "execute_bash", "submit", "lookup"]


def parse(message: dict[str, Any]) -> Turn:
    return parse_turn(message, NAMES, (f"call_{n}" for n in itertools.count(1)))


def entry(arguments: Any = "{}", **fields: Any) -> dict[str, Any]:
    function = {"name": "execute_bash", "arguments": arguments}
    return {"id": "c1", "type": "function", "function": function, **fields}


def message(*entries: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(entries)}


def test_well_formed_message_is_not_copied() -> None:
    sent = message(entry('{"command" : "ls"}', index=0, extra={"x": 1}))
    turn = parse(sent)
    assert turn.message is sent
    assert turn.calls == (
        ToolCall("c1", "execute_bash", {"command": "ls"}, raw=sent["tool_calls"][0]),
    )
    assert not turn.calls_are_text


@pytest.mark.parametrize("calls", [None, [], "none", {}])
def test_message_without_tool_calls_is_parsed_as_a_turn_without_calls(calls: object) -> None:
    sent = {"role": "assistant", "content": "42", "tool_calls": calls}
    assert parse(sent) == Turn(sent, (), calls_are_text=False)


def test_repair_of_tool_calls_does_not_modify_the_message_and_keeps_its_other_fields() -> None:
    sent = {**message(entry("{broken", extra={"x": 1}), entry("{}", id="c2")), "reasoning": "Hm."}
    before = json.dumps(sent)
    turn = parse(sent)
    assert json.dumps(sent) == before
    assert turn.message == {
        **sent,
        "tool_calls": [
            entry('{"invalid_arguments": "{broken"}', extra={"x": 1}),
            entry("{}", id="c2"),
        ],
    }


def test_parsed_call_keeps_the_arguments_as_the_model_wrote_them() -> None:
    [call] = parse(message(entry("{broken"))).calls
    assert (call.raw, call.invalid_arguments) == (entry("{broken"), "{broken")


def test_missing_and_repeated_call_ids_are_replaced_by_new_ids() -> None:
    turn = parse(message(entry(), entry(), entry(id=""), entry(id=None), entry(id="c2")))
    assert [call.id for call in turn.calls] == ["c1", "call_1", "call_2", "call_3", "c2"]
    assert [call["id"] for call in turn.message["tool_calls"]] == [c.id for c in turn.calls]


def test_missing_type_of_a_tool_call_is_added() -> None:
    bare = {"id": "c1", "function": {"name": "execute_bash", "arguments": "{}"}}
    assert parse(message(bare)).message["tool_calls"] == [entry()]


VALUES: list[Any] = [
    None,
    0,
    7.5,
    True,
    "",
    "x",
    "{}",
    "[]",
    "null",
    '{"a": 1}',
    '{"a": ',
    "\ud800",
    [],
    [1],
    {},
    {"a": 1},
    "execute_bash",
    "c1",
    "function",
    {"name": "submit"},
    '"\\ud800"',
    "NaN",
    "1" * 5000,
]


@pytest.mark.parametrize("seed", range(40))
def test_random_tool_calls_are_parsed_and_can_be_sent_back(seed: int) -> None:
    rng = random.Random(seed)

    def random_value() -> Any:
        return rng.choice(VALUES)

    def call() -> Any:
        if rng.random() < 0.2:
            return random_value()
        fields = {
            "id": random_value(),
            "type": "function",
            "function": {"name": random_value(), "arguments": random_value()},
        }
        return {key: value for key, value in fields.items() if rng.random() < 0.9}

    turn = parse(message(*(call() for _ in range(rng.randint(1, 5)))))
    sent_calls = turn.message["tool_calls"]
    json.dumps(sent_calls)
    assert [call.id for call in turn.calls] == [call["id"] for call in sent_calls]
    assert len({call["id"] for call in sent_calls}) == len(sent_calls)
    for sent_call, parsed_call in zip(sent_calls, turn.calls, strict=True):
        assert sent_call["function"]["name"]
        assert isinstance(json.loads(sent_call["function"]["arguments"]), dict)
        assert isinstance(parsed_call.arguments, dict) or parsed_call.mistake


def calls_in_text(text: Any) -> list[tuple[str, Any]]:
    turn = parse({"role": "assistant", "content": text})
    assert turn.calls_are_text == bool(turn.calls)
    return [(call.name, call.arguments) for call in turn.calls]


BASH = {"name": "execute_bash", "arguments": {"command": "ls"}}
CALLED = [("execute_bash", {"command": "ls"})]


def test_calls_in_tags_are_found_in_order() -> None:
    other = {"name": "submit", "arguments": {"answer": "42"}}
    text = f"<tool_call>{json.dumps(BASH)}</tool_call> and\n<tool_call>\n{json.dumps(other)}"
    assert calls_in_text(text) == [*CALLED, ("submit", {"answer": "42"})]


def test_repeated_call_in_text_is_found_once() -> None:
    assert calls_in_text(f"<tool_call>{json.dumps(BASH)}</tool_call>" * 2) == CALLED


def test_call_split_across_text_parts_is_found() -> None:
    half = len(json.dumps(BASH)) // 2
    parts = [json.dumps(BASH)[:half], json.dumps(BASH)[half:]]
    assert calls_in_text([{"type": "text", "text": part} for part in parts]) == CALLED


@pytest.mark.parametrize("mark", ["```", "</tool_call>", "<tool_call>"])
def test_fence_or_tag_inside_an_argument_does_not_end_the_call(mark: str) -> None:
    arguments = {"command": "create", "path": "/x", "file_text": f"a\n{mark}\nb"}
    call = json.dumps({"name": "str_replace_editor", "arguments": arguments})
    expected = [("str_replace_editor", arguments)]
    assert calls_in_text(f"<tool_call>{call}</tool_call>") == expected
    if mark == "```":
        assert calls_in_text(f"```json\n{call}\n```") == expected


def test_calls_in_several_fences_and_in_a_list_are_found() -> None:
    other = {"name": "submit", "answer": "42"}
    text = f"```json\n{json.dumps(BASH)}\n```\nthen\n```json\n{json.dumps(other)}\n```"
    assert calls_in_text(text) == [*CALLED, ("submit", {"answer": "42"})]
    assert calls_in_text(f"```json\n{json.dumps([BASH, other])}\n```") == [
        *CALLED,
        ("submit", {"answer": "42"}),
    ]


def test_call_written_as_text_keeps_a_parameter_named_command() -> None:
    text = '{"name": "str_replace_editor", "command": "view", "path": "/x"}'
    assert calls_in_text(text) == [("str_replace_editor", {"command": "view", "path": "/x"})]


@pytest.mark.parametrize("seed", range(40))
def test_random_prose_is_parsed_without_an_error(seed: int) -> None:
    rng = random.Random(seed)
    parts = [
        "<tool_call>",
        "</tool_call>",
        "```json\n",
        "```",
        "\n",
        "{",
        "}",
        '{"name": ',
        '"submit"',
        json.dumps(BASH),
        "[",
        "]",
        "text ",
        "\ud800",
        "\\",
        '"',
        ":",
        "{}" * 3,
        "[" * 2000,
    ]
    text = "".join(rng.choice(parts) for _ in range(rng.randint(0, 20)))
    turn = parse({"role": "assistant", "content": text})
    assert turn.message["content"] == text
    assert all(call.name for call in turn.calls)


@pytest.mark.parametrize("content", [None, 42, {"text": "x"}, [None, {"text": 7}, "x"], []])
def test_content_that_is_no_text_holds_no_call(content: object) -> None:
    assert calls_in_text(content) == []


@pytest.mark.parametrize("piece", ["<tool_call>", "<tool_call>no call {}", "<tool_call>{{}}"])
def test_repetitive_calls_in_a_text_are_bounded_in_number_and_length(piece: str) -> None:
    text = "".join(piece.format(number) for number in range(10 * MAX_CALLS))
    turn = parse({"role": "assistant", "content": text})
    assert 0 < len(turn.calls) <= MAX_CALLS
    assert sum(len(call.invalid_arguments) for call in turn.calls) <= len(text)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('<create_user>{"name": "Bob"}</create_user>', {"name": "Bob"}),
        ('<create_user>{"name": "Bob", "age": 5}', {"name": "Bob", "age": 5}),
        ('<create_user>{"name": "Bob", "arguments": {}}', None),
    ],
)
def test_name_field_in_a_tool_tag_is_an_argument_unless_there_is_an_arguments_field(
    text: str, arguments: dict[str, Any] | None
) -> None:
    turn = parse_turn({"role": "assistant", "content": text}, ["create_user"], iter(["c1"]))
    assert [call.arguments for call in turn.calls] == ([] if arguments is None else [arguments])


@pytest.mark.parametrize("count", [MAX_CALLS, MAX_CALLS + 1, 5000])
def test_calls_written_as_text_are_parsed_up_to_a_maximum_number(count: int) -> None:
    template = (
        '<tool_call>{"name": "execute_bash", "arguments": {"command": "echo %s"}}</tool_call>'
    )
    text = "\n".join(template % number for number in range(count))
    ids = (f"call_{number}" for number in itertools.count())
    turn = parse_turn({"role": "assistant", "content": text}, ["execute_bash"], ids)
    assert (len(turn.calls), turn.has_more_calls) == (MAX_CALLS, count > MAX_CALLS)
