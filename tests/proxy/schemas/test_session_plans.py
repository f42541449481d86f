"""Resolution of the session of a request."""

from typing import Any

from policies.sessions import ResumePoint, Session, SessionState, container_id, session_container_id
from proxy.agent.suspended_run import SuspendedRun
from proxy.agent.task import SessionPlan
from proxy.api.prepare import resolve_session

USER = {"role": "user", "content": "one"}
MORE = {"role": "user", "content": "two"}
CHAT = {"x-chat-id": "chat 1"}


def session_plan(
    headers: dict[str, str], suspended: SuspendedRun | None = None, run_id: str = "r1", **body: Any
) -> SessionPlan:
    return resolve_session("me", run_id, headers, {"messages": [USER], **body}, suspended)


def suspended_in(resume_from: ResumePoint | None) -> SuspendedRun:
    return SuspendedRun(
        messages=[USER], run_start_index=1, calls=[], calls_are_text=False, resume_from=resume_from
    )


def test_run_without_a_session_saves_its_state_only_if_it_is_suspended() -> None:
    session = Session("me", container_id("me", "r1"))
    assert session_plan({}) == SessionPlan(session, suspend_as=SessionState(session, "r1"))


def test_chat_resumes_from_the_state_saved_after_its_earlier_messages() -> None:
    first = session_plan(CHAT)
    second = session_plan(
        CHAT, run_id="r2", messages=[USER, {"role": "assistant", "content": "x"}, MORE]
    )
    assert first.save_as
    assert second.resume_from == ResumePoint(first.save_as.session, (first.save_as.name,))
    assert second.container_id == first.container_id == session_container_id("me", "chat 1")


def test_session_resumes_by_name_or_by_container_id() -> None:
    by_name = session_plan({}, sandbox={"session": "mine"})
    by_container = session_plan({}, sandbox={"container_id": by_name.container_id})
    assert by_name == by_container
    assert by_name.resume_from == ResumePoint(Session("me", by_name.container_id))
    assert by_name.save_as == SessionState(Session("me", by_name.container_id), "r1")


def test_sessions_of_the_same_name_are_separate_for_each_owner() -> None:
    assert session_container_id("me", "chat 1") != session_container_id("you", "chat 1")


def test_suspended_run_resumes_in_its_own_workspace() -> None:
    before = session_plan({})
    suspended = suspended_in(ResumePoint(before.session, ["r1"]))
    after = session_plan({}, suspended, "r2")
    assert (after.container_id, after.resume_from) == (
        container_id("me", "r1"),
        suspended.resume_from,
    )
    assert (after.save_as, after.suspend_as) == (None, SessionState(before.session, "r2"))


def test_suspended_run_of_a_chat_stays_in_the_session_of_the_chat() -> None:
    before = session_plan(CHAT)
    assert before.save_as
    suspended = suspended_in(ResumePoint(before.save_as.session, [before.save_as.name]))
    result = {"role": "tool", "tool_call_id": "call_r1_1", "content": "sunny"}
    after = session_plan(CHAT, suspended, "r2", messages=[USER, result])
    assert after.resume_from == suspended.resume_from
    assert after.save_as
    assert after.save_as.session == before.save_as.session
    assert after.save_as != before.save_as


def stored_session_plan(
    headers: dict[str, str],
    resume_point: ResumePoint | None = None,
    suspended: SuspendedRun | None = None,
    **body: Any,
) -> SessionPlan:
    """Return the session plan of a request whose response is stored."""
    body = {"messages": [USER], **body}
    return resolve_session(
        "me", "r2", headers, body, suspended, resume_point=resume_point, is_stored=True
    )


def test_request_with_a_stored_response_saves_its_files_under_its_run_id() -> None:
    session = Session("me", container_id("me", "r2"))
    assert stored_session_plan({}).save_as == SessionState(session, "r2")
    assert stored_session_plan({}).resume_from is None
    suspended = suspended_in(ResumePoint(Session("me", "cntr_1"), ["r1"]))
    assert stored_session_plan({}, None, suspended).save_as == SessionState(
        Session("me", "cntr_1"), "r2"
    )


def test_previous_response_takes_precedence_over_chat_but_not_over_session() -> None:
    resume_point = ResumePoint(Session("me", "cntr_1"), ["r1"], starts_empty=True)
    for headers in ({}, CHAT):
        assert stored_session_plan(headers, resume_point).resume_from == resume_point
        assert stored_session_plan(headers, resume_point).save_as == SessionState(
            Session("me", "cntr_1"), "r2"
        )
    named = stored_session_plan({}, resume_point, sandbox={"session": "mine"})
    assert named.container_id == session_container_id("me", "mine")
    assert named.save_as == SessionState(Session("me", named.container_id), "r2")
