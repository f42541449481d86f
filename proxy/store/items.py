"""What was said to a model and by it, item by item, under the response or conversation it is of."""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from sqlalchemy import ColumnElement, Connection, RowMapping, Table, delete, func, insert, select

from proxy.store.tables import ITEMS, STREAMS

Item = Mapping[str, Any]
Source = Literal["input", "output"]
EXPIRED_AT_ONCE = 50
"""How many holders, each with all its items, a sweep forgets in one transaction."""
MAX_NAMES = 1000
"""How many names one statement has: SQLite takes only so many."""


def add(
    connection: Connection,
    owner: str,
    holder: str,
    items: Iterable[Item],
    source: Source = "input",
    held: Collection[str] = (),
) -> int:
    """Append items, each but once, and none of those that are held already; how many bytes."""
    new = {item["id"]: json.dumps(item) for item in items if item["id"] not in held}
    place = {"owner": owner, "holder": holder, "source": source}
    rows = [{"id": id, **place, "body": body, "bytes": len(body)} for id, body in new.items()]
    if rows:
        connection.execute(insert(ITEMS), rows)
    return sum(map(len, new.values()))


def ids(connection: Connection, holder: str) -> set[str]:
    """The names of all that a holder has, or has had lately."""
    return set(connection.execute(select(ITEMS.c.id).where(ITEMS.c.holder == holder)).scalars())


def of(connection: Connection, holder: str, *which: ColumnElement[bool]) -> list[Item]:
    """A holder's items in order, all or some."""
    query = select(ITEMS).where(ITEMS.c.holder == holder, kept, *which).order_by(ITEMS.c.seq)
    return [item(row) for row in connection.execute(query).mappings()]


def by_holder(connection: Connection, holders: Collection[str]) -> dict[str, list[Item]]:
    """The items of several holders, in order."""
    query = select(ITEMS).where(ITEMS.c.holder.in_(holders), kept).order_by(ITEMS.c.seq)
    found: dict[str, list[Item]] = {holder: [] for holder in holders}
    for row in connection.execute(query).mappings():
        found[row["holder"]].append(item(row))
    return found


def named(connection: Connection, owner: str, ids: Sequence[str]) -> dict[str, Item]:
    """The owner's items of those names, wherever they are."""
    found: dict[str, Item] = {}
    for some in _parts(ids):
        query = select(ITEMS).where(ITEMS.c.owner == owner, ITEMS.c.id.in_(some), kept)
        rows = connection.execute(query.order_by(ITEMS.c.seq)).mappings()
        found |= {row["id"]: item(row) for row in rows}
    return found


def last_seq(connection: Connection, holder: str) -> int:
    """Where a conversation stands."""
    query = select(func.coalesce(func.max(ITEMS.c.seq), 0)).where(ITEMS.c.holder == holder)
    return int(connection.execute(query).scalar_one())


def discard(connection: Connection, table: Table, ids: Sequence[str]) -> None:
    """Forget holders, and all that is theirs."""
    for some in _parts(ids):
        connection.execute(delete(ITEMS).where(ITEMS.c.holder.in_(some)))
        connection.execute(delete(STREAMS).where(STREAMS.c.response_id.in_(some)))
        connection.execute(delete(table).where(table.c.id.in_(some)))


def expire(connection: Connection, table: Table, now: int) -> bool:
    """Forget some holders that are past their time; whether there may be more."""
    past = select(table.c.id).where(table.c.expires_at <= now).limit(EXPIRED_AT_ONCE)
    ids = connection.execute(past).scalars().all()
    discard(connection, table, ids)
    return len(ids) == EXPIRED_AT_ONCE


def _parts(names: Sequence[str]) -> Iterator[Sequence[str]]:
    for first in range(0, len(names), MAX_NAMES):
        yield names[first : first + MAX_NAMES]


def item(row: RowMapping) -> Item:
    """What a row holds."""
    found: Item = json.loads(row["body"])
    return found


kept = ITEMS.c.deleted_at.is_(None)
