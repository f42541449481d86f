"""The database: one SQLite file, one thread, whole transactions.

It also contains the queries that several tables share: pages of a list, quotas, and the rows that a
sweep removes.
"""

import asyncio
import os
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import (
    URL,
    ColumnElement,
    Connection,
    Delete,
    Engine,
    RowMapping,
    Select,
    Table,
    Update,
    create_engine,
    delete,
    event,
    func,
    select,
)
from sqlalchemy.exc import DBAPIError

from proxy.errors import BadRequestError, QuotaError, StoreError
from proxy.store.migrations import migrate
from proxy.store.records import Page, PageRequest
from proxy.store.tables import CONTAINER_FILES, CONTAINERS, FILES

T = TypeVar("T")
BUSY_MS = 10_000
"""The milliseconds that a transaction waits for one of another process."""
SWEEP_ROWS = 500
"""The rows of a table that a sweep changes in one transaction, while requests wait."""
PRAGMAS = (
    f"busy_timeout = {BUSY_MS}",  # first, because the next one may have to wait
    "journal_mode = WAL",
    "synchronous = NORMAL",
)
MAX_FILES = 10_000
"""The most files that a key may upload, whatever their size."""


class Database:
    """An SQLite database, which several processes may have open."""

    def __init__(self, path: Path) -> None:
        """Open the file, and create its tables or migrate them. Raises StoreError."""
        try:
            self._engine = _engine(path)
            self._writing = self._engine.execution_options(writes=True)
            with self._writing.begin() as connection:
                migrate(connection)
        except (DBAPIError, OSError, StoreError) as error:
            raise StoreError(f"{path}: {getattr(error, 'orig', None) or error}") from error
        # One thread: SQLite has one writer, and its own event loop is three times as slow (README).
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")

    async def read(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in a transaction that only reads."""
        return await self._run(self._engine, work)

    async def write(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in a transaction that is committed as a whole or not at all."""
        return await self._run(self._writing, work)

    async def read_concurrently(self, work: Callable[[Connection], T]) -> T:
        """Run `work`, a long read, beside the transactions of the store's thread."""
        return await asyncio.to_thread(_in_transaction, self._engine, work)

    async def _run(self, engine: Engine, work: Callable[[Connection], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, _in_transaction, engine, work
        )

    def close(self) -> None:
        """Finish the transactions begun and close the file. Safe to call twice."""
        self._thread.shutdown()
        self._engine.dispose()


def oldest_rows(table: Table, where: ColumnElement[bool]) -> Select[int]:
    """Select the `seq` of the oldest rows, as many as a sweep changes in one transaction."""
    return select(table.c.seq).where(where).order_by(table.c.seq).limit(SWEEP_ROWS)


def sweep_batch(connection: Connection, *changes: Delete | Update) -> bool:
    """Execute changes to `oldest_rows` rows; return True if one of them may have left some."""
    counts = [connection.execute(change).rowcount for change in changes]
    return max(counts) >= SWEEP_ROWS


def _in_transaction(engine: Engine, work: Callable[[Connection], T]) -> T:
    with engine.begin() as connection:
        return work(connection)


def _engine(path: Path) -> Engine:
    os.close(os.open(path, os.O_CREAT | os.O_CLOEXEC, 0o600))  # SQLite's other files copy the mode
    # Every use ends in commit or rollback: the pool's own rollback would cost 0.1 ms for nothing.
    engine = create_engine(URL.create("sqlite", database=str(path)), pool_reset_on_return=None)
    event.listen(engine, "connect", _prepare)
    event.listen(engine, "begin", _begin)
    return engine


def _prepare(connection: sqlite3.Connection, _record: object) -> None:
    connection.isolation_level = None  # `_begin` does it: sqlite3 would begin too late
    for pragma in PRAGMAS:
        connection.execute(f"PRAGMA {pragma}")


def _begin(connection: Connection) -> None:
    # A transaction that reads first and then writes fails instead of waiting for another writer.
    writes = connection.get_execution_options().get("writes")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def fetch_page(
    connection: Connection,
    table: Table,
    page: PageRequest,
    *,
    mine: ColumnElement[bool],
    wanted: ColumnElement[bool],
) -> tuple[Sequence[RowMapping], bool]:
    """Return the rows of a page, and whether more follow. Raises BadRequestError.

    `page.after` may name any row of `mine`, even one that is no longer `wanted`.
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


def page_of_list(items: Sequence[Mapping[str, Any]], page: PageRequest) -> Page[Mapping[str, Any]]:
    """Return a page of a list in memory, which is oldest first. Raises BadRequestError."""
    ordered = list(reversed(items)) if page.newest_first else list(items)
    if page.after is not None:
        place = next((n for n, item in enumerate(ordered) if item["id"] == page.after), None)
        if place is None:
            raise _not_in_list(page.after)
        ordered = ordered[place + 1 :]
    return Page(tuple(ordered[: page.limit]), len(ordered) > page.limit)


def _not_in_list(after: str) -> BadRequestError:
    message = f"Invalid 'after': there is no {after!r} in this list."
    return BadRequestError(message, param="after", code="invalid_value")


def require_quota(connection: Connection, owner: str, size: int, quota: int, now: float) -> None:
    """Raise QuotaError if one more file, or `size` more bytes, exceed the owner's quota."""
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


def delete_beyond(table: Table, owner: str, *, max_rows: int, max_bytes: int) -> Delete:
    """Return the statement that deletes an owner's oldest rows beyond `max_rows` or `max_bytes`.
    Rows without an expiry stay, and so does the newest, whatever its size."""
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
