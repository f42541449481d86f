"""/v1/responses/{id}: what is kept of a response, and one in the background while it is made."""

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

from proxy.api.answering import replayed
from proxy.api.connection import authorize, owner, services
from proxy.api.json_response import JSON
from proxy.api.kept_response import KeptResponse
from proxy.api.said_before import is_at_work, run_of
from proxy.errors import BadRequestError, NotFoundError, ProxyError, interrupted
from proxy.store.paging import part
from proxy.store.records import StoredResponse
from proxy.wire.listing import CONTAINERS, integer, listing, page
from proxy.wire.response_object import failed
from proxy.wire.responses_request import INCLUDES
from proxy.wire.shapes import array, one_of

PATH = "/v1/responses/{response_id}"
MAX_SEQUENCE = 2**53


class _Route(APIRoute):
    """One that leaves /v1/responses/input_tokens and the like, which are no ids, to the backend."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, found = super().matches(scope)
        is_other = match is Match.PARTIAL and self.path == PATH and scope["method"] == "POST"
        return (Match.NONE, {}) if is_other else (match, found)


router = APIRouter(route_class=_Route)


@router.get(PATH)
async def retrieve_response(request: Request, response_id: str) -> Response:
    stored = await _found(request, response_id)
    _check_include(request)
    if request.query_params.get("stream") == "true":
        return _streamed(request, response_id)
    return JSON(await _shown(request, stored))


@router.delete(PATH)
async def delete_response(request: Request, response_id: str) -> Response:
    stored = await _found(request, response_id)
    await services(request).store.responses.delete(owner(request), response_id)
    run = run_of(request, response_id)
    if run and stored.record["background"]:
        run.cancel("it was deleted")
        await run.ended()
    return JSON({"id": response_id, "object": "response", "deleted": True})


@router.post(PATH + "/cancel")
async def cancel_response(request: Request, response_id: str) -> Response:
    stored = await _found(request, response_id)
    if not stored.record["background"]:
        raise BadRequestError("Cannot cancel a synchronous response.", param="response_id")
    if run := run_of(request, response_id):
        run.cancel("it was cancelled")
        await run.ended()
    elif is_at_work(request, stored):
        raise ProxyError(
            "The response is being made by another process of this server, which alone can end it.",
            status=409,
            type="invalid_request_error",
            code="response_elsewhere",
        )
    return JSON(await _shown(request, await _found(request, response_id)))


@router.get(PATH + "/input_items")
async def list_input_items(request: Request, response_id: str) -> Response:
    await _found(request, response_id)
    _check_include(request)
    chain = await services(request).store.responses.chain(owner(request), response_id)
    items = chain.inputs if chain else ()
    shown = part(items, page(request.query_params, CONTAINERS))
    return JSON(listing(shown.items, shown.has_more))


def _check_include(request: Request) -> None:
    """All that is there is always shown; what is no such thing is refused."""
    for name in ("include", "include[]"):  # the latter is how the SDKs write a list
        array(one_of(*INCLUDES))(request.query_params.getlist(name), "include")


async def _found(request: Request, response_id: str) -> StoredResponse:
    authorize(request)
    found = await services(request).store.responses.get(owner(request), response_id)
    if found is None:
        raise NotFoundError(f"Response with id '{response_id}' not found.", param="response_id")
    return found


async def _shown(request: Request, stored: StoredResponse) -> Mapping[str, Any]:
    """OpenAI's object, as it stands now."""
    if stored.worker is None or is_at_work(request, stored):
        return stored.record
    # It may have come to its end since it was looked up.
    now = await _found(request, stored.id)
    return failed(now.record, interrupted(), []) if now.worker else now.record


def _streamed(request: Request, response_id: str) -> Response:
    run = run_of(request, response_id)
    kept = run.witness if run else None
    if run is None or not isinstance(kept, KeptResponse) or kept.frames is None:
        raise BadRequestError(
            "This response cannot be streamed: only one that was made in the background can, until"
            " ten minutes after its end.",
            param="stream",
            code="invalid_value",
        )
    number = request.query_params.get("starting_after")
    after = integer(number, "starting_after", least=0, most=MAX_SEQUENCE)
    first = 0 if after is None else after + 1
    if first < kept.frames.first:
        raise BadRequestError(
            f"Events before number {kept.frames.first} are kept no more.",
            param="starting_after",
            code="integer_below_min_value",
        )
    return replayed(request, run, kept.frames, first)
