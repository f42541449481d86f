"""Stored responses: the routes of /v1/responses/{id}, the event stream of a background response,
and the context that a new request names by previous_response_id, conversation or item references.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

from policies.sessions import ResumePoint, Session, session_container_id
from proxy.api.dependencies import JSONResponse, authorize, get_owner, get_services, set_run_id
from proxy.api.parameters import EVENT_RESPONSES, REQUIRES_KEY, errors, openapi_query
from proxy.api.passthrough import with_upstream_fallback
from proxy.api.response_recorder import ResponseRecorder
from proxy.api.run_response import replay_response, run_headers
from proxy.errors import (
    BadRequestError,
    NotFoundError,
    ProxyError,
    RunInOtherProcessError,
    RunLostError,
)
from proxy.runs.frame_log import FrameLog
from proxy.runs.run import Run, Subscriber
from proxy.schemas.resources import (
    DeletedObject,
    ItemObject,
    ListObject,
    ListQuery,
    ResponseObject,
    ResponseQuery,
    StreamQuery,
    items_list,
    parse,
)
from proxy.schemas.responses_parameters import INCLUDE_VALUES, item_type
from proxy.schemas.responses_response import (
    failed_response,
    failure_frames,
    response_id,
    run_id,
)
from proxy.schemas.validation import array, one_of
from proxy.store.database import page_of_list
from proxy.store.records import StoredResponse

PATH = "/v1/responses/{response_id}"
FOLLOW_TIMEOUT_S = 10.0
"""Maximum wait for the first frames of a response whose run is in another process, in seconds."""
MISSING_FILE_TEXT = "[A file that was given here was deleted since, or has expired.]"
"""The placeholder in an item for a file that is no longer stored."""
Item = Mapping[str, Any]


class _ResponseRoute(APIRoute):
    """A route that does not match POST /v1/responses/{name}: such requests, for example to
    /v1/responses/input_tokens, are relayed to the backend."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, found = super().matches(scope)
        is_other = match is Match.PARTIAL and self.path == PATH and scope["method"] == "POST"
        return (Match.NONE, {}) if is_other else (match, found)


router = APIRouter(
    route_class=_ResponseRoute,
    tags=["Responses"],
    default_response_class=JSONResponse,
    dependencies=[REQUIRES_KEY],
)


# Queries are documented, but parsed only for a response of this server: the backend may accept
# other queries for its responses.
@router.get(
    PATH,
    response_model=ResponseObject,
    responses=EVENT_RESPONSES | errors(400, 404, 409, "4XX"),
    openapi_extra=openapi_query(ResponseQuery),
)
@with_upstream_fallback
async def retrieve_response(request: Request, response_id: str) -> Response:
    """Return a stored response, or its events as a stream."""
    stored_response = await get_stored_response(request, response_id)
    _check_include(request)
    if request.query_params.get("stream") == "true":
        return await replay_stream(request, stored_response)
    return JSONResponse(await current_response(request, stored_response))


@router.delete(PATH, response_model=DeletedObject, responses=errors(404, 409, "4XX"))
@with_upstream_fallback
async def delete_response(request: Request, response_id: str) -> Response:
    """Delete a response. The run of a background response is cancelled first."""
    stored_response = await get_stored_response(request, response_id)
    owner, runs = get_owner(request), get_services(request).runs
    if stored_response.record["background"]:
        if run := run_of(request, response_id):
            run.cancel("the response was deleted")
            await run.wait_until_ended()
        elif await is_running(request, stored_response):
            await runs.cancel_elsewhere(
                run_id(response_id), partial(_process_with_unstored_outcome, request, response_id)
            )
    await get_services(request).store.responses.delete(owner, response_id)
    await runs.delete_contents(owner, run_id(response_id))
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


@router.post(
    PATH + "/cancel", response_model=ResponseObject, responses=errors(400, 404, 409, "4XX")
)
@with_upstream_fallback
async def cancel_response(request: Request, response_id: str) -> Response:
    """Cancel a background response, and return it."""
    stored_response = await get_stored_response(request, response_id)
    if not stored_response.record["background"]:
        raise BadRequestError("Cannot cancel a synchronous response.", param="response_id")
    if run := run_of(request, response_id):
        run.cancel("a request cancelled it")
        await run.wait_until_ended()
    elif await is_running(request, stored_response):
        await get_services(request).runs.cancel_elsewhere(
            run_id(response_id), partial(_process_of, request, response_id)
        )
    return JSONResponse(
        await current_response(request, await get_stored_response(request, response_id))
    )


