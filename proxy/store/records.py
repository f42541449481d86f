"""What is kept, as values."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Page:
    """A part of a list, as it is asked for."""

    limit: int = 20
    newest_first: bool = True
    after: str | None = None
    """The id that the part before ended with."""


@dataclass(frozen=True, slots=True)
class Slice(Generic[T]):
    """A part of a list."""

    items: tuple[T, ...]
    has_more: bool


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as clients can ask for it again."""

    id: str
    session: str
    """The container that its run worked in."""
    state: str
    """What its files are kept as."""
    record: Mapping[str, Any]
    """OpenAI's object: of a run at work as it was at the beginning."""
    previous_id: str | None = None
    conversation_id: str | None = None
    seen_seq: int | None = None
    """The last item that the conversation had when it began."""
    worker: str | None = None
    """The process that is at work on it; None once it has ended."""


@dataclass(frozen=True, slots=True)
class Chain:
    """A response, and what it went on from."""

    latest: StoredResponse
    ids: tuple[str, ...]
    """Of all of them, latest first."""
    states: tuple[str, ...]
    """Those that the files had in the container of the latest, latest first."""
    inputs: tuple[Mapping[str, Any], ...]
    """All that had been said when it began, in order, its own request included."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Items under one name, to which responses can add theirs."""

    id: str
    created_at: int
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class StoredUpload:
    """A file that a client has uploaded."""

    id: str
    filename: str
    purpose: str
    mime_type: str
    bytes: int
    sha256: str
    blob: str
    created_at: int
    expires_at: int


@dataclass(frozen=True, slots=True)
class ContainerWish:
    """A container as it is asked for."""

    name: str
    minutes: int
    """How long it lives without being used."""
    memory_limit: str | None = None
    network_policy: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Container:
    """What a run produced, and what a client put beside it."""

    id: str
    name: str
    minutes: int
    memory_limit: str | None
    network_policy: Mapping[str, Any] | None
    created_at: int
    last_active_at: int


Maker = Literal["user", "assistant"]
"""Of a container's file: the client or a run."""


@dataclass(frozen=True, slots=True)
class ContainerFile:
    """A file of a container."""

    id: str
    container_id: str
    path: str
    mime_type: str
    bytes: int
    sha256: str
    blob: str
    source: Maker
    created_at: int

    @property
    def filename(self) -> str:
        return self.path.rpartition("/")[2]


RunStatus = Literal["running", "completed", "failed", "cancelled", "lost"]
"""lost: its server died before it had ended."""


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run, and what came of it."""

    id: str
    owner: str
    key: str | None
    """The client's own name for the request."""
    fingerprint: str
    """Of the work that was asked for."""
    status: RunStatus
    model: str
    container_id: str
    created_at: int
    record: str = ""
    """Once it has ended: what happened in it, as JSON."""
