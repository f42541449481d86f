"""GET and DELETE /v1/runs/{id}: the state of a run, its result or its error; and its trajectory."""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from policies.sessions import TrajectoryFormat
from policies.steps import StepsMode, default_mode
from proxy.agent.events import Event
from proxy.agent.result import Result
from proxy.api.dependencies import JSONResponse, Services
from proxy.api.parameters import REQUIRES_KEY, Owner, ServicesDep, errors
from proxy.errors import NotFoundError, ProxyError, RunElsewhereError
from proxy.runs.event_log import Record
from proxy.runs.run import RunMetadata
from proxy.runs.trajectory_recorder import stored_texts
from proxy.schemas.chat_response import ChatCompletionBuilder, completion_head
from proxy.schemas.resources import (
    Deleted,
    OpenAITrajectory,
    ReferenceTrajectory,
    RunObject,
    TrajectoryObject,
    TrajectoryQuery,
)
from proxy.schemas.result_objects import usage
from proxy.schemas.trajectory import json_pieces, read_trajectory, to_openai, to_reference
from proxy.store.trajectories import DeletionReason, StoredTrajectory

_CONVERTERS = {"openai": to_openai, "reference": to_reference}

router = APIRouter(
    tags=["Runs"],
    default_response_class=JSONResponse,
    dependencies=[REQUIRES_KEY],
)


@router.get("/v1/runs/{run_id}", response_model=RunObject, responses=errors(404))
async def retrieve_run(
    request: Request, services: ServicesDep, owner: Owner, run_id: str
) -> Response:
    """Return a run, with the completion of a completed run or the error of a failed run."""
    return JSONResponse(_run_object(request, services, *await _find_run(services, owner, run_id)))


@router.get(
    "/v1/runs/{run_id}/trajectory",
    response_model=TrajectoryObject | OpenAITrajectory | ReferenceTrajectory,
    responses=errors(400, 404),
)
async def retrieve_trajectory(
    services: ServicesDep, owner: Owner, run_id: str, query: Annotated[TrajectoryQuery, Query()]
) -> Response:
    """Return the trajectory of a run whose request has `sandbox.capture: messages`. The trajectory
    of a running run ends with its last complete turn."""
    stored = await services.runs.trajectory(owner, run_id)
    if stored is None:
        await _find_run(services, owner, run_id)
        raise NotFoundError(
            f"No trajectory of the run {run_id!r} was stored. Only requests with"
            " sandbox.capture: messages have one.",
            code="trajectory_not_captured",
        )
    if stored.deletion_reason:
        raise _deletion_error(run_id, stored.deletion_reason)
    async with services.trajectory_conversions:
        # In a thread: a trajectory may have megabytes.
        body = await asyncio.to_thread(_trajectory_json, stored, query.format)
    return Response(body, media_type="application/json")


@router.delete("/v1/runs/{run_id}/trajectory", responses=errors(404))
async def delete_trajectory(services: ServicesDep, owner: Owner, run_id: str) -> Deleted:
    """Delete the trajectory of a run, with `n` also those of the other choices if the run is that
    of the first choice. Later turns of a run in progress are not stored."""
    if not await services.runs.delete_trajectory(owner, run_id):
        raise NotFoundError(f"No trajectory of a run {run_id!r}.")
    return Deleted(id=run_id, object="run.trajectory.deleted")


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


def _trajectory_json(stored: StoredTrajectory, format: TrajectoryFormat) -> bytes:
    found = read_trajectory(
        stored.id,
        stored.created_at,
        stored_texts(stored),
        rewards=[asdict(each) for each in stored.rewards],
        is_lost=stored.is_lost,
    )
    convert = _CONVERTERS.get(format)
    pieces = json_pieces(convert(found) if convert else found)
    return b"".join(piece.encode() for piece in pieces)


@router.delete("/v1/runs/{run_id}", response_model=RunObject, responses=errors(404, 409))
async def cancel_run(
    request: Request, services: ServicesDep, owner: Owner, run_id: str
) -> Response:
    """Cancel a run if it has not ended, and return it. Its trajectory stays."""
    if run := services.runs.get(owner, run_id):
        if run.status == "running":
            run.cancel("a request cancelled it")
            await run.wait_until_ended()
        # Not from `_find_run`: the manager may have dropped the run after its end.
        return JSONResponse(_run_object(request, services, run.metadata, run.record()))
    metadata, record = await _find_run(services, owner, run_id)
    if record.status == "running":
        raise RunElsewhereError
    return JSONResponse(_run_object(request, services, metadata, record))


async def _find_run(services: Services, owner: str, run_id: str) -> tuple[RunMetadata, Record]:
    found = await services.runs.find(owner, run_id)
    if found is None:
        raise NotFoundError(f"No run {run_id!r}.")
    return found


def _run_object(
    request: Request, services: Services, metadata: RunMetadata, record: Record
) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "id": metadata.id,
        "object": "run",
        "created_at": metadata.created,
        "model": metadata.model,
        "container_id": metadata.container_id,
        "status": "failed" if record.status == "lost" else record.status,
        "stop_reason": str(record.result.stop_reason) if record.result else None,
        "usage": usage(record.result) if record.result else None,
        "completion": None,
        "error": None,
    }
    if record.status not in ("running", "cancelled"):
        try:
            result = record.outcome()
            if not record.is_summary:
                steps = default_mode(services.steps, request.headers)
                fields["completion"] = _completion(steps, metadata, record.events, result)
        except ProxyError as error:
            fields |= error.body()
    return fields


def _completion(
    steps: StepsMode, metadata: RunMetadata, events: Sequence[Event], result: Result
) -> dict[str, Any]:
    head = completion_head(metadata.id, metadata.created, metadata.model)
    builder = ChatCompletionBuilder(head, metadata.id, steps)
    for event in events:
        builder.event(event)
    return builder.finish(result)
