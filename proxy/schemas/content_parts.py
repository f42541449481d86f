"""The files in the content parts of messages, in all forms that clients send."""

import binascii
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import unquote

from policies.file_names import UNKNOWN_TYPE, guess_mime_type, normalize_mime_type
from policies.large_json import Steps
from policies.workspace import Kind, Message, text_digest
from proxy.errors import BadRequestError
from proxy.schemas.validation import array, check_text, missing_error

# Inline data: data URLs and bare base64, decoded in pieces

_PIECE_CHARS = 1 << 18
_ESCAPED_PIECE_CHARS = 1 << 16
"""Length of a piece of percent-encoded data. Decoding one takes up to 15 ms."""
_MAX_HEAD_CHARS = 500
_SPACE = b" \t\r\n"
_ALPHABET = (string.ascii_letters + string.digits + "+/").encode()
_NOT_BASE64 = "it has characters that are not of base64"
_LITERAL_PERCENT = re.compile(rb"%(?![0-9A-Fa-f]{2})")
"""A percent sign that does not begin an escape."""


@dataclass(frozen=True, slots=True)
class InlineData:
    """A file whose data is in a string of the request. The data is decoded in pieces, without a
    copy of the string."""

    text: str
    start: int
    """The index in `text` of the first character of the data."""
    mime_type: str
    """The MIME type from the client, or an empty string."""
    is_base64: bool = True

    def measure(self) -> Steps[int]:
        """Return the number of bytes of the decoded data, with a pause between its pieces. Raises
        ValueError if the data is malformed."""
        count = pads = 0
        if not self.is_base64:
            for number, piece in enumerate(self.pieces()):
                if number:
                    yield
                count += len(piece)
            return count
        for number, piece in enumerate(self._slices()):
            if number:
                yield
            encoded = piece.translate(None, delete=_SPACE)
            rest = encoded.translate(None, delete=_ALPHABET)
            if (
                rest.strip(b"=")
                or not encoded.endswith(rest)
                or (pads and len(rest) < len(encoded))
            ):
                raise ValueError(_NOT_BASE64)
            pads += len(rest)
            count += len(encoded) - len(rest)
        if count % 4 == 1 or pads > 2 or (pads and (count + pads) % 4):
            raise ValueError("it is cut off or wrongly padded")
        return count * 3 // 4

    def pieces(self) -> Iterator[bytes]:
        """Yield the decoded data in pieces. `measure` must have accepted the data."""
        if not self.is_base64:
            yield from self._unquoted_pieces()
            return
        rest = b""
        for piece in self._slices():
            digits = rest + piece.translate(None, delete=_SPACE + b"=")
            end = len(digits) & ~3
            yield binascii.a2b_base64(digits[:end])
            rest = digits[end:]
        if rest:
            yield binascii.a2b_base64(rest + b"=" * (4 - len(rest)))

    def _unquoted_pieces(self) -> Iterator[bytes]:
        start = self.start
        while start < len(self.text):
            end = start + _ESCAPED_PIECE_CHARS
            if end < len(self.text) and (escape := self.text.rfind("%", end - 2, end)) >= 0:
                end = escape
            yield _unquote(self.text[start:end].encode())
            start = end

    def _slices(self) -> Iterator[bytes]:
        for start in range(self.start, len(self.text), _PIECE_CHARS):
            try:
                yield self.text[start : start + _PIECE_CHARS].encode("ascii")
            except UnicodeEncodeError as error:
                raise ValueError(_NOT_BASE64) from error


def _unquote(text: bytes) -> bytes:
    """Return the bytes of percent-encoded text. The text is decoded as quoted-printable, which
    differs only in its escape character, because `urllib.parse.unquote_to_bytes` takes ten times as
    long."""
    only_escapes = _LITERAL_PERCENT.sub(b"%25", text).replace(b"=", b"%3D")
    return binascii.a2b_qp(only_escapes.replace(b"%", b"="))


def parse_data_url(url: str) -> InlineData:
    """Return the file in a data URL. Raises ValueError."""
    comma = url.find(",", 0, _MAX_HEAD_CHARS)
    if comma < 0:
        raise ValueError("it has no comma")
    mime_type, *rest = url[len("data:") : comma].split(";")
    is_base64 = any(word.strip().lower() == "base64" for word in rest)
    return InlineData(url, comma + 1, mime_type or "text/plain", is_base64)


# Parts

