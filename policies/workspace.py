"""Where things lie inside the sandbox (the paper's directories), and which part of a request
becomes which file there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from policies.file_names import Names

WORKING_DIR = "/testbed"
INPUT_DIR = "/testbed/documents"
OUTPUT_DIR = "/testbed/output"
SHARED_DIR = "/testbed/shared"
ANSWER_FILES = ("/testbed/output/answer.txt", "/testbed/answer.txt")
"""Where a submitted answer may be written, first found first."""
MAX_ANSWER_BYTES = 1 << 20

KEPT_CHARS = 1000
"""How much of a moved text stays in the prompt, from its start and from its end: people put what
they want done there."""
_WORTH_MOVING = 4 * KEPT_CHARS
_SHOWN_FAULT_CHARS = 300

Modality = Literal["image", "audio", "video"]
Kind = Modality | Literal["file"]
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class InputLimits:
    """What becomes of the files and long texts in a request."""

    fetch_urls: bool = True
    """Whether files that are named by http(s) URL are fetched, from public addresses only."""
    max_file_mib: int = 64
    """The largest file that may come inside a request or from a URL."""
    max_total_mib: int = 128
    """All of them together."""
    move_text_over_chars: int | None = 50_000
    """A user's message with more text than this keeps its start and end; the whole becomes a file.
    null: never."""


@dataclass(frozen=True, slots=True)
class Given:
    """A file that came with a request."""

    at: tuple[int, int] | None
    """The message and the part of it that stand for the file; None: it was named beside them."""
    kind: Kind
    identity: str
    """The same for the same file, however often it is sent."""
    filename: str
    """As the client calls it; may be empty."""
    mime_type: str
    bytes: int
    shown: Mapping[str, Any] | None = None
    """What the model is sent of it, beside the words that say where it lies."""
    fault: str = ""
    """Why it cannot be had, if so."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A file that is to lie in the sandbox."""

    path: str
    source: int | str
    """Which of the given files it is, or its text."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """A request, split into files and prompt."""

    messages: Sequence[Message]
    files: tuple[Placed, ...]


def plan(
    messages: Sequence[Message], given: Sequence[Given], *, move_text_over_chars: int | None
) -> Workspace:
    """Give every file its place, and say in the messages where it is.

    What is said stands where the file stood, and depends on nothing that follows: a conversation
    that grows keeps its beginning, so prefix caches hit.
    """
    planner = _Planner(given, move_text_over_chars)
    planned = tuple(planner.message(index, message) for index, message in enumerate(messages))
    first_user = next((i for i, each in enumerate(planned) if each.get("role") == "user"), 0)
    told = [
        _with_note(message, planner.beside) if index == first_user and planner.beside else message
        for index, message in enumerate(planned)
    ]
    return Workspace(told, tuple(planner.files))


class _Planner:
    """Names files in the order of the conversation."""

    def __init__(self, given: Sequence[Given], move_text_over_chars: int | None) -> None:
        self._given = given
        self._at = {each.at: index for index, each in enumerate(given) if each.at}
        self._move_over = move_text_over_chars
        self._names = Names()
        self._paths: dict[tuple[str, str], str] = {}
        self.files: list[Placed] = []
        beside = [index for index, each in enumerate(given) if each.at is None]
        self.beside = "\n".join(self._note(index) for index in beside)
        """What is said of the files that were named beside the messages."""

    def message(self, index: int, message: Message) -> Message:
        """The message as the model gets it."""
        content = message.get("content")
        is_long = (
            message.get("role") == "user"
            and self._move_over is not None
            and _text_chars(content) > self._move_over
        )
        if isinstance(content, str) and is_long:
            return {**message, "content": self._moved(content)}
        if not isinstance(content, list):
            return message
        parts: list[Any] = []
        for place, part in enumerate(content):
            if (number := self._at.get((index, place))) is not None:
                parts += self._stand_in(number)
            elif is_long and (text := _text(part)):
                parts.append({**part, "text": self._moved(text)})
            else:
                parts.append(part)
        return message if parts == content else {**message, "content": parts}

    def _stand_in(self, number: int) -> list[Any]:
        """The parts that stand for a given file."""
        shown = self._given[number].shown
        note = {"type": "text", "text": self._note(number)}
        return [note] if shown is None else [shown, note]

    def _note(self, number: int) -> str:
        given = self._given[number]
        known = (given.identity, given.filename) in self._paths
        path = self._path(given.identity, given.filename, given.kind, given.mime_type)
        if given.fault:
            return f"[{_printable(given.fault)}]"
        if not known:
            self.files.append(Placed(path, number))
        above = "The image above is the file " if given.shown and given.kind == "image" else ""
        return f"[{above or 'Given file: '}{path} ({given.mime_type}, {given.bytes:,} bytes)]"

    def _path(self, identity: str, filename: str, kind: str, mime_type: str) -> str:
        key = (identity, filename)
        if key not in self._paths:
            name = self._names.give(filename, kind=kind, mime_type=mime_type)
            self._paths[key] = f"{INPUT_DIR}/{name}"
        return self._paths[key]

    def _moved(self, text: str) -> str:
        """Start and end of a text, and where the whole of it lies."""
        if len(text) <= _WORTH_MOVING:
            return text
        known = (text, "") in self._paths
        path = self._path(text, "", "message", "text/plain")
        if not known:
            self.files.append(Placed(path, text))
        head, tail = _head(text), _tail(text)
        left_out = len(text) - len(head) - len(tail)
        return (
            f"{head}\n[... {left_out:,} characters are left out here. The whole text, {len(text):,}"
            f" characters, is the file {path}: search and read it there. Its end follows ...]\n"
            f"{tail}"
        )


def _with_note(message: Message, note: str) -> Message:
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": [*content, {"type": "text", "text": note}]}
    return {**message, "content": f"{content}\n\n{note}" if content else note}


def _text_chars(content: Any) -> int:
    if isinstance(content, list):
        return sum(len(_text(part)) for part in content)
    return len(content) if isinstance(content, str) else 0


def _text(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    return text if isinstance(text, str) else ""


def _head(text: str) -> str:
    """The first lines."""
    head = text[:KEPT_CHARS]
    end = head.rfind("\n")
    return head[:end] if end > KEPT_CHARS // 2 else head


def _tail(text: str) -> str:
    """The last lines."""
    tail = text[-KEPT_CHARS:]
    start = tail.find("\n") + 1
    return tail[start:] if 0 < start < KEPT_CHARS // 2 else tail


def _printable(text: str) -> str:
    """One line, and no bracket that would end the note."""
    words = "".join(character if character.isprintable() else " " for character in text)
    return words[:_SHOWN_FAULT_CHARS].replace("[", "(").replace("]", ")")
