"""GET /v1/trajectories: the list of a client's trajectories."""

from typing import Annotated

from fastapi import APIRouter, Query

from proxy.api.dependencies import JSONResponse
from proxy.api.parameters import REQUIRES_KEY, Owner, ServicesDep, errors
from proxy.schemas.resources import ListObject, ListQuery, TrajectorySummaryObject

router = APIRouter(
    tags=["Runs"],
    default_response_class=JSONResponse,
    dependencies=[REQUIRES_KEY],
)


@router.get("/v1/trajectories", responses=errors(400))
async def list_trajectories(
    services: ServicesDep, owner: Owner, query: Annotated[ListQuery, Query()]
) -> ListObject[TrajectorySummaryObject]:
    """List the trajectories of runs, without deleted and expired ones."""
    found = await services.store.trajectories.page(owner, query.page_request)
    items = [
        TrajectorySummaryObject(
            id=each.id, created_at=each.created_at, ended_at=each.ended_at, bytes=each.bytes
        )
        for each in found.items
    ]
    return ListObject.of(items, found.has_more)
