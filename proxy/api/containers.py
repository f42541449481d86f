"""/v1/containers: containers with the files that runs produce and clients upload. A file, or a zip
of all files, can be downloaded with the client's key or with a signed link."""

import time
import zipfile
from collections.abc import Iterable, Iterator
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from starlette.requests import Request
from starlette.responses import Response

from policies.file_names import guess_mime_type
from policies.sessions import Session
from policies.workspace import ArchiveNames
from proxy.api import dependencies
from proxy.api.dependencies import (
    JSONResponse,
    Services,
    base_url,
    has_valid_key,
    read_json_object,
)
from proxy.api.files import (
    copy_upload_to_container,
    file_response,
    owned_upload,
    receive_upload_form,
    zip_response,
)
from proxy.api.parameters import (
    BODY_ERRORS,
    FORM_MEDIA_TYPE,
    Owner,
    ServicesDep,
    content,
    errors,
    json_body,
    openapi_body,
)
from proxy.errors import BadRequestError, NotFoundError, ProxyError, UnauthorizedError
from proxy.files import ARCHIVE_FILE_ID
from proxy.schemas.resources import (
    ArchiveQuery,
    ContainerCreate,
    ContainerFileCreate,
    ContainerFileListQuery,
    ContainerFileObject,
    ContainerListQuery,
    ContainerObject,
    DeletedObject,
    LinkQuery,
    ListObject,
    container_file_object,
    container_object,
    parse,
)
from proxy.schemas.validation import missing_error
from proxy.store.blobs import BlobStore
from proxy.store.records import Container, ContainerFile

router = APIRouter(
    tags=["Containers"],
    default_response_class=JSONResponse,
)

FILES_PATH = "/v1/containers/{container_id}/files"
FILE_PATH = FILES_PATH + "/{file_id}"
READ_BYTES = 1 << 20
_FILE_BODY = openapi_body(ContainerFileCreate, "application/json", FORM_MEDIA_TYPE)


async def _container(services: ServicesDep, owner: Owner, container_id: str) -> Container:
    """Return the client's container, and extend its expiry. Raises NotFoundError."""
    container = await services.store.containers.touch(owner, container_id)
    if container is None:
        raise _no_such_container(container_id)
    return container


OwnedContainer = Annotated[Container, Depends(_container)]
"""The client's container that the path names."""


@router.post(
    "/v1/containers",
    response_model_exclude_none=True,
    responses=errors(*BODY_ERRORS, 404),
    openapi_extra=openapi_body(ContainerCreate),
)
async def create_container(
    request: Request,
    services: ServicesDep,
    owner: Owner,
    body: Annotated[ContainerCreate, Depends(json_body(ContainerCreate))],
) -> ContainerObject:
    """Create a container with copies of uploads."""
    files = services.files
    new_container = body.to_new_container(max_minutes=files.container_minutes)
    uploads = [
        await owned_upload(services, owner, file_id, "file_ids") for file_id in body.file_ids or []
    ]
    container = await files.store.containers.create(owner, new_container)
    try:
        for upload in uploads:
            await copy_upload_to_container(services, owner, container.id, upload)
    except ProxyError:
        await files.store.containers.delete(owner, container.id)
        raise
    return _container_object(request, services, container)


@router.get("/v1/containers", response_model_exclude_none=True, responses=errors(400))
async def list_containers(
    request: Request,
    services: ServicesDep,
    owner: Owner,
    query: Annotated[ContainerListQuery, Query()],
) -> ListObject[ContainerObject]:
    """List the containers."""
    found = await services.store.containers.page(owner, query.page_request, query.name)
    objects = [_container_object(request, services, container) for container in found.items]
    return ListObject.from_page(objects, found.has_more)


@router.get(
    "/v1/containers/{container_id}", response_model_exclude_none=True, responses=errors(404)
)
async def retrieve_container(
    request: Request, services: ServicesDep, container: OwnedContainer
) -> ContainerObject:
    """Return a container."""
    return _container_object(request, services, container)


@router.delete("/v1/containers/{container_id}", responses=errors(404, 409))
async def delete_container(services: ServicesDep, owner: Owner, container_id: str) -> DeletedObject:
    """Delete a container with its files. The runs in the container are cancelled first."""
    await services.runs.cancel_in_container(owner, container_id)
    had_files = await services.workspaces.discard(Session(owner, container_id))
    if not (await services.store.containers.delete(owner, container_id) or had_files):
        raise _no_such_container(container_id)
    return DeletedObject(id=container_id, object="container.deleted")


def _container_object(
    request: Request, services: Services, container: Container
) -> ContainerObject:
    files = services.files
    zip_url = files.url(base_url(request), container.id, ARCHIVE_FILE_ID, files.link_expiry())
    return container_object(container, zip_url)


@router.post(FILES_PATH, responses=errors(*BODY_ERRORS, 404, 408), openapi_extra=_FILE_BODY)
async def create_container_file(
    request: Request, services: ServicesDep, owner: Owner, container: OwnedContainer
) -> ContainerFileObject:
    """Add a file to a container: a copy of an upload, or the file of a form."""
    if request.headers.get("content-type", "").lower().startswith("application/json"):
        body = parse(ContainerFileCreate, await read_json_object(request))
        file = await _file_from_upload(services, owner, container.id, body.file_id)
    else:
        file = await _file_from_form(request, services, owner, container.id)
    return _file_object(request, services, file)


@router.get(FILES_PATH, responses=errors(400, 404))
async def list_container_files(
    request: Request,
    services: ServicesDep,
    owner: Owner,
    container: OwnedContainer,
    query: Annotated[ContainerFileListQuery, Query()],
) -> ListObject[ContainerFileObject]:
    """List the files of a container."""
    found = await services.store.container_files.page(
        owner, container.id, query.page_request, query.path
    )
    objects = [_file_object(request, services, file) for file in found.items]
    return ListObject.from_page(objects, found.has_more)


