"""/v1/containers: the files that runs produced and that clients put beside them; one by one for a
client with the link or the key, or all as a zip."""

import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from policies.file_names import type_of
from policies.sessions import Session
from policies.workspace import ArchiveNames
from proxy.api.dependencies import (
    JSONResponse,
    authorize,
    base_url,
    has_key,
    json_body,
    owner,
    services,
)
from proxy.api.files import file_response, owned_upload, put_upload, read_upload, zip_response
from proxy.errors import BadRequestError, NotFoundError, ProxyError, UnauthorizedError
from proxy.files import WHOLE
from proxy.store.records import Container, ContainerFile
from proxy.wire.resources import (
    CONTAINERS,
    container_file_object,
    container_object,
    container_wish,
    deleted,
    file_ids,
    listing,
    name_of,
    page,
)
from proxy.wire.validation import missing

router = APIRouter()

FILES = "/v1/containers/{container_id}/files"
FILE = FILES + "/{file_id}"
READ_BYTES = 1 << 20


@router.post("/v1/containers")
async def create_container(request: Request) -> Response:
    authorize(request)
    body = await json_body(request)
    files = services(request).files
    wish = container_wish(body, max_minutes=files.container_minutes)
    uploads = [await owned_upload(request, each, "file_ids") for each in file_ids(body)]
    container = await files.store.containers.create(owner(request), wish)
    try:
        for upload in uploads:
            await put_upload(request, container.id, upload)
    except ProxyError:
        await files.store.containers.delete(owner(request), container.id)
        raise
    return JSONResponse(_described(request, container))


@router.get("/v1/containers")
async def list_containers(request: Request) -> Response:
    authorize(request)
    query = request.query_params
    containers = services(request).store.containers
    found = await containers.page(owner(request), page(query, CONTAINERS), query.get("name"))
    return JSONResponse(
        listing([_described(request, each) for each in found.items], found.has_more)
    )


@router.get("/v1/containers/{container_id}")
async def retrieve_container(request: Request, container_id: str) -> Response:
    return JSONResponse(_described(request, await _owned_container(request, container_id)))


@router.delete("/v1/containers/{container_id}")
async def delete_container(request: Request, container_id: str) -> Response:
    authorize(request)
    whose = owner(request)
    await services(request).runs.cancel_in(whose, container_id)
    had_files = await services(request).workspaces.discard(Session(whose, container_id))
    if not (await services(request).store.containers.delete(whose, container_id) or had_files):
        raise _no_such_container(container_id)
    return JSONResponse(deleted(container_id, "container.deleted"))


def _described(request: Request, container: Container) -> dict[str, object]:
    files = services(request).files
    zip_url = files.url(base_url(request), container.id, WHOLE, files.link_expiry())
    return container_object(container, zip_url)


@router.post(FILES)
async def create_container_file(request: Request, container_id: str) -> Response:
    await _owned_container(request, container_id)
    if request.headers.get("content-type", "").lower().startswith("application/json"):
        file_id = name_of(await json_body(request), "file_id")
        file = await _from_upload(request, container_id, file_id)
    else:
        file = await _from_form(request, container_id)
    return JSONResponse(_describe_file(request)(file))


@router.get(FILES)
async def list_container_files(request: Request, container_id: str) -> Response:
    await _owned_container(request, container_id)
    query = request.query_params
    found = await services(request).store.container_files.page(
        owner(request), container_id, page(query, CONTAINERS), query.get("path")
    )
    return JSONResponse(listing(list(map(_describe_file(request), found.items)), found.has_more))


@router.get(f"{FILES}/content")
async def zip_of_files(request: Request, container_id: str) -> Response:
    if request.query_params.get("format", "zip") != "zip":
        raise BadRequestError(
            "Invalid 'format': supported is 'zip'.", param="format", code="invalid_value"
        )
    store = services(request).store
    under = request.query_params.get("path")
    reader = _reader(request, container_id, WHOLE)
    files = await store.container_files.all(container_id, reader, under)
    if files is None:
        raise _no_such_container(container_id)
    pieces = _zip_pieces((file, store.blobs.path(file.blob)) for file in files)
    return zip_response(pieces, f"{container_id}.zip")


