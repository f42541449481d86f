"""Produced files (artifacts): which of them are returned to the client, how many and how large, and
the signed links to them, where clients send those back."""

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from policies.file_names import check_type_patterns, matches_type
from policies.workspace import ANSWER_FILES, OUTPUT_DIR

ListFiles = Literal["auto", "always", "never"]
TEXT_ONLY_HEADERS = ("chatui-conversation-id",)
"""Headers of interfaces that show only a message's text: Hugging Face's chat-ui."""


@dataclass(frozen=True, slots=True)
class ArtifactLimits:
    """What one run may return. Raises ValueError for a malformed type."""

    max_files: int = 100
    max_file_mib: int = 256
    max_total_mib: int = 512
    inline_image_kib: int = 512
    """Pictures up to this size also travel inside the message, as data URLs."""
    keep_hours: float = 24.0
    """How long files and their links live."""
    allow_types: tuple[str, ...] | None = None
    """The files that may be returned, by endings (.csv) and types (text/csv, image/*); an ending
    tells a file's type. null: all files."""
    deny_types: tuple[str, ...] = ()
    """The files that may not, even if `allow_types` has them."""
    list_files: ListFiles = "auto"
    """Whether the answer ends with a list of links to the files that it does not name. auto: for
    interfaces that are known to show nothing of a message but its text."""

    def __post_init__(self) -> None:
        check_type_patterns((*(self.allow_types or ()), *self.deny_types))

    def allows(self, path: str) -> bool:
        """Return True if a file of that name may be returned."""
        is_allowed = self.allow_types is None or matches_type(path, self.allow_types)
        return is_allowed and not matches_type(path, self.deny_types)

    def for_client(self, headers: Container[str]) -> "ArtifactLimits":
        """Return the limits with `list_files` decided for a client that sent these headers."""
        if self.list_files != "auto":
            return self
        is_text_only = any(name in headers for name in TEXT_ONLY_HEADERS)
        return replace(self, list_files="always" if is_text_only else "never")


SkipReason = Literal[
    "type_not_allowed", "too_large", "too_many", "no_room", "changed", "rule", "lost", "no_time"
]
"""no_room: together the files are too large; changed: the file was written to while it was fetched;
rule: a rule of the policy withholds it; lost: the sandbox ended before it was fetched; no_time: the
time was up before it was fetched, or before it was known whether it has changed."""


@dataclass(frozen=True, slots=True)
class ProducedFile:
    """A regular file in the output directory."""

    path: str
    """Absolute, inside the sandbox."""
    bytes: int


@dataclass(frozen=True, slots=True)
class SavedFile:
    """What is known of a file's content."""

    bytes: int | None
    """None: unknown."""
    sha256: str
    """Empty: unknown."""


@dataclass(frozen=True, slots=True)
class SkippedFile:
    """A file that is not returned."""

    path: str
    bytes: int
    why: SkipReason


@dataclass(frozen=True, slots=True)
class Selection:
    """The files that are returned, and the others."""

    chosen: tuple[ProducedFile, ...]
    skipped: tuple[SkippedFile, ...]


def select_files(files: Iterable[ProducedFile], limits: ArtifactLimits) -> Selection:
    """Choose files in the given order while the limits allow. The answer file does not count."""
    chosen: list[ProducedFile] = []
    skipped_files: list[SkippedFile] = []
    room = limits.max_total_mib << 20
    for file in files:
        if file.path in ANSWER_FILES:
            continue
        why = _skip_reason(file, limits, room, len(chosen))
        if why is None:
            chosen.append(file)
            room -= file.bytes
        else:
            skipped_files.append(SkippedFile(file.path, file.bytes, why))
    return Selection(tuple(chosen), tuple(skipped_files))


def _skip_reason(
    file: ProducedFile, limits: ArtifactLimits, room: int, chosen: int
) -> SkipReason | None:
    if not limits.allows(file.path):
        return "type_not_allowed"
    if file.bytes > limits.max_file_mib << 20:
        return "too_large"
    if chosen >= limits.max_files:
        return "too_many"
    return "no_room" if file.bytes > room else None