@router.get(
    f"{FILES_PATH}/content",
    response_class=Response,
    responses=content("application/zip") | errors(400, 401, 404),
)
async def zip_of_files(
    request: Request,
    services: ServicesDep,
    container_id: str,
    query: Annotated[ArchiveQuery, Query()],
) -> Response:
    """Return a zip archive of all files of a container, or of the files under `path`. A request
    with a signed link needs no key."""
    owner = _authorized_owner(request, services, container_id, ARCHIVE_FILE_ID, query)
    store = services.store
    files = await store.container_files.all(container_id, owner, query.path)
    if files is None:
        raise _no_such_container(container_id)
    pieces = _zip_pieces(files, store.blobs)
    return zip_response(pieces, f"{container_id}.zip")


@router.get(FILE_PATH, responses=errors(404))
async def retrieve_container_file(
    request: Request, services: ServicesDep, owner: Owner, container: OwnedContainer, file_id: str
) -> ContainerFileObject:
    """Return the metadata of a container's file."""
    file = await services.store.container_files.get(container.id, file_id, owner)
    if file is None:
        raise _no_such_file(container.id, file_id)
    return _file_object(request, services, file)


@router.delete(FILE_PATH, responses=errors(404))
async def delete_container_file(
    services: ServicesDep, owner: Owner, container: OwnedContainer, file_id: str
) -> DeletedObject:
    """Delete a container's file."""
    if not await services.store.container_files.delete(owner, container.id, file_id):
        raise _no_such_file(container.id, file_id)
    return DeletedObject(id=file_id, object="container.file.deleted")


@router.get(f"{FILE_PATH}/content", response_class=Response, responses=content() | errors(401, 404))
@router.head(f"{FILE_PATH}/content", include_in_schema=False)
async def file_content(
    request: Request,
    services: ServicesDep,
    container_id: str,
    file_id: str,
    query: Annotated[LinkQuery, Query()],
) -> Response:
    """Return the content of a container's file. A request with a signed link needs no key."""
    owner = _authorized_owner(request, services, container_id, file_id, query)
    stored = await services.files.find(container_id, file_id, owner)
    if stored is None:
        raise _no_such_file(container_id, file_id)
    return file_response(stored)


async def _file_from_upload(
    services: Services, owner: str, container_id: str, file_id: str | None
) -> ContainerFile:
    if file_id is None:
        raise missing_error("file")
    upload = await owned_upload(services, owner, file_id, "file_id")
    return await copy_upload_to_container(services, owner, container_id, upload)


async def _file_from_form(
    request: Request, services: Services, owner: str, container_id: str
) -> ContainerFile:
    store, limits = services.store, services.file_limits
    async with store.blobs.open_writer() as writer:
        form = await receive_upload_form(request, services, owner, writer)
        file_id = form.fields.get("file_id")
        if form.filename is None:
            return await _file_from_upload(services, owner, container_id, file_id)
        if file_id is not None:
            raise BadRequestError("Send either 'file' or 'file_id', not both.", param="file_id")
        return await store.container_files.put(
            owner,
            container_id,
            await writer.commit(),
            filename=form.filename,
            mime_type=guess_mime_type(form.filename),
            quota=limits.quota_mib << 20,
        )


def _authorized_owner(
    request: Request, services: Services, container_id: str, file_id: str, link: LinkQuery
) -> str | None:
    """Return the owner whose files the request may read, or None if a valid signed link authorizes
    the request. Raises UnauthorizedError if neither a link nor a key does."""
    if services.files.is_valid_link(container_id, file_id, link.exp, link.sig):
        return None
    if not has_valid_key(request):
        raise UnauthorizedError("This link has expired or is not one of ours.")
    return dependencies.get_owner(request)


def _file_object(request: Request, services: Services, file: ContainerFile) -> ContainerFileObject:
    files = services.files
    url = files.url(base_url(request), file.container_id, file.id, files.link_expiry())
    return container_file_object(file, url)


def _no_such_file(container_id: str, file_id: str) -> NotFoundError:
    return NotFoundError(f"No file {file_id!r} in container {container_id!r}.", param="file_id")


def _no_such_container(container_id: str) -> NotFoundError:
    return NotFoundError(f"Container with id '{container_id}' not found.", param="container_id")


def _zip_pieces(files: Iterable[ContainerFile], blobs: BlobStore) -> Iterator[bytes]:
    """Yield the pieces of a zip archive of files, whose contents are read from `blobs`. Blocks."""
    buffer, names = _ZipBuffer(), ArchiveNames()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            info = zipfile.ZipInfo(names.assign(file.path), time.gmtime(file.created_at)[:6])
            info.compress_type = zipfile.ZIP_DEFLATED
            info.file_size = file.bytes  # zipfile chooses the 64-bit format by this size
            info.external_attr = 0o644 << 16
            with blobs.open(file.blob) as source, archive.open(info, "w") as target:
                while piece := source.read(READ_BYTES):
                    target.write(piece)
                    yield buffer.take()
    yield buffer.take()


class _ZipBuffer:
    """Collects in memory the bytes that zipfile writes. The buffer cannot seek, so zipfile writes
    the archive as a stream."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def write(self, data: bytes, /) -> int:
        self._pieces.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        """See io.IOBase."""

    def close(self) -> None:
        """See io.IOBase."""

    def take(self) -> bytes:
        """Return the bytes written since the last call."""
        data, self._pieces = b"".join(self._pieces), []
        return data
