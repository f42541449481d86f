"""A client's uploads, as its requests name them."""

from starlette.requests import Request

from proxy.api.connection import owner, services
from proxy.api.multipart import Form, read_form
from proxy.errors import NotFoundError
from proxy.store.blobs import Blob, BlobWriter
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
        blob = await store.blobs.copy(Blob(upload.blob, upload.bytes, upload.sha256))
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


async def upload_form(request: Request, writer: BlobWriter) -> Form:
    """A form whose file, as far as there is room for it, goes to the writer. Raises ProxyError."""
    store, limits = services(request).store, services(request).file_limits

    async def admit(size: int) -> None:
        await store.require_room(owner(request), size, limits.quota_mib << 20)

    return await read_form(request, writer, max_mib=limits.max_file_mib, admit=admit)


def no_such_file(file_id: str, param: str = "id") -> NotFoundError:
    """The client has no upload of that name."""
    return NotFoundError(f"No such File object: {file_id}", param=param)
