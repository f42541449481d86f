"""Conversations, the items of conversations and responses, and the quota that both share.

An item belongs to a holder: a conversation or a response.
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
from proxy.store.database import Database, fetch_page, oldest_rows, sweep_batch
from proxy.store.records import Conversation, Page, PageRequest
from proxy.store.tables import CONVERSATIONS, ITEMS, RESPONSES, STREAMS

OWN_BYTES = 10_000
"""The bytes that a conversation counts for without its items, whatever its metadata."""
Item = Mapping[str, Any]
_Source = Literal["input", "output"]
EXPIRE_BATCH = 50
"""The holders that a sweep deletes in one transaction, each with all its items."""
_MAX_IDS = 1000
"""The most ids in one statement: SQLite bounds its parameters."""
_QUOTA_STEPS = 16
"""An owner's bytes are counted whenever a 16th of the quota was added: counting takes time."""

_ITEM_KEPT = ITEMS.c.deleted_at.is_(None)


class ResponseQuota:
    """Bounds the bytes of each owner's responses and conversations together."""

    def __init__(self, quota: int) -> None:
        self._quota = quota
        self._added = defaultdict[str, int](lambda: quota)
        """Bytes added by owner since the last count."""

    def charge(self, connection: Connection, owner: str, size: int, keep: str) -> None:
        """Note `size` more bytes. If the owner exceeds the quota, delete its least recently used
        holders, but not `keep`."""
        self._added[owner] += size
        if self._added[owner] < self._quota // _QUOTA_STEPS:
            return
        self._added[owner] = 0
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
        beyond = select(sizes.c.id).where(sizes.c.total > self._quota, sizes.c.id != keep)
        if gone := connection.execute(beyond).scalars().all():
            delete_holders(connection, RESPONSES, gone)
            delete_holders(connection, CONVERSATIONS, gone)


class ConversationRepository:
    """The conversations of all owners; each owner sees its own only."""

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
        """Create a conversation with its first items."""
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
            size = append_to_conversation(connection, owner, made.id, begins_with)
            self._quota.charge(connection, owner, OWN_BYTES + size, made.id)

        await self._database.write(work)
        return made

    async def get(self, owner: str, conversation_id: str) -> Conversation | None:
        """Return the owner's conversation, or None."""
        query = select(CONVERSATIONS).where(self._the(owner, conversation_id))

        def work(connection: Connection) -> Conversation | None:
            row = connection.execute(query).mappings().one_or_none()
            return _conversation(row) if row else None

        return await self._database.read(work)

    async def update(
        self, owner: str, conversation_id: str, metadata: Mapping[str, str]
    ) -> Conversation | None:
        """Replace the metadata of the owner's conversation; None if there is no such one."""
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
        """Delete a conversation and its items; return True if there was one."""
        query = select(CONVERSATIONS.c.id).where(self._the(owner, conversation_id))

        def work(connection: Connection) -> bool:
            found = connection.execute(query).scalars().all()
            delete_holders(connection, CONVERSATIONS, found)
            return bool(found)

        return await self._database.write(work)

    async def all_items(self, owner: str, conversation_id: str) -> tuple[list[Item], int] | None:
        """Return all items and the `seq` of the last; None if there is no such conversation."""
        query = select(CONVERSATIONS.c.id).where(self._the(owner, conversation_id))
        last_seq = select(func.coalesce(func.max(ITEMS.c.seq), 0)).where(
            ITEMS.c.holder == conversation_id
        )

        def work(connection: Connection) -> tuple[list[Item], int] | None:
            if connection.execute(query).one_or_none() is None:
                return None
            last = int(connection.execute(last_seq).scalar_one())
            return list_items(connection, conversation_id), last

        return await self._database.read(work)

    async def add(self, owner: str, conversation_id: str, new: Sequence[Item]) -> bool:
        """Append items to the owner's conversation; return True if there is one."""
        now = int(self._now())
        used = update(CONVERSATIONS).where(self._the(owner, conversation_id))
        used = used.values(expires_at=self._settings.expiry(now))

        def work(connection: Connection) -> bool:
            if not connection.execute(used).rowcount:
                return False
            size = append_to_conversation(connection, owner, conversation_id, new)
            self._quota.charge(connection, owner, size, conversation_id)
            return True

        return await self._database.write(work)

    async def page(self, owner: str, conversation_id: str, asked: PageRequest) -> Page[Item]:
        """Return a page of a conversation's items. Raises BadRequestError."""
        mine = (ITEMS.c.owner == owner) & (ITEMS.c.holder == conversation_id)

        def work(connection: Connection) -> Page[Item]:
            rows, more = fetch_page(connection, ITEMS, asked, mine=mine, wanted=_ITEM_KEPT)
            return Page(tuple(map(_item_of, rows)), more)

        return await self._database.read(work)

    async def item(self, owner: str, conversation_id: str, item_id: str) -> Item | None:
        """Return an item of a conversation, or None."""
        query = select(ITEMS).where(_is_item(owner, conversation_id, item_id))

        def work(connection: Connection) -> Item | None:
            row = connection.execute(query).mappings().one_or_none()
            return _item_of(row) if row else None

        return await self._database.read(work)

    async def delete_item(self, owner: str, conversation_id: str, item_id: str) -> bool:
        """Delete an item of a conversation; return True if there was one."""
        gone = (
            update(ITEMS)
            .where(_is_item(owner, conversation_id, item_id))
            .values(deleted_at=int(self._now()), body="")
            .returning(ITEMS.c.bytes)
        )

        def work(connection: Connection) -> bool:
            size = connection.execute(gone).scalar_one_or_none()
            _grow(connection, conversation_id, -(size or 0))
            return size is not None

        return await self._database.write(work)

    def expire(self, connection: Connection, now: int, forget_before: int) -> bool:
        """Delete expired conversations, and the rows of items deleted long ago. See Shelf."""
        is_more = expire_holders(connection, CONVERSATIONS, now)
        long_ago = oldest_rows(ITEMS, ITEMS.c.deleted_at < forget_before)
        return sweep_batch(connection, delete(ITEMS).where(ITEMS.c.seq.in_(long_ago))) or is_more

    def _the(self, owner: str, conversation_id: str) -> ColumnElement[bool]:
        mine = (CONVERSATIONS.c.owner == owner) & (CONVERSATIONS.c.id == conversation_id)
        return mine & (CONVERSATIONS.c.expires_at > self._now())


