"""The values that the store takes and returns."""

from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

T = TypeVar("T")
Pieces = AsyncGenerator[bytes, None]
"""The content of a file, piece by piece."""


@dataclass(frozen=True, slots=True)
class PageRequest:
    """A client's request for one page of a list."""

    limit: int = 20
    newest_first: bool = True
    after_id: str | None = None
    """The id of the last item of the previous page."""


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """A page of a list."""

    items: tuple[T, ...]
    has_more: bool


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response that clients can retrieve."""

    id: str
    session: str
    """The id of the run's container."""
    state: str
    """The name of the snapshot of the run's files."""
    record: Mapping[str, Any]
    """OpenAI's response object. Until the run ends, it has the state from the start of the run."""
    previous_id: str | None = None
    conversation_id: str | None = None
    seen_seq: int | None = None
    """The `seq` of the conversation's last item when the response began."""
    worker: str | None = None
    """The id of the process that runs the response; None once the run has ended."""


@dataclass(frozen=True, slots=True)
class ResponseChain:
    """A response and its predecessors."""

    latest: StoredResponse
    ids: tuple[str, ...]
    """The ids of all responses of the chain, latest first."""
    states: tuple[str, ...]
    """The names of the snapshots, latest first. Responses with another container than the latest
    response are left out."""
    inputs: tuple[Mapping[str, Any], ...]
    """All items before the output of the latest response, oldest first."""


@dataclass(frozen=True, slots=True)
class StoredConversation:
    """A conversation of OpenAI's API. Responses can append their items to it."""

    id: str
    created_at: int
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class StoredUpload:
    """The row of a file that a client has uploaded."""

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
    """An uploaded file that a request refers to."""

    file_id: str
    filename: str
    bytes: int
    mime_type: str
    read: Callable[[], Pieces]
    """Yields the content piece by piece. Raises FileMissingError if it is no longer stored."""


class UploadLookup(Protocol):
    """Finds the uploads that requests refer to."""

    async def find(self, owner: str, file_id: str) -> Upload | None:
        """Return the owner's upload with that id, or None."""


class EmptyUploadLookup:
    """The `UploadLookup` of a server without a store."""

    async def find(self, owner: str, file_id: str) -> Upload | None:
        return None


@dataclass(frozen=True, slots=True)
class NewContainer:
    """The fields of a container that a client creates."""

    name: str
    minutes: int
    """Minutes without use after which the container expires."""
    memory_limit: str | None = None
    network_policy: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Container:
    """A container of OpenAI's API. Runs and clients add files to it."""

    id: str
    name: str
    minutes: int
    memory_limit: str | None
    network_policy: Mapping[str, Any] | None
    created_at: int
    last_active_at: int


FileSource = Literal["user", "assistant"]
"""The origin of a file in a container: `user` is the client, `assistant` a run."""


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


class ProcessRegistration(Protocol):
    """This process, as an owner of runs."""

    @property
    def id(self) -> str:
        """The id by which rows name this process."""

    def is_dead(self, process_id: str) -> bool:
        """Return True if no living process has that id. May block for a query."""

    def remove_dead_records(self) -> None:
        """Delete the records of processes that have been dead for long."""

    def release(self) -> None:
        """Make other processes find this process dead. Safe to call twice."""


RunStatus = Literal["running", "completed", "failed", "cancelled", "lost"]
"""lost: the server process died before the run ended."""


@dataclass(frozen=True, slots=True)
class PublishedBatch:
    """Some events of a run, or frames of its response, which the run's process publishes for the
    processes that follow the run."""

    seq: int
    """The position of the batch. A later batch has a higher `seq`."""
    content: str
    """The events or frames as JSON."""
    is_first: bool
    """True if the batch begins a publication. A run may be published a second time, from the
    beginning."""
    is_last: bool
    """True if the run has ended, and no batch follows."""


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run, with its result once it has ended."""

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
    """The outcome of a run that has ended, as JSON. In a summary, the outcome has no text."""


class RunStart(NamedTuple):
    """The stored runs with the Idempotency-Key of a run that begins."""

    joinable: StoredRun | None
    """The newest run that is completed, or is running in another process. If there is one, the run
    that begins is not stored."""
    earlier: StoredRun | None
    """The newest run that has failed, was cancelled, or is lost."""
    checkpoint: str | None = None
    """The checkpoint of `earlier`, if there is one and `earlier` is a lost run of the same
    request."""
