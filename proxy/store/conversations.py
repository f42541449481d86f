"""Conversations, the items of conversations and responses, and the quota that conversations and
responses share.

Each item belongs to a parent, which is a conversation or a response.
"""

import json
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from sqlalchemy import (
    ColumnElement,
    Connection,
    RowMapping,
    Table,
    delete,
    func,
    insert,
    select,
    union_all,
    update,
)

from policies.sessions import ResponseSettings
from proxy.store.database import Database, oldest_rows, sweep_batch
from proxy.store.records import Page, PageRequest, StoredConversation
from proxy.store.tables import CONVERSATIONS, ITEMS, RESPONSES, STREAMS

EMPTY_CONVERSATION_BYTES = 10_000
"""The bytes that an empty conversation uses of the quota, whatever the size of its metadata."""
Item = Mapping[str, Any]
_ItemSource = Literal["input", "output"]
EXPIRE_BATCH = 50
"""Maximum number of parents that a sweep deletes, with their items, in one transaction."""
_MAX_IDS = 1000
"""Maximum number of ids in one statement: SQLite limits the number of parameters."""
_QUOTA_STEPS = 16
"""An owner's bytes are summed each time the owner has added 1 / `_QUOTA_STEPS` of the quota,
because the sum is slow."""

_NOT_DELETED = ITEMS.c.deleted_at.is_(None)


class ResponseQuota:
    """Limits the total size of each owner's responses and conversations, in bytes."""

    def __init__(self, quota: int) -> None:
        self._quota = quota
        self._added_bytes = defaultdict[str, int](lambda: quota)
        """The bytes that each owner has added since the last count."""

    def charge(self, connection: Connection, owner: str, size: int, keep_id: str) -> None:
        """Count `size` more bytes of the owner. If the bytes exceed the quota, delete the responses
        and conversations that expire first, except for the id `keep_id`.

        The quota is checked once enough bytes were added since the last check.
        """
        self._added_bytes[owner] += size
        if self._added_bytes[owner] < self._quota // _QUOTA_STEPS:
            return
        self._added_bytes[owner] = 0
        both = union_all(
            *(
                select(table.c.id, table.c.bytes, table.c.expires_at, table.c.created_at).where(
                    table.c.owner == owner
                )
                for table in (RESPONSES, CONVERSATIONS)
            )
        ).subquery()
        latest = (both.c.expires_at.desc(), both.c.created_at.desc(), both.c.id)
        total = func.sum(both.c.bytes).over(order_by=latest)
        sizes = select(both.c.id, total.label("total")).subquery()
        beyond = select(sizes.c.id).where(sizes.c.total > self._quota, sizes.c.id != keep_id)
        if ids := connection.execute(beyond).scalars().all():
            delete_with_items(connection, RESPONSES, ids)
            delete_with_items(connection, CONVERSATIONS, ids)


