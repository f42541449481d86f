"""Artifacts: the choice of the produced files that a client gets, and the removal of signed links
from messages that clients send back."""

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from policies.file_names import check_type_patterns, matches_type
from policies.headers import RequestHeader
from policies.workspace import ANSWER_FILES, OUTPUT_DIR

ListFiles = Literal["auto", "always", "never"]
TEXT_ONLY_HEADERS = (RequestHeader.CHAT_UI_CHAT_ID,)
"""Request headers of chat UIs that show only the text of a message. The only known such UI is
Hugging Face's chat-ui."""


@dataclass(frozen=True, slots=True)
class ArtifactLimits:
    """Limits on the files that one run returns. Raises ValueError for a malformed entry of
    `allow_types` or `deny_types`."""

    max_files: int = 100
    """Maximum number of files; further files are skipped."""
    max_file_mib: int = 256
    """Maximum size of one file, in MiB; a larger file is skipped."""
    max_total_mib: int = 512
    """Maximum size of all files together, in MiB; a file that does not fit is skipped."""
    inline_image_kib: int = 512
    """Images up to this size, in KiB, are also part of the message, as data URLs."""
    retention_hours: float = 24.0
    """Hours until files and their links expire."""
    allow_types: tuple[str, ...] | None = None
    """Files that may be returned, by file extension (.csv) or media type (text/csv, image/*). The
    extension determines the media type. null: all files."""
    deny_types: tuple[str, ...] = ()
    """Files that may not be returned, even if `allow_types` contains them."""
    list_files: ListFiles = "auto"
    """always: the answer ends with a list of links to the files that it does not mention. never: no
    list. auto: always for chat UIs that are known to show only the text of a message."""

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
"""The reason why a produced file is not returned. `SkippedFile.why` explains each reason."""


@dataclass(frozen=True, slots=True)
class ProducedFile:
    """A regular file in the output directory."""

    path: str
    """Absolute path inside the sandbox."""
    bytes: int


@dataclass(frozen=True, slots=True)
class FileVersion:
    """Size and hash of one version of a file's content, as far as they are known."""

    bytes: int | None
    """None if unknown."""
    sha256: str
    """Empty if unknown."""


@dataclass(frozen=True, slots=True)
class SkippedFile:
    """A produced file that is not returned to the client."""

    path: str
    """The absolute path in the sandbox."""
    bytes: int
    """Size of the file, in bytes."""
    why: SkipReason
    """type_not_allowed, too_large, too_many: a limit of `artifacts`. no_room: the files together
    are too large. changed: the file was written to during the download. rule: a rule of the policy
    forbids the file. lost: the sandbox ended before the download. no_time: the run's time was up
    before the download, or before the check whether the file has changed."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Produced files, divided into files for the client and files that are not returned."""

    chosen: tuple[ProducedFile, ...]
    skipped: tuple[SkippedFile, ...]


def select_files(files: Iterable[ProducedFile], limits: ArtifactLimits) -> Selection:
    """Choose files in the given order while the limits allow. The ANSWER_FILES, which hold the
    final answer, are neither chosen nor skipped."""
    chosen: list[ProducedFile] = []
    skipped: list[SkippedFile] = []
    bytes_left = limits.max_total_mib << 20
    for file in files:
        if file.path in ANSWER_FILES:
            continue
        reason = _skip_reason(file, limits, bytes_left, len(chosen))
        if reason is None:
            chosen.append(file)
            bytes_left -= file.bytes
        else:
            skipped.append(SkippedFile(file.path, file.bytes, reason))
    return Selection(tuple(chosen), tuple(skipped))


def _skip_reason(
    file: ProducedFile, limits: ArtifactLimits, bytes_left: int, chosen_count: int
) -> SkipReason | None:
    if not limits.allows(file.path):
        return "type_not_allowed"
    if file.bytes > limits.max_file_mib << 20:
        return "too_large"
    if chosen_count >= limits.max_files:
        return "too_many"
    return "no_room" if file.bytes > bytes_left else None


def is_changed(before: FileVersion | None, now: FileVersion) -> bool | None:
    """Return True if a file is new or its content has changed, None if that is unknown."""
    if before is None:
        return True
    if before.sha256 and now.sha256:
        return before.sha256 != now.sha256
    if before.bytes is not None and before.bytes != now.bytes:
        return True
    return None


def output_path(relative: str) -> str:
    """Return the absolute path of a file in the output directory."""
    return f"{OUTPUT_DIR}/{relative}"


