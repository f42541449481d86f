"""How a request is assigned to a session (a conversation), which saved state of it the run resumes
from, and how much clients may keep in the server and how long."""

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
"""Headers in which chat UIs and coding agents name the chat."""
MAX_PARENTS = 200
_UNIQUE = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """How long, and how many, workspaces of sessions are kept."""

    keep_s: float = 120.0
    """How long a sandbox stays leased to its session after a run."""
    max_kept: int = 8
    """How many stay leased so at one time, and never more than half of the sandboxes there may be;
    beyond that the oldest goes."""
    keep_hours: float = 168.0
    """How long the files are kept after that."""
    quota_mib: int = 4096
    """The files of all of a key's sessions; beyond that the oldest go."""


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation: its owner, and the client's name for it."""

    owner: str
    name: str


@dataclass(frozen=True, slots=True)
class SessionState:
    """A version of a session's files, as one of its runs left them."""

    session: Session
    name: str


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The state that a run resumes from: the first of `parents` (names of states) that exists, else
    the session's newest, or, if `anew`, none."""

    session: Session
    parents: Sequence[str] = ()
    starts_empty: bool = False


@dataclass(frozen=True, slots=True)
class NamedSession:
    """The name by which a request speaks of its session."""

    name: str
    by_messages: bool
    """True if the messages show the state to resume from; else it is the session's newest."""


def named_session(headers: Mapping[str, str], body: Mapping[str, Any]) -> NamedSession | None:
    """Return the session that a request names, or None. What our own API has comes before the
    headers and fields of others.

    `headers` are in lower case.
    """
    ours = body.get("sandbox")
    ours = ours if isinstance(ours, dict) else {}
    explicit = (ours.get("container_id"), ours.get("session"), headers.get("x-sandbox-session"))
    if name := _first(explicit):
        return NamedSession(name, by_messages=False)
    metadata = body.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    chats = (headers.get(header) for header in CHAT_HEADERS)
    if name := _first((*chats, body.get("session_id"), metadata.get("session_id"))):
        return NamedSession(name, by_messages=True)
    return None


def session_states(messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[str]]:
    """Return the name of a session's state after these messages, and of the states that it may
    resume from, latest first.

    Only the user's words and the results of the client's tools count: clients change what the
    assistant said, and system prompts tell the time.
    """
    chain = [state for state, _ in groupby(state_names(messages))]
    state, *before = reversed(chain[1:]) if chain[1:] else ("",)
    return state, before[:MAX_PARENTS]


def state_names(messages: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the name of the state before each of these messages, and after the last one."""
    state = ""
    for message in messages:
        yield state
        if message.get("role") in ("user", "tool", "function"):
            said = json.dumps([message.get("role"), message.get("content")], sort_keys=True)
            state = _digest(f"{state}{said}")[:32]
    yield state


def function_call_id(state: str, name: object, arguments: object) -> str:
    """Return the id of a call that the client says was made in that state, where its API has no ids
    of calls. It is the same each time the call is sent."""
    return f"call_{_digest(json.dumps([state, name, arguments]))[:32]}_1"


def container_id(owner: str, unique: str) -> str:
    """Return the id of an owner's container; `unique` is 32 hexadecimal digits."""
    return f"cntr_{_digest(owner)[:16]}{unique}"


def run_container_id(owner: str, run_id: str) -> str | None:
    """Return the container of a run without a session, or None if no run can have this id."""
    return container_id(owner, run_id) if _UNIQUE.fullmatch(run_id) else None


def session_container_id(owner: str, name: str) -> str:
    """Return the container of a session, by the client's name for it or by the container's own id.
    Another owner's id is taken for a name, so it leads to none of that owner's containers."""
    prefix = container_id(owner, "")
    if name.startswith(prefix) and _UNIQUE.fullmatch(name.removeprefix(prefix)):
        return name
    return container_id(owner, _digest(f"{owner}/{name}")[:32])


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _first(names: Sequence[object]) -> str | None:
    """Return the first that can be a name, or None."""
    return next((name.strip() for name in names if isinstance(name, str) and name.strip()), None)


# What clients store


@dataclass(frozen=True, slots=True)
class FileLimits:
    """What one key may store, as uploads and as files of containers."""

    max_file_mib: int = 512
    """The largest single file."""
    quota_mib: int = 10240
    """All of a key's files together; what runs produce does not count."""
    keep_hours: float = 720.0
    """How long an upload lives, unless its client asked for less."""

    def expiry(self, created_at: int, asked_s: int | None) -> int:
        """Return when an upload expires, in seconds since 1970."""
        longest_s = int(self.keep_hours * 3600)
        return created_at + (longest_s if asked_s is None else min(asked_s, longest_s))


@dataclass(frozen=True, slots=True)
class ResponseSettings:
    """How long responses and conversations are kept."""

    keep_hours: float = 720.0
    """How long after they were created or last continued."""
    quota_mib: int = 1024
    """All of a key's together; beyond that the least recently used go."""

    def expiry(self, used_at: int) -> int:
        """Return when one expires that is not used again, in seconds since 1970."""
        return used_at + int(self.keep_hours * 3600)
