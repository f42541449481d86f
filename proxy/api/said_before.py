"""What a request of /v1/responses goes on from: a response, a conversation, single items."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from policies.sessions import GoesOn, Session, container_named
from proxy.api.dependencies import owner, services
from proxy.errors import BadRequestError, NotFoundError
from proxy.runs.run import Run
from proxy.store.records import StoredResponse
from proxy.wire.lost_files import file_ids, without_files
from proxy.wire.responses_response import run_id
from proxy.wire.responses_shapes import item_type

Item = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Before:
    """All that was said before, and by whom it is known."""

    items: Sequence[Item] = ()
    follows: GoesOn | None = None
    previous_id: str | None = None
    chain: Sequence[str] = ()
    """The responses that the request goes on from, latest first."""
    conversation_id: str | None = None
    seen_seq: int | None = None
    """Where the conversation stands."""


async def said_before(request: Request, body: Mapping[str, Any]) -> Before:
    """What the request names; what is no name is left for who checks all fields.

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
        return await _previous(request, previous_id)
    named = conversation.get("id") if isinstance(conversation, dict) else conversation
    if isinstance(named, str):
        return await _conversation(request, named)
    return Before()


async def resolved(request: Request, given: Sequence[Any]) -> list[Any]:
    """Items, with those that others refer to in their place, where these are found."""
    ids = [item["id"] for item in given if is_reference(item)]
    found = await services(request).store.responses.items(owner(request), ids) if ids else {}
    found = dict(zip(found, await _with_lost_told(request, list(found.values())), strict=True))
    return [dict(found.get(item["id"], item)) if is_reference(item) else item for item in given]


def no_such_conversation(conversation_id: str) -> NotFoundError:
    """The client has no conversation of that name."""
    words = f"Conversation with id '{conversation_id}' not found."
    return NotFoundError(words, param="conversation_id")


async def _previous(request: Request, response_id: str) -> Before:
    shelf = services(request).store.responses
    chain = await shelf.chain(owner(request), response_id)
    if chain and chain.latest.worker and not await is_at_work(request, chain.latest):
        chain = await shelf.chain(owner(request), response_id)  # it may just have ended
    if chain is None:
        raise BadRequestError(
            f"Previous response with id '{response_id}' not found.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    if await is_at_work(request, chain.latest):
        raise BadRequestError(
            f"Previous response with id '{response_id}' is still in progress.",
            param="previous_response_id",
            code="previous_response_in_progress",
        )
    latest = chain.latest
    session = Session(owner(request), latest.session)
    return Before(
        items=await _with_lost_told(request, [*chain.inputs, *latest.record["output"]]),
        follows=GoesOn(session, chain.states, anew=True),
        previous_id=response_id,
        chain=chain.ids,
    )


def run_of(request: Request, response_id: str) -> Run | None:
    """The run that makes a response, if it is at work here, or is remembered."""
    return services(request).runs.get(owner(request), run_id(response_id))


async def is_at_work(request: Request, response: StoredResponse) -> bool:
    """Whether anybody will still bring it to its end."""
    if response.worker is None:
        return False
    if response.worker == services(request).store.worker.id:
        run = run_of(request, response.id)
        return run is not None and not run.has_ended
    return not await asyncio.to_thread(services(request).store.worker.is_dead, response.worker)


async def _conversation(request: Request, conversation_id: str) -> Before:
    whose = owner(request)
    said = await services(request).store.conversations.said(whose, conversation_id)
    if said is None:
        raise no_such_conversation(conversation_id)
    items, seq = said
    session = Session(whose, container_named(whose, conversation_id))
    told = await _with_lost_told(request, items)
    return Before(told, GoesOn(session), conversation_id=conversation_id, seen_seq=seq)


async def _with_lost_told(request: Request, items: Sequence[Item]) -> Sequence[Item]:
    if not (named := file_ids(items)):
        return items
    return without_files(items, await services(request).inputs.lost(owner(request), named))


def is_reference(item: Any) -> bool:
    """Whether an item only names another."""
    if not isinstance(item, dict) or item_type(item) != "item_reference":
        return False
    return isinstance(item.get("id"), str)