# Signed links. A signed link opens a file without an API key until the link expires. If a client
# sends a link back, the model and its backend get the path of the file, or the link without its
# signature.

_LINK_MARK = "/v1/containers/"
"""A part of every link; searching for it is faster than matching the pattern."""
_LINK = re.compile(
    r"(?P<place>(?:https?://[^\s\"'<>()\[\]/]{1,255}(?:/[\w.~-]{1,64}){0,8})?/v1/containers/"
    r"(?P<container>[\w-]{1,128})/files/(?:(?P<file>cfile_\w{1,64})/)?content)"
    r"\?exp=\d{1,12}&(?:amp;)?sig=[0-9a-f]{64}"
)
_MAX_LINK_CHARS = 2048
_PIECE_CHARS = 1 << 20
_URL_FIELDS = ("image_url", "video_url", "audio_url", "file_url")
FileRef = tuple[str, str]
"""The ids of a container and of a file in it."""
FindPath = Callable[[FileRef], str | None]


def linked_files(value: Any) -> Iterator[FileRef]:
    """Yield the file of each signed link in a text, or in the strings of a JSON value."""
    if isinstance(value, str):
        for piece in _pieces_with_whole_links(value):
            if _LINK_MARK in piece:
                yield from ((m["container"], m["file"]) for m in _LINK.finditer(piece) if m["file"])
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from linked_files(item)


def replace_links_with_file_ids(
    message: Mapping[str, Any], files: Container[FileRef]
) -> Mapping[str, Any]:
    """Return the message with file ids in place of signed links.

    A content part whose URL is a signed link to one of `files` becomes a part with the file's id,
    `container/file`. So the file is not fetched by URL. Links within texts, and messages of the
    assistant, do not change.
    """
    content = message.get("content")
    if not isinstance(content, list) or message.get("role") == "assistant":
        return message
    parts = [_with_file_id(part, files) if isinstance(part, dict) else part for part in content]
    return {**message, "content": parts} if _has_replaced_item(parts, content) else message


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


def replace_signed_links(value: Any, find_path: FindPath = lambda link: None) -> Any:
    """Return a JSON value with each signed link replaced by the path of its file, or by the link
    without its signature if the path is unknown. A value without a link is not copied."""
    return _replace_signed_links(value, find_path) if _has_link_mark(value) else value


def _has_link_mark(value: Any) -> bool:
    """Return True if a string in a JSON value may contain a link."""
    pending = [value]
    while pending:
        each = pending.pop()
        if isinstance(each, str):
            if len(each) > _PIECE_CHARS:
                if any(_LINK_MARK in piece for piece in _pieces_with_whole_links(each)):
                    return True
            elif _LINK_MARK in each:
                return True
        elif isinstance(each, dict):
            pending += each.values()
        elif isinstance(each, list):
            pending += each
    return False


def _replace_signed_links(value: Any, find_path: FindPath) -> Any:
    if isinstance(value, str):
        if not any(_LINK_MARK in piece for piece in _pieces_with_whole_links(value)):
            return value
        replacement = partial(_link_replacement, find_path=find_path)
        return "".join(_LINK.sub(replacement, piece) for piece in _pieces_with_whole_links(value))
    if isinstance(value, dict):
        fields = {name: _replace_signed_links(item, find_path) for name, item in value.items()}
        return fields if any(fields[name] is not value[name] for name in value) else value
    if isinstance(value, list):
        items = [_replace_signed_links(item, find_path) for item in value]
        return items if _has_replaced_item(items, value) else value
    return value


def _pieces_with_whole_links(text: str) -> Iterator[str]:
    """Yield the pieces of a text, without dividing a link. Yield nothing for a data URL. A thread
    that searched a long text as a whole would hold the GIL for the whole search."""
    if text.startswith("data:"):
        return
    start = 0
    while len(text) - start > _PIECE_CHARS:
        end = start + _PIECE_CHARS
        for link in _LINK.finditer(text, end - _MAX_LINK_CHARS, end + _MAX_LINK_CHARS):
            if link.start() < end:
                end = max(end, link.end())
        yield text[start:end]
        start = end
    yield text[start:] if start else text


def _may_have_link(text: str) -> bool:
    return not text.startswith("data:") and _LINK_MARK in text


def _link_replacement(match: re.Match[str], find_path: FindPath) -> str:
    path = find_path((match["container"], match["file"])) if match["file"] else None
    return path or match["place"]


def _has_replaced_item(items: Sequence[Any], originals: Sequence[Any]) -> bool:
    return any(one is not other for one, other in zip(items, originals, strict=True))
