"""multipart/form-data: small fields in memory, the one file straight to where it is kept."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from proxy.errors import BadRequestError, FileTooLargeError, ProxyError
from proxy.store.blobs import BlobWriter

FILE = "file"
MAX_FIELDS = 32
MAX_FIELD_BYTES = 64 << 10
MAX_FORM_BYTES = 64 << 10
"""What a form is about, beside its file."""
SILENCE_S = 120
"""How long a client may send nothing before it counts as gone."""


Admit = Callable[[int], Awaitable[None]]
"""Asked before anything is written whether so many bytes may come. Raises ProxyError."""


@dataclass(frozen=True, slots=True)
class Form:
    """A form that was read."""

    fields: Mapping[str, str]
    filename: str | None
    """None where no file came."""


async def read_form(request: Request, writer: BlobWriter, *, max_mib: int, admit: Admit) -> Form:
    """Read the body; the file in it goes to the writer. Raises BadRequestError, what `admit`
    raises, and FileTooLargeError when the file is larger than allowed."""
    parts = _Parts()
    parser = _parser(request, parts)
    stream = request.stream()
    room = max_mib << 20
    try:
        await admit(_file_bytes(request, room))
        while piece := await _next(stream):
            parser.write(piece)
            for data in parts.take():
                room -= len(data)
                if room < 0:
                    raise FileTooLargeError(
                        f"The file is larger than {max_mib} MiB, the most that is allowed.",
                        param=FILE,
                    )
                await writer.take(data)
    except (ProxyError, FormParserError) as error:
        await _discard(stream, max_mib << 20)
        if isinstance(error, ProxyError):
            raise
        raise BadRequestError(f"The form cannot be read: {error}.") from error
    if not parts.complete:
        raise BadRequestError("The form cannot be read: it ends before its last part does.")
    return Form(parts.fields, parts.filename)


def _file_bytes(request: Request, most: int) -> int:
    """How large the file is at least, by what the client says of its request; 0 where it may be
    larger than any may, for then it hears of that."""
    said = request.headers.get("content-length", "")
    length = int(said) if said.isdecimal() else 0
    return max(0, length - MAX_FORM_BYTES) if length <= most else 0


def _parser(request: Request, parts: "_Parts") -> MultipartParser:
    kind, options = parse_options_header(request.headers.get("content-type"))
    if kind != b"multipart/form-data":
        raise BadRequestError(
            f"Unsupported content type: {kind.decode(errors='replace')!r}. This API method takes"
            " 'multipart/form-data'.",
            code="unsupported_content_type",
        )
    try:
        return MultipartParser(
            options[b"boundary"],
            {
                "on_part_begin": parts.begin,
                "on_header_field": parts.header_name,
                "on_header_value": parts.header_value,
                "on_header_end": parts.header_end,
                "on_headers_finished": parts.headers_finished,
                "on_part_data": parts.data,
                "on_end": parts.end,
            },
        )
    except (KeyError, FormParserError) as error:
        raise BadRequestError("The form cannot be read: its boundary is missing or bad.") from error


async def _next(stream: AsyncGenerator[bytes, None]) -> bytes:
    try:
        async with asyncio.timeout(SILENCE_S):
            return await anext(stream, b"")
    except TimeoutError as error:
        raise ProxyError(
            f"Nothing came for {SILENCE_S} s.",
            status=408,
            type="invalid_request_error",
            code="request_timeout",
        ) from error


async def _discard(stream: AsyncGenerator[bytes, None], most: int) -> None:
    """Read on for a while: who is still sending would not read what it is told."""
    while most > 0 and (piece := await _next(stream)):
        most -= len(piece)


class _Parts:
    """What the parser tells, in the order in which it tells it."""

    def __init__(self) -> None:
        self.filename: str | None = None
        self.complete = False
        self._fields: dict[str, bytearray] = {}
        self._pending: list[bytes] = []
        self._name = ""
        self._is_file = False
        self._header = self._value = self._disposition = b""

    @property
    def fields(self) -> dict[str, str]:
        return {name: value.decode(errors="replace") for name, value in self._fields.items()}

    def begin(self) -> None:
        self._disposition = b""

    def header_name(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header = self._value = b""

    def headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode(errors="replace")
        filename = options.get(b"filename")
        self._is_file = filename is not None
        if filename is None:
            self._begin_field()
        elif self._name != FILE or self.filename is not None:
            raise BadRequestError(
                f"Unexpected file {self._name!r}: one is taken, as 'file'.", param=self._name
            )
        else:
            self.filename = filename.decode(errors="replace")

    def data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._pending.append(data[start:end])
            return
        value = self._fields[self._name]
        value += data[start:end]
        if len(value) > MAX_FIELD_BYTES:
            raise BadRequestError(f"The field {self._name!r} is too long.", param=self._name)

    def end(self) -> None:
        self.complete = True

    def take(self) -> list[bytes]:
        """What came of the file since the last time."""
        pending, self._pending = self._pending, []
        return pending

    def _begin_field(self) -> None:
        if len(self._fields) >= MAX_FIELDS:
            raise BadRequestError(f"The form has more than {MAX_FIELDS} fields.")
        self._fields[self._name] = bytearray()
