"""Names and states of sessions, and the expiry of uploaded files."""

from typing import Any

import pytest

from policies.sessions import FileLimits, NamedSession, named_session, session_state_names

U1, U2, U3 = ({"role": "user", "content": word} for word in ("one", "two", "three"))
A1, A2 = ({"role": "assistant", "content": word} for word in ("eins", "zwei"))


@pytest.mark.parametrize(
    ("headers", "body", "expected"),
    [
        ({}, {}, None),
        ({}, {"sandbox": {"session": "mine"}}, NamedSession("mine", resumes_by_messages=False)),
        (
            {},
            {"sandbox": {"container_id": "cntr_1"}},
            NamedSession("cntr_1", resumes_by_messages=False),
        ),
        ({"x-sandbox-session": "mine"}, {}, NamedSession("mine", resumes_by_messages=False)),
        ({"x-openwebui-chat-id": "c1"}, {}, NamedSession("c1", resumes_by_messages=True)),
        ({"chatui-conversation-id": "c2"}, {}, NamedSession("c2", resumes_by_messages=True)),
        ({"x-claude-code-session-id": "c3"}, {}, NamedSession("c3", resumes_by_messages=True)),
        ({}, {"session_id": "s"}, NamedSession("s", resumes_by_messages=True)),
        ({}, {"metadata": {"session_id": "s"}}, NamedSession("s", resumes_by_messages=True)),
        (
            {"x-chat-id": "c", "x-sandbox-session": "s"},
            {},
            NamedSession("s", resumes_by_messages=False),
        ),
        ({"x-chat-id": " "}, {"session_id": 7, "metadata": "?", "sandbox": []}, None),
    ],
)
def test_session_is_named_by_the_first_field_in_order_of_precedence(
    headers: dict[str, str], body: dict[str, Any], expected: NamedSession | None
) -> None:
    assert named_session(headers, body) == expected


def test_parent_session_states_are_returned_newest_first() -> None:
    first, none = session_state_names([U1])
    second, before_second = session_state_names([U1, A1, U2])
    third, before_third = session_state_names([U1, A1, U2, A2, U3])
    assert (none, before_second, before_third) == ([], [first], [second, first])
    assert len({first, second, third}) == 3


def test_session_state_ignores_system_and_assistant_messages() -> None:
    system = {"role": "system", "content": "It is Tuesday."}
    assert session_state_names([system, U1, A1, U2]) == session_state_names(
        [U1, {**A1, "content": "edited"}, U2]
    )


def test_edited_message_has_the_parent_states_of_the_replaced_message() -> None:
    first, _ = session_state_names([U1])
    _, before = session_state_names([U1, A1, U3])
    assert before == [first]


def test_tool_result_starts_a_new_session_state() -> None:
    question_state, _ = session_state_names([U1])
    result = {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}
    result_state, before = session_state_names([U1, A1, result])
    assert result_state != question_state
    assert before == [question_state]


def test_file_expires_at_the_requested_time_or_after_the_retention_time() -> None:
    limits = FileLimits(retention_hours=2)
    expiries = [limits.expiry(100, requested_s) for requested_s in (None, 3600, 7200, 7201)]
    assert expiries == [7300, 3700, 7300, 7300]
