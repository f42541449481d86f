"""What was said to a model and by it, item by item, under the response or conversation it is of."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
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
)

from proxy.store.tables import CONVERSATIONS, ITEMS, RESPONSES

Item = Mapping[str, Any]
Source = Literal["input", "output"]


def add(
    connection: Connection,
    owner: str,
    holder: str,
    items: Iterable[Item],
    source: Source = "input",
) -> int:
    """Append items, but those that the holder has already; how many bytes they are."""
    held = select(ITEMS.c.id).where(ITEMS.c.holder == holder)
    seen = set(connection.execute(held).scalars())
    total = 0
    for item in items:
        if item["id"] in seen:
            continue
        seen.add(item["id"])
        body = json.dumps(item)
        total += len(body)
        row = {"id": item["id"], "owner": owner, "holder": holder, "source": source}
        connection.execute(insert(ITEMS), {**row, "body": body, "bytes": len(body)})
    return total


def of(connection: Connection, holder: str, *which: ColumnElement[bool]) -> list[Item]:
    """A holder's items in order, all or some."""
    query = select(ITEMS).where(ITEMS.c.holder == holder, kept, *which).order_by(ITEMS.c.seq)
    return [item(row) for row in connection.execute(query).mappings()]


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


def make_room(connection: Connection, owner: str, quota: int, but: str) -> None:
    """Forget the owner's responses and conversations that were used the longest ago, beyond the
    quota; the one named `but` stays."""
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
    beyond = select(sizes.c.id).where(sizes.c.total > quota, sizes.c.id != but)
    if gone := connection.execute(beyond).scalars().all():
        discard(connection, RESPONSES, gone)
        discard(connection, CONVERSATIONS, gone)


def item(row: RowMapping) -> Item:
    """What a row holds."""
    found: Item = json.loads(row["body"])
    return found


kept = ITEMS.c.deleted_at.is_(None)
