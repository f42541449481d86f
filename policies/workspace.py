"""The workspace of a request: paths inside the sandbox (the paper's directories), the conversion of
parts of a request into files, and the names of files that clients upload or download."""

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType
from typing import Any, Literal

from policies.context import estimate_tokens, is_far_above, is_far_below, is_near_threshold
from policies.documents import LARGE_CHARS, offload_as_one_file, offload_documents
from policies.file_names import UniqueDisplayNames, UniqueNames, display_name

WORKING_DIR = "/testbed"
INPUT_DIR = "/testbed/documents"
OUTPUT_DIR = "/testbed/output"
SHARED_DIR = "/testbed/shared"
OBSERVATION_DIR = "/testbed/.observations"
"""The directory for observations that do not fit into the model's context window."""
ANSWER_FILES = ("/testbed/output/answer.txt", "/testbed/answer.txt")
"""The files in which the model may write its answer; the first that exists counts."""
MAX_ANSWER_BYTES = 1 << 20

_MAX_FILES = 1000
"""Once a conversation has this many files, a further long text becomes a single file, and no longer
a file for each of its documents."""
_SLOW_CHARS = 200_000
_MERGED = object()
"""Replaces a part that was merged into the part before it."""
_MAX_ERROR_CHARS = 300
_PIECE_CHARS = 1 << 20

Modality = Literal["image", "audio", "video"]
Kind = Modality | Literal["file"]
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class InputLimits:
    """Limits on the files and long texts of a request."""

    fetch_urls: bool = True
    """True if files with an http(s) URL are fetched, from public addresses only."""
    max_file_mib: int = 64
    """Maximum size of one file in a request or from a URL, in MiB."""
    max_total_mib: int = 128
    """Maximum size of all files of a request together, in MiB."""
    offload_text_over_tokens: int | None = 12_000
    """Size of the text of a user message, in tokens, above which its documents become files. A text
    without documents becomes one file, except for its start and end. The limit is at most half of
    the model's context window, if the window is known. null: texts never become files."""


@dataclass(frozen=True, slots=True)
class ReceivedFile:
    """A file that a client has sent with a request."""

    position: tuple[int, int] | None
    """The indexes of the message and of its part with the file. None: the request names the file
    outside the messages."""
    kind: Kind
    identity: str
    """An id that is the same whenever the same file is sent."""
    filename: str
    """The client's name for the file; may be empty."""
    mime_type: str
    bytes: int
    content_part: Mapping[str, Any] | None = None
    """The message part that shows the file itself to the model, in addition to the note with its
    path."""
    error: str = ""
    """The reason why the file's content is missing; empty if the content was received."""


