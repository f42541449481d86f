"""Which conversation a request belongs to, and what it goes on from."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

CHAT_HEADERS = (
    "x-openwebui-chat-id",
    "chatui-conversation-id",
    "x-chat-id",
    "x-session-id",
    "x-hermes-session-id",
    "x-claude-code-session-id",
    "thread-id",  # Codex
)
"""Where chat UIs and coding agents say which chat it is."""
MAX_PARENTS = 200
_UNIQUE = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """How long the workspaces of conversations are kept."""

    keep_s: float = 120.0
    """How long a computer stays with its conversation after a run."""
    max_kept: int = 8
    """How many stay so at one time, of half the sandboxes there may be at most; beyond that the
    oldest goes."""
    keep_hours: float = 168.0
    """How long the files are kept after that."""
    quota_mib: int = 4096
    """The files of all of a key's conversations; beyond that the oldest go."""


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation: whose it is, and what the client calls it."""

    owner: str
    name: str


@dataclass(frozen=True, slots=True)
class State:
    """How the files of a conversation stood after one of its runs."""

    session: Session
    name: str


@dataclass(frozen=True, slots=True)
class GoesOn:
    """A conversation that a run goes on with: from the first of `parents` (names of states) that
    is there, else from the state that was left last, or, where it begins anew, from none."""

    session: Session
    parents: Sequence[str] = ()
    anew: bool = False


@dataclass(frozen=True, slots=True)
class Named:
    """What a client calls a conversation."""

    name: str
    by_messages: bool
    """Whether the messages show what it goes on from; else it goes on from where it stands."""


def named(headers: Mapping[str, str], body: Mapping[str, Any]) -> Named | None:
    """The conversation, in the order in which clients can say it; None: the request is alone.

    `headers` are in lower case.
    """
    ours = body.get("sandbox")
    ours = ours if isinstance(ours, dict) else {}
    explicit = (ours.get("container_id"), ours.get("session"), headers.get("x-sandbox-session"))
    if name := _first(explicit):
        return Named(name, by_messages=False)
    metadata = body.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    chats = (headers.get(header) for header in CHAT_HEADERS)
    if name := _first((*chats, body.get("session_id"), metadata.get("session_id"))):
        return Named(name, by_messages=True)
    return None


def states(messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[str]]:
    """The state that a conversation has after these messages, and those it may go on from, latest
    first.

    Only what the client brings counts, the user's words and its tools' results: clients change what
    the assistant said, and system prompts tell the time.
    """
    chain = [state for state, _ in groupby(states_between(messages))]
    state, *before = reversed(chain[1:]) if chain[1:] else ("",)
    return state, before[:MAX_PARENTS]


def states_between(messages: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """The state before each of these messages, and the one after the last."""
    state = ""
    for message in messages:
        yield state
        if message.get("role") in ("user", "tool", "function"):
            said = json.dumps([message.get("role"), message.get("content")], sort_keys=True)
            state = _digest(f"{state}{said}")[:32]
    yield state


def function_call_id(state: str, name: object, arguments: object) -> str:
    """The id of a call that was made in that state by a client's own account, where its API has no
    ids of calls: the same when it is shown again."""
    return f"call_{_digest(json.dumps([state, name, arguments]))[:32]}_1"


def container_id(owner: str, unique: str) -> str:
    """The container of that owner with a name of its own, 32 hexadecimal digits."""
    return f"cntr_{_digest(owner)[:16]}{unique}"


def container_of(owner: str, run_id: str) -> str | None:
    """The container of a run without a conversation; None where no run of ours has such an id."""
    return container_id(owner, run_id) if _UNIQUE.fullmatch(run_id) else None


def container_named(owner: str, name: str) -> str:
    """The container of a conversation, which may be asked for by what the client calls it or by the
    container itself. Nobody can name another's: what would be its name is one of the owner's."""
    prefix = container_id(owner, "")
    if name.startswith(prefix) and _UNIQUE.fullmatch(name.removeprefix(prefix)):
        return name
    return container_id(owner, _digest(f"{owner}/{name}")[:32])


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _first(names: Sequence[object]) -> str | None:
    """The first that can be a name."""
    found = (name for name in names if isinstance(name, str) and name.strip())
    name = next(found, None)
    return name.strip() if name else None