_KINDS: dict[str, Kind] = {"image": "image", "audio": "audio", "video": "video"}
"""Kinds of files by the first part of the MIME type."""
_URL_PARTS: dict[str, Kind] = {"image_url": "image", "video_url": "video", "audio_url": "audio"}
_SVG = "image/svg+xml"
"""No model accepts SVG as an image, because SVG is text."""
_URL = re.compile(r"https?://[^/\s]|(?!https?:)[a-z][a-z0-9+.-]*:", re.IGNORECASE)
"""The beginning of a URL: http(s) with a host, or another scheme."""
_FETCHED_SCHEMES = ("http://", "https://")
"""Prefixes of URLs that become a RemoteFile. A run downloads the file, or tells the model in a note
why it did not."""
_LOCAL_SCHEME = "file:"
MAX_SHOWN_URL_CHARS = 100
_DETAIL_VALUES = ("auto", "low", "high", "original")
_FILE_TYPES = ("file", "input_file", "input_image")
_FILE_FIELDS = ("file_data", "file_id", "file_url")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file at a URL."""

    url: str


@dataclass(frozen=True, slots=True)
class UploadedFile:
    """A file that the client has uploaded."""

    file_id: str


Source = InlineData | RemoteFile | UploadedFile


@dataclass(frozen=True, slots=True)
class FilePart:
    """A file in a content part of a message, or in `sandbox.file_ids`."""

    position: tuple[int, int] | None
    """The indices of the message and of the part; None for `sandbox.file_ids`."""
    param: str
    """The field's path in the request, for errors."""
    kind: Kind
    source: Source
    filename: str = ""
    content_part: Mapping[str, Any] | None = None
    """The content part, or None if no model accepts files of this kind."""

    identity: str = ""
    """A digest that is equal for parts with the same file, or "" before `with_identity` has set
    it."""

    def with_identity(self) -> "FilePart":
        """Return the part with `identity` set: a digest of its data, its URL or its file id."""
        match self.source:
            case InlineData(text=text) | RemoteFile(url=text) | UploadedFile(file_id=text):
                return replace(self, identity=text_digest(text))

    @property
    def mime_type(self) -> str:
        """The MIME type from the client, else the type that the file name suggests."""
        if isinstance(self.source, InlineData) and self.source.mime_type:
            return normalize_mime_type(self.source.mime_type)
        return guess_mime_type(self.filename)


def extract_files(messages: Sequence[Message]) -> tuple[list[Message], list[FilePart]]:
    """Return the messages with the part types of chat completions, and the files in the messages.

    Messages of the assistant are not searched. Raises BadRequestError.
    """
    files: list[FilePart] = []
    converted: list[Message] = []
    for index, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list) and message.get("role") != "assistant":
            parts = [_as_chat_part(part) if isinstance(part, dict) else part for part in content]
            message = message if parts == content else {**message, "content": parts}
            found = (_file_part(part, (index, number)) for number, part in enumerate(parts))
            files += filter(None, found)
        converted.append(message)
    return converted, files


def documents_and_uploads(messages: Sequence[Message]) -> list[FilePart]:
    """Return the parts of the types `file` and `input_file`, and the images that are uploads.
    Malformed parts are left out."""
    found: list[FilePart] = []
    for index, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, list) or message.get("role") == "assistant":
            continue
        for number, part in enumerate(content):
            if not isinstance(part, dict) or part.get("type") not in _FILE_TYPES:
                continue
            with suppress(BadRequestError):
                file = _file_part(part, (index, number))
                found += [file] if file else []
    return found


def uploads_in_sandbox_field(body: Mapping[str, Any]) -> list[FilePart]:
    """Return the uploads in `sandbox.file_ids`. Raises BadRequestError."""
    sandbox = body.get("sandbox")
    file_ids = sandbox.get("file_ids") if isinstance(sandbox, dict) else None
    if file_ids is None:
        return []
    array(check_text)(file_ids, "sandbox.file_ids")
    return [
        FilePart(None, f"sandbox.file_ids[{index}]", "file", UploadedFile(file_id))
        for index, file_id in enumerate(file_ids)
    ]


def _as_chat_part(part: dict[str, Any]) -> dict[str, Any]:
    """Return a part of the Responses API as a part of a chat completion."""
    if part.get("type") == "input_text":
        return {**part, "type": "text"}
    if part.get("type") == "input_image" and (url := _url(part.get("image_url"))):
        detail = {"detail": part["detail"]} if part.get("detail") else {}
        return {"type": "image_url", "image_url": {"url": url, **detail}}
    return part


def _file_part(part: Any, position: tuple[int, int]) -> FilePart | None:
    """Return the file in a part, or None."""
    if not isinstance(part, dict):
        return None
    param = f"messages[{position[0]}].content[{position[1]}]"
    match part.get("type"):
        case "file" | "input_file" as kind:
            return _document_file(part, position, f"{param}.{kind}" if kind in part else param)
        case "input_image" if isinstance(part.get("file_id"), str):
            return FilePart(
                position,
                f"{param}.file_id",
                "image",
                UploadedFile(part["file_id"]),
                content_part=part,
            )
        case "input_audio":
            return _audio_file(part, position, f"{param}.input_audio")
        case "image_url" | "video_url" | "audio_url" as kind:
            return _file_by_url(part, position, kind, f"{param}.{kind}")
    return None


