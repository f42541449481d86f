"""The files among the parts of messages, in every form in which clients write them."""

import binascii
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, unquote_to_bytes

from policies.file_names import UNKNOWN_TYPE, guess_mime_type, normalize_mime_type
from policies.workspace import Kind, Message
from proxy.errors import BadRequestError
from proxy.schemas.validation import array, missing, text

# Bytes in a string: data URLs and bare base64, decoded in pieces

_PIECE_CHARS = 1 << 18
_MAX_HEAD_CHARS = 500
_SPACE = b" \t\r\n"
_ALPHABET = (string.ascii_letters + string.digits + "+/").encode()
_NOT_BASE64 = "it has characters that are not of base64"


@dataclass(frozen=True, slots=True)
class InlineData:
    """A file inside a string of the request, which is neither copied nor decoded until needed."""

    text: str
    start: int
    """The index in `text` at which the data begins."""
    mime_type: str
    """As the client wrote it, or empty."""
    is_base64: bool = True

    def measure(self) -> int:
        """Return the number of bytes. Raises ValueError if the data is malformed."""
        if not self.is_base64:
            return sum(map(len, self.pieces()))
        count = pads = 0
        for piece in self._slices():
            written = piece.translate(None, delete=_SPACE)
            rest = written.translate(None, delete=_ALPHABET)
            if (
                rest.strip(b"=")
                or not written.endswith(rest)
                or (pads and len(rest) < len(written))
            ):
                raise ValueError(_NOT_BASE64)
            pads += len(rest)
            count += len(written) - len(rest)
        if count % 4 == 1 or pads > 2 or (pads and (count + pads) % 4):
            raise ValueError("it is cut off, or wrongly padded")
        return count * 3 // 4

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes, after `measure` has found them well formed."""
        if not self.is_base64:
            yield unquote_to_bytes(self.text[self.start :])
            return
        rest = b""
        for piece in self._slices():
            digits = rest + piece.translate(None, delete=_SPACE + b"=")
            whole = len(digits) & ~3
            yield binascii.a2b_base64(digits[:whole])
            rest = digits[whole:]
        if rest:
            yield binascii.a2b_base64(rest + b"=" * (4 - len(rest)))

    def _slices(self) -> Iterator[bytes]:
        for start in range(self.start, len(self.text), _PIECE_CHARS):
            try:
                yield self.text[start : start + _PIECE_CHARS].encode("ascii")
            except UnicodeEncodeError as error:
                raise ValueError(_NOT_BASE64) from error


def data_url(url: str) -> InlineData:
    """Return the file in a data URL. Raises ValueError."""
    comma = url.find(",", 0, _MAX_HEAD_CHARS)
    if comma < 0:
        raise ValueError("it has no comma")
    mime_type, *rest = url[len("data:") : comma].split(";")
    is_base64 = any(word.strip().lower() == "base64" for word in rest)
    return InlineData(url, comma + 1, mime_type or "text/plain", is_base64)


# Parts

_URL_PARTS: dict[str, Kind] = {"image_url": "image", "video_url": "video", "audio_url": "audio"}
_DRAWING = "image/svg+xml"
"""Text: no model accepts it as a picture."""
_URL = re.compile(r"https?://[^/\s]|(?!https?:)[a-z][a-z0-9+.-]*:", re.IGNORECASE)
"""How a URL begins: with a host, or with a scheme other than HTTP's."""
_FETCHED = ("http://", "https://", "file:")
"""Prefixes of URLs that never reach the backend, because some backends open local files. The proxy
fetches them, or tells the model why it does not."""
MAX_SHOWN_URL_CHARS = 100
_DETAILS = ("auto", "low", "high", "original")
_FILE_FIELDS = ("file_data", "file_id", "file_url")


@dataclass(frozen=True, slots=True)
class Remote:
    """A file that a URL names."""

    url: str


@dataclass(frozen=True, slots=True)
class Uploaded:
    """A file that was uploaded before."""

    file_id: str


Source = InlineData | Remote | Uploaded


@dataclass(frozen=True, slots=True)
class FilePart:
    """A file among the parts of the messages, or in `sandbox.file_ids`."""

    at: tuple[int, int] | None
    """The indices of the message and of the part; None for `sandbox.file_ids`."""
    param: str
    """The field's path in the request, for errors."""
    kind: Kind
    source: Source
    filename: str = ""
    part: Mapping[str, Any] | None = None
    """The part as chat backends expect it, if some models accept it."""

    @property
    def identity(self) -> str:
        """A string that is equal for parts that name the same file."""
        match self.source:
            case InlineData(text=data):
                return data
            case Remote(url=url):
                return url
            case Uploaded(file_id=file_id):
                return file_id

    @property
    def mime_type(self) -> str:
        """The MIME type by the client's words, else by the file name."""
        if isinstance(self.source, InlineData) and self.source.mime_type:
            return normalize_mime_type(self.source.mime_type)
        return guess_mime_type(self.filename)


def read(messages: Sequence[Message]) -> tuple[list[Message], list[FilePart]]:
    """Return the messages with the part types of chat completions, and the files in them.

    Messages of the assistant are not read. Raises BadRequestError.
    """
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
    """Return the uploads that `sandbox.file_ids` names. Raises BadRequestError."""
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
    """Return a part of the Responses API as a part of a chat completion."""
    if part.get("type") == "input_text":
        return {**part, "type": "text"}
    if part.get("type") == "input_image" and (url := _url(part.get("image_url"))):
        detail = {"detail": part["detail"]} if part.get("detail") else {}
        return {"type": "image_url", "image_url": {"url": url, **detail}}
    return part


def _file_part(part: Any, at: tuple[int, int]) -> FilePart | None:
    """Return the file that a part is, or None."""
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
        mime_type = guess_mime_type(f"audio.{audio.get('format')}")
        source = InlineData(data, 0, mime_type if mime_type != UNKNOWN_TYPE else "")
    return FilePart(at, f"{param}.data", "audio", source, part=part)


def _by_url(part: dict[str, Any], at: tuple[int, int], kind: str, param: str) -> FilePart | None:
    url = _url(part.get(kind))
    _check_detail(part.get(kind), param)
    if not _URL.match(url):
        raise BadRequestError(
            f"Invalid '{param}': expected a URL (https://...) or a data URL"
            f" (data:image/png;base64,...), got {url[:MAX_SHOWN_URL_CHARS]!r}.",
            param=param,
            code="invalid_value",
        )
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
        mime_type = guess_mime_type(
            part.filename
        )  # some servers call everything application/octet-stream
    return normalize_mime_type(mime_type) if _kind(mime_type) == part.kind else None


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
    """Return the source that a string names, a URL or data. Raises BadRequestError."""
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
    """Return the error for file data that cannot be decoded."""
    return BadRequestError(
        f"Invalid file data: '{param}'. Expected a base64-encoded data URL (e.g."
        f" 'data:text/plain;base64,SGVsbG8='), but {error}.",
        param=param,
        code="invalid_value",
    )


def _url(value: Any) -> str:
    url = value.get("url") if isinstance(value, dict) else value
    return url if isinstance(url, str) else ""


def _kind(mime_type: str) -> Kind:
    bare = normalize_mime_type(mime_type)
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
    """Return the last segment of a URL's path, decoded."""
    if not isinstance(source, Remote):
        return ""
    path = source.url.partition("#")[0].partition("?")[0].partition("://")[2]
    return unquote(path.rpartition("/")[2]) if "/" in path else ""