@router.get(
    PATH + "/input_items",
    response_model=ListObject[ItemObject],
    responses=errors(400, 404, "4XX"),
    openapi_extra=openapi_query(ListQuery),
)
@with_upstream_fallback
async def list_input_items(request: Request, response_id: str) -> Response:
    """List the items before the output of a response: the items of the responses or of the
    conversation that the response continues, and the response's own input items."""
    await get_stored_response(request, response_id)
    _check_include(request)
    chain = await get_services(request).store.responses.chain(get_owner(request), response_id)
    items = chain.inputs if chain else ()
    page = page_of_list(items, parse(ListQuery, dict(request.query_params)).page_request)
    return JSONResponse(items_list(page.items, page.has_more))


def _check_include(request: Request) -> None:
    """Raise BadRequestError for an unknown value of `include`. Known values do not change a stored
    response."""
    for name in ("include", "include[]"):  # the SDKs send a list as `include[]`
        array(one_of(*INCLUDE_VALUES))(request.query_params.getlist(name), "include")


async def get_stored_response(request: Request, response_id: str) -> StoredResponse:
    """Return the client's response. Raises UnauthorizedError, NotFoundError."""
    authorize(request)
    stored_response = await get_services(request).store.responses.get(
        get_owner(request), response_id
    )
    if stored_response is None:
        raise NotFoundError(f"Response with id '{response_id}' not found.", param="response_id")
    return stored_response


async def current_response(request: Request, stored_response: StoredResponse) -> Mapping[str, Any]:
    """Return OpenAI's response object as stored, or as failed if the process of its run has
    ended."""
    if stored_response.worker is None or await is_running(request, stored_response):
        return stored_response.record
    # The run may have ended since `stored_response` was read.
    now = await get_stored_response(request, stored_response.id)
    return failed_response(now.record, RunLostError(), []) if now.worker else now.record


async def background_response(
    request: Request, subscriber: Subscriber, *, stream: bool
) -> Response:
    """Return the immediate answer to a background request, and unsubscribe from the run."""
    set_run_id(request, subscriber.run.id)
    with subscriber:
        stored_response = await get_stored_response(request, response_id(subscriber.run.id))
        # The client receives this response: a later request with the same body is not a retry.
        subscriber.run.is_fully_read |= not await request.is_disconnected()
    if stream:
        return await replay_stream(request, stored_response)
    response = await current_response(request, stored_response)
    if response["status"] == "in_progress":
        response = {**response, "status": "queued"}
    return JSONResponse(response, headers=run_headers(subscriber.run.id, stored_response.session))


async def replay_stream(request: Request, stored_response: StoredResponse) -> Response:
    """Return a response's events as a stream: the events after the number `starting_after` if the
    query has it, else all events."""
    after = parse(StreamQuery, dict(request.query_params)).starting_after
    first = 0 if after is None else after + 1
    if frame_log := await _frame_log(request, stored_response):
        _require_frame(first, frame_log.first_number)
        frames = _frames_from(frame_log, first)
    else:
        frames = await _frames_from_other_process(request, stored_response, first)
    headers = run_headers(run_id(stored_response.id), stored_response.session)
    return replay_response(request, headers, frames)


def _require_frame(number: int, first_number: int) -> None:
    """Raise BadRequestError if the frame `number` was dropped. `first_number` is the number of the
    oldest frame that is left."""
    if number < first_number:
        raise BadRequestError(
            f"Events before number {first_number} are no longer stored.",
            param="starting_after",
            code="integer_below_min_value",
        )


async def _frame_log(request: Request, stored_response: StoredResponse) -> FrameLog | None:
    """Return the frames of a background response; None if its run is in another process. Raises
    BadRequestError if the response has no frames."""
    run = run_of(request, stored_response.id)
    if run and isinstance(run.observer, ResponseRecorder) and run.observer.frames:
        return run.observer.frames
    if frames := await get_services(request).store.responses.frames(
        get_owner(request), stored_response.id
    ):
        return await asyncio.to_thread(FrameLog.from_json, frames)
    if stored_response.record["background"] and await is_running(request, stored_response):
        return None
    raise BadRequestError(
        "This response cannot be streamed: only a background response can be, if its run has ended"
        " or is in progress.",
        param="stream",
        code="invalid_value",
    )


async def _frames_from(log: FrameLog, first: int) -> AsyncIterator[bytes]:
    """Yield the frames from number `first` on, until the response has ended."""
    while frames := await log.wait_for_frames(first):
        first = max(first, log.first_number) + len(frames)
        yield "".join(frames).encode()


