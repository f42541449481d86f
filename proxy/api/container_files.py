"""/v1/containers/…/files: one by one for whoever has the link or the key, or all as a zip."""

from collections.abc import Callable

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from policies.file_names import type_of
from proxy.api.connection import base_url, has_key, json_body, owner, services
from proxy.api.downloads import download, zip_download
from proxy.api.json_response import JSON
from proxy.api.owned_container import no_such_container, owned_container
from proxy.api.uploads import owned_upload, put_upload, upload_form
from proxy.errors import BadRequestError, NotFoundError, UnauthorizedError
from proxy.files import WHOLE
from proxy.store.archive import zipped
from proxy.store.records import ContainerFile
from proxy.wire.resources import CONTAINERS, container_file_object, deleted, listing, name_of, page
from proxy.wire.validation import missing

router = APIRouter()

FILES = "/v1/containers/{container_id}/files"
FILE = FILES + "/{file_id}"


@router.post(FILES)
async def create_container_file(request: Request, container_id: str) -> Response:
    await owned_container(request, container_id)
    if request.headers.get("content-type", "").lower().startswith("application/json"):
        file_id = name_of(await json_body(request), "file_id")
        file = await _from_upload(request, container_id, file_id)
    else:
        file = await _from_form(request, container_id)
    return JSON(_teller(request)(file))


@router.get(FILES)
async def list_container_files(request: Request, container_id: str) -> Response:
    await owned_container(request, container_id)
    query = request.query_params
    found = await services(request).store.container_files.page(
        owner(request), container_id, page(query, CONTAINERS), query.get("path")
    )
    return JSON(listing(list(map(_teller(request), found.items)), found.has_more))


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
        raise no_such_container(container_id)
    pieces = zipped((file, store.blobs.path(file.blob)) for file in files)
    return zip_download(pieces, f"{container_id}.zip")


@router.get(FILE)
async def retrieve_container_file(request: Request, container_id: str, file_id: str) -> Response:
    await owned_container(request, container_id)
    files = services(request).store.container_files
    file = await files.get(container_id, file_id, owner(request))
    if file is None:
        raise _no_such_file(container_id, file_id)
    return JSON(_teller(request)(file))


@router.delete(FILE)
async def delete_container_file(request: Request, container_id: str, file_id: str) -> Response:
    await owned_container(request, container_id)
    files = services(request).store.container_files
    if not await files.delete(owner(request), container_id, file_id):
        raise _no_such_file(container_id, file_id)
    return JSON(deleted(file_id, "container.file.deleted"))


@router.api_route(f"{FILE}/content", methods=["GET", "HEAD"])
async def file_content(request: Request, container_id: str, file_id: str) -> Response:
    reader = _reader(request, container_id, file_id)
    stored = await services(request).files.find(container_id, file_id, reader)
    if stored is None:
        raise _no_such_file(container_id, file_id)
    return download(stored)


async def _from_upload(request: Request, container_id: str, file_id: str | None) -> ContainerFile:
    if file_id is None:
        raise missing("file")
    return await put_upload(request, container_id, await owned_upload(request, file_id, "file_id"))


async def _from_form(request: Request, container_id: str) -> ContainerFile:
    store, limits = services(request).store, services(request).file_limits
    async with store.blobs.new() as writer:
        form = await upload_form(request, writer)
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
    """Whose files may be read: by a true link anybody's, else the client's own. Raises
    UnauthorizedError."""
    expires, signature = request.query_params.get("exp", ""), request.query_params.get("sig", "")
    if services(request).files.is_signed(container_id, file_id, expires, signature):
        return None
    if not has_key(request):
        raise UnauthorizedError("This link has expired or is not one of ours.")
    return owner(request)


def _teller(request: Request) -> Callable[[ContainerFile], dict[str, object]]:
    files, base = services(request).files, base_url(request)
    expires = files.link_expiry()
    return lambda file: container_file_object(
        file, files.url(base, file.container_id, file.id, expires)
    )


def _no_such_file(container_id: str, file_id: str) -> NotFoundError:
    return NotFoundError(f"No file {file_id!r} in container {container_id!r}.", param="file_id")