@dataclass(frozen=True, slots=True)
class FileToWrite:
    """A file that will be written to the sandbox."""

    path: str
    source: int | str
    """The index of a received file, or the text of the file."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """The messages of a request for the model, and the files that were taken out of them."""

    messages: Sequence[Message]
    files: tuple[FileToWrite, ...]
    tokens_saved: int = 0
    """An estimate of the tokens by which offloading texts made the prompt shorter."""
    notes: tuple[str, ...] = ()
    """The notes that are not in the messages: see `index_without_notes` of `plan_workspace`."""


def texts_to_count(messages: Sequence[Message], threshold_tokens: int | None) -> list[str]:
    """Return the user's texts whose estimated size is too near `threshold_tokens` to decide whether
    they become files. A caller with a tokenizer counts the tokens of these texts and passes the
    counts to `plan_workspace`."""
    if threshold_tokens is None:
        return []
    texts = [
        text
        for text in _user_texts(messages)
        if not is_far_below(text, threshold_tokens) and not is_far_above(text, threshold_tokens)
    ]
    return [text for text in texts if is_near_threshold(estimate_tokens(text), threshold_tokens)]


def has_long_text(messages: Sequence[Message]) -> bool:
    """Return True if a user message has more than LARGE_CHARS characters. Only a longer text can be
    offloaded to a file."""
    return any(count > LARGE_CHARS for count in _user_text_lengths(messages))


def is_slow_to_plan(messages: Sequence[Message]) -> bool:
    """Return True if `plan_workspace` would block the event loop for long."""
    return sum(_user_text_lengths(messages)) > _SLOW_CHARS


def _user_texts(messages: Sequence[Message]) -> Iterator[str]:
    return (
        _text_of_content(message.get("content")) for message in messages if _is_from_user(message)
    )


def _user_text_lengths(messages: Sequence[Message]) -> Iterator[int]:
    """Yield the approximate length of the text of each user message."""
    for message in messages:
        if _is_from_user(message):
            content = message.get("content")
            parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
            yield sum(len(_text_of_part(part)) for part in parts)


def plan_workspace(
    messages: Sequence[Message],
    received: Sequence[ReceivedFile],
    *,
    threshold_tokens: int | None,
    token_counts: Mapping[str, int] = MappingProxyType({}),
    index_without_notes: int | None = None,
) -> Workspace:
    """Assign a path to every file, and replace the file in the messages by a note with the path.
    The user's long texts become files too.

    A note depends only on the messages before it, so that a growing conversation keeps its prefix
    in the backend's cache. `token_counts` maps texts from `texts_to_count` to their token counts;
    the tokens of other texts are estimated. The notes on the files of the message with the index
    `index_without_notes` are put into `Workspace.notes` instead of the message.
    """
    planner = _Planner(received, threshold_tokens, token_counts, index_without_notes)
    planned = [
        planner.replace_files_with_notes(index, message) for index, message in enumerate(messages)
    ]
    roles = [message.get("role") for message in planned]
    first_user = roles.index("user") if "user" in roles else 0
    notes, request_note = tuple(planner.notes), planner.request_note
    if request_note and first_user == index_without_notes:
        notes = (*notes, request_note)
    elif request_note and planned:
        planned[first_user] = _append_note(planned[first_user], request_note)
    return Workspace(planned, tuple(planner.files), planner.tokens_saved, notes)


def last_user_index(messages: Sequence[Message]) -> int | None:
    """Return the index of the last user message, or None."""
    return next((n for n in reversed(range(len(messages))) if _is_from_user(messages[n])), None)


class _Planner:
    """Assigns paths to files in the order of the conversation."""

    def __init__(
        self,
        received: Sequence[ReceivedFile],
        threshold_tokens: int | None,
        token_counts: Mapping[str, int],
        index_without_notes: int | None,
    ) -> None:
        self._index_without_notes = index_without_notes
        self.notes: list[str] = []
        self._received = received
        self._numbers_by_position = {
            file.position: n for n, file in enumerate(received) if file.position
        }
        self._threshold_tokens = threshold_tokens
        self._token_counts = token_counts
        self.tokens_saved = 0
        self._names = UniqueNames()
        self._paths: dict[tuple[str, str], str] = {}
        self.files: list[FileToWrite] = []
        in_request = [n for n, file in enumerate(received) if file.position is None]
        self.request_note = "\n".join(map(self._file_note, in_request))
        """The notes on files that the request names outside the messages."""

    def replace_files_with_notes(self, index: int, message: Message) -> Message:
        """Return the message that the model gets. Notes replace files and long texts."""
        content = message.get("content")
        is_long = self._is_long(message)
        if isinstance(content, str) and is_long:
            return {**message, "content": self._offload_text(content)}
        if not isinstance(content, list):
            return message
        parts: list[Any] = []
        for position, part in enumerate(self._merge_short_texts(content) if is_long else content):
            if part is _MERGED:
                continue
            if (number := self._numbers_by_position.get((index, position))) is not None:
                parts += self._parts_for_file(number, index)
            elif is_long and (text := _text_of_part(part)):
                parts.append({**part, "text": self._offload_text(text)})
            else:
                parts.append(part)
        return message if parts == content else {**message, "content": parts}

    def _merge_short_texts(self, content: Sequence[Any]) -> list[Any]:
        """Return the parts of a message. Neighbouring short texts are merged if all its short texts
        together exceed the threshold."""
        short_text = "".join(_text_of_part(part) for part in content if _is_short(part))
        if self._threshold_tokens is None or estimate_tokens(short_text) <= self._threshold_tokens:
            return list(content)
        merged: list[Any] = []
        for are_short, group in groupby(content, key=_is_short):
            first, *others = group
            if are_short:
                text = "\n\n".join(map(_text_of_part, [first, *others]))
                first, others = {**first, "text": text}, [_MERGED] * len(others)
            merged += [first, *others]
        return merged

    def _is_long(self, message: Message) -> bool:
        if self._threshold_tokens is None or not _is_from_user(message):
            return False
        text = _text_of_content(message.get("content"))
        if is_far_below(text, self._threshold_tokens):
            return False
        if is_far_above(text, self._threshold_tokens):
            return True
        tokens = self._token_counts.get(text)
        return (estimate_tokens(text) if tokens is None else tokens) > self._threshold_tokens

    def _parts_for_file(self, number: int, index: int) -> list[Any]:
        """Return the parts that replace the received file `number` in the message `index`."""
        content_part = self._received[number].content_part
        parts: list[Any] = [] if content_part is None else [content_part]
        if index == self._index_without_notes:
            self.notes.append(self._file_note(number))
            return parts
        is_image_above = content_part is not None and self._received[number].kind == "image"
        return [
            *parts,
            {"type": "text", "text": self._file_note(number, is_image_above=is_image_above)},
        ]

    def _file_note(self, number: int, *, is_image_above: bool = False) -> str:
        """Return the note on a received file. The first note on a file also adds the file to
        `files`."""
        file = self._received[number]
        is_known = (file.identity, file.filename) in self._paths
        path = self._assign_path(file.identity, file.filename, file.kind, file.mime_type)
        if file.error:
            return f"[{_note_line(file.error)}]"
        if not is_known:
            self.files.append(FileToWrite(path, number))
        subject = "The image above is the file" if is_image_above else "Given file:"
        return f"[{subject} {path} ({file.mime_type}, {file.bytes:,} bytes)]"

    def _assign_path(self, identity: str, filename: str, kind: str, mime_type: str) -> str:
        key = (identity, filename)
        if key not in self._paths:
            name = self._names.assign(filename, kind=kind, mime_type=mime_type)
            self._paths[key] = f"{INPUT_DIR}/{name}"
        return self._paths[key]

    def _offload_text(self, text: str) -> str:
        """Write a long text to files. Return the text that replaces it in the prompt."""
        if len(text) <= LARGE_CHARS:
            return text
        offload = offload_as_one_file if len(self.files) >= _MAX_FILES else offload_documents
        replacement = offload(text, self._save_text)
        self.tokens_saved += max(0, estimate_tokens(text) - estimate_tokens(replacement))
        return replacement

    def _save_text(self, text: str, title: str) -> str:
        identity = text_digest(text)
        is_known = (identity, title) in self._paths
        path = self._assign_path(identity, title, "document" if title else "message", "text/plain")
        if not is_known:
            self.files.append(FileToWrite(path, text))
        return path


def text_digest(text: str) -> str:
    """Return the digest of a text. The text is encoded in pieces, so that it is not copied and a
    thread does not hold the GIL for long."""
    digest = hashlib.sha256()
    for start in range(0, len(text), _PIECE_CHARS):
        digest.update(text[start : start + _PIECE_CHARS].encode(errors="surrogatepass"))
    return digest.hexdigest()


def _append_note(message: Message, note: str) -> Message:
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": [*content, {"type": "text", "text": note}]}
    return {**message, "content": f"{content}\n\n{note}" if content else note}


def _is_from_user(message: Message) -> bool:
    return message.get("role") == "user"


def _text_of_content(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(map(_text_of_part, content))
    return content if isinstance(content, str) else ""


def _is_short(part: Any) -> bool:
    return 0 < len(_text_of_part(part)) <= LARGE_CHARS


def _text_of_part(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    return text if isinstance(text, str) else ""


def _note_line(text: str) -> str:
    """Return the text on one line and without brackets, because a bracket would end the note."""
    line = "".join(character if character.isprintable() else " " for character in text)
    return line[:_MAX_ERROR_CHARS].replace("[", "(").replace("]", ")")


# Names of the files of a container and of a zip archive

MAX_NAME_BYTES = 200
"""Maximum length of a name. File systems allow 255 bytes, so a number can still be added."""


def input_path(filename: str, taken_paths: Collection[str]) -> str:
    """Return a path in INPUT_DIR that is not in `taken_paths`, for a file that the client calls
    `filename`."""
    bare = filename.replace("\\", "/").rpartition("/")[2]
    clean = "".join(character if character.isprintable() else "_" for character in bare)
    name = "file" if clean.strip(". ") == "" else clean
    stem, dot, extension = name.rpartition(".")
    if not stem:
        stem, dot, extension = name, "", ""
    ending = _cut_to_bytes(dot + extension, MAX_NAME_BYTES // 2)
    stem = _cut_to_bytes(stem, MAX_NAME_BYTES - len(ending.encode()))
    path, number = f"{INPUT_DIR}/{stem}{ending}", 1
    while path in taken_paths:
        number += 1
        path = f"{INPUT_DIR}/{stem}-{number}{ending}"
    return path


class ArchiveNames(UniqueDisplayNames):
    """Assigns names to the files of one zip archive. The names are relative paths that never leave
    the directory in which the archive is unpacked."""

    def base_name(self, path: str) -> str:
        relative = path.removeprefix(f"{WORKING_DIR}/")
        parts = [part for part in relative.split("/") if part not in ("", "..", ".")]
        return "/".join(map(display_name, parts)) or "file"


def _cut_to_bytes(text: str, max_bytes: int) -> str:
    return text.encode()[:max_bytes].decode(errors="ignore")