@router.get(FILE)
async def retrieve_container_file(request: Request, container_id: str, file_id: str) -> Response:
    await _owned_container(request, container_id)
    files = services(request).store.container_files
    file = await files.get(container_id, file_id, owner(request))
    if file is None:
        raise _no_such_file(container_id, file_id)
    return JSONResponse(_describe_file(request)(file))


@router.delete(FILE)
async def delete_container_file(request: Request, container_id: str, file_id: str) -> Response:
    await _owned_container(request, container_id)
    files = services(request).store.container_files
    if not await files.delete(owner(request), container_id, file_id):
        raise _no_such_file(container_id, file_id)
    return JSONResponse(deleted(file_id, "container.file.deleted"))


@router.api_route(f"{FILE}/content", methods=["GET", "HEAD"])
async def file_content(request: Request, container_id: str, file_id: str) -> Response:
    reader = _reader(request, container_id, file_id)
    stored = await services(request).files.find(container_id, file_id, reader)
    if stored is None:
        raise _no_such_file(container_id, file_id)
    return file_response(stored)


async def _from_upload(request: Request, container_id: str, file_id: str | None) -> ContainerFile:
    if file_id is None:
        raise missing("file")
    return await put_upload(request, container_id, await owned_upload(request, file_id, "file_id"))


async def _from_form(request: Request, container_id: str) -> ContainerFile:
    store, limits = services(request).store, services(request).file_limits
    async with store.blobs.new() as writer:
        form = await read_upload(request, writer)
        file_id = form.fields.get("file_id")
        if form.filename is None:
            return await _from_upload(request, container_id, file_id)
        if file_id is not None:
            raise BadRequestError("Send either 'file' or 'file_id', not both.", param="file_id")
        return await store.container_files.put(
            owner(request),
            container_id,
            await writer.keep(),
            filename=form.filename,
            mime_type=type_of(form.filename),
            quota=limits.quota_mib << 20,
        )


def _reader(request: Request, container_id: str, file_id: str) -> str | None:
    """Return the owner whose files the request may read: None, for any, with a valid link, else
    the client itself. Raises UnauthorizedError."""
    expires, signature = request.query_params.get("exp", ""), request.query_params.get("sig", "")
    if services(request).files.is_signed(container_id, file_id, expires, signature):
        return None
    if not has_key(request):
        raise UnauthorizedError("This link has expired or is not one of ours.")
    return owner(request)


def _describe_file(request: Request) -> Callable[[ContainerFile], dict[str, object]]:
    files, base = services(request).files, base_url(request)
    expires = files.link_expiry()
    return lambda file: container_file_object(
        file, files.url(base, file.container_id, file.id, expires)
    )


def _no_such_file(container_id: str, file_id: str) -> NotFoundError:
    return NotFoundError(f"No file {file_id!r} in container {container_id!r}.", param="file_id")


async def _owned_container(request: Request, container_id: str) -> Container:
    """Return the client's container, and note its use. Raises UnauthorizedError, NotFoundError."""
    authorize(request)
    container = await services(request).store.containers.use(owner(request), container_id)
    if container is None:
        raise _no_such_container(container_id)
    return container


def _no_such_container(container_id: str) -> NotFoundError:
    return NotFoundError(f"Container with id '{container_id}' not found.", param="container_id")


def _zip_pieces(files: Iterable[tuple[ContainerFile, Path]]) -> Iterator[bytes]:
    """Yield a zip of files, each with the path of its content, while it is made."""
    buffer, names = _ZipBuffer(), ArchiveNames()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, path in files:
            info = zipfile.ZipInfo(names.give(file.path), time.gmtime(file.created_at)[:6])
            info.compress_type = zipfile.ZIP_DEFLATED
            info.file_size = file.bytes  # decides whether it needs the large format
            info.external_attr = 0o644 << 16
            with path.open("rb") as source, archive.open(info, "w") as target:
                while piece := source.read(READ_BYTES):
                    target.write(piece)
                    yield buffer.take()
    yield buffer.take()


class _ZipBuffer:
    """The file that the archive writes into; it cannot seek."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def write(self, data: bytes, /) -> int:
        self._pieces.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Nothing is held open."""

    def take(self) -> bytes:
        """Return what was written since the last call."""
        data, self._pieces = b"".join(self._pieces), []
        return data
