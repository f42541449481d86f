"""The workspace of a request: paths inside the sandbox (the paper's directories), the parts of a
request that become files there, and the names of files that clients put in or download."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType
from typing import Any, Literal

from policies.context import estimate_tokens, is_near_threshold
from policies.documents import LARGE_CHARS, offload_as_one_file, offload_documents
from policies.file_names import UniqueDisplayNames, UniqueNames, display_name

WORKING_DIR = "/testbed"
INPUT_DIR = "/testbed/documents"
OUTPUT_DIR = "/testbed/output"
SHARED_DIR = "/testbed/shared"
OBSERVATION_DIR = "/testbed/.observations"
"""Where observations lie that do not fit into the model's context."""
ANSWER_FILES = ("/testbed/output/answer.txt", "/testbed/answer.txt")
"""Where a submitted answer may be written; the first that exists counts."""
MAX_ANSWER_BYTES = 1 << 20

_MAX_FILES = 1000
"""Once a conversation has so many files, long texts are no longer divided into documents."""
_MUCH_CHARS = 200_000
_GATHERED = object()
"""Stands for a part that was joined to the one before it."""
_SHOWN_FAULT_CHARS = 300

Modality = Literal["image", "audio", "video"]
Kind = Modality | Literal["file"]
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class InputLimits:
    """Limits on the files and long texts of a request."""

    fetch_urls: bool = True
    """Whether files that are named by http(s) URL are fetched, from public addresses only."""
    max_file_mib: int = 64
    """The largest file that may come inside a request or from a URL."""
    max_total_mib: int = 128
    """All of them together."""
    move_text_over_tokens: int | None = 12_000
    """The documents in a user's message with more text than this become files; without documents,
    all of it does but its start and end. Half of the model's context window, if known to be
    smaller, takes its place. null: never."""


@dataclass(frozen=True, slots=True)
class ReceivedFile:
    """A file that came with a request."""

    position: tuple[int, int] | None
    """The indexes of the message and of its part that hold the file; None: it was named beside the
    messages."""
    kind: Kind
    identity: str
    """The same for the same file, however often it is sent."""
    filename: str
    """The client's name for it; may be empty."""
    mime_type: str
    bytes: int
    content_part: Mapping[str, Any] | None = None
    """The part of a message that shows it to the model, beside the note that tells its path."""
    error: str = ""
    """Why its content is missing, if it is."""


@dataclass(frozen=True, slots=True)
class FileToWrite:
    """A file that is to be written to the sandbox."""

    path: str
    source: int | str
    """The index of the given file, or the text."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """A request, split into files and prompt."""

    messages: Sequence[Message]
    files: tuple[FileToWrite, ...]
    tokens_saved: int = 0
    """The estimated size of the moved texts in the prompt, less that of what stands for them."""
    notes: tuple[str, ...] = ()
    """The notes on the files of the message `without_notes` (see `plan_workspace`)."""


def texts_to_count(messages: Sequence[Message], over_tokens: int | None) -> list[str]:
    """Return the texts of the user of which an estimate cannot tell whether they are over the
    limit. Where a tokenizer is at hand, their counts are given to `plan_workspace`."""
    if over_tokens is None:
        return []
    said = (_text_of_content(message.get("content")) for message in messages if _is_users(message))
    return [text for text in said if is_near_threshold(estimate_tokens(text), over_tokens)]


def has_long_text(messages: Sequence[Message]) -> bool:
    """Return True if a message of the user is long enough to be moved, whatever the limit."""
    said = (_text_of_content(message.get("content")) for message in messages if _is_users(message))
    return any(len(text) > LARGE_CHARS for text in said)


def is_slow_to_plan(messages: Sequence[Message]) -> bool:
    """Return True if `plan_workspace` takes so long that it would hold up the event loop."""
    said = (_text_of_content(message.get("content")) for message in messages if _is_users(message))
    return sum(map(len, said)) > _MUCH_CHARS


def plan_workspace(
    messages: Sequence[Message],
    given: Sequence[ReceivedFile],
    *,
    over_tokens: int | None,
    counted: Mapping[str, int] = MappingProxyType({}),
    without_notes: int | None = None,
) -> Workspace:
    """Give every file a path, and replace it in the messages by a note that tells the path.

    A note depends on nothing that follows it: a conversation that grows keeps its beginning, so
    prefix caches hit. `counted` are the tokens of texts that `texts_to_count` returned; others are
    estimated. The notes on the files of the message with the index `without_notes` go into
    `Workspace.notes` instead.
    """
    planner = _Planner(given, over_tokens, counted, without_notes)
    planned = tuple(planner.message(index, message) for index, message in enumerate(messages))
    first_user = next((i for i, each in enumerate(planned) if each.get("role") == "user"), 0)
    notes, beside = tuple(planner.notes), planner.beside
    if beside and first_user == without_notes:
        notes, beside = (*notes, beside), ""
    told = [
        _append_note(message, beside) if index == first_user and beside else message
        for index, message in enumerate(planned)
    ]
    return Workspace(told, tuple(planner.files), planner.tokens_kept_out, notes)


def last_user_index(messages: Sequence[Message]) -> int | None:
    """Return the index of the user's last message, or None."""
    return next((n for n in reversed(range(len(messages))) if _is_users(messages[n])), None)


