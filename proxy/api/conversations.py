"""/v1/conversations: items under one name, which responses go on from and add to."""

import uuid
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from starlette.requests import Request
from starlette.responses import Response

from proxy.api.dependencies import JSONResponse
from proxy.api.parameters import (
    BODY_ERRORS,
    REQUIRES_KEY,
    Owner,
    ServicesDep,
    body_of,
    errors,
    large_json_body,
)
from proxy.api.stored_responses import is_reference, no_such_conversation, resolve_references
from proxy.errors import NotFoundError
from proxy.schemas.resources import (
    ConversationCreate,
    ConversationObject,
    ConversationUpdate,
    Deleted,
    ItemObject,
    ItemsCreate,
    ListObject,
    ListQuery,
    conversation_object,
    items_list,
)
from proxy.schemas.responses_request import input_items
from proxy.store.conversations import ConversationRepository
from proxy.store.records import Conversation

router = APIRouter(
    tags=["Conversations"],
    default_response_class=JSONResponse,
    dependencies=[REQUIRES_KEY],
)
PATH = "/v1/conversations"
THE_CONVERSATION = PATH + "/{conversation_id}"
ITEMS = THE_CONVERSATION + "/items"
THE_ITEM = ITEMS + "/{item_id}"


async def _repository(services: ServicesDep) -> ConversationRepository:
    return services.store.conversations


RepositoryDep = Annotated[ConversationRepository, Depends(_repository)]


async def _conversation(
    repository: RepositoryDep, owner: Owner, conversation_id: str
) -> Conversation:
    """Return the client's conversation. Raises NotFoundError."""
    found = await repository.get(owner, conversation_id)
    if found is None:
        raise no_such_conversation(conversation_id)
    return found


OwnedConversation = Annotated[Conversation, Depends(_conversation)]
"""The client's conversation that the path names."""


@router.post(PATH, responses=errors(*BODY_ERRORS, 404), openapi_extra=body_of(ConversationCreate))
async def create_conversation(
    request: Request,
    repository: RepositoryDep,
    owner: Owner,
    asked: Annotated[ConversationCreate, Depends(large_json_body(ConversationCreate))],
) -> ConversationObject:
    """Create a conversation, with the items that it begins with."""
    begins_with = await _identified(request, asked.items or [])
    return conversation_object(await repository.create(owner, asked.metadata or {}, begins_with))


@router.get(THE_CONVERSATION, responses=errors(404))
async def retrieve_conversation(conversation: OwnedConversation) -> ConversationObject:
    """Return a conversation without its items."""
    return conversation_object(conversation)


@router.post(
    THE_CONVERSATION,
    responses=errors(*BODY_ERRORS, 404),
    openapi_extra=body_of(ConversationUpdate),
)
async def update_conversation(
    repository: RepositoryDep,
    owner: Owner,
    conversation_id: str,
    asked: Annotated[ConversationUpdate, Depends(large_json_body(ConversationUpdate))],
) -> ConversationObject:
    """Replace the metadata of a conversation."""
    found = await repository.update(owner, conversation_id, asked.metadata or {})
    if found is None:
        raise no_such_conversation(conversation_id)
    return conversation_object(found)


@router.delete(THE_CONVERSATION, responses=errors(404))
async def delete_conversation(
    repository: RepositoryDep, owner: Owner, conversation_id: str
) -> Deleted:
    """Delete a conversation with its items."""
    if not await repository.delete(owner, conversation_id):
        raise no_such_conversation(conversation_id)
    return Deleted(id=conversation_id, object="conversation.deleted")


@router.post(
    ITEMS,
    response_model=ListObject[ItemObject],
    responses=errors(*BODY_ERRORS, 404),
    openapi_extra=body_of(ItemsCreate),
)
async def create_items(
    request: Request,
    repository: RepositoryDep,
    owner: Owner,
    conversation_id: str,
    asked: Annotated[ItemsCreate, Depends(large_json_body(ItemsCreate))],
) -> Response:
    """Add items to a conversation."""
    new = await _identified(request, asked.items)
    if not await repository.add(owner, conversation_id, new):
        raise no_such_conversation(conversation_id)
    return JSONResponse(items_list(new, has_more=False))


@router.get(ITEMS, response_model=ListObject[ItemObject], responses=errors(400, 404))
async def list_items(
    repository: RepositoryDep,
    owner: Owner,
    conversation: OwnedConversation,
    query: Annotated[ListQuery, Query()],
) -> Response:
    """List the items of a conversation."""
    found = await repository.page(owner, conversation.id, query.page)
    return JSONResponse(items_list(found.items, found.has_more))


@router.get(THE_ITEM, response_model=ItemObject, responses=errors(404))
async def retrieve_item(
    repository: RepositoryDep, owner: Owner, conversation_id: str, item_id: str
) -> Response:
    """Return an item of a conversation."""
    found = await repository.item(owner, conversation_id, item_id)
    if found is None:
        raise _no_such_item(conversation_id, item_id)
    return JSONResponse(found)


@router.delete(THE_ITEM, responses=errors(404))
async def delete_item(
    repository: RepositoryDep, owner: Owner, conversation: OwnedConversation, item_id: str
) -> ConversationObject:
    """Delete an item of a conversation, and return the conversation."""
    if not await repository.delete_item(owner, conversation.id, item_id):
        raise _no_such_item(conversation.id, item_id)
    return conversation_object(conversation)


async def _identified(request: Request, new: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return items as they are kept: with ids, and what they refer to in their place. Raises
    NotFoundError."""
    found = await resolve_references(request, new)
    if missing := next(filter(is_reference, found), None):
        raise NotFoundError(f"Item with id '{missing['id']}' not found.", param="items")
    return input_items(found, uuid.uuid4().hex)


def _no_such_item(conversation_id: str, item_id: str) -> NotFoundError:
    words = f"Item with id '{item_id}' not found in conversation with id '{conversation_id}'."
    return NotFoundError(words, param="item_id")
