"""/v1/containers: what runs produced and what clients put beside it."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from policies.sessions import Session
from proxy.api.connection import authorize, base_url, json_body, owner, services
from proxy.api.json_response import JSON
from proxy.api.owned_container import no_such_container, owned_container
from proxy.api.uploads import owned_upload, put_upload
from proxy.errors import ProxyError
from proxy.files import WHOLE
from proxy.store.records import Container
from proxy.wire.resources import (
    CONTAINERS,
    container_object,
    container_wish,
    deleted,
    file_ids,
    listing,
    page,
)

router = APIRouter()


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
    return JSON(_told(request, container))


@router.get("/v1/containers")
async def list_containers(request: Request) -> Response:
    authorize(request)
    query = request.query_params
    containers = services(request).store.containers
    found = await containers.page(owner(request), page(query, CONTAINERS), query.get("name"))
    return JSON(listing([_told(request, each) for each in found.items], found.has_more))


@router.get("/v1/containers/{container_id}")
async def retrieve_container(request: Request, container_id: str) -> Response:
    return JSON(_told(request, await owned_container(request, container_id)))


@router.delete("/v1/containers/{container_id}")
async def delete_container(request: Request, container_id: str) -> Response:
    authorize(request)
    whose = owner(request)
    await services(request).runs.cancel_in(whose, container_id)
    had_files = await services(request).workspaces.discard(Session(whose, container_id))
    if not (await services(request).store.containers.delete(whose, container_id) or had_files):
        raise no_such_container(container_id)
    return JSON(deleted(container_id, "container.deleted"))


def _told(request: Request, container: Container) -> dict[str, object]:
    files = services(request).files
    zip_url = files.url(base_url(request), container.id, WHOLE, files.link_expiry())
    return container_object(container, zip_url)