async def _frames_from_other_process(
    request: Request, stored_response: StoredResponse, first: int
) -> AsyncIterator[bytes]:
    """Return the frames from number `first` on of a response whose run is in another process. If
    the run has ended meanwhile, the frames come from the database.

    Raises BadRequestError, and RunInOtherProcessError if that process does not answer.
    """
    batches = get_services(request).runs.follow_frames(
        run_id(stored_response.id), partial(_process_of, request, stored_response.id)
    )
    begun = None
    with anyio.move_on_after(FOLLOW_TIMEOUT_S):
        begun = await anext(batches, None)
    if begun and first >= begun[0]:
        return _frames_from_batches(request, stored_response, begun, batches, first)
    await batches.aclose()
    if begun:
        _require_frame(first, begun[0])
    ended = await get_stored_response(request, stored_response.id)
    if frame_log := await _frame_log(request, ended):
        _require_frame(first, frame_log.first_number)
        return _frames_from(frame_log, first)
    raise RunInOtherProcessError


async def _frames_from_batches(
    request: Request,
    stored_response: StoredResponse,
    begun: tuple[int, Sequence[str]],
    batches: AsyncGenerator[tuple[int, Sequence[str]]],
    first: int,
) -> AsyncIterator[bytes]:
    """Yield the frames from number `first` on, each once: first those of the batch `begun`, then
    those of `batches`. A batch has the number of its first frame, and may repeat earlier frames. If
    the run is lost, continue with `_frames_after_lost_run`."""
    number, frames = begun
    try:
        while True:
            if number > first:
                raise RunLostError  # the frames between are no longer there
            if wanted := frames[first - number :]:
                yield "".join(wanted).encode()
                first = number + len(frames)
            number, frames = await anext(batches)
    except StopAsyncIteration:
        return
    except ProxyError as error:
        async for rest in _frames_after_lost_run(request, stored_response, first, error):
            yield rest
    finally:
        await batches.aclose()


async def _frames_after_lost_run(
    request: Request, stored_response: StoredResponse, first: int, error: ProxyError
) -> AsyncIterator[bytes]:
    """Yield the stored frames from number `first` on. If none are stored, yield frames that report
    `error` as the failure of the response."""
    stored = await get_services(request).store.responses.frames(
        get_owner(request), stored_response.id
    )
    if not stored:
        yield failure_frames(stored_response.record, error, first).encode()
        return
    async for frames in _frames_from(await asyncio.to_thread(FrameLog.from_json, stored), first):
        yield frames


@dataclass(frozen=True, slots=True)
class PreviousContext:
    """The context that a request continues: the earlier items, and the saved workspace with their
    files. Empty for a request that continues nothing."""

    items: Sequence[Item] = ()
    resume_point: ResumePoint | None = None
    previous_id: str | None = None
    chain: Sequence[str] = ()
    """The ids of the responses that the request continues, latest first."""
    conversation_id: str | None = None
    seen_seq: int | None = None
    """The sequence number of the conversation's last item."""


async def previous_context(request: Request, body: Mapping[str, Any]) -> PreviousContext:
    """Return the context that a request names. A value of the wrong type is ignored here: it is
    rejected when all fields are validated.

    Raises BadRequestError, NotFoundError.
    """
    previous_id, conversation = body.get("previous_response_id"), body.get("conversation")
    if previous_id is not None and conversation is not None:
        raise BadRequestError(
            "Mutually exclusive parameters: 'previous_response_id' and 'conversation'. Ensure you"
            " are only providing one of them.",
            param="previous_response_id",
            code="mutually_exclusive_parameters",
        )
    if isinstance(previous_id, str):
        return await _previous_response_context(request, previous_id)
    named = conversation.get("id") if isinstance(conversation, dict) else conversation
    if isinstance(named, str):
        return await _conversation_context(request, named)
    return PreviousContext()


async def resolve_references(request: Request, items: Sequence[Any]) -> list[Any]:
    """Return the items, with each reference replaced by the stored item if there is one."""
    ids = [item["id"] for item in items if is_reference(item)]
    found = (
        await get_services(request).store.responses.items(get_owner(request), ids) if ids else {}
    )
    found = dict(
        zip(found, await _without_missing_files(request, list(found.values())), strict=True)
    )
    return [dict(found.get(item["id"], item)) if is_reference(item) else item for item in items]


