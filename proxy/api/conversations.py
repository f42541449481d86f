"""/v1/conversations: stored lists of items. A response continues the list of its conversation, and
adds its own items."""

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
    errors,
    large_json_body,
    openapi_body,
)
from proxy.api.stored_responses import is_reference, no_such_conversation, resolve_references
from proxy.errors import NotFoundError
from proxy.schemas.resources import (
    ConversationCreate,
    ConversationObject,
    ConversationUpdate,
    DeletedObject,
    ItemObject,
    ItemsCreate,
    ListObject,
    ListQuery,
    conversation_object,
    items_list,
)
from proxy.schemas.responses_request import input_items
from proxy.store.conversations import ConversationRepository
from proxy.store.records import StoredConversation

router = APIRouter(
    tags=["Conversations"],
    default_response_class=JSONResponse,
    dependencies=[REQUIRES_KEY],
)
PATH = "/v1/conversations"
CONVERSATION_PATH = PATH + "/{conversation_id}"
ITEMS_PATH = CONVERSATION_PATH + "/items"
ITEM_PATH = ITEMS_PATH + "/{item_id}"


async def _repository(services: ServicesDep) -> ConversationRepository:
    return services.store.conversations


RepositoryDep = Annotated[ConversationRepository, Depends(_repository)]


async def _conversation(
    repository: RepositoryDep, owner: Owner, conversation_id: str
) -> StoredConversation:
    """Return the client's conversation. Raises NotFoundError."""
    found = await repository.get(owner, conversation_id)
    if found is None:
        raise no_such_conversation(conversation_id)
    return found


OwnedConversation = Annotated[StoredConversation, Depends(_conversation)]
"""The client's conversation that the path names."""


@router.post(
    PATH, responses=errors(*BODY_ERRORS, 404), openapi_extra=openapi_body(ConversationCreate)
)
async def create_conversation(
    request: Request,
    repository: RepositoryDep,
    owner: Owner,
    body: Annotated[ConversationCreate, Depends(large_json_body(ConversationCreate))],
) -> ConversationObject:
    """Create a conversation with its first items."""
    items = await _items_with_ids(request, body.items or [])
    return conversation_object(await repository.create(owner, body.metadata or {}, items))


@router.get(CONVERSATION_PATH, responses=errors(404))
async def retrieve_conversation(conversation: OwnedConversation) -> ConversationObject:
    """Return a conversation without its items."""
    return conversation_object(conversation)


@router.post(
    CONVERSATION_PATH,
    responses=errors(*BODY_ERRORS, 404),
    openapi_extra=openapi_body(ConversationUpdate),
)
async def update_conversation(
    repository: RepositoryDep,
    owner: Owner,
    conversation_id: str,
    body: Annotated[ConversationUpdate, Depends(large_json_body(ConversationUpdate))],
) -> ConversationObject:
    """Replace the metadata of a conversation."""
    found = await repository.update(owner, conversation_id, body.metadata or {})
    if found is None:
        raise no_such_conversation(conversation_id)
    return conversation_object(found)


@router.delete(CONVERSATION_PATH, responses=errors(404))
async def delete_conversation(
    repository: RepositoryDep, owner: Owner, conversation_id: str
) -> DeletedObject:
    """Delete a conversation with its items."""
    if not await repository.delete(owner, conversation_id):
        raise no_such_conversation(conversation_id)
    return DeletedObject(id=conversation_id, object="conversation.deleted")


@router.post(
    ITEMS_PATH,
    response_model=ListObject[ItemObject],
    responses=errors(*BODY_ERRORS, 404),
    openapi_extra=openapi_body(ItemsCreate),
)
async def create_items(
    request: Request,
    repository: RepositoryDep,
    owner: Owner,
    conversation_id: str,
    body: Annotated[ItemsCreate, Depends(large_json_body(ItemsCreate))],
) -> Response:
    """Add items to a conversation."""
    items = await _items_with_ids(request, body.items)
    if not await repository.add(owner, conversation_id, items):
        raise no_such_conversation(conversation_id)
    return JSONResponse(items_list(items, has_more=False))


@router.get(ITEMS_PATH, response_model=ListObject[ItemObject], responses=errors(400, 404))
async def list_items(
    repository: RepositoryDep,
    owner: Owner,
    conversation: OwnedConversation,
    query: Annotated[ListQuery, Query()],
) -> Response:
    """List the items of a conversation."""
    found = await repository.page(owner, conversation.id, query.page_request)
    return JSONResponse(items_list(found.items, found.has_more))


@router.get(ITEM_PATH, response_model=ItemObject, responses=errors(404))
async def retrieve_item(
    repository: RepositoryDep, owner: Owner, conversation_id: str, item_id: str
) -> Response:
    """Return an item of a conversation."""
    found = await repository.item(owner, conversation_id, item_id)
    if found is None:
        raise _no_such_item(conversation_id, item_id)
    return JSONResponse(found)


@router.delete(ITEM_PATH, responses=errors(404))
async def delete_item(
    repository: RepositoryDep, owner: Owner, conversation: OwnedConversation, item_id: str
) -> ConversationObject:
    """Delete an item of a conversation, and return the conversation."""
    if not await repository.delete_item(owner, conversation.id, item_id):
        raise _no_such_item(conversation.id, item_id)
    return conversation_object(conversation)


async def _items_with_ids(
    request: Request, items: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the items with ids, and with the stored item in place of each reference. Raises
    NotFoundError."""
    resolved = await resolve_references(request, items)
    if missing := next(filter(is_reference, resolved), None):
        raise NotFoundError(f"Item with id '{missing['id']}' not found.", param="items")
    return input_items(resolved, uuid.uuid4().hex)


def _no_such_item(conversation_id: str, item_id: str) -> NotFoundError:
    message = f"Item with id '{item_id}' not found in conversation with id '{conversation_id}'."
    return NotFoundError(message, param="item_id")