class ConversationRepository:
    """Stores the conversations of all owners. Each owner sees only its own conversations."""

    def __init__(
        self,
        database: Database,
        now: Callable[[], float],
        settings: ResponseSettings,
        quota: ResponseQuota,
    ) -> None:
        self._database = database
        self._now = now
        self._settings = settings
        self._quota = quota

    async def create(
        self, owner: str, metadata: Mapping[str, str], items: Sequence[Item]
    ) -> StoredConversation:
        """Create a conversation with its first items."""
        now = int(self._now())
        conversation = StoredConversation(f"conv_{uuid.uuid4().hex}", now, metadata)
        row = {
            "id": conversation.id,
            "owner": owner,
            "metadata": json.dumps(metadata),
            "bytes": EMPTY_CONVERSATION_BYTES,
            "created_at": now,
            "expires_at": self._settings.expiry(now),
        }

        def transaction(connection: Connection) -> None:
            connection.execute(insert(CONVERSATIONS), row)
            size = append_to_conversation(connection, owner, conversation.id, items)
            self._quota.charge(connection, owner, EMPTY_CONVERSATION_BYTES + size, conversation.id)

        await self._database.write(transaction)
        return conversation

    async def get(self, owner: str, conversation_id: str) -> StoredConversation | None:
        """Return the owner's conversation, or None."""
        query = select(CONVERSATIONS).where(self._is_conversation(owner, conversation_id))
        return await self._database.read_one(query, _conversation)

    async def update(
        self, owner: str, conversation_id: str, metadata: Mapping[str, str]
    ) -> StoredConversation | None:
        """Replace the metadata of the owner's conversation. Return the conversation, or None if
        there is no such conversation."""
        change = (
            update(CONVERSATIONS)
            .where(self._is_conversation(owner, conversation_id))
            .values(metadata=json.dumps(metadata))
            .returning(*CONVERSATIONS.c)
        )
        return await self._database.write_one(change, _conversation)

    async def delete(self, owner: str, conversation_id: str) -> bool:
        """Delete a conversation and its items. Return False if there is no such conversation."""
        query = select(CONVERSATIONS.c.id).where(self._is_conversation(owner, conversation_id))

        def transaction(connection: Connection) -> bool:
            found = connection.execute(query).scalars().all()
            delete_with_items(connection, CONVERSATIONS, found)
            return bool(found)

        return await self._database.write(transaction)

    async def all_items(self, owner: str, conversation_id: str) -> tuple[list[Item], int] | None:
        """Return all items of a conversation and the `seq` of the last item, or None if there is no
        such conversation."""
        query = select(CONVERSATIONS.c.id).where(self._is_conversation(owner, conversation_id))
        last_seq = select(func.coalesce(func.max(ITEMS.c.seq), 0)).where(
            ITEMS.c.holder == conversation_id
        )

        def transaction(connection: Connection) -> tuple[list[Item], int] | None:
            if connection.execute(query).one_or_none() is None:
                return None
            last = int(connection.execute(last_seq).scalar_one())
            return list_items(connection, conversation_id), last

        return await self._database.read(transaction)

    async def add(self, owner: str, conversation_id: str, items: Sequence[Item]) -> bool:
        """Append items to the owner's conversation and postpone its expiry. Return False if there
        is no such conversation."""
        change = update(CONVERSATIONS).where(self._is_conversation(owner, conversation_id))
        change = change.values(expires_at=self._settings.expiry(int(self._now())))

        def transaction(connection: Connection) -> bool:
            if not connection.execute(change).rowcount:
                return False
            size = append_to_conversation(connection, owner, conversation_id, items)
            self._quota.charge(connection, owner, size, conversation_id)
            return True

        return await self._database.write(transaction)

    async def page(self, owner: str, conversation_id: str, request: PageRequest) -> Page[Item]:
        """Return a page of a conversation's items. Raises BadRequestError."""
        scope = (ITEMS.c.owner == owner) & (ITEMS.c.holder == conversation_id)
        return await self._database.read_page(
            ITEMS, request, _item, scope=scope, visible=_NOT_DELETED
        )

    async def item(self, owner: str, conversation_id: str, item_id: str) -> Item | None:
        """Return an item of a conversation, or None."""
        query = select(ITEMS).where(_is_item(owner, conversation_id, item_id))
        return await self._database.read_one(query, _item)

    async def delete_item(self, owner: str, conversation_id: str, item_id: str) -> bool:
        """Delete an item of a conversation. Return False if there is no such item."""
        change = (
            update(ITEMS)
            .where(_is_item(owner, conversation_id, item_id))
            .values(deleted_at=int(self._now()), body="")
            .returning(ITEMS.c.bytes)
        )

        def transaction(connection: Connection) -> bool:
            size = connection.execute(change).scalar_one_or_none()
            _add_bytes(connection, conversation_id, -(size or 0))
            return size is not None

        return await self._database.write(transaction)

    def expire(self, connection: Connection, now: int, forget_before: int) -> bool:
        """Delete expired conversations, and the rows of items that were deleted before
        `forget_before`. See Repository."""
        is_more = expire_with_items(connection, CONVERSATIONS, now)
        deleted_items = oldest_rows(ITEMS, ITEMS.c.deleted_at < forget_before)
        return sweep_batch(connection, delete(ITEMS).where(deleted_items)) or is_more

    def _is_conversation(self, owner: str, conversation_id: str) -> ColumnElement[bool]:
        named = (CONVERSATIONS.c.owner == owner) & (CONVERSATIONS.c.id == conversation_id)
        return named & (CONVERSATIONS.c.expires_at > self._now())