class _Planner:
    """Names files in the order of the conversation."""

    def __init__(
        self,
        given: Sequence[ReceivedFile],
        over_tokens: int | None,
        counted: Mapping[str, int],
        without_notes: int | None,
    ) -> None:
        self._without_notes = without_notes
        self.notes: list[str] = []
        self._given = given
        self._at = {each.position: index for index, each in enumerate(given) if each.position}
        self._over_tokens = over_tokens
        self._counted = counted
        self.tokens_kept_out = 0
        self._names = UniqueNames()
        self._paths: dict[tuple[str, str], str] = {}
        self.files: list[FileToWrite] = []
        beside = [index for index, each in enumerate(given) if each.position is None]
        self.beside = "\n".join(self._note(index) for index in beside)
        """The notes on files that were named beside the messages."""

    def message(self, index: int, message: Message) -> Message:
        """Return the message as the model gets it."""
        content = message.get("content")
        is_long = self._is_long(message)
        if isinstance(content, str) and is_long:
            return {**message, "content": self._moved(content)}
        if not isinstance(content, list):
            return message
        parts: list[Any] = []
        for place, part in enumerate(self._gathered(content) if is_long else content):
            if part is _GATHERED:
                continue
            if (number := self._at.get((index, place))) is not None:
                parts += self._stand_in(number, index)
            elif is_long and (text := _text(part)):
                parts.append({**part, "text": self._moved(text)})
            else:
                parts.append(part)
        return message if parts == content else {**message, "content": parts}

    def _gathered(self, content: Sequence[Any]) -> list[Any]:
        """Return the parts, with neighbours joined to one text if short texts are long together."""
        words = "".join(_text(part) for part in content if _is_short(part))
        if self._over_tokens is None or estimate_tokens(words) <= self._over_tokens:
            return list(content)
        gathered: list[Any] = []
        for are_short, group in groupby(content, key=_is_short):
            first, *others = group
            if are_short:
                text = "\n\n".join(map(_text, [first, *others]))
                first, others = {**first, "text": text}, [_GATHERED] * len(others)
            gathered += [first, *others]
        return gathered

    def _is_long(self, message: Message) -> bool:
        if self._over_tokens is None or not _is_users(message):
            return False
        said = _text_of_content(message.get("content"))
        tokens = self._counted.get(said)
        return (estimate_tokens(said) if tokens is None else tokens) > self._over_tokens

    def _stand_in(self, number: int, index: int) -> list[Any]:
        """Return the parts that replace a given file in the message with that index."""
        shown = self._given[number].content_part
        parts: list[Any] = [] if shown is None else [shown]
        if index == self._without_notes:
            self.notes.append(self._note(number))
            return parts
        is_above = shown is not None and self._given[number].kind == "image"
        return [*parts, {"type": "text", "text": self._note(number, is_above=is_above)}]

    def _note(self, number: int, *, is_above: bool = False) -> str:
        given = self._given[number]
        known = (given.identity, given.filename) in self._paths
        path = self._path(given.identity, given.filename, given.kind, given.mime_type)
        if given.error:
            return f"[{_printable(given.error)}]"
        if not known:
            self.files.append(FileToWrite(path, number))
        what = "The image above is the file" if is_above else "Given file:"
        return f"[{what} {path} ({given.mime_type}, {given.bytes:,} bytes)]"

    def _path(self, identity: str, filename: str, kind: str, mime_type: str) -> str:
        key = (identity, filename)
        if key not in self._paths:
            name = self._names.assign(filename, kind=kind, mime_type=mime_type)
            self._paths[key] = f"{INPUT_DIR}/{name}"
        return self._paths[key]

    def _moved(self, text: str) -> str:
        """Return what stands in the prompt for a text that becomes files."""
        if len(text) <= LARGE_CHARS:
            return text
        is_full = len(self.files) >= _MAX_FILES
        told = (
            offload_as_one_file(text, self._place)
            if is_full
            else offload_documents(text, self._place)
        )
        self.tokens_kept_out += max(0, estimate_tokens(text) - estimate_tokens(told))
        return told

    def _place(self, text: str, title: str) -> str:
        known = (text, title) in self._paths
        path = self._path(text, title, "document" if title else "message", "text/plain")
        if not known:
            self.files.append(FileToWrite(path, text))
        return path


