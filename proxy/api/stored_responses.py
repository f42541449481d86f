"""/v1/responses/{id}: what is kept of a response, and one in the background while it is made."""

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

from proxy.api.dependencies import JSONResponse, owner, services
from proxy.api.passthrough import or_upstream
from proxy.api.said_before import is_at_work, run_of
from proxy.api.told_again import found, shown, streamed_again
from proxy.errors import BadRequestError, RunElsewhereError
from proxy.store.database import part
from proxy.wire.resources import CONTAINERS, listing, page
from proxy.wire.responses_response import run_id
from proxy.wire.responses_shapes import INCLUDES
from proxy.wire.validation import array, one_of

PATH = "/v1/responses/{response_id}"


class _Route(APIRoute):
    """One that leaves /v1/responses/input_tokens and the like, which are no ids, to the backend."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, found = super().matches(scope)
        is_other = match is Match.PARTIAL and self.path == PATH and scope["method"] == "POST"
        return (Match.NONE, {}) if is_other else (match, found)


router = APIRouter(route_class=_Route)


@router.get(PATH)
@or_upstream
async def retrieve_response(request: Request, response_id: str) -> Response:
    stored = await found(request, response_id)
    _check_include(request)
    if request.query_params.get("stream") == "true":
        return await streamed_again(request, stored)
    return JSONResponse(await shown(request, stored))


@router.delete(PATH)
@or_upstream
async def delete_response(request: Request, response_id: str) -> Response:
    stored = await found(request, response_id)
    await services(request).store.responses.delete(owner(request), response_id)
    run = run_of(request, response_id)
    if run and stored.record["background"]:
        run.cancel("it was deleted")
        await run.ended()
    await services(request).runs.forget(owner(request), run_id(response_id))
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


@router.post(PATH + "/cancel")
@or_upstream
async def cancel_response(request: Request, response_id: str) -> Response:
    stored = await found(request, response_id)
    if not stored.record["background"]:
        raise BadRequestError("Cannot cancel a synchronous response.", param="response_id")
    if run := run_of(request, response_id):
        run.cancel("it was cancelled")
        await run.ended()
    elif await is_at_work(request, stored):
        raise RunElsewhereError
    return JSONResponse(await shown(request, await found(request, response_id)))


@router.get(PATH + "/input_items")
@or_upstream
async def list_input_items(request: Request, response_id: str) -> Response:
    await found(request, response_id)
    _check_include(request)
    chain = await services(request).store.responses.chain(owner(request), response_id)
    items = chain.inputs if chain else ()
    few = part(items, page(request.query_params, CONTAINERS))
    return JSONResponse(listing(few.items, few.has_more))


def _check_include(request: Request) -> None:
    """All that is there is always shown; what is no such thing is refused."""
    for name in ("include", "include[]"):  # the latter is how the SDKs write a list
        array(one_of(*INCLUDES))(request.query_params.getlist(name), "include")
