"""How much of the store a key may fill."""

from sqlalchemy import Connection, Delete, Select, Table, delete, func, select

from proxy.errors import QuotaError
from proxy.store.tables import CONTAINER_FILES, CONTAINERS, FILES

MAX_FILES = 10_000
"""How many files a key may put in, whatever their size."""


def require_room(connection: Connection, owner: str, size: int, quota: int, now: float) -> None:
    """Raises QuotaError where one more file, or `size` more bytes, would be too many."""
    sums = (_uploaded(owner, now), _put_into_containers(owner, now))
    found = [connection.execute(each).one() for each in sums]
    files, used = (sum(each) for each in zip(*found, strict=True))
    if files >= MAX_FILES:
        raise QuotaError(f"{files} files, the most that are allowed, are there")
    if used + size > quota:
        raise QuotaError(f"{used} of {quota} bytes are used")


def _uploaded(owner: str, now: float) -> Select[int, int]:
    return select(func.count(), func.coalesce(func.sum(FILES.c.bytes), 0)).where(
        FILES.c.owner == owner, FILES.c.deleted_at.is_(None), FILES.c.expires_at > now
    )


def _put_into_containers(owner: str, now: float) -> Select[int, int]:
    files = CONTAINER_FILES.join(CONTAINERS, CONTAINERS.c.id == CONTAINER_FILES.c.container_id)
    return (
        select(func.count(), func.coalesce(func.sum(CONTAINER_FILES.c.bytes), 0))
        .select_from(files)
        .where(
            CONTAINER_FILES.c.owner == owner,
            CONTAINER_FILES.c.source == "user",
            CONTAINER_FILES.c.deleted_at.is_(None),
            CONTAINERS.c.expires_at > now,
        )
    )


def oldest_beyond(table: Table, owner: str, *, max_rows: int, max_bytes: int) -> Delete:
    """What deletes an owner's oldest rows, of those that have an end, where they are too many or
    too large together; the newest stays whatever its size."""
    newest_first = table.c.seq.desc()
    counted = (
        select(
            table.c.seq,
            func.row_number().over(order_by=newest_first).label("number"),
            func.sum(table.c.bytes).over(order_by=newest_first).label("total"),
        )
        .where(table.c.owner == owner, table.c.expires_at.is_not(None))
        .subquery()
    )
    too_many = (counted.c.number > max_rows) | (counted.c.total > max_bytes)
    beyond = select(counted.c.seq).where(counted.c.number > 1, too_many)
    return delete(table).where(table.c.seq.in_(beyond))