def no_such_conversation(conversation_id: str) -> NotFoundError:
    """Return the error for a conversation that the client does not have."""
    message = f"Conversation with id '{conversation_id}' not found."
    return NotFoundError(message, param="conversation_id")


async def _previous_response_context(request: Request, response_id: str) -> PreviousContext:
    repository = get_services(request).store.responses
    chain = await repository.chain(get_owner(request), response_id)
    if chain and chain.latest.worker and not await is_running(request, chain.latest):
        chain = await repository.chain(
            get_owner(request), response_id
        )  # the run may just have ended
    if chain is None:
        raise BadRequestError(
            f"Previous response with id '{response_id}' not found.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    if await is_running(request, chain.latest):
        raise BadRequestError(
            f"Previous response with id '{response_id}' is still in progress.",
            param="previous_response_id",
            code="previous_response_in_progress",
        )
    latest = chain.latest
    session = Session(get_owner(request), latest.session)
    return PreviousContext(
        items=await _without_missing_files(request, [*chain.inputs, *latest.record["output"]]),
        resume_point=ResumePoint(session, chain.states, starts_empty=True),
        previous_id=response_id,
        chain=chain.ids,
    )


def run_of(request: Request, response_id: str) -> Run | None:
    """Return the run of a response if this process has it, else None."""
    return get_services(request).runs.get(get_owner(request), run_id(response_id))


async def is_running(request: Request, response: StoredResponse) -> bool:
    """Return True if the response's run is in progress, in this server process or another."""
    if response.worker is None:
        return False
    if response.worker == get_services(request).store.process.id:
        run = run_of(request, response.id)
        return run is not None and not run.has_ended
    return not await get_services(request).store.is_process_dead(response.worker)


async def _process_of(request: Request, response_id: str) -> str | None:
    """Return the id of the process in which the response's run is in progress, or None."""
    response = await get_stored_response(request, response_id)
    return response.worker if await is_running(request, response) else None


async def _process_with_unstored_outcome(request: Request, response_id: str) -> str | None:
    """Return the id of the process in which the response's run has not ended, or has ended without
    its outcome being stored yet. Return None if there is no such process. `RunManager.forget`
    can delete the outcome of another process's run only once the outcome is stored."""
    owner, runs = get_owner(request), get_services(request).runs
    process_id = await _process_of(request, response_id)
    return process_id or await runs.process_of(owner, run_id(response_id))


async def _conversation_context(request: Request, conversation_id: str) -> PreviousContext:
    owner = get_owner(request)
    found = await get_services(request).store.conversations.all_items(owner, conversation_id)
    if found is None:
        raise no_such_conversation(conversation_id)
    items, seq = found
    session = Session(owner, session_container_id(owner, conversation_id))
    return PreviousContext(
        await _without_missing_files(request, items),
        ResumePoint(session),
        conversation_id=conversation_id,
        seen_seq=seq,
    )


async def _without_missing_files(request: Request, items: Sequence[Item]) -> Sequence[Item]:
    """Return the items with a placeholder in place of each upload that is no longer stored, because
    the client cannot edit stored items."""
    if not (file_ids := _file_ids(items)):
        return items
    missing_ids = await get_services(request).inputs.missing_uploads(get_owner(request), file_ids)
    return [
        _with_placeholders(item, missing_ids)
        if missing_ids.intersection(_file_ids([item]))
        else item
        for item in items
    ]


def is_reference(item: Any) -> bool:
    """Return True if the item is a reference to a stored item."""
    if not isinstance(item, dict) or item_type(item) != "item_reference":
        return False
    return isinstance(item.get("id"), str)


def _file_ids(items: Iterable[Item]) -> set[str]:
    """Return the ids of the uploads in the items."""
    ids = (part.get("file_id") for item in items for part in _content_field_and_parts(item)[1])
    return {file_id for file_id in ids if isinstance(file_id, str)}


def _with_placeholders(item: Item, missing_ids: Collection[str]) -> Item:
    field, parts = _content_field_and_parts(item)
    placeholder = {"type": "input_text", "text": MISSING_FILE_TEXT}
    parts = [placeholder if part.get("file_id") in missing_ids else part for part in parts]
    return {**item, field: parts}


def _content_field_and_parts(item: Item) -> tuple[str, Sequence[Item]]:
    """Return the name of the field with an item's content parts, and the parts."""
    field = "output" if str(item.get("type")).endswith("_output") else "content"
    parts = item.get(field)
    return field, parts if isinstance(parts, list) else []