def append_to_conversation(
    connection: Connection, owner: str, conversation_id: str, items: Sequence[Item]
) -> int:
    """Append items to a conversation if it still exists. Return the number of added bytes."""
    conversation = select(CONVERSATIONS.c.id).where(
        CONVERSATIONS.c.id == conversation_id, CONVERSATIONS.c.owner == owner
    )
    if connection.execute(conversation).one_or_none() is None:
        return 0
    ids = select(ITEMS.c.id).where(ITEMS.c.holder == conversation_id)  # also of deleted items
    existing_ids = set(connection.execute(ids).scalars())
    size = add_items(connection, owner, conversation_id, items, existing_ids=existing_ids)
    _add_bytes(connection, conversation_id, size)
    return size


def _add_bytes(connection: Connection, conversation_id: str, size: int) -> None:
    change = update(CONVERSATIONS).where(CONVERSATIONS.c.id == conversation_id)
    connection.execute(change.values(bytes=CONVERSATIONS.c.bytes + size))


def _is_item(owner: str, conversation_id: str, item_id: str) -> ColumnElement[bool]:
    in_conversation = (ITEMS.c.owner == owner) & (ITEMS.c.holder == conversation_id)
    return in_conversation & (ITEMS.c.id == item_id) & _NOT_DELETED


def _conversation(row: RowMapping) -> StoredConversation:
    return StoredConversation(row["id"], row["created_at"], json.loads(row["metadata"]))


def add_items(
    connection: Connection,
    owner: str,
    parent_id: str,
    items: Iterable[Item],
    source: _ItemSource = "input",
    existing_ids: Collection[str] = (),
) -> int:
    """Append items to a parent, except items whose ids are in `existing_ids`. Of several items with
    one id, the last is appended. Return the number of added bytes."""
    new = {item["id"]: json.dumps(item) for item in items if item["id"] not in existing_ids}
    common = {"owner": owner, "holder": parent_id, "source": source}
    rows = [{"id": id, **common, "body": body, "bytes": len(body)} for id, body in new.items()]
    if rows:
        connection.execute(insert(ITEMS), rows)
    return sum(map(len, new.values()))


def list_items(connection: Connection, parent_id: str, *where: ColumnElement[bool]) -> list[Item]:
    """Return the items of a parent that match `where`, in order."""
    query = select(ITEMS).where(ITEMS.c.holder == parent_id, _NOT_DELETED, *where)
    query = query.order_by(ITEMS.c.seq)
    return [_item(row) for row in connection.execute(query).mappings()]


def items_by_parent(connection: Connection, parent_ids: Collection[str]) -> dict[str, list[Item]]:
    """Return the items of several parents, by parent, each list in order."""
    query = select(ITEMS).where(ITEMS.c.holder.in_(parent_ids), _NOT_DELETED).order_by(ITEMS.c.seq)
    found: dict[str, list[Item]] = {parent_id: [] for parent_id in parent_ids}
    for row in connection.execute(query).mappings():
        found[row["holder"]].append(_item(row))
    return found


def get_items(connection: Connection, owner: str, ids: Sequence[str]) -> dict[str, Item]:
    """Return the owner's items with these ids, from all conversations and responses."""
    found: dict[str, Item] = {}
    for batch in _batches(ids):
        query = select(ITEMS).where(ITEMS.c.owner == owner, ITEMS.c.id.in_(batch), _NOT_DELETED)
        rows = connection.execute(query.order_by(ITEMS.c.seq)).mappings()
        found |= {row["id"]: _item(row) for row in rows}
    return found


def delete_with_items(connection: Connection, table: Table, ids: Sequence[str]) -> None:
    """Delete rows of `table`, which are responses or conversations, with their items and
    streams."""
    for batch in _batches(ids):
        connection.execute(delete(ITEMS).where(ITEMS.c.holder.in_(batch)))
        connection.execute(delete(STREAMS).where(STREAMS.c.response_id.in_(batch)))
        connection.execute(delete(table).where(table.c.id.in_(batch)))


def expire_with_items(connection: Connection, table: Table, now: int) -> bool:
    """Delete up to `EXPIRE_BATCH` expired rows of `table` with their items. Return True if more
    expired rows may remain."""
    expired = select(table.c.id).where(table.c.expires_at <= now).limit(EXPIRE_BATCH)
    ids = connection.execute(expired).scalars().all()
    delete_with_items(connection, table, ids)
    return len(ids) == EXPIRE_BATCH


def _batches(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    for first in range(0, len(ids), _MAX_IDS):
        yield ids[first : first + _MAX_IDS]


def _item(row: RowMapping) -> Item:
    item: Item = json.loads(row["body"])
    return item