def append_to_conversation(
    connection: Connection, owner: str, conversation_id: str, new: Sequence[Item]
) -> int:
    """Append items to a conversation if it still exists; return how many bytes were added."""
    there = select(CONVERSATIONS.c.id).where(
        CONVERSATIONS.c.id == conversation_id, CONVERSATIONS.c.owner == owner
    )
    if connection.execute(there).one_or_none() is None:
        return 0
    ids = select(ITEMS.c.id).where(ITEMS.c.holder == conversation_id)  # of deleted items too
    held = set(connection.execute(ids).scalars())
    size = add_items(connection, owner, conversation_id, new, held=held)
    _grow(connection, conversation_id, size)
    return size


def _grow(connection: Connection, conversation_id: str, size: int) -> None:
    grown = update(CONVERSATIONS).where(CONVERSATIONS.c.id == conversation_id)
    connection.execute(grown.values(bytes=CONVERSATIONS.c.bytes + size))


def _is_item(owner: str, conversation_id: str, item_id: str) -> ColumnElement[bool]:
    place = (ITEMS.c.owner == owner) & (ITEMS.c.holder == conversation_id)
    return place & (ITEMS.c.id == item_id) & _ITEM_KEPT


def _conversation(row: RowMapping) -> Conversation:
    return Conversation(row["id"], row["created_at"], json.loads(row["metadata"]))


def add_items(
    connection: Connection,
    owner: str,
    holder: str,
    items: Iterable[Item],
    source: _Source = "input",
    held: Collection[str] = (),
) -> int:
    """Append items to a holder, each id once and none of those in `held`; return the bytes
    added."""
    new = {item["id"]: json.dumps(item) for item in items if item["id"] not in held}
    place = {"owner": owner, "holder": holder, "source": source}
    rows = [{"id": id, **place, "body": body, "bytes": len(body)} for id, body in new.items()]
    if rows:
        connection.execute(insert(ITEMS), rows)
    return sum(map(len, new.values()))


def list_items(connection: Connection, holder: str, *which: ColumnElement[bool]) -> list[Item]:
    """Return a holder's items in order, or those that match `which`."""
    query = select(ITEMS).where(ITEMS.c.holder == holder, _ITEM_KEPT, *which).order_by(ITEMS.c.seq)
    return [_item_of(row) for row in connection.execute(query).mappings()]


def items_by_holder(connection: Connection, holders: Collection[str]) -> dict[str, list[Item]]:
    """Return the items of several holders, each in order."""
    query = select(ITEMS).where(ITEMS.c.holder.in_(holders), _ITEM_KEPT).order_by(ITEMS.c.seq)
    found: dict[str, list[Item]] = {holder: [] for holder in holders}
    for row in connection.execute(query).mappings():
        found[row["holder"]].append(_item_of(row))
    return found


def get_items(connection: Connection, owner: str, ids: Sequence[str]) -> dict[str, Item]:
    """Return the owner's items with these ids, of whatever holder."""
    found: dict[str, Item] = {}
    for some in _parts(ids):
        query = select(ITEMS).where(ITEMS.c.owner == owner, ITEMS.c.id.in_(some), _ITEM_KEPT)
        rows = connection.execute(query.order_by(ITEMS.c.seq)).mappings()
        found |= {row["id"]: _item_of(row) for row in rows}
    return found


def delete_holders(connection: Connection, table: Table, ids: Sequence[str]) -> None:
    """Delete holders with their items and streams."""
    for some in _parts(ids):
        connection.execute(delete(ITEMS).where(ITEMS.c.holder.in_(some)))
        connection.execute(delete(STREAMS).where(STREAMS.c.response_id.in_(some)))
        connection.execute(delete(table).where(table.c.id.in_(some)))


def expire_holders(connection: Connection, table: Table, now: int) -> bool:
    """Delete some expired holders; return True if there may be more."""
    past = select(table.c.id).where(table.c.expires_at <= now).limit(EXPIRE_BATCH)
    ids = connection.execute(past).scalars().all()
    delete_holders(connection, table, ids)
    return len(ids) == EXPIRE_BATCH


def _parts(names: Sequence[str]) -> Iterator[Sequence[str]]:
    for first in range(0, len(names), _MAX_IDS):
        yield names[first : first + _MAX_IDS]


def _item_of(row: RowMapping) -> Item:
    found: Item = json.loads(row["body"])
    return found