def _append_note(message: Message, note: str) -> Message:
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": [*content, {"type": "text", "text": note}]}
    return {**message, "content": f"{content}\n\n{note}" if content else note}


def _is_users(message: Message) -> bool:
    return message.get("role") == "user"


def _text_of_content(content: Any) -> str:
    """Return the text of a message's content."""
    if isinstance(content, list):
        return "\n".join(map(_text, content))
    return content if isinstance(content, str) else ""


def _is_short(part: Any) -> bool:
    return 0 < len(_text(part)) <= LARGE_CHARS


def _text(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    return text if isinstance(text, str) else ""


def _printable(text: str) -> str:
    """Return the text on one line, without brackets, which would end the note."""
    words = "".join(character if character.isprintable() else " " for character in text)
    return words[:_SHOWN_FAULT_CHARS].replace("[", "(").replace("]", ")")


# Files that clients put into a container, and those of a zip

MAX_NAME_BYTES = 200
"""Less than the 255 of file systems, so that a number fits behind the name."""


def input_path(filename: str, taken: Collection[str]) -> str:
    """Return a path for a file that a client has named, other than the taken ones."""
    bare = filename.replace("\\", "/").rpartition("/")[2]
    clean = "".join(each if each.isprintable() else "_" for each in bare)
    name = "file" if clean.strip(". ") == "" else clean
    stem, dot, extension = name.rpartition(".")
    if not stem:
        stem, dot, extension = name, "", ""
    ending = _cut(dot + extension, MAX_NAME_BYTES // 2)
    stem = _cut(stem, MAX_NAME_BYTES - len(ending.encode()))
    path, number = f"{INPUT_DIR}/{stem}{ending}", 1
    while path in taken:
        number += 1
        path = f"{INPUT_DIR}/{stem}-{number}{ending}"
    return path


class ArchiveNames(UniqueDisplayNames):
    """Names for the files of one zip: relative, and never outside of where it is unpacked."""

    def base_name(self, path: str) -> str:
        inside = path.removeprefix(f"{WORKING_DIR}/")
        parts = [part for part in inside.split("/") if part not in ("", "..", ".")]
        return "/".join(map(display_name, parts)) or "file"


def _cut(text: str, max_bytes: int) -> str:
    return text.encode()[:max_bytes].decode(errors="ignore")
