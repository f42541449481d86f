"""What was said to a model and by it, item by item, under the response or conversation it is of."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

from sqlalchemy import ColumnElement, Connection, RowMapping, Table, delete, func, insert, select

from proxy.store.tables import ITEMS

Item = Mapping[str, Any]
Source = Literal["input", "output"]


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
    query = select(ITEMS).where(ITEMS.c.owner == owner, ITEMS.c.id.in_(ids), kept)
    rows = connection.execute(query.order_by(ITEMS.c.seq)).mappings()
    return {row["id"]: item(row) for row in rows}


def last_seq(connection: Connection, holder: str) -> int:
    """Where a conversation stands."""
    query = select(func.coalesce(func.max(ITEMS.c.seq), 0)).where(ITEMS.c.holder == holder)
    return int(connection.execute(query).scalar_one())


def discard(connection: Connection, table: Table, ids: Collection[str]) -> None:
    """Forget holders, and all that is theirs."""
    connection.execute(delete(ITEMS).where(ITEMS.c.holder.in_(ids)))
    connection.execute(delete(table).where(table.c.id.in_(ids)))


def item(row: RowMapping) -> Item:
    """What a row holds."""
    found: Item = json.loads(row["body"])
    return found


kept = ITEMS.c.deleted_at.is_(None)
