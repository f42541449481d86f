"""Conversations: items under one name, which clients and responses add to."""

import json
import uuid
from collections.abc import Callable, Mapping, Sequence

from sqlalchemy import ColumnElement, Connection, RowMapping, delete, insert, select, update

from policies.sessions import ResponseSettings
from proxy.store import items
from proxy.store.database import Database, is_full, oldest
from proxy.store.items import Item
from proxy.store.paging import rows_of
from proxy.store.records import Conversation, Page, Slice
from proxy.store.response_quota import ResponseQuota
from proxy.store.tables import CONVERSATIONS, ITEMS

OWN_BYTES = 10_000
"""What a conversation counts for beside its items, whatever its metadata."""


class ConversationShelf:
    """Everybody's conversations; each owner sees its own."""

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
        self, owner: str, metadata: Mapping[str, str], begins_with: Sequence[Item]
    ) -> Conversation:
        """Make a conversation."""
        now = int(self._now())
        made = Conversation(f"conv_{uuid.uuid4().hex}", now, metadata)
        row = {
            "id": made.id,
            "owner": owner,
            "metadata": json.dumps(metadata),
            "bytes": OWN_BYTES,
            "created_at": now,
            "expires_at": self._settings.expiry(now),
        }

        def work(connection: Connection) -> None:
            connection.execute(insert(CONVERSATIONS), row)
            size = append(connection, owner, made.id, begins_with)
            self._quota.take(connection, owner, OWN_BYTES + size, made.id)

        await self._database.write(work)
        return made

    async def get(self, owner: str, conversation_id: str) -> Conversation | None:
        """The owner's conversation, or None."""
        query = select(CONVERSATIONS).where(self._the(owner, conversation_id))

        def work(connection: Connection) -> Conversation | None:
            row = connection.execute(query).mappings().one_or_none()
            return _conversation(row) if row else None

        return await self._database.read(work)

    async def update(
        self, owner: str, conversation_id: str, metadata: Mapping[str, str]
    ) -> Conversation | None:
        """Give the owner's conversation other metadata; None where there is none."""
        change = (
            update(CONVERSATIONS)
            .where(self._the(owner, conversation_id))
            .values(metadata=json.dumps(metadata))
            .returning(*CONVERSATIONS.c)
        )

        def work(connection: Connection) -> Conversation | None:
            row = connection.execute(change).mappings().one_or_none()
            return _conversation(row) if row else None

        return await self._database.write(work)

    async def delete(self, owner: str, conversation_id: str) -> bool:
        """Forget a conversation and its items; whether there was one."""
        query = select(CONVERSATIONS.c.id).where(self._the(owner, conversation_id))

        def work(connection: Connection) -> bool:
            found = connection.execute(query).scalars().all()
            items.discard(connection, CONVERSATIONS, found)
            return bool(found)

        return await self._database.write(work)

    async def said(self, owner: str, conversation_id: str) -> tuple[list[Item], int] | None:
        """All its items, and where it stands; None where there is no such conversation."""
        query = select(CONVERSATIONS.c.id).where(self._the(owner, conversation_id))

        def work(connection: Connection) -> tuple[list[Item], int] | None:
            if connection.execute(query).one_or_none() is None:
                return None
            stands = items.last_seq(connection, conversation_id)
            return items.of(connection, conversation_id), stands

        return await self._database.read(work)

    async def add(self, owner: str, conversation_id: str, new: Sequence[Item]) -> bool:
        """Append items to the owner's conversation; whether there is one."""
        now = int(self._now())
        used = update(CONVERSATIONS).where(self._the(owner, conversation_id))
        used = used.values(expires_at=self._settings.expiry(now))

        def work(connection: Connection) -> bool:
            if not connection.execute(used).rowcount:
                return False
            size = append(connection, owner, conversation_id, new)
            self._quota.take(connection, owner, size, conversation_id)
            return True

        return await self._database.write(work)

    async def page(self, owner: str, conversation_id: str, asked: Page) -> Slice[Item]:
        """A part of its items. Raises BadRequestError."""
        mine = (ITEMS.c.owner == owner) & (ITEMS.c.holder == conversation_id)

        def work(connection: Connection) -> Slice[Item]:
            rows, more = rows_of(connection, ITEMS, asked, mine=mine, wanted=items.kept)
            return Slice(tuple(map(items.item, rows)), more)

        return await self._database.read(work)

    async def item(self, owner: str, conversation_id: str, item_id: str) -> Item | None:
        """One of its items, or None."""
        query = select(ITEMS).where(_item(owner, conversation_id, item_id))

        def work(connection: Connection) -> Item | None:
            row = connection.execute(query).mappings().one_or_none()
            return items.item(row) if row else None

        return await self._database.read(work)

    async def delete_item(self, owner: str, conversation_id: str, item_id: str) -> bool:
        """Take one of its items out; whether there was one."""
        gone = (
            update(ITEMS)
            .where(_item(owner, conversation_id, item_id))
            .values(deleted_at=int(self._now()), body="")
            .returning(ITEMS.c.bytes)
        )

        def work(connection: Connection) -> bool:
            size = connection.execute(gone).scalar_one_or_none()
            _grow(connection, conversation_id, -(size or 0))
            return size is not None

        return await self._database.write(work)

    def expire(self, connection: Connection, now: int, forget_before: int) -> bool:
        """Delete what is past its time, and items that were deleted long ago."""
        is_more = items.expire(connection, CONVERSATIONS, now)
        long_ago = oldest(ITEMS, ITEMS.c.deleted_at < forget_before)
        return is_full(connection, delete(ITEMS).where(ITEMS.c.seq.in_(long_ago))) or is_more

    def _the(self, owner: str, conversation_id: str) -> ColumnElement[bool]:
        mine = (CONVERSATIONS.c.owner == owner) & (CONVERSATIONS.c.id == conversation_id)
        return mine & (CONVERSATIONS.c.expires_at > self._now())


def append(connection: Connection, owner: str, conversation_id: str, new: Sequence[Item]) -> int:
    """Add items to a conversation, if it is there yet; how many bytes they are."""
    there = select(CONVERSATIONS.c.id).where(
        CONVERSATIONS.c.id == conversation_id, CONVERSATIONS.c.owner == owner
    )
    if connection.execute(there).one_or_none() is None:
        return 0
    held = items.ids(connection, conversation_id)
    size = items.add(connection, owner, conversation_id, new, held=held)
    _grow(connection, conversation_id, size)
    return size


def _grow(connection: Connection, conversation_id: str, size: int) -> None:
    grown = update(CONVERSATIONS).where(CONVERSATIONS.c.id == conversation_id)
    connection.execute(grown.values(bytes=CONVERSATIONS.c.bytes + size))


def _item(owner: str, conversation_id: str, item_id: str) -> ColumnElement[bool]:
    place = (ITEMS.c.owner == owner) & (ITEMS.c.holder == conversation_id)
    return place & (ITEMS.c.id == item_id) & items.kept


def _conversation(row: RowMapping) -> Conversation:
    return Conversation(row["id"], row["created_at"], json.loads(row["metadata"]))
