"""The place of a request in its conversation."""

from typing import Any

from policies.sessions import ResumePoint, Session, State, container_id, container_named
from proxy.agent.suspension import SuspendedRun
from proxy.agent.task import SessionPlan
from proxy.api.prepare import resolve_session

USER = {"role": "user", "content": "one"}
MORE = {"role": "user", "content": "two"}
CHAT = {"x-chat-id": "chat 1"}


def of(
    headers: dict[str, str], waiting: SuspendedRun | None = None, run_id: str = "r1", **body: Any
) -> SessionPlan:
    return resolve_session("me", run_id, headers, {"messages": [USER], **body}, waiting)


def waits_in(goes_on: ResumePoint | None) -> SuspendedRun:
    return SuspendedRun(messages=[USER], ours_from=1, calls=[], as_text=False, goes_on=goes_on)


def test_a_request_alone_leaves_nothing_but_where_it_waits_for_its_client() -> None:
    session = Session("me", container_id("me", "r1"))
    assert of({}) == SessionPlan(session, suspend_as=State(session, "r1"))


def test_a_chat_goes_on_from_what_its_messages_show() -> None:
    first = of(CHAT)
    second = of(CHAT, run_id="r2", messages=[USER, {"role": "assistant", "content": "x"}, MORE])
    assert first.save_as
    assert second.resume_from == ResumePoint(first.save_as.session, (first.save_as.name,))
    assert second.container_id == first.container_id == container_named("me", "chat 1")


def test_a_session_goes_on_from_where_it_stands_by_its_name_or_its_containers() -> None:
    by_name = of({}, sandbox={"session": "mine"})
    by_container = of({}, sandbox={"container_id": by_name.container_id})
    assert by_name == by_container
    assert by_name.resume_from == ResumePoint(Session("me", by_name.container_id))
    assert by_name.save_as == State(Session("me", by_name.container_id), "r1")


def test_two_owners_of_one_name_have_two_conversations() -> None:
    assert container_named("me", "chat 1") != container_named("you", "chat 1")


def test_a_run_that_waited_goes_on_in_its_own_workspace() -> None:
    before = of({})
    waiting = waits_in(ResumePoint(before.session, ["r1"]))
    after = of({}, waiting, "r2")
    assert (after.container_id, after.resume_from) == (container_id("me", "r1"), waiting.goes_on)
    assert (after.save_as, after.suspend_as) == (None, State(before.session, "r2"))


def test_a_run_that_waited_in_a_chat_stays_in_it() -> None:
    before = of(CHAT)
    assert before.save_as
    waiting = waits_in(ResumePoint(before.save_as.session, [before.save_as.name]))
    result = {"role": "tool", "tool_call_id": "call_r1_1", "content": "sunny"}
    after = of(CHAT, waiting, "r2", messages=[USER, result])
    assert after.resume_from == waiting.goes_on
    assert after.save_as
    assert after.save_as.session == before.save_as.session
    assert after.save_as != before.save_as


def kept(
    headers: dict[str, str],
    follows: ResumePoint | None = None,
    waiting: SuspendedRun | None = None,
    **body: Any,
) -> SessionPlan:
    """The place of a request that others may go on from by its name."""
    said = {"messages": [USER], **body}
    return resolve_session("me", "r2", headers, said, waiting, resume_point=follows, is_stored=True)


def test_a_request_that_others_go_on_from_leaves_its_files_under_its_name() -> None:
    session = Session("me", container_id("me", "r2"))
    assert kept({}).save_as == State(session, "r2")
    assert kept({}).resume_from is None
    waiting = waits_in(ResumePoint(Session("me", "cntr_1"), ["r1"]))
    assert kept({}, None, waiting).save_as == State(Session("me", "cntr_1"), "r2")


def test_what_a_request_says_it_follows_comes_before_its_chat_and_after_its_container() -> None:
    follows = ResumePoint(Session("me", "cntr_1"), ["r1"], anew=True)
    for headers in ({}, CHAT):
        assert kept(headers, follows).resume_from == follows
        assert kept(headers, follows).save_as == State(Session("me", "cntr_1"), "r2")
    named = kept({}, follows, sandbox={"session": "mine"})
    assert named.container_id == container_named("me", "mine")
    assert named.save_as == State(Session("me", named.container_id), "r2")
