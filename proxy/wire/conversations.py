"""Which conversation a request goes on with, and under what name its files are found."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from policies.sessions import (
    GoesOn,
    Session,
    State,
    container_id,
    container_named,
    container_of,
    named,
    states,
)
from proxy.agent.parking import Parked, names


@dataclass(frozen=True, slots=True)
class Thread:
    """The place of one run in what came before it and what will come after."""

    container_id: str
    goes_on: GoesOn | None
    leaves: State | None
    parks: State
    resumes: Parked | None


def thread(
    owner: str,
    run_id: str,
    headers: Mapping[str, str],
    body: Mapping[str, Any],
    waiting: Parked | None,
    *,
    follows: GoesOn | None = None,
    is_kept: bool = False,
) -> Thread:
    """`headers` are in lower case; `waiting` is the run that the client has answered, if any.

    `follows` is what the request goes on from by its own words, `is_kept` whether others may go on
    from it by its name: a chat needs neither, for its messages show both.
    """
    goes_on, leaves = _conversation(owner, run_id, headers, body, follows)
    if goes_on is None and waiting is None:
        goes_on = _left(owner, body)
    if waiting and waiting.goes_on and not _includes(follows, waiting.goes_on):
        goes_on = waiting.goes_on
    session = goes_on.session if goes_on else Session(owner, container_id(owner, run_id))
    parks = State(session, run_id)
    if leaves is None or leaves.session != session:
        leaves = parks if is_kept else None
    return Thread(
        container_id=session.name,
        goes_on=goes_on,
        leaves=leaves,
        parks=parks,
        resumes=waiting,
    )


def _left(owner: str, body: Mapping[str, Any]) -> GoesOn | None:
    """What a run without a conversation has left whose calls are answered, but which itself is kept
    no more."""
    for name in names(body["messages"]):
        if container := container_of(owner, name):
            return GoesOn(Session(owner, container), (name,), anew=True)
    return None


def _includes(follows: GoesOn | None, waited: GoesOn) -> bool:
    """Whether what a request says it follows is the run that waited, and says it more exactly."""
    if follows is None or follows.session != waited.session:
        return False
    return set(waited.parents) <= set(follows.parents)


def _conversation(
    owner: str,
    run_id: str,
    headers: Mapping[str, str],
    body: Mapping[str, Any],
    follows: GoesOn | None,
) -> tuple[GoesOn | None, State | None]:
    chat = named(headers, body)
    if follows and (chat is None or chat.by_messages):
        return follows, State(follows.session, run_id)
    if chat is None:
        return None, None
    session = Session(owner, container_named(owner, chat.name))
    if not chat.by_messages:
        return GoesOn(session), State(session, run_id)
    state, parents = states(body["messages"])
    return GoesOn(session, tuple(parents), anew=not parents), State(session, state)
