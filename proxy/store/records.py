"""The values that the store keeps and returns, and parts of lists of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PageRequest:
    """The part of a list that a client asks for."""

    limit: int = 20
    newest_first: bool = True
    after: str | None = None
    """The id of the last item of the part before."""


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """A part of a list."""

    items: tuple[T, ...]
    has_more: bool


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response that clients can retrieve."""

    id: str
    session: str
    """The container of its run."""
    state: str
    """The name of the snapshot of its files."""
    record: Mapping[str, Any]
    """OpenAI's object; while the run is running, as it was at the beginning."""
    previous_id: str | None = None
    conversation_id: str | None = None
    seen_seq: int | None = None
    """The `seq` of the conversation's last item when the response began."""
    worker: str | None = None
    """The process that runs it; None once it has ended."""


@dataclass(frozen=True, slots=True)
class ResponseChain:
    """A response with all responses before it."""

    latest: StoredResponse
    ids: tuple[str, ...]
    """The ids of all these responses, latest first."""
    states: tuple[str, ...]
    """The snapshots of the latest response's container, latest first."""
    inputs: tuple[Mapping[str, Any], ...]
    """All items before the latest response's output, in order, its own request included."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation, to which responses can add their items."""

    id: str
    created_at: int
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class StoredUpload:
    """A file that a client has uploaded, as the store keeps it."""

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
class Upload:
    """An uploaded file that a request names."""

    file_id: str
    filename: str
    bytes: int
    mime_type: str
    path: Path


class UploadLookup(Protocol):
    """Finds the uploads that requests name."""

    async def find(self, owner: str, file_id: str) -> Upload | None:
        """Return the owner's upload of that id, or None."""


class EmptyUploadLookup:
    """`UploadLookup` of a server without a store: finds nothing."""

    async def find(self, owner: str, file_id: str) -> Upload | None:
        return None


@dataclass(frozen=True, slots=True)
class NewContainer:
    """A container that a client asks for."""

    name: str
    minutes: int
    """How long it lives unused."""
    memory_limit: str | None = None
    network_policy: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Container:
    """A container of files that runs and clients put into it."""

    id: str
    name: str
    minutes: int
    memory_limit: str | None
    network_policy: Mapping[str, Any] | None
    created_at: int
    last_active_at: int


FileSource = Literal["user", "assistant"]
"""Who put a file into a container: the client or a run."""


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
    source: FileSource
    created_at: int

    @property
    def filename(self) -> str:
        return self.path.rpartition("/")[2]


RunStatus = Literal["running", "completed", "failed", "cancelled", "lost"]
"""lost: its server died before the run had ended."""


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run with its result."""

    id: str
    owner: str
    key: str | None
    """The client's Idempotency-Key."""
    fingerprint: str
    """The hash of the request."""
    status: RunStatus
    model: str
    container_id: str
    created_at: int
    record: str = ""
    """The events of a run that has ended, as JSON."""
