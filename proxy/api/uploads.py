"""A client's uploads, as its requests name them."""

from starlette.requests import Request

from proxy.api.connection import owner, services
from proxy.errors import BadRequestError, NotFoundError
from proxy.store.blobs import Blob
from proxy.store.records import ContainerFile, StoredUpload


async def owned_upload(request: Request, file_id: str, param: str = "id") -> StoredUpload:
    """The client's upload. Raises NotFoundError."""
    upload = await services(request).store.uploads.get(owner(request), file_id)
    if upload is None:
        raise no_such_file(file_id, param)
    return upload


async def put_upload(request: Request, container_id: str, upload: StoredUpload) -> ContainerFile:
    """Put a copy of an upload into a container. Raises NotFoundError, and QuotaError."""
    store, limits = services(request).store, services(request).file_limits
    try:
        blob = store.blobs.copy(Blob(upload.blob, upload.bytes, upload.sha256))
    except FileNotFoundError as error:  # it was deleted since it was found
        raise no_such_file(upload.id) from error
    return await store.container_files.put(
        owner(request),
        container_id,
        blob,
        filename=upload.filename,
        mime_type=upload.mime_type,
        quota=limits.quota_mib << 20,
    )


async def require_room(request: Request, size: int) -> None:
    """Raises QuotaError where a file of that size would be too much for the client's key."""
    store, limits = services(request).store, services(request).file_limits
    await store.require_room(owner(request), size, limits.quota_mib << 20)


def missing_file() -> BadRequestError:
    """No file came."""
    return BadRequestError(
        "Missing required parameter: 'file'.", param="file", code="missing_required_parameter"
    )


def no_such_file(file_id: str, param: str = "id") -> NotFoundError:
    """The client has no upload of that name."""
    return NotFoundError(f"No such File object: {file_id}", param=param)
