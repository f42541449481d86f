"""GET and DELETE /v1/runs/{id}: a run at work, what came of it, or how it ended."""

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from policies.steps import suited
from proxy.agent.events import Event
from proxy.agent.result import Result
from proxy.api.dependencies import JSONResponse, authorize, owner, services
from proxy.errors import NotFoundError, ProxyError, RunElsewhereError
from proxy.runs.event_log import Record
from proxy.runs.run import Head
from proxy.wire.chat_response import WholeCompletion, head
from proxy.wire.result_objects import usage

router = APIRouter()


@router.get("/v1/runs/{run_id}")
async def retrieve_run(request: Request, run_id: str) -> JSONResponse:
    authorize(request)
    return JSONResponse(_shown(request, *await _found(request, run_id)))


@router.delete("/v1/runs/{run_id}")
async def cancel_run(request: Request, run_id: str) -> JSONResponse:
    authorize(request)
    if run := services(request).runs.get(owner(request), run_id):
        if run.status == "running":
            run.cancel("it was cancelled")
            await run.ended()
        return JSONResponse(_shown(request, run.head, run.record()))  # it may be forgotten by now
    known, record = await _found(request, run_id)
    if record.status == "running":
        raise RunElsewhereError
    return JSONResponse(_shown(request, known, record))


async def _found(request: Request, run_id: str) -> tuple[Head, Record]:
    found = await services(request).runs.find(owner(request), run_id)
    if found is None:
        raise NotFoundError(f"No run {run_id!r}.")
    return found


def _shown(request: Request, known: Head, record: Record) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "id": known.id,
        "object": "run",
        "created_at": known.created,
        "model": known.model,
        "container_id": known.container_id,
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
                shown["completion"] = _completion(request, known, record.events, result)
        except ProxyError as error:
            shown |= error.body()
    return shown


def _completion(
    request: Request, known: Head, events: Sequence[Event], result: Result
) -> dict[str, Any]:
    names = head(known.id, known.created, known.model)
    document = WholeCompletion(names, known.id, suited(services(request).steps, request.headers))
    for event in events:
        document.event(event)
    return document.finish(result)
