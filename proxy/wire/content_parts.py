"""The parts of messages that are files, in every form that clients write them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from policies.file_names import UNKNOWN_TYPE, clean_type, type_of
from policies.workspace import Kind, Message
from proxy.errors import BadRequestError
from proxy.wire.inline_data import InlineData, data_url
from proxy.wire.validation import array, missing, text

_URL_PARTS: dict[str, Kind] = {"image_url": "image", "video_url": "video", "audio_url": "audio"}
_DRAWING = "image/svg+xml"
"""Text, which no model takes in as a picture."""
_URL = re.compile(r"https?://[^/\s]|(?!https?:)[a-z][a-z0-9+.-]*:", re.IGNORECASE)
"""How a URL begins: with a host, or with a scheme other than HTTP's."""
_FETCHED = ("http://", "https://", "file:")
"""Prefixes of URLs that never reach the backend, as some backends open local files: the proxy
fetches them, or tells the model why it does not."""
MAX_SHOWN_URL_CHARS = 100
_DETAILS = ("auto", "low", "high", "original")
_FILE_FIELDS = ("file_data", "file_id", "file_url")


@dataclass(frozen=True, slots=True)
class Remote:
    """A file somewhere on the web."""

    url: str


@dataclass(frozen=True, slots=True)
class Uploaded:
    """A file that was sent beforehand."""

    file_id: str


Source = InlineData | Remote | Uploaded


@dataclass(frozen=True, slots=True)
class FilePart:
    """A file among the parts of the messages, or named beside them."""

    at: tuple[int, int] | None
    """The message and its part; None: beside."""
    param: str
    """The field, as errors name it."""
    kind: Kind
    source: Source
    filename: str = ""
    part: Mapping[str, Any] | None = None
    """As chat backends know it, where there are models that take it in."""

    @property
    def identity(self) -> str:
        """The same for the same file."""
        match self.source:
            case InlineData(text=data):
                return data
            case Remote(url=url):
                return url
            case Uploaded(file_id=file_id):
                return file_id

    @property
    def mime_type(self) -> str:
        """What the client says it is, or its name does."""
        if isinstance(self.source, InlineData) and self.source.mime_type:
            return clean_type(self.source.mime_type)
        return type_of(self.filename)


def read(messages: Sequence[Message]) -> tuple[list[Message], list[FilePart]]:
    """The messages, each part under the name that chat completions have for it, and the files in
    them. The model's own messages are left as they are. Raises BadRequestError."""
    files: list[FilePart] = []
    told: list[Message] = []
    for index, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list) and message.get("role") != "assistant":
            parts = [_renamed(part) if isinstance(part, dict) else part for part in content]
            message = message if parts == content else {**message, "content": parts}
            found = (_file_part(part, (index, place)) for place, part in enumerate(parts))
            files += [each for each in found if each]
        told.append(message)
    return told, files


def beside(body: Mapping[str, Any]) -> list[FilePart]:
    """The uploaded files that the extension `sandbox.file_ids` names. Raises BadRequestError."""
    ours = body.get("sandbox")
    file_ids = ours.get("file_ids") if isinstance(ours, dict) else None
    if file_ids is None:
        return []
    array(text)(file_ids, "sandbox.file_ids")
    return [
        FilePart(None, f"sandbox.file_ids[{index}]", "file", Uploaded(file_id))
        for index, file_id in enumerate(file_ids)
    ]


def _renamed(part: dict[str, Any]) -> dict[str, Any]:
    """The Responses API's parts as chat completions have them."""
    if part.get("type") == "input_text":
        return {**part, "type": "text"}
    if part.get("type") == "input_image" and (url := _url(part.get("image_url"))):
        detail = {"detail": part["detail"]} if part.get("detail") else {}
        return {"type": "image_url", "image_url": {"url": url, **detail}}
    return part


def _file_part(part: Any, at: tuple[int, int]) -> FilePart | None:
    """The file that a part is, if it is one."""
    if not isinstance(part, dict):
        return None
    param = f"messages[{at[0]}].content[{at[1]}]"
    match part.get("type"):
        case "file" | "input_file" as kind:
            return _document(part, at, f"{param}.{kind}" if kind in part else param)
        case "input_image" if isinstance(part.get("file_id"), str):
            return FilePart(at, f"{param}.file_id", "image", Uploaded(part["file_id"]), part=part)
        case "input_audio":
            return _audio(part, at, f"{param}.input_audio")
        case "image_url" | "video_url" | "audio_url" as kind:
            return _by_url(part, at, kind, f"{param}.{kind}")
    return None


