"""Lists, a part at a time."""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, RowMapping, Table, select

from proxy.errors import BadRequestError
from proxy.store.records import Page, Slice


def rows_of(
    connection: Connection,
    table: Table,
    page: Page,
    *,
    mine: ColumnElement[bool],
    wanted: ColumnElement[bool],
) -> tuple[Sequence[RowMapping], bool]:
    """The rows of a page, and whether more follow. Raises BadRequestError.

    `after` may name a row that is no longer wanted, if only it is one of `mine`.
    """
    query = select(table).where(mine, wanted).limit(page.limit + 1)
    order = table.c.seq.desc() if page.newest_first else table.c.seq.asc()
    if page.after is not None:
        place = connection.execute(
            select(table.c.seq).where(mine, table.c.id == page.after)
        ).scalar_one_or_none()
        if place is None:
            raise _not_in_list(page.after)
        query = query.where(table.c.seq < place if page.newest_first else table.c.seq > place)
    rows = connection.execute(query.order_by(order)).mappings().all()
    return rows[: page.limit], len(rows) > page.limit


def part(items: Sequence[Mapping[str, Any]], page: Page) -> Slice[Mapping[str, Any]]:
    """The same of a list that is at hand, oldest first. Raises BadRequestError."""
    ordered = list(reversed(items)) if page.newest_first else list(items)
    if page.after is not None:
        place = next((n for n, item in enumerate(ordered) if item["id"] == page.after), None)
        if place is None:
            raise _not_in_list(page.after)
        ordered = ordered[place + 1 :]
    return Slice(tuple(ordered[: page.limit]), len(ordered) > page.limit)


def _not_in_list(after: str) -> BadRequestError:
    words = f"Invalid 'after': there is no {after!r} in this list."
    return BadRequestError(words, param="after", code="invalid_value")
