"""/v1/trajectories: the list of a client's trajectories, and their rewards."""

import time
from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Depends, Query

from proxy.api.dependencies import JSONResponse
from proxy.api.parameters import (
    BODY_ERRORS,
    REQUIRES_KEY,
    Owner,
    ServicesDep,
    body_of,
    errors,
    json_body,
)
from proxy.errors import NotFoundError
from proxy.schemas.resources import (
    ListObject,
    ListQuery,
    RewardCreate,
    RewardObject,
    TrajectorySummaryObject,
)
from proxy.store.trajectories import Reward

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


@router.post(
    "/v1/trajectories/{run_id}/reward",
    responses=errors(*BODY_ERRORS, 404),
    openapi_extra=body_of(RewardCreate),
)
async def add_reward(
    services: ServicesDep,
    owner: Owner,
    run_id: str,
    body: Annotated[RewardCreate, Depends(json_body(RewardCreate))],
) -> RewardObject:
    """Append a reward to a trajectory. The last reward counts; earlier ones stay."""
    reward = Reward(body.value, body.source, body.reason, int(time.time()))
    if not await services.store.trajectories.add_reward(owner, run_id, reward):
        raise NotFoundError(f"No trajectory of a run {run_id!r}.")
    return RewardObject(**asdict(reward))
