"""GET and DELETE /v1/runs/{id}: the state of a run, its result or its error."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from policies.steps import StepsMode, default_mode
from proxy.agent.events import Event
from proxy.agent.result import Result
from proxy.api.dependencies import JSONResponse, Services
from proxy.api.parameters import REQUIRES_KEY, Owner, ServicesDep, errors
from proxy.errors import NotFoundError, ProxyError
from proxy.runs.event_log import RunRecord
from proxy.runs.run import RunMetadata
from proxy.schemas.chat_response import ChatCompletionBuilder, completion_head
from proxy.schemas.resources import RunObject
from proxy.schemas.result_objects import usage

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
    return JSONResponse(_run_object(request, services, *await find_run(services, owner, run_id)))


@router.delete("/v1/runs/{run_id}", response_model=RunObject, responses=errors(404, 409))
async def cancel_run(
    request: Request, services: ServicesDep, owner: Owner, run_id: str
) -> Response:
    """Cancel a run if it has not ended, and return the run. The trajectory of the run is kept. If
    the server of the run has died, a retry of the request starts a new run instead of continuing
    this one."""
    if run := services.runs.get(owner, run_id):
        if run.status == "running":
            run.cancel("a request cancelled it")
            await run.wait_until_ended()
        # Read from `run`, because `find_run` may no longer find it: the manager drops ended runs.
        return JSONResponse(_run_object(request, services, run.metadata, run.record()))
    metadata, record = await find_run(services, owner, run_id)
    if record.status == "running":
        await services.runs.cancel_elsewhere(
            run_id, partial(services.runs.process_of, owner, run_id)
        )
        metadata, record = await find_run(services, owner, run_id)
    if record.status == "lost":
        await services.store.runs.delete_ended(owner, run_id)
    return JSONResponse(_run_object(request, services, metadata, record))


async def find_run(services: Services, owner: str, run_id: str) -> tuple[RunMetadata, RunRecord]:
    """Return the metadata and the record of the owner's run. Raises NotFoundError."""
    found = await services.runs.find(owner, run_id)
    if found is None:
        raise NotFoundError(f"No run {run_id!r}.")
    return found


def _run_object(
    request: Request, services: Services, metadata: RunMetadata, record: RunRecord
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
        builder.add_event(event)
    return builder.finish(result)
