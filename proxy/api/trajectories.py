"""The routes of trajectories: list and export them, read one in several formats, delete one, and
append rewards to one."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from starlette.responses import Response, StreamingResponse

from policies.sessions import TrajectoryExportFormat, TrajectoryFormat, TrajectoryLabels
from proxy.api.dependencies import JSONResponse, Services
from proxy.api.parameters import (
    BODY_ERRORS,
    REQUIRES_KEY,
    Owner,
    ServicesDep,
    errors,
    json_body,
    openapi_body,
)
from proxy.api.runs import find_run
from proxy.errors import NotFoundError
from proxy.runs.trajectory_recorder import stored_texts
from proxy.schemas.resources import (
    DeletedObject,
    ListObject,
    OpenAITrajectory,
    ReferenceTrajectory,
    RewardCreate,
    RewardObject,
    TrajectoryExportQuery,
    TrajectoryListQuery,
    TrajectoryObject,
    TrajectoryQuery,
    TrajectorySummaryObject,
)
from proxy.schemas.trajectory import json_pieces, read_trajectory, to_openai, to_reference_format
from proxy.schemas.trajectory_exports import EXPORTS
from proxy.store.records import PageRequest
from proxy.store.trajectories import DeletionReason, StoredTrajectory

JSON_LINES_TYPE = "application/jsonl"
EXPORT_PAGE_SIZE = 100
"""Number of trajectories that an export looks up at once."""
_CONVERTERS = {"openai": to_openai, "reference": to_reference_format}

router = APIRouter(
    tags=["Runs"],
    default_response_class=JSONResponse,
    dependencies=[REQUIRES_KEY],
)


@router.get("/v1/trajectories", responses=errors(400))
async def list_trajectories(
    services: ServicesDep, owner: Owner, query: Annotated[TrajectoryListQuery, Query()]
) -> ListObject[TrajectorySummaryObject]:
    """List the trajectories that are neither deleted nor expired."""
    await services.runs.write_trajectories(owner)
    found = await services.store.trajectories.page(owner, query.page_request, query.labels)
    items = [TrajectorySummaryObject(**asdict(each)) for each in found.items]
    return ListObject.from_page(items, found.has_more)


@router.get(
    "/v1/trajectories/export",
    response_class=StreamingResponse,
    responses={200: {"content": {JSON_LINES_TYPE: {}}}, **errors(400)},
)
async def export_trajectories(
    services: ServicesDep, owner: Owner, query: Annotated[TrajectoryExportQuery, Query()]
) -> StreamingResponse:
    """Return the trajectories of ended runs, the oldest first, in a format for trainers. Each line
    is a JSON object."""
    lines = _stream_export(services, owner, query.format, query.labels)
    return StreamingResponse(lines, media_type=JSON_LINES_TYPE)


async def _stream_export(
    services: Services, owner: str, format: TrajectoryExportFormat, labels: TrajectoryLabels
) -> AsyncIterator[bytes]:
    await services.runs.write_trajectories(owner)
    repository = services.store.trajectories
    request = PageRequest(EXPORT_PAGE_SIZE, newest_first=False)
    while True:
        page = await repository.page(owner, request, labels)
        for summary in page.items:
            stored_trajectory = None
            if summary.ended_at is not None:
                stored_trajectory = await repository.find(owner, summary.id)
            if stored_trajectory and not stored_trajectory.deletion_reason:
                async with services.trajectory_conversions:
                    lines = await asyncio.to_thread(_export_lines, stored_trajectory, format)
                yield lines
        if not page.has_more:
            return
        request = replace(request, after_id=page.items[-1].id)


@router.get(
    "/v1/trajectories/{run_id}",
    response_model=TrajectoryObject | OpenAITrajectory | ReferenceTrajectory,
    responses=errors(400, 404),
)
@router.get(
    "/v1/runs/{run_id}/trajectory",
    response_model=TrajectoryObject | OpenAITrajectory | ReferenceTrajectory,
    responses=errors(400, 404),
)
async def retrieve_trajectory(
    services: ServicesDep, owner: Owner, run_id: str, query: Annotated[TrajectoryQuery, Query()]
) -> Response:
    """Return the trajectory of a captured run. The trajectory of a run in progress contains the run
    so far. `/v1/trajectories/{run_id}` and `/v1/runs/{run_id}/trajectory` return the same."""
    stored_trajectory = await services.runs.trajectory(owner, run_id)
    if stored_trajectory is None:
        await find_run(services, owner, run_id)
        raise NotFoundError(
            f"No trajectory of the run {run_id!r} was stored. Only requests with sandbox.capture"
            " (messages or tokens) have one.",
            code="trajectory_not_captured",
        )
    if stored_trajectory.deletion_reason:
        raise _deletion_error(run_id, stored_trajectory.deletion_reason)
    async with services.trajectory_conversions:
        # In a thread: a trajectory may have megabytes.
        body = await asyncio.to_thread(_trajectory_json, stored_trajectory, query.format)
    return Response(body, media_type="application/json")


@router.delete("/v1/trajectories/{run_id}", responses=errors(404))
@router.delete("/v1/runs/{run_id}/trajectory", responses=errors(404))
async def delete_trajectory(services: ServicesDep, owner: Owner, run_id: str) -> DeletedObject:
    """Delete the trajectory of a run. If the run is the first choice of a request with `n`, delete
    the trajectories of the other choices too. Later turns of a run in progress are not stored. Both
    paths are equivalent."""
    if not await services.runs.delete_trajectory(owner, run_id):
        raise NotFoundError(f"No trajectory of a run {run_id!r}.")
    return DeletedObject(id=run_id, object="run.trajectory.deleted")


@router.post(
    "/v1/trajectories/{run_id}/reward",
    responses=errors(*BODY_ERRORS, 404),
    openapi_extra=openapi_body(RewardCreate),
)
async def add_reward(
    services: ServicesDep,
    owner: Owner,
    run_id: str,
    body: Annotated[RewardCreate, Depends(json_body(RewardCreate))],
) -> RewardObject:
    """Append a reward to a trajectory. Earlier rewards stay."""
    await services.runs.write_trajectories(owner, run_id)
    reward = await services.store.trajectories.add_reward(
        owner, run_id, body.value, body.source, body.reason
    )
    if reward is None:
        raise NotFoundError(f"No trajectory of a run {run_id!r}.")
    return RewardObject(**asdict(reward))


def _deletion_error(run_id: str, reason: DeletionReason) -> NotFoundError:
    match reason:
        case "expired":
            return NotFoundError(
                f"The trajectory of the run {run_id!r} has expired (trajectories.retention_hours).",
                code="trajectory_expired",
            )
        case "quota":
            return NotFoundError(
                f"The trajectory of the run {run_id!r} was deleted for newer ones"
                " (trajectories.quota_mib).",
                code="trajectory_expired",
            )
        case "deleted":
            return NotFoundError(
                f"The trajectory of the run {run_id!r} was deleted.", code="trajectory_deleted"
            )
        case "failed":
            return NotFoundError(
                f"The trajectory of the run {run_id!r} could not be stored; the proxy's log has"
                " the error.",
                code="trajectory_not_stored",
            )


def _trajectory_json(stored_trajectory: StoredTrajectory, format: TrajectoryFormat) -> bytes:
    found, convert = _native_trajectory(stored_trajectory), _CONVERTERS.get(format)
    pieces = json_pieces(convert(found) if convert else found)
    return b"".join(piece.encode() for piece in pieces)


def _export_lines(stored_trajectory: StoredTrajectory, format: TrajectoryExportFormat) -> bytes:
    pieces = (
        piece
        for line in EXPORTS[format](_native_trajectory(stored_trajectory))
        for piece in (*json_pieces(line), "\n")
    )
    return b"".join(piece.encode() for piece in pieces)


def _native_trajectory(stored_trajectory: StoredTrajectory) -> dict[str, Any]:
    return read_trajectory(
        stored_trajectory.id,
        stored_trajectory.created_at,
        stored_texts(stored_trajectory),
        labels=stored_trajectory.labels,
        rewards=[asdict(each) for each in stored_trajectory.rewards],
        is_lost=stored_trajectory.is_lost,
    )
