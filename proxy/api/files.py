"""/v1/files: uploads. Also the reader of multipart forms, which writes the file of a form straight
to disk, and the responses that send a file or an archive."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from email.utils import formatdate
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse

from policies.file_names import display_name, guess_mime_type
from policies.headers import ResponseHeader
from proxy.api.dependencies import JSONResponse, Services
from proxy.api.parameters import (
    BODY_ERRORS,
    FORM_MEDIA_TYPE,
    Owner,
    ServicesDep,
    content,
    errors,
    openapi_body,
)
from proxy.errors import BadRequestError, FileTooLargeError, NotFoundError, ProxyError
from proxy.files import StoredFile
from proxy.schemas.resources import (
    DeletedObject,
    FileListQuery,
    FileObject,
    ListObject,
    UploadForm,
    file_object,
    parse,
)
from proxy.schemas.validation import missing_error
from proxy.store.blobs import Blob, BlobWriter
from proxy.store.records import ContainerFile, StoredUpload

router = APIRouter(tags=["Files"], default_response_class=JSONResponse)

DEFAULT_FILENAME = "upload"
FILE_FIELD = "file"
MAX_FIELDS = 32
MAX_FIELD_BYTES = 64 << 10
MAX_FORM_BYTES = 64 << 10
"""Largest expected size of a form without its file, in bytes. The file is assumed to have at least
Content-Length minus this number of bytes."""
IDLE_TIMEOUT_S = 120
"""Maximum seconds without data from the client."""
SHOWN_MIME_TYPES = ("image/png", "image/jpeg", "image/gif", "image/webp", "text/plain")
"""MIME types without active content. A browser may show files of these types on this server's
origin; files of all other types, HTML and SVG too, are downloads."""
DOWNLOAD_HEADERS: Mapping[str, str] = {
    ResponseHeader.CONTENT_TYPE_OPTIONS: "nosniff",
    ResponseHeader.CONTENT_SECURITY_POLICY: "sandbox; default-src 'none'",
    ResponseHeader.REFERRER_POLICY: "no-referrer",  # the URL alone opens the file
    ResponseHeader.CACHE_CONTROL: "private, max-age=3600",
}


async def owned_upload(
    services: Services, owner: str, file_id: str, param: str = "id"
) -> StoredUpload:
    """Return the client's upload. Raises NotFoundError."""
    upload = await services.store.uploads.get(owner, file_id)
    if upload is None:
        raise upload_not_found(file_id, param)
    return upload


async def _upload(services: ServicesDep, owner: Owner, file_id: str) -> StoredUpload:
    return await owned_upload(services, owner, file_id)


OwnedUpload = Annotated[StoredUpload, Depends(_upload)]
"""The client's upload that the path names."""


@router.post(
    "/v1/files",
    responses=errors(*BODY_ERRORS, 408),
    openapi_extra=openapi_body(UploadForm, FORM_MEDIA_TYPE),
)
async def create_file(request: Request, services: ServicesDep, owner: Owner) -> FileObject:
    """Upload a file as a multipart form."""
    store, limits = services.store, services.file_limits
    async with store.blobs.open_writer() as writer:
        form = await receive_upload_form(request, services, owner, writer)
        fields = parse(UploadForm, form.fields)
        if form.filename is None:
            raise missing_error(FILE_FIELD)
        expires_after_s = fields.expires_after.seconds if fields.expires_after else None
        upload = await store.uploads.add(
            owner,
            await writer.commit(),
            filename=form.filename or DEFAULT_FILENAME,
            purpose=fields.purpose,
            mime_type=guess_mime_type(form.filename),
            compute_expiry=lambda created_at: limits.expiry(created_at, expires_after_s),
            quota=limits.quota_mib << 20,
        )
    return file_object(upload)


