"""/v1/files: what clients upload."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from policies.file_names import type_of
from proxy.api.connection import authorize, owner, services
from proxy.api.downloads import download
from proxy.api.json_response import JSON
from proxy.api.uploads import no_such_file, owned_upload, upload_form
from proxy.files import StoredFile
from proxy.wire.resources import (
    FILES,
    deleted,
    expires_after_s,
    listing,
    page,
    purpose,
    upload_object,
)
from proxy.wire.validation import missing

router = APIRouter()

UNNAMED = "upload"


@router.post("/v1/files")
async def create_file(request: Request) -> Response:
    authorize(request)
    store, limits = services(request).store, services(request).file_limits
    async with store.blobs.new() as writer:
        form = await upload_form(request, writer)
        asked_purpose, asked_s = purpose(form.fields), expires_after_s(form.fields)
        if form.filename is None:
            raise missing("file")
        upload = await store.uploads.add(
            owner(request),
            await writer.keep(),
            filename=form.filename or UNNAMED,
            purpose=asked_purpose,
            mime_type=type_of(form.filename),
            expires_at=lambda created_at: limits.expiry(created_at, asked_s),
            quota=limits.quota_mib << 20,
        )
    return JSON(upload_object(upload))


@router.get("/v1/files")
async def list_files(request: Request) -> Response:
    authorize(request)
    asked = page(request.query_params, FILES)
    uploads = services(request).store.uploads
    found = await uploads.page(owner(request), asked, request.query_params.get("purpose"))
    return JSON(listing([upload_object(upload) for upload in found.items], found.has_more))


@router.get("/v1/files/{file_id}")
async def retrieve_file(request: Request, file_id: str) -> Response:
    authorize(request)
    return JSON(upload_object(await owned_upload(request, file_id)))


@router.delete("/v1/files/{file_id}")
async def delete_file(request: Request, file_id: str) -> Response:
    authorize(request)
    if not await services(request).store.uploads.delete(owner(request), file_id):
        raise no_such_file(file_id)
    return JSON(deleted(file_id, "file"))


@router.get("/v1/files/{file_id}/content")
async def file_content(request: Request, file_id: str) -> Response:
    authorize(request)
    upload = await owned_upload(request, file_id)
    path = services(request).store.blobs.path(upload.blob)
    return download(StoredFile(path, upload.filename, upload.mime_type))
