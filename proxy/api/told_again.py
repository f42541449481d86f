"""A response that is kept, told again: as it stands, or event by event."""

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from proxy.api.answering import headers, replayed
from proxy.api.dependencies import JSONResponse, authorize, note_run, owner, services
from proxy.api.kept_response import KeptResponse
from proxy.api.said_before import is_at_work, run_of
from proxy.errors import BadRequestError, NotFoundError, RunElsewhereError, RunLostError
from proxy.runs.recording import Recording
from proxy.runs.run import Listener
from proxy.store.records import StoredResponse
from proxy.wire.resources import integer_param as integer
from proxy.wire.responses_response import failed, response_id, run_id

MAX_SEQUENCE = 2**53


async def found(request: Request, response_id: str) -> StoredResponse:
    """What is kept of it. Raises UnauthorizedError, NotFoundError."""
    authorize(request)
    stored = await services(request).store.responses.get(owner(request), response_id)
    if stored is None:
        raise NotFoundError(f"Response with id '{response_id}' not found.", param="response_id")
    return stored


async def shown(request: Request, stored: StoredResponse) -> Mapping[str, Any]:
    """OpenAI's object, as it stands now."""
    if stored.worker is None or await is_at_work(request, stored):
        return stored.record
    # It may have come to its end since it was looked up.
    now = await found(request, stored.id)
    return failed(now.record, RunLostError(), []) if now.worker else now.record


async def in_background(request: Request, listener: Listener, *, stream: bool) -> Response:
    """What a client is told at once of a response that is made without it. Leaves the listener."""
    note_run(request, listener.run.id)
    with listener:
        stored = await found(request, response_id(listener.run.id))
        # It has its answer: who asks for the same later on is somebody else.
        listener.run.heard_out |= not await request.is_disconnected()
    if stream:
        return await streamed_again(request, stored)
    response = await shown(request, stored)
    if response["status"] == "in_progress":
        response = {**response, "status": "queued"}
    return JSONResponse(response, headers=headers(listener.run.id, stored.session))


async def streamed_again(request: Request, stored: StoredResponse) -> Response:
    """Its events from the beginning, or after the one that the request names."""
    recording = await _recording(request, stored)
    number = request.query_params.get("starting_after")
    after = integer(number, "starting_after", least=0, most=MAX_SEQUENCE)
    first = 0 if after is None else after + 1
    if first < recording.first:
        raise BadRequestError(
            f"Events before number {recording.first} are kept no more.",
            param="starting_after",
            code="integer_below_min_value",
        )
    names = headers(run_id(stored.id), stored.session)
    return replayed(request, names, recording, first)


async def _recording(request: Request, stored: StoredResponse) -> Recording:
    run = run_of(request, stored.id)
    if run and isinstance(run.witness, KeptResponse) and run.witness.frames:
        return run.witness.frames
    if frames := await services(request).store.responses.frames(owner(request), stored.id):
        return await asyncio.to_thread(Recording.from_json, frames)
    if stored.record["background"] and await is_at_work(request, stored):
        raise RunElsewhereError
    raise BadRequestError(
        "This response cannot be streamed: only one that was made in the background, to its end,"
        " can be.",
        param="stream",
        code="invalid_value",
    )
