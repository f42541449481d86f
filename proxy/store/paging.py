"""Lists, a part at a time."""

from collections.abc import Sequence

from sqlalchemy import ColumnElement, Connection, RowMapping, Table, select

from proxy.errors import BadRequestError
from proxy.store.records import Page


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
            raise BadRequestError(
                f"Invalid 'after': there is no {page.after!r} in this list.",
                param="after",
                code="invalid_value",
            )
        query = query.where(table.c.seq < place if page.newest_first else table.c.seq > place)
    rows = connection.execute(query.order_by(order)).mappings().all()
    return rows[: page.limit], len(rows) > page.limit
