"""Sessions: the assignment of requests to sessions and to saved states of their workspaces, and the
settings for data that the server stores for clients."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from policies.headers import RequestHeader

CHAT_HEADERS = (
    RequestHeader.OPEN_WEBUI_CHAT_ID,
    RequestHeader.CHAT_UI_CHAT_ID,
    RequestHeader.CHAT_ID,
    RequestHeader.SESSION_ID,
    RequestHeader.HERMES_SESSION_ID,
    RequestHeader.CLAUDE_CODE_SESSION_ID,
    RequestHeader.CODEX_THREAD_ID,
)
"""Headers in which chat UIs and coding agents send the id of the chat."""
_MAX_PARENTS = 200
_HEX_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """Limits on the sandboxes and files that sessions keep between requests."""

    idle_s: float = 120.0
    """Seconds that a sandbox stays leased to its session after a run."""
    max_kept: int = 8
    """Maximum number of sandboxes that stay leased to idle sessions; never more than half of the
    sandboxes that the pool may have. Above it, the sandbox that has been idle for longest ends."""
    retention_hours: float = 168.0
    """Hours that the files of a session are stored after its sandbox has ended."""
    quota_mib: int = 4096
    """Maximum size of the stored files of all sessions of one key, in MiB. Above it, the oldest
    snapshots are deleted."""


TrajectoryFormat = Literal["native", "openai", "reference"]
"""The formats in which clients get a trajectory."""
TrajectoryExportFormat = Literal["rows", "verl", "openenv", "sft", "native"]
"""The formats in which clients get many trajectories: a line of JSON for each trajectory or each
row."""


MAX_LABEL_CHARS = 512
"""Maximum length of a label, in characters, as for values of OpenAI's `metadata`."""


@dataclass(frozen=True, slots=True)
class TrajectoryLabels:
    """The labels of a trajectory, by which a trainer finds it again."""

    group_id: str | None = None
    """The group of runs whose rewards are compared, usually several runs of one task."""
    task_id: str | None = None
    session_id: str | None = None
    """The client's name for the session."""


@dataclass(frozen=True, slots=True)
class TrajectorySettings:
    """Limits on the trajectories of runs that clients have captured."""

    retention_hours: float = 720.0
    """Hours until a trajectory expires after its run has ended."""
    quota_mib: int = 4096
    """Maximum size of all stored trajectories of one key, in MiB, compressed. Above it, the oldest
    trajectories are deleted."""


@dataclass(frozen=True, slots=True)
class Session:
    """A session: its owner, and the client's name for it."""

    owner: str
    name: str


@dataclass(frozen=True, slots=True)
class SessionState:
    """A version of a session's files: the files after one of its runs."""

    session: Session
    name: str


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The state that a run resumes from: the first of `parents` that exists. If none exists, the
    run resumes from the newest state of the session, or starts with an empty workspace."""

    session: Session
    parents: Sequence[str] = ()
    """Names of states, in order of preference."""
    starts_empty: bool = False
    """True if the run starts with an empty workspace when no parent exists."""


@dataclass(frozen=True, slots=True)
class NamedSession:
    """The name of a request's session."""

    name: str
    resumes_by_messages: bool
    """True if the messages determine the state to resume from. False: resume from the newest
    state."""


def named_session(headers: Mapping[str, str], body: Mapping[str, Any]) -> NamedSession | None:
    """Return the session that a request names, or None. The proxy's own fields and header take
    precedence over the chat ids that clients send.

    The names of `headers` are in lower case.
    """
    own = body.get("sandbox")
    own = own if isinstance(own, dict) else {}
    explicit = (
        own.get("container_id"),
        own.get("session"),
        headers.get(RequestHeader.SESSION),
    )
    if name := _first_valid_name(explicit):
        return NamedSession(name, resumes_by_messages=False)
    metadata = body.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    chats = (headers.get(header) for header in CHAT_HEADERS)
    if name := _first_valid_name((*chats, body.get("session_id"), metadata.get("session_id"))):
        return NamedSession(name, resumes_by_messages=True)
    return None