def is_changed(before: SavedFile | None, now: SavedFile) -> bool | None:
    """Return True if a file is new or has another content, None if that is not known."""
    if before is None:
        return True
    if before.sha256 and now.sha256:
        return before.sha256 != now.sha256
    if before.bytes is not None and before.bytes != now.bytes:
        return True
    return None


def output_path(relative: str) -> str:
    """Return the absolute path of a name in the output directory."""
    return f"{OUTPUT_DIR}/{relative}"


# Signed links, where clients send them back. A link opens a file without a key, for a day. The
# model and its backend need no such thing: they are told the file's path, or the link without its
# signature.

_LINK_MARK = "/v1/containers/"
"""Part of every link."""
_LINK = re.compile(
    r"(?P<place>(?:https?://[^\s\"'<>()\[\]/]{1,255}(?:/[\w.~-]{1,64}){0,8})?/v1/containers/"
    r"(?P<container>[\w-]{1,128})/files/(?:(?P<file>cfile_\w{1,64})/)?content)"
    r"\?exp=\d{1,12}&(?:amp;)?sig=[0-9a-f]{64}"
)
_URL_FIELDS = ("image_url", "video_url", "audio_url", "file_url")
FileRef = tuple[str, str]
"""A container's id and a file's."""
FindPath = Callable[[FileRef], str | None]


def linked_files(value: Any) -> Iterator[FileRef]:
    """Yield the file of each signed link in a text, or in the texts of JSON."""
    if isinstance(value, str):
        if _may_have_link(value):
            yield from ((m["container"], m["file"]) for m in _LINK.finditer(value) if m["file"])
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from linked_files(item)


def links_to_file_ids(message: Mapping[str, Any], files: Container[FileRef]) -> Mapping[str, Any]:
    """Return a message whose parts name these files by their ids, `container/file`, instead of by
    signed links: a file that is kept here need not be fetched."""
    content = message.get("content")
    if not isinstance(content, list) or message.get("role") == "assistant":
        return message
    parts = [_with_file_id(part, files) if isinstance(part, dict) else part for part in content]
    return {**message, "content": parts} if _differ(parts, content) else message


def _with_file_id(part: dict[str, Any], files: Container[FileRef]) -> dict[str, Any]:
    nested = part.get("file")
    fields = nested if isinstance(nested, dict) else part
    for name in _URL_FIELDS:
        value = fields.get(name)
        url = value.get("url") if isinstance(value, dict) else value
        link = _LINK.fullmatch(url) if isinstance(url, str) and _may_have_link(url) else None
        if link is None or (link["container"], link["file"]) not in files:
            continue
        file_id = f"{link['container']}/{link['file']}"
        if name != "image_url":
            return {"type": "input_file", "file_id": file_id}
        detail = (value if isinstance(value, dict) else part).get("detail")
        return {"type": "input_image", "file_id": file_id, "detail": detail}
    return part


def strip_links(value: Any, path_of: FindPath = lambda link: None) -> Any:
    """Return JSON with each signed link replaced by its file's path, or, where that is not known,
    by the link without its signature. A value without a link is returned itself, not a copy."""
    if isinstance(value, str):
        return (
            _LINK.sub(lambda m: _replacement(m, path_of), value) if _may_have_link(value) else value
        )
    if isinstance(value, dict):
        fields = {name: strip_links(item, path_of) for name, item in value.items()}
        return fields if any(fields[name] is not value[name] for name in value) else value
    if isinstance(value, list):
        items = [strip_links(item, path_of) for item in value]
        return items if _differ(items, value) else value
    return value


def _may_have_link(text: str) -> bool:
    return not text.startswith("data:") and _LINK_MARK in text


def _replacement(match: re.Match[str], path_of: FindPath) -> str:
    path = path_of((match["container"], match["file"])) if match["file"] else None
    return path or match["place"]


def _differ(items: Sequence[Any], others: Sequence[Any]) -> bool:
    return any(one is not other for one, other in zip(items, others, strict=True))