@router.get("/v1/files", responses=errors(400))
async def list_files(
    services: ServicesDep, owner: Owner, query: Annotated[FileListQuery, Query()]
) -> ListObject[FileObject]:
    """List the uploads."""
    found = await services.store.uploads.page(owner, query.page_request, query.purpose)
    return ListObject.from_page([file_object(upload) for upload in found.items], found.has_more)


@router.get("/v1/files/{file_id}", responses=errors(404))
async def retrieve_file(upload: OwnedUpload) -> FileObject:
    """Return the metadata of an upload."""
    return file_object(upload)


@router.delete("/v1/files/{file_id}", responses=errors(404))
async def delete_file(services: ServicesDep, owner: Owner, file_id: str) -> DeletedObject:
    """Delete an upload."""
    if not await services.store.uploads.delete(owner, file_id):
        raise upload_not_found(file_id)
    return DeletedObject(id=file_id, object="file")


@router.get(
    "/v1/files/{file_id}/content", response_class=Response, responses=content() | errors(404)
)
async def file_content(services: ServicesDep, upload: OwnedUpload) -> Response:
    """Return the content of an upload."""
    path = await services.store.blobs.local_path(upload.blob)
    return file_response(
        StoredFile(path, upload.filename, upload.mime_type, upload.sha256, upload.created_at)
    )


async def copy_upload_to_container(
    services: Services, owner: str, container_id: str, upload: StoredUpload
) -> ContainerFile:
    """Copy an upload into a container. Raises NotFoundError, QuotaError."""
    store, limits = services.store, services.file_limits
    try:
        blob = await store.blobs.copy(Blob(upload.blob, upload.bytes, upload.sha256))
    except FileNotFoundError as error:  # deleted since the caller found it
        raise upload_not_found(upload.id) from error
    return await store.container_files.put(
        owner,
        container_id,
        blob,
        filename=upload.filename,
        mime_type=upload.mime_type,
        quota=limits.quota_mib << 20,
    )


async def receive_upload_form(
    request: Request, services: Services, owner: str, writer: BlobWriter
) -> "Form":
    """Read a form, and write its file to `writer` if the owner's quota allows the size. Raises
    ProxyError."""
    store, limits = services.store, services.file_limits

    async def check_quota(size: int) -> None:
        await store.check_quota(owner, size, limits.quota_mib << 20)

    return await _read_form(request, writer, max_mib=limits.max_file_mib, check_quota=check_quota)


def upload_not_found(file_id: str, param: str = "id") -> NotFoundError:
    """Return the error for an unknown upload."""
    return NotFoundError(f"No such File object: {file_id}", param=param)


def file_response(file: StoredFile) -> FileResponse:
    """Return a response with a file. A browser shows the file if its type is in
    `SHOWN_MIME_TYPES`, else downloads it."""
    is_shown = file.mime_type in SHOWN_MIME_TYPES
    # Without these, the headers would depend on the time of the server's own copy of the file.
    validators = {
        "ETag": f'"{file.sha256}"',
        "Last-Modified": formatdate(file.created_at, usegmt=True),
    }
    return FileResponse(
        file.path,
        media_type=file.mime_type,
        filename=display_name(file.filename),
        content_disposition_type="inline" if is_shown else "attachment",
        headers={**DOWNLOAD_HEADERS, **validators},
    )


def zip_response(pieces: Iterator[bytes], filename: str) -> StreamingResponse:
    """Return a response that sends the pieces of a zip archive while they are generated."""
    disposition = f'attachment; filename="{filename}"'
    headers = {**DOWNLOAD_HEADERS, ResponseHeader.CONTENT_DISPOSITION: disposition}
    return StreamingResponse(pieces, media_type="application/zip", headers=headers)


@dataclass(frozen=True, slots=True)
class Form:
    """The fields of a multipart form, and the name of its file."""

    fields: Mapping[str, str]
    filename: str | None
    """None if the form has no file."""


