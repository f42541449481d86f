"""URLs in requests passed on, which the backend would fetch from inside the operator's network."""

from typing import Any

from starlette.requests import Request

from policies.remote_urls import remote_urls
from proxy.api.connection import owner, services


async def refuse_private_urls(request: Request, body: Any) -> None:
    """Check each URL in a body that the backend is about to fetch. Raises BadRequestError."""
    if urls := list(dict.fromkeys(remote_urls(body))):
        await services(request).inputs.refuse_private(urls, owner(request))