def _document_file(part: dict[str, Any], position: tuple[int, int], param: str) -> FilePart:
    nested = part.get(part["type"])
    fields = nested if isinstance(nested, dict) else part
    filename = fields.get("filename")
    name = filename if isinstance(filename, str) else ""
    for field in _FILE_FIELDS:
        if isinstance(value := fields.get(field), str) and value:
            path = f"{param}.{field}"
            source = UploadedFile(value) if field == "file_id" else _parse_source(value, path)
            return FilePart(position, path, "file", source, name or _url_filename(source))
    raise missing_error(f"{param}.file_id")


def _audio_file(part: dict[str, Any], position: tuple[int, int], param: str) -> FilePart | None:
    audio = part.get("input_audio")
    data = audio.get("data") if isinstance(audio, dict) else None
    if not isinstance(audio, dict) or not isinstance(data, str):
        return None
    source = _parse_source(data, f"{param}.data")
    if isinstance(source, InlineData) and not source.mime_type:
        mime_type = guess_mime_type(f"audio.{audio.get('format')}")
        source = InlineData(data, 0, mime_type if mime_type != UNKNOWN_TYPE else "")
    return FilePart(position, f"{param}.data", "audio", source, content_part=part)


def _file_by_url(
    part: dict[str, Any], position: tuple[int, int], kind: str, param: str
) -> FilePart | None:
    url = _url(part.get(kind))
    _check_detail(part.get(kind), param)
    if not _URL.match(url):
        raise BadRequestError(
            f"Invalid '{param}': expected a URL (https://...) or a data URL"
            f" (data:image/png;base64,...), got {url[:MAX_SHOWN_URL_CHARS]!r}.",
            param=param,
            code="invalid_value",
        )
    if not url.lower().startswith(("data:", _LOCAL_SCHEME, *_FETCHED_SCHEMES)):
        return None  # a scheme that the backend may know, such as gs:
    source = _parse_source(url, param)
    expected = _URL_PARTS[kind]
    if isinstance(source, InlineData) and (found := _file_kind(source.mime_type)) != expected:
        return FilePart(position, param, found, source)
    return FilePart(position, param, expected, source, _url_filename(source), content_part=part)


def media_type_to_show(part: FilePart, mime_type: str) -> str | None:
    """Return the MIME type to give the model for a file that was downloaded for a part, or None if
    the file is not of the part's kind (image, audio or video)."""
    if part.content_part is None or part.kind not in _URL_PARTS.values():
        return None
    if _file_kind(mime_type) != part.kind:
        # Some servers send only application/octet-stream.
        mime_type = guess_mime_type(part.filename)
    return normalize_mime_type(mime_type) if _file_kind(mime_type) == part.kind else None


def replace_url(part: FilePart, url: str) -> dict[str, Any]:
    """Return the part of an image, audio or video with another URL."""
    name = next(name for name, kind in _URL_PARTS.items() if kind == part.kind)
    fields = part.content_part or {}
    nested = fields.get(name)
    others = nested if isinstance(nested, dict) else {}
    return {**fields, name: {**others, "url": url}}


def _check_detail(value: Any, param: str) -> None:
    """Raise BadRequestError for a `detail` that OpenAI does not know. This check cannot be left to
    the backend, which does not receive every image."""
    detail = value.get("detail") if isinstance(value, dict) else None
    if detail is not None and detail not in _DETAIL_VALUES:
        raise BadRequestError(
            f"Invalid value for '{param}.detail': expected one of {', '.join(_DETAIL_VALUES)}.",
            param=f"{param}.detail",
            code="invalid_value",
        )


def _parse_source(value: str, param: str) -> Source:
    """Return the file at a URL, or the file in a data URL or in bare base64. Raises
    BadRequestError."""
    scheme = value[: len("https://")].lower()
    if scheme.startswith(_LOCAL_SCHEME):
        raise local_file_error(value, param)
    if scheme.startswith(_FETCHED_SCHEMES):
        return RemoteFile(value)
    if not scheme.startswith("data:"):
        return InlineData(value, 0, "")
    try:
        return parse_data_url(value)
    except ValueError as error:
        raise malformed_data_error(param, error) from error


def local_file_error(url: str, param: str | None = None) -> BadRequestError:
    """Return the error for a `file:` URL or a path, which some backends open on their own
    machine."""
    return BadRequestError(
        f"Invalid URL {url[:MAX_SHOWN_URL_CHARS]!r}: files of the server are not read. Upload the"
        " file, or send it as a data URL.",
        param=param,
        code="url_not_allowed",
    )


def malformed_data_error(param: str, error: ValueError) -> BadRequestError:
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


def _file_kind(mime_type: str) -> Kind:
    cleaned = normalize_mime_type(mime_type)
    if cleaned == _SVG:
        return "file"
    return _KINDS.get(cleaned.partition("/")[0], "file")


def _url_filename(source: Source) -> str:
    """Return the last segment of a URL's path, decoded, or an empty string."""
    if not isinstance(source, RemoteFile):
        return ""
    path = source.url.partition("#")[0].partition("?")[0].partition("://")[2]
    return unquote(path.rpartition("/")[2]) if "/" in path else ""