def _document(part: dict[str, Any], at: tuple[int, int], param: str) -> FilePart:
    nested = part.get(part["type"])
    fields = nested if isinstance(nested, dict) else part
    filename = fields.get("filename")
    name = filename if isinstance(filename, str) else ""
    for field in _FILE_FIELDS:
        if isinstance(value := fields.get(field), str) and value:
            where = f"{param}.{field}"
            source = Uploaded(value) if field == "file_id" else _source(value, where)
            return FilePart(at, where, "file", source, name or _last_of(source))
    raise missing(f"{param}.file_id")


def _audio(part: dict[str, Any], at: tuple[int, int], param: str) -> FilePart | None:
    audio = part.get("input_audio")
    data = audio.get("data") if isinstance(audio, dict) else None
    if not isinstance(audio, dict) or not isinstance(data, str):
        return None
    source = _source(data, f"{param}.data")
    if isinstance(source, InlineData) and not source.mime_type:
        mime_type = type_of(f"audio.{audio.get('format')}")
        source = InlineData(data, 0, mime_type if mime_type != UNKNOWN_TYPE else "")
    return FilePart(at, f"{param}.data", "audio", source, part=part)


def _by_url(part: dict[str, Any], at: tuple[int, int], kind: str, param: str) -> FilePart | None:
    url = _url(part.get(kind))
    _check_detail(part.get(kind), param)
    if not _URL.match(url):
        raise _no_url(url, param)
    if not url.lower().startswith(("data:", *_FETCHED)):
        return None  # such as gs:, which only the backend may understand
    source = _source(url, param)
    expected = _URL_PARTS[kind]
    if isinstance(source, InlineData) and (found := _kind(source.mime_type)) != expected:
        return FilePart(at, param, found, source)
    return FilePart(at, param, expected, source, _last_of(source), part=part)


def shown_type(part: FilePart, mime_type: str) -> str | None:
    """Return the type under which the model is shown a file that a part names by URL, or None if
    it is not the picture, sound or video that the part says."""
    if part.part is None or part.kind not in _URL_PARTS.values():
        return None
    if _kind(mime_type) != part.kind:
        mime_type = type_of(part.filename)  # some servers call everything application/octet-stream
    return clean_type(mime_type) if _kind(mime_type) == part.kind else None


def with_url(part: FilePart, url: str) -> dict[str, Any]:
    """Return a part that names a picture, sound or video by URL with another URL."""
    name = next(name for name, kind in _URL_PARTS.items() if kind == part.kind)
    there = part.part or {}
    written = there.get(name)
    others = written if isinstance(written, dict) else {}
    return {**there, name: {**others, "url": url}}


def _check_detail(value: Any, param: str) -> None:
    """Raise BadRequestError for a `detail` that OpenAI does not know: a backend that is not shown
    the picture cannot refuse it."""
    detail = value.get("detail") if isinstance(value, dict) else None
    if detail is not None and detail not in _DETAILS:
        raise BadRequestError(
            f"Invalid value for '{param}.detail': expected one of {', '.join(_DETAILS)}.",
            param=f"{param}.detail",
            code="invalid_value",
        )


def _source(written: str, param: str) -> Source:
    """What a string with data or a URL leads to. Raises BadRequestError."""
    scheme = written[: len("https://")].lower()
    if scheme.startswith(_FETCHED):
        return Remote(written)
    if not scheme.startswith("data:"):
        return InlineData(written, 0, "")
    try:
        return data_url(written)
    except ValueError as error:
        raise malformed(param, error) from error


def malformed(param: str, error: ValueError) -> BadRequestError:
    """What the client hears of data that cannot be read."""
    return BadRequestError(
        f"Invalid file data: '{param}'. Expected a base64-encoded data URL (e.g."
        f" 'data:text/plain;base64,SGVsbG8='), but {error}.",
        param=param,
        code="invalid_value",
    )


def _no_url(written: str, param: str) -> BadRequestError:
    """What the client hears of a URL without a scheme."""
    return BadRequestError(
        f"Invalid '{param}': expected a URL (https://...) or a data URL"
        f" (data:image/png;base64,...), got {written[:MAX_SHOWN_URL_CHARS]!r}.",
        param=param,
        code="invalid_value",
    )


def _url(value: Any) -> str:
    url = value.get("url") if isinstance(value, dict) else value
    return url if isinstance(url, str) else ""


def _kind(mime_type: str) -> Kind:
    bare = clean_type(mime_type)
    if bare == _DRAWING:
        return "file"
    match bare.partition("/")[0]:
        case "image":
            return "image"
        case "audio":
            return "audio"
        case "video":
            return "video"
    return "file"


def _last_of(source: Source) -> str:
    """The name at the end of a URL's path."""
    if not isinstance(source, Remote):
        return ""
    path = source.url.partition("#")[0].partition("?")[0].partition("://")[2]
    return unquote(path.rpartition("/")[2]) if "/" in path else ""
