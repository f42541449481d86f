"""The place of a request in its conversation."""

from typing import Any

from policies.sessions import GoesOn, Session, State, container_id, container_named
from proxy.agent.parking import Parked
from proxy.wire.conversations import Thread, thread

USER = {"role": "user", "content": "one"}
MORE = {"role": "user", "content": "two"}
CHAT = {"x-chat-id": "chat 1"}


def of(
    headers: dict[str, str], waiting: Parked | None = None, run_id: str = "r1", **body: Any
) -> Thread:
    return thread("me", run_id, headers, {"messages": [USER], **body}, waiting)


def waits_in(goes_on: GoesOn | None) -> Parked:
    return Parked(messages=[USER], ours_from=1, calls=[], as_text=False, goes_on=goes_on)


def test_a_request_alone_leaves_nothing_but_where_it_waits_for_its_client() -> None:
    session = Session("me", container_id("me", "r1"))
    assert of({}) == Thread(container_id("me", "r1"), None, None, State(session, "r1"), None)


def test_a_chat_goes_on_from_what_its_messages_show() -> None:
    first = of(CHAT)
    second = of(CHAT, run_id="r2", messages=[USER, {"role": "assistant", "content": "x"}, MORE])
    assert first.leaves
    assert second.goes_on == GoesOn(first.leaves.session, (first.leaves.name,))
    assert second.container_id == first.container_id == container_named("me", "chat 1")


def test_a_session_goes_on_from_where_it_stands_by_its_name_or_its_containers() -> None:
    by_name = of({}, sandbox={"session": "mine"})
    by_container = of({}, sandbox={"container_id": by_name.container_id})
    assert by_name == by_container
    assert by_name.goes_on == GoesOn(Session("me", by_name.container_id))
    assert by_name.leaves == State(Session("me", by_name.container_id), "r1")


def test_two_owners_of_one_name_have_two_conversations() -> None:
    assert container_named("me", "chat 1") != container_named("you", "chat 1")


def test_a_run_that_waited_goes_on_in_its_own_workspace() -> None:
    before = of({})
    waiting = waits_in(GoesOn(before.parks.session, [before.parks.name]))
    after = of({}, waiting, "r2")
    assert (after.container_id, after.goes_on) == (container_id("me", "r1"), waiting.goes_on)
    assert (after.leaves, after.parks) == (None, State(before.parks.session, "r2"))


def test_a_run_that_waited_in_a_chat_stays_in_it() -> None:
    before = of(CHAT)
    assert before.leaves
    waiting = waits_in(GoesOn(before.leaves.session, [before.leaves.name]))
    result = {"role": "tool", "tool_call_id": "call_r1_1", "content": "sunny"}
    after = of(CHAT, waiting, "r2", messages=[USER, result])
    assert after.goes_on == waiting.goes_on
    assert after.leaves
    assert after.leaves.session == before.leaves.session
    assert after.leaves != before.leaves


def kept(
    headers: dict[str, str],
    follows: GoesOn | None = None,
    waiting: Parked | None = None,
    **body: Any,
) -> Thread:
    """The place of a request that others may go on from by its name."""
    said = {"messages": [USER], **body}
    return thread("me", "r2", headers, said, waiting, follows=follows, is_kept=True)


def test_a_request_that_others_go_on_from_leaves_its_files_under_its_name() -> None:
    session = Session("me", container_id("me", "r2"))
    assert kept({}).leaves == State(session, "r2")
    assert kept({}).goes_on is None
    waiting = waits_in(GoesOn(Session("me", "cntr_1"), ["r1"]))
    assert kept({}, None, waiting).leaves == State(Session("me", "cntr_1"), "r2")


def test_what_a_request_says_it_follows_comes_before_its_chat_and_after_its_container() -> None:
    follows = GoesOn(Session("me", "cntr_1"), ["r1"], anew=True)
    for headers in ({}, CHAT):
        assert kept(headers, follows).goes_on == follows
        assert kept(headers, follows).leaves == State(Session("me", "cntr_1"), "r2")
    named = kept({}, follows, sandbox={"session": "mine"})
    assert named.container_id == container_named("me", "mine")
    assert named.leaves == State(Session("me", named.container_id), "r2")
