"""The append-only history and its segments."""

import copy
import json
from typing import Any

import pytest

from policies.prompts import BEFORE_SUMMARY
from proxy.agent.history import History, text_of
from tests.proxy.agent.runs import valid

CLIENT = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u"},
]

BRIDGE = {"role": "assistant", "content": BEFORE_SUMMARY}


def said(id: str) -> dict[str, Any]:
    function = {"name": "execute_bash", "arguments": "{}"}
    calls = [{"id": id, "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def observed(id: str, text: str = "x") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": text}


def history(*messages: dict[str, Any]) -> History:
    made = History(CLIENT)
    made.append(*messages)
    return made


def test_history_does_not_modify_the_clients_list() -> None:
    given = list(CLIENT)
    made = History(given)
    made.append(observed("a"))
    assert given == CLIENT
    assert made.messages == [*CLIENT, observed("a")]


def test_shortened_segment_differs_in_nothing_but_its_stubs() -> None:
    long = {**observed("a", "long"), "extra": 1}
    made = history(said("a"), long)
    before = made.messages
    told = copy.deepcopy(before)
    made.replace_with_stubs({3: "stub"})
    assert made.messages == [*CLIENT, said("a"), {**long, "content": "stub"}]
    assert before == told


def test_summary_takes_the_place_of_all_but_the_clients_words_and_the_latest_turns() -> None:
    made = history(said("a"), observed("a"), said("b"), observed("b"), said("c"), observed("c"))
    made.replace_with_summary("so far", made.turns()[2:])
    told = {"role": "user", "content": "so far"}
    assert made.messages == [*CLIENT, BRIDGE, told, said("c"), observed("c")]
    assert valid({"messages": made.messages})


def test_later_summary_takes_the_place_of_an_earlier_one() -> None:
    made = history(said("a"), observed("a"))
    made.replace_with_summary("first", [])
    made.append(said("b"), observed("b"))
    made.replace_with_summary("second", [])
    assert made.messages == [*CLIENT, BRIDGE, {"role": "user", "content": "second"}]


def test_last_request_is_kept_after_a_summary() -> None:
    made = history(said("a"), observed("a"))
    made.append_request("Answer now.")
    made.replace_with_summary("so far", [])
    assert [text_of(message) for message in made.messages] == ["s", "u", "so far", "Answer now."]
    assert [each["role"] for each in made.messages[1:]] == ["user", "assistant", "user"]


@pytest.mark.parametrize("is_kept", [False, True])
def test_appended_text_is_kept_after_a_summary(is_kept: bool) -> None:
    made = history(said("a"), observed("a"))
    made.append_to_last(" 3 steps remain.")
    made.replace_with_summary("so far", made.turns() if is_kept else [])
    made.append(said("b"), observed("b"))
    texts = [text_of(message) for message in made.messages]
    assert [text for text in texts if "remain" in text] == [
        "x 3 steps remain." if is_kept else "so far 3 steps remain."
    ]


def test_later_client_messages_are_kept_before_a_summary() -> None:
    marks: dict[int, Any] = {3: "result", 4: "theirs"}
    later = {"role": "user", "content": "And quickly."}
    made = History([*CLIENT, said("a"), observed("a"), later], 2, marks)
    made.append(said("b"), observed("b"))
    made.replace_with_summary("so far", made.turns()[1:])
    told = {"role": "user", "content": "so far"}
    assert made.messages == [*CLIENT, later, BRIDGE, told, said("b"), observed("b")]
    assert made.own_start == 3


def test_marks_are_the_kinds_that_differ_from_roles() -> None:
    made = history(said("a"), observed("a"))
    made.replace_with_summary("so far", [])
    made.append(said("b"), observed("b"))
    made.append_request("Answer now.")
    assert made.marks == {2: "summary", 3: "summary", 6: "asked"}
    again = History(json.loads(json.dumps(made.messages)), made.own_start, made.marks)
    assert [each.kind for each in again.entries] == [each.kind for each in made.entries]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("x", "x"),
        (None, ""),
        ([{"type": "text", "text": "a"}, {"type": "image_url"}, {"text": "b"}, "c"], "ab"),
        (7, ""),
    ],
)
def test_text_of_a_message(content: object, text: str) -> None:
    assert text_of({"content": content}) == text
    assert text_of({}) == ""