async def _read_form(
    request: Request,
    writer: BlobWriter,
    *,
    max_mib: int,
    check_quota: Callable[[int], Awaitable[None]],
) -> Form:
    """Return the form in the body, and write the form's file to `writer`. `check_quota` is called
    first, with the minimum size of the file in bytes.

    Raises BadRequestError, FileTooLargeError, ProxyError with status 408 if the client sends
    nothing for `IDLE_TIMEOUT_S`, and the errors of `check_quota`.
    """
    parts = _FormParts()
    parser = _form_parser(request, parts)
    stream = request.stream()
    bytes_left = max_mib << 20
    try:
        await check_quota(_min_file_bytes(request, bytes_left))
        while piece := await _receive_piece(stream):
            parser.write(piece)
            for data in parts.take_file_pieces():
                bytes_left -= len(data)
                if bytes_left < 0:
                    raise FileTooLargeError(
                        f"The file is larger than {max_mib} MiB, the most that is allowed.",
                        param=FILE_FIELD,
                    )
                await writer.write(data)
    except (ProxyError, FormParserError) as error:
        await _discard_body(stream, max_mib << 20)
        if isinstance(error, ProxyError):
            raise
        raise BadRequestError(f"The form cannot be read: {error}.") from error
    if not parts.is_complete:
        raise BadRequestError("The form cannot be read: it ends before its last part does.")
    return Form(parts.fields, parts.filename)


def _min_file_bytes(request: Request, limit: int) -> int:
    """Return the minimum size of the file in bytes, computed from the request's Content-Length.
    Return 0 if Content-Length exceeds `limit`, so that the client gets FileTooLargeError and not
    QuotaError."""
    value = request.headers.get("content-length", "")
    length = int(value) if value.isdecimal() else 0
    return max(0, length - MAX_FORM_BYTES) if length <= limit else 0


def _form_parser(request: Request, parts: "_FormParts") -> MultipartParser:
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


async def _receive_piece(stream: AsyncGenerator[bytes, None]) -> bytes:
    try:
        async with asyncio.timeout(IDLE_TIMEOUT_S):
            return await anext(stream, b"")
    except TimeoutError as error:
        raise ProxyError(
            f"The client sent no data for {IDLE_TIMEOUT_S} s.",
            status=408,
            type="invalid_request_error",
            code="request_timeout",
        ) from error


async def _discard_body(stream: AsyncGenerator[bytes, None], max_bytes: int) -> None:
    """Read the rest of the body, up to `max_bytes`: a client reads the response only after sending
    the body."""
    while max_bytes > 0 and (piece := await _receive_piece(stream)):
        max_bytes -= len(piece)


class _FormParts:
    """Collects the fields of a form, and buffers pieces of its file until `take_file_pieces`. The
    other methods are the callbacks of the parser."""

    def __init__(self) -> None:
        self.filename: str | None = None
        self.is_complete = False
        self._fields: dict[str, bytearray] = {}
        self._pending_pieces: list[bytes] = []
        self._part_name = ""
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
        self._part_name = options.get(b"name", b"").decode(errors="replace")
        filename = options.get(b"filename")
        self._is_file = filename is not None
        if filename is None:
            if len(self._fields) >= MAX_FIELDS:
                raise BadRequestError(f"The form has more than {MAX_FIELDS} fields.")
            self._fields[self._part_name] = bytearray()
        elif self._part_name != FILE_FIELD or self.filename is not None:
            raise BadRequestError(
                f"Unexpected file {self._part_name!r}: send one file, in the field 'file'.",
                param=self._part_name,
            )
        else:
            self.filename = filename.decode(errors="replace")

    def data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._pending_pieces.append(data[start:end])
            return
        value = self._fields[self._part_name]
        value += data[start:end]
        if len(value) > MAX_FIELD_BYTES:
            raise BadRequestError(
                f"The field {self._part_name!r} is too long.", param=self._part_name
            )

    def end(self) -> None:
        self.is_complete = True

    def take_file_pieces(self) -> list[bytes]:
        """Return the pieces of the file that arrived since the last call."""
        pending, self._pending_pieces = self._pending_pieces, []
        return pending
