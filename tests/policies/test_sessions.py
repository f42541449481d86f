"""Which conversation a request belongs to, and what it goes on from."""

from typing import Any

import pytest

from policies.sessions import NamedSession, named_session, session_states

U1, U2, U3 = ({"role": "user", "content": word} for word in ("one", "two", "three"))
A1, A2 = ({"role": "assistant", "content": word} for word in ("eins", "zwei"))


@pytest.mark.parametrize(
    ("headers", "body", "expected"),
    [
        ({}, {}, None),
        ({}, {"sandbox": {"session": "mine"}}, NamedSession("mine", by_messages=False)),
        ({}, {"sandbox": {"container_id": "cntr_1"}}, NamedSession("cntr_1", by_messages=False)),
        ({"x-sandbox-session": "mine"}, {}, NamedSession("mine", by_messages=False)),
        ({"x-openwebui-chat-id": "c1"}, {}, NamedSession("c1", by_messages=True)),
        ({"chatui-conversation-id": "c2"}, {}, NamedSession("c2", by_messages=True)),
        ({"x-claude-code-session-id": "c3"}, {}, NamedSession("c3", by_messages=True)),
        ({}, {"session_id": "s"}, NamedSession("s", by_messages=True)),
        ({}, {"metadata": {"session_id": "s"}}, NamedSession("s", by_messages=True)),
        ({"x-chat-id": "c", "x-sandbox-session": "s"}, {}, NamedSession("s", by_messages=False)),
        ({"x-chat-id": " "}, {"session_id": 7, "metadata": "?", "sandbox": []}, None),
    ],
)
def test_a_conversation_is_named_by_whoever_comes_first(
    headers: dict[str, str], body: dict[str, Any], expected: NamedSession | None
) -> None:
    assert named_session(headers, body) == expected


def test_a_turn_goes_on_from_the_ones_before_latest_first() -> None:
    first, none = session_states([U1])
    second, before_second = session_states([U1, A1, U2])
    third, before_third = session_states([U1, A1, U2, A2, U3])
    assert (none, before_second, before_third) == ([], [first], [second, first])
    assert len({first, second, third}) == 3


def test_state_ignores_system_and_assistant_messages() -> None:
    system = {"role": "system", "content": "It is Tuesday."}
    assert session_states([system, U1, A1, U2]) == session_states(
        [U1, {**A1, "content": "edited"}, U2]
    )


def test_an_edited_question_goes_on_from_what_was_before_it() -> None:
    first, _ = session_states([U1])
    _, before = session_states([U1, A1, U3])
    assert before == [first]


def test_a_tools_result_is_a_step_of_its_own() -> None:
    asked, _ = session_states([U1])
    result = {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}
    told, before = session_states([U1, A1, result])
    assert told != asked
    assert before == [asked]
