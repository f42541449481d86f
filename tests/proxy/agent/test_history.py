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


def assistant_call(id: str) -> dict[str, Any]:
    function = {"name": "execute_bash", "arguments": "{}"}
    calls = [{"id": id, "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def tool_result(id: str, text: str = "x") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": text}


def make_history(*messages: dict[str, Any]) -> History:
    history = History(CLIENT)
    history.append(*messages)
    return history


def test_history_does_not_modify_the_message_list_of_the_client() -> None:
    client_messages = list(CLIENT)
    history = History(client_messages)
    history.append(tool_result("a"))
    assert client_messages == CLIENT
    assert history.messages == [*CLIENT, tool_result("a")]


def test_stubs_replace_only_the_contents_of_the_named_observations() -> None:
    long = {**tool_result("a", "long"), "extra": 1}
    history = make_history(assistant_call("a"), long)
    before = history.messages
    copied = copy.deepcopy(before)
    history.replace_with_stubs({3: "stub"})
    assert history.messages == [*CLIENT, assistant_call("a"), {**long, "content": "stub"}]
    assert before == copied


def test_summary_replaces_all_but_the_client_messages_and_the_latest_turns() -> None:
    history = make_history(
        assistant_call("a"),
        tool_result("a"),
        assistant_call("b"),
        tool_result("b"),
        assistant_call("c"),
        tool_result("c"),
    )
    history.replace_with_summary("so far", history.turns()[2:])
    summary = {"role": "user", "content": "so far"}
    assert history.messages == [*CLIENT, BRIDGE, summary, assistant_call("c"), tool_result("c")]
    assert valid({"messages": history.messages})


def test_later_summary_replaces_the_earlier_one() -> None:
    history = make_history(assistant_call("a"), tool_result("a"))
    history.replace_with_summary("first", [])
    history.append(assistant_call("b"), tool_result("b"))
    history.replace_with_summary("second", [])
    assert history.messages == [*CLIENT, BRIDGE, {"role": "user", "content": "second"}]


def test_last_request_from_the_proxy_to_the_model_is_kept_after_a_summary() -> None:
    history = make_history(assistant_call("a"), tool_result("a"))
    history.append_request("Answer now.")
    history.replace_with_summary("so far", [])
    assert [text_of(message) for message in history.messages] == ["s", "u", "so far", "Answer now."]
    assert [each["role"] for each in history.messages[1:]] == ["user", "assistant", "user"]


@pytest.mark.parametrize("is_latest", [False, True])
def test_text_that_was_appended_to_the_last_message_is_kept_by_a_summary(is_latest: bool) -> None:
    history = make_history(assistant_call("a"), tool_result("a"))
    history.append_to_last_message(" 3 steps remain.")
    history.replace_with_summary("so far", history.turns() if is_latest else [])
    history.append(assistant_call("b"), tool_result("b"))
    texts = [text_of(message) for message in history.messages]
    assert [text for text in texts if "remain" in text] == [
        "x 3 steps remain." if is_latest else "so far 3 steps remain."
    ]


def test_later_client_messages_stay_unchanged_in_front_of_a_summary() -> None:
    message_kinds: dict[int, Any] = {3: "result", 4: "theirs"}
    later = {"role": "user", "content": "And quickly."}
    history = History([*CLIENT, assistant_call("a"), tool_result("a"), later], 2, message_kinds)
    history.append(assistant_call("b"), tool_result("b"))
    history.replace_with_summary("so far", history.turns()[1:])
    summary = {"role": "user", "content": "so far"}
    assert history.messages == [
        *CLIENT,
        later,
        BRIDGE,
        summary,
        assistant_call("b"),
        tool_result("b"),
    ]
    assert history.run_start_index == 3


def test_restored_history_has_the_message_kinds_of_the_stored_history() -> None:
    history = make_history(assistant_call("a"), tool_result("a"))
    history.replace_with_summary("so far", [])
    history.append(assistant_call("b"), tool_result("b"))
    history.append_request("Answer now.")
    assert history.message_kinds == {2: "summary", 3: "summary", 6: "asked"}
    restored = History(
        json.loads(json.dumps(history.messages)), history.run_start_index, history.message_kinds
    )
    assert [each.kind for each in restored.entries] == [each.kind for each in history.entries]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("x", "x"),
        (None, ""),
        ([{"type": "text", "text": "a"}, {"type": "image_url"}, {"text": "b"}, "c"], "ab"),
        (7, ""),
    ],
)
def test_text_of_a_message_consists_of_its_text_parts(content: object, text: str) -> None:
    assert text_of({"content": content}) == text
    assert text_of({}) == ""
