"""GET and DELETE /v1/runs/{id}: a run that goes on without its client, or whose result is kept."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from policies.steps import suited
from proxy.api.connection import authorize, owner, services
from proxy.api.json_response import JSON
from proxy.errors import NotFoundError, ProxyError, internal_error
from proxy.runs.run import Run
from proxy.wire.chat_answer import WholeCompletion, head

router = APIRouter()


@router.get("/v1/runs/{run_id}")
async def retrieve_run(request: Request, run_id: str) -> JSON:
    return JSON(_shown(request, _found(request, run_id)))


@router.delete("/v1/runs/{run_id}")
async def cancel_run(request: Request, run_id: str) -> JSON:
    run = _found(request, run_id)
    if run.status == "running":
        run.cancel("it was cancelled")
        await run.ended()
    return JSON(_shown(request, run))


def _found(request: Request, run_id: str) -> Run:
    authorize(request)
    run = services(request).runs.get(owner(request), run_id)
    if run is None:
        raise NotFoundError(f"No run {run_id!r}.")
    return run


def _shown(request: Request, run: Run) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "id": run.id,
        "object": "run",
        "created_at": run.created,
        "model": run.model,
        "status": run.status,
        "completion": None,
        "error": None,
    }
    if run.status in ("completed", "failed"):
        try:
            shown["completion"] = _completion(request, run)
        except ProxyError as error:
            shown |= error.body()
        except Exception:  # noqa: BLE001 - the run's fault, not this request's; it is in the log
            shown |= internal_error().body()
    return shown


def _completion(request: Request, run: Run) -> dict[str, Any]:
    names = head(run.id, run.created, run.model)
    document = WholeCompletion(names, run.id, suited(services(request).steps, request.headers))
    result = run.result()
    for event in run.past():
        document.event(event)
    return document.finish(result)
