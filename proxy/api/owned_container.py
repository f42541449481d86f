"""A client's containers, as its requests name them."""

from starlette.requests import Request

from proxy.api.connection import authorize, owner, services
from proxy.errors import NotFoundError
from proxy.store.records import Container


async def owned_container(request: Request, container_id: str) -> Container:
    """The client's container, which is in use again. Raises UnauthorizedError, NotFoundError."""
    authorize(request)
    container = await services(request).store.containers.use(owner(request), container_id)
    if container is None:
        raise no_such_container(container_id)
    return container


def no_such_container(container_id: str) -> NotFoundError:
    """The client has no container of that name."""
    return NotFoundError(f"Container with id '{container_id}' not found.", param="container_id")