def trajectory_labels(headers: Mapping[str, str], body: Mapping[str, Any]) -> TrajectoryLabels:
    """Return the labels of a request, from its `metadata` and its session. Values other than short
    texts are ignored. The names of `headers` are in lower case."""
    metadata, session = body.get("metadata"), named_session(headers, body)
    metadata = metadata if isinstance(metadata, dict) else {}
    found = (metadata.get("group_id"), metadata.get("task_id"), session and session.name)
    return TrajectoryLabels(*map(_valid_label, found))


def _valid_label(value: object) -> str | None:
    return value if isinstance(value, str) and 0 < len(value) <= MAX_LABEL_CHARS else None


def session_state_names(messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[str]]:
    """Return the name of a session's state after these messages, and the names of the states that a
    run with these messages may resume from, newest first.

    Names depend only on user messages and on results of the client's tools, because clients edit
    assistant messages, and system prompts contain the time.
    """
    chain = [state for state, _ in groupby(state_names(messages))]
    state, *parents = reversed(chain[1:]) if chain[1:] else ("",)
    return state, parents[:_MAX_PARENTS]


def state_names(messages: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the name of the workspace's state before each message, then after the last one."""
    state = ""
    for message in messages:
        yield state
        if message.get("role") in ("user", "tool", "function"):
            content = json.dumps([message.get("role"), message.get("content")], sort_keys=True)
            state = _digest(f"{state}{content}")[:32]
    yield state


def function_call_id(state: str, name: object, arguments: object) -> str:
    """Return an id for a tool call in a client's messages, for APIs without call ids. The same call
    in the same state always gets the same id."""
    return f"call_{_digest(json.dumps([state, name, arguments]))[:32]}_1"


def container_id(owner: str, unique_hex: str) -> str:
    """Return the id of an owner's container. `unique_hex` has 32 hexadecimal digits."""
    return f"cntr_{_digest(owner)[:16]}{unique_hex}"


def run_container_id(owner: str, run_id: str) -> str | None:
    """Return the container id of a run without a session, or None if the run id is malformed."""
    return container_id(owner, run_id) if _HEX_ID.fullmatch(run_id) else None


def session_container_id(owner: str, name: str) -> str:
    """Return the container id of a session. `name` is the client's name for the session or the
    container id itself.

    The id of another owner's container counts as a name, so it gives no access to that container.
    """
    prefix = container_id(owner, "")
    if name.startswith(prefix) and _HEX_ID.fullmatch(name.removeprefix(prefix)):
        return name
    return container_id(owner, _digest(f"{owner}/{name}")[:32])


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _first_valid_name(names: Sequence[object]) -> str | None:
    """Return the first name that is a text and not blank, or None."""
    return next((name.strip() for name in names if isinstance(name, str) and name.strip()), None)


# Stored data of clients


@dataclass(frozen=True, slots=True)
class FileLimits:
    """Limits on the files that one key stores, as uploads and in containers."""

    max_file_mib: int = 512
    """Maximum size of one file, in MiB; a larger file is refused."""
    quota_mib: int = 10240
    """Maximum size of all files of one key, in MiB; above it, uploads are refused. Artifacts do not
    count."""
    retention_hours: float = 720.0
    """Hours until an upload expires, unless the client has requested a shorter time."""

    def expiry(self, created_at: int, requested_s: int | None) -> int:
        """Return the time at which an upload expires, in seconds since 1970."""
        max_s = int(self.retention_hours * 3600)
        return created_at + (max_s if requested_s is None else min(requested_s, max_s))


@dataclass(frozen=True, slots=True)
class ResponseSettings:
    """Limits on stored responses and conversations."""

    retention_hours: float = 720.0
    """Hours until a response or a conversation expires after it was created or last continued."""
    quota_mib: int = 1024
    """Maximum size of all stored responses and conversations of one key, in MiB. Above it, the
    responses and conversations that were used least recently are deleted."""

    def expiry(self, used_at: int) -> int:
        """Return the expiry of an item that was last used at `used_at`, both in seconds since
        1970."""
        return used_at + int(self.retention_hours * 3600)
