"""Which produced files go back, how many, how large."""

from collections.abc import Container, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from policies.file_types import check_types, is_of
from policies.workspace import ANSWER_FILES, OUTPUT_DIR

ListFiles = Literal["auto", "always", "never"]
TEXT_ONLY_HEADERS = ("chatui-conversation-id",)
"""Headers of interfaces that show only a message's text: Hugging Face's chat-ui."""


@dataclass(frozen=True, slots=True)
class ArtifactLimits:
    """What one run may hand back. Raises ValueError for a type that means nothing."""

    max_files: int = 100
    max_file_mib: int = 256
    max_total_mib: int = 512
    inline_image_kib: int = 512
    """Pictures up to this size also travel inside the message, as data URLs."""
    keep_hours: float = 24.0
    """How long files and their links live."""
    allow_types: tuple[str, ...] | None = None
    """What may go back: endings (.csv) and types (text/csv, image/*), a file's being what its name
    speaks of; null: everything."""
    deny_types: tuple[str, ...] = ()
    """What may not, though it is allowed."""
    list_files: ListFiles = "auto"
    """Whether links to files that the answer does not name stand in a list below it. auto: for
    interfaces that are known to show nothing of a message but its text."""

    def __post_init__(self) -> None:
        check_types((*(self.allow_types or ()), *self.deny_types))

    def allow(self, path: str) -> bool:
        """Whether a file of that name may go back."""
        is_allowed = self.allow_types is None or is_of(path, self.allow_types)
        return is_allowed and not is_of(path, self.deny_types)

    def suited(self, headers: Container[str]) -> "ArtifactLimits":
        """Return the limits with `list_files` decided for a client that sent these headers."""
        if self.list_files != "auto":
            return self
        is_text_only = any(name in headers for name in TEXT_ONLY_HEADERS)
        return replace(self, list_files="always" if is_text_only else "never")


WhyLeftOut = Literal[
    "type_not_allowed", "too_large", "too_many", "no_room", "changed", "rule", "lost", "no_time"
]
"""no_room: together they are too large; changed: somebody still wrote while it was fetched; rule:
one of the policy withholds it; lost: the sandbox was, before it was fetched; no_time: the time was
up before it was fetched, or before it was known whether it has changed."""


@dataclass(frozen=True, slots=True)
class Produced:
    """A regular file that lies in the output directory."""

    path: str
    """Absolute, inside the sandbox."""
    bytes: int


@dataclass(frozen=True, slots=True)
class Contents:
    """What is known of a file's content."""

    bytes: int | None
    """None: unknown."""
    sha256: str
    """Empty: unknown."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """One that is not handed back."""

    path: str
    bytes: int
    why: WhyLeftOut


@dataclass(frozen=True, slots=True)
class Selection:
    """What is handed back and what is not."""

    chosen: tuple[Produced, ...]
    left_out: tuple[LeftOut, ...]


def select(files: Iterable[Produced], limits: ArtifactLimits) -> Selection:
    """Take files in the order of their paths while the limits allow; the answer file is no file."""
    chosen: list[Produced] = []
    left_out: list[LeftOut] = []
    room = limits.max_total_mib << 20
    for file in files:
        if file.path in ANSWER_FILES:
            continue
        why = _why_not(file, limits, room, len(chosen))
        if why is None:
            chosen.append(file)
            room -= file.bytes
        else:
            left_out.append(LeftOut(file.path, file.bytes, why))
    return Selection(tuple(chosen), tuple(left_out))


def _why_not(file: Produced, limits: ArtifactLimits, room: int, chosen: int) -> WhyLeftOut | None:
    if not limits.allow(file.path):
        return "type_not_allowed"
    if file.bytes > limits.max_file_mib << 20:
        return "too_large"
    if chosen >= limits.max_files:
        return "too_many"
    return "no_room" if file.bytes > room else None


def changed(before: Contents | None, now: Contents) -> bool | None:
    """Return True if a file is new or has another content, None if that is not known."""
    if before is None:
        return True
    if before.sha256 and now.sha256:
        return before.sha256 != now.sha256
    if before.bytes is not None and before.bytes != now.bytes:
        return True
    return None


def output_path(relative: str) -> str:
    """A listed name of the output directory as an absolute path."""
    return f"{OUTPUT_DIR}/{relative}"
