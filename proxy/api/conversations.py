"""/v1/conversations: items under one name, which responses go on from and add to."""

import uuid
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from proxy.api.dependencies import JSONResponse, authorize, held_json, owner, read_body, services
from proxy.api.stored_responses import is_reference, no_such_conversation, resolve_references
from proxy.errors import NotFoundError
from proxy.store.conversations import ConversationShelf
from proxy.store.records import Conversation
from proxy.wire.resources import (
    CONTAINERS,
    conversation_object,
    deleted,
    items,
    listing,
    metadata,
    page,
)
from proxy.wire.responses_request import input_items
from proxy.wire.validation import request_body

router = APIRouter()
PATH = "/v1/conversations"
THE_ITEM = PATH + "/{conversation_id}/items/{item_id}"


@router.post(PATH)
async def create_conversation(request: Request) -> Response:
    body = await _body(request)
    notes, new = metadata(body), items(body, required=False)
    begins_with = await _identified(request, new)
    return _told(await _shelf(request).create(owner(request), notes, begins_with))


@router.get(PATH + "/{conversation_id}")
async def retrieve_conversation(request: Request, conversation_id: str) -> Response:
    return _told(await _found(request, conversation_id))


@router.post(PATH + "/{conversation_id}")
async def update_conversation(request: Request, conversation_id: str) -> Response:
    notes = metadata(await _body(request))
    found = await _shelf(request).update(owner(request), conversation_id, notes)
    if found is None:
        raise no_such_conversation(conversation_id)
    return _told(found)


@router.delete(PATH + "/{conversation_id}")
async def delete_conversation(request: Request, conversation_id: str) -> Response:
    authorize(request)
    if not await _shelf(request).delete(owner(request), conversation_id):
        raise no_such_conversation(conversation_id)
    return JSONResponse(deleted(conversation_id, "conversation.deleted"))


@router.post(PATH + "/{conversation_id}/items")
async def create_items(request: Request, conversation_id: str) -> Response:
    new = await _identified(request, items(await _body(request), required=True))
    if not await _shelf(request).add(owner(request), conversation_id, new):
        raise no_such_conversation(conversation_id)
    return JSONResponse(listing(new, has_more=False))


@router.get(PATH + "/{conversation_id}/items")
async def list_items(request: Request, conversation_id: str) -> Response:
    await _found(request, conversation_id)
    asked = page(request.query_params, CONTAINERS)
    found = await _shelf(request).page(owner(request), conversation_id, asked)
    return JSONResponse(listing(found.items, found.has_more))


@router.get(THE_ITEM)
async def retrieve_item(request: Request, conversation_id: str, item_id: str) -> Response:
    authorize(request)
    found = await _shelf(request).item(owner(request), conversation_id, item_id)
    if found is None:
        raise _no_such_item(conversation_id, item_id)
    return JSONResponse(found)


@router.delete(THE_ITEM)
async def delete_item(request: Request, conversation_id: str, item_id: str) -> Response:
    conversation = await _found(request, conversation_id)
    if not await _shelf(request).delete_item(owner(request), conversation_id, item_id):
        raise _no_such_item(conversation_id, item_id)
    return _told(conversation)


def _shelf(request: Request) -> ConversationShelf:
    return services(request).store.conversations


async def _body(request: Request) -> Mapping[str, Any]:
    authorize(request)
    written = await read_body(request, services(request).inputs.max_body_bytes)
    return request_body(await held_json(request, written) if written else {})


async def _identified(request: Request, new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items as they are kept: with ids, and what they refer to in their place."""
    found = await resolve_references(request, new)
    if missing := next(filter(is_reference, found), None):
        raise NotFoundError(f"Item with id '{missing['id']}' not found.", param="items")
    return input_items(found, uuid.uuid4().hex)


async def _found(request: Request, conversation_id: str) -> Conversation:
    authorize(request)
    found = await _shelf(request).get(owner(request), conversation_id)
    if found is None:
        raise no_such_conversation(conversation_id)
    return found


def _told(conversation: Conversation) -> Response:
    return JSONResponse(conversation_object(conversation))


def _no_such_item(conversation_id: str, item_id: str) -> NotFoundError:
    words = f"Item with id '{item_id}' not found in conversation with id '{conversation_id}'."
    return NotFoundError(words, param="item_id")
