"""The database, whose transactions run in threads, and the queries that several tables share: pages
of a list, quotas, and the rows that a sweep removes."""

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import (
    URL,
    ColumnElement,
    Connection,
    Delete,
    Engine,
    Executable,
    RowMapping,
    Select,
    Table,
    Update,
    delete,
    func,
    select,
)
from sqlalchemy.dialects import sqlite as sqlite_dialect
from sqlalchemy.exc import DBAPIError

from proxy.errors import BadRequestError, QuotaError, StoreError, StoreUnavailableError
from proxy.store import postgresql, sqlite
from proxy.store.migrations import migrate
from proxy.store.records import Page, PageRequest
from proxy.store.tables import CONTAINER_FILES, CONTAINERS, FILES

if TYPE_CHECKING:
    from sqlalchemy.dialects import postgresql as postgresql_dialect

T = TypeVar("T")
SWEEP_ROWS = 500
"""Maximum number of rows of a table that a sweep changes in one transaction. Requests wait until
the transaction ends."""
MAX_ATTEMPTS = 20
"""Maximum number of attempts of a transaction that conflicts with concurrent transactions."""
MAX_BACKOFF_S = 0.25
"""Maximum pause before the next attempt of a transaction, in seconds."""
MAX_FILES = 10_000
"""Maximum number of files that an owner may store: uploads, and files put into containers."""


class Database:
    """An SQLite or PostgreSQL database. Several processes may have it open.

    A transaction that conflicts with a concurrent transaction runs again. So the functions that are
    passed to `read` and `write` may be called several times. `read` and `write` raise
    StoreUnavailableError if the database cannot be reached or the conflicts do not end.
    """

    def __init__(self, url: URL) -> None:
        """Open the database, and create or migrate its tables. Raises StoreError."""
        self._dialect = sqlite if url.get_backend_name() == "sqlite" else postgresql
        try:
            engine = self._dialect.open_engine(url)
            self._engine = self._dialect.read_engine(engine)
            self._write_engine = self._dialect.write_engine(engine)
            try:
                with self._dialect.migration_engine(engine).begin() as connection:
                    migrate(connection, self._dialect)
            except BaseException:
                engine.dispose()
                raise
        except (DBAPIError, OSError, StoreError) as error:
            name = url.database if self._dialect is sqlite else url.render_as_string()
            raise StoreError(f"{name}: {getattr(error, 'orig', None) or error}") from error
        self._threads = ThreadPoolExecutor(self._dialect.THREADS, thread_name_prefix="store")

    async def read(self, transaction: Callable[[Connection], T]) -> T:
        """Run a function that only reads, in a transaction in one of the store's threads."""
        return await self._run_in_store_thread(self._engine, transaction)

    async def write(self, transaction: Callable[[Connection], T]) -> T:
        """Run a function that may write, in a transaction in one of the store's threads."""
        return await self._run_in_store_thread(self._write_engine, transaction)

    def write_blocking(self, transaction: Callable[[Connection], T]) -> T:
        """Run a function that may write, in a transaction in this thread, which blocks. Call it
        only while the server starts."""
        return self._run_transaction(self._write_engine, transaction)

    async def read_concurrently(self, transaction: Callable[[Connection], T]) -> T:
        """Run a function that only reads but takes long, in a transaction in another thread, so
        that other transactions are not delayed."""
        return await asyncio.to_thread(self._run_transaction, self._engine, transaction)

    async def read_one(
        self, query: Executable, convert: Callable[[RowMapping], T | None]
    ) -> T | None:
        """Return the only row that a query selects, converted in one of the store's threads, or
        None."""
        return await self.read(lambda connection: _fetch_one(connection, query, convert))

    async def write_one(
        self, change: Executable, convert: Callable[[RowMapping], T | None]
    ) -> T | None:
        """Execute a change that returns at most one row. Return the row, converted, or None."""
        return await self.write(lambda connection: _fetch_one(connection, change, convert))

    async def read_page(
        self,
        table: Table,
        request: PageRequest,
        convert: Callable[[RowMapping], T],
        *,
        scope: ColumnElement[bool],
        visible: ColumnElement[bool],
    ) -> Page[T]:
        """Return a page of the visible rows in `scope`. Raises BadRequestError if
        `request.after_id` names no row in `scope`.

        The row of `request.after_id` may be invisible: a client can continue after a deleted row.
        """

        def transaction(connection: Connection) -> Page[T]:
            query = select(table).where(scope, visible).limit(request.limit + 1)
            order = table.c.seq.desc() if request.newest_first else table.c.seq.asc()
            if request.after_id is not None:
                position = connection.execute(
                    select(table.c.seq).where(scope, table.c.id == request.after_id)
                ).scalar_one_or_none()
                if position is None:
                    raise _not_in_list_error(request.after_id)
                is_older = table.c.seq < position
                query = query.where(is_older if request.newest_first else table.c.seq > position)
            rows = connection.execute(query.order_by(order)).mappings().all()
            return Page(tuple(map(convert, rows[: request.limit])), len(rows) > request.limit)

        return await self.read(transaction)

    async def _run_in_store_thread(
        self, engine: Engine, transaction: Callable[[Connection], T]
    ) -> T:
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, self._run_transaction, engine, transaction
        )

    def _run_transaction(self, engine: Engine, transaction: Callable[[Connection], T]) -> T:
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                with engine.begin() as connection:
                    return transaction(connection)
            except DBAPIError as error:
                is_conflict = self._dialect.is_conflict(error)
                if self._dialect.is_unavailable(error) or (is_conflict and attempt == MAX_ATTEMPTS):
                    raise StoreUnavailableError from error
                if not is_conflict:
                    raise
            time.sleep(random.uniform(0, min(MAX_BACKOFF_S, 0.002 * 2**attempt)))
        raise AssertionError("unreachable")

    def close(self) -> None:
        """Finish the running transactions and close the connections. Safe to call twice."""
        self._threads.shutdown()
        self._engine.dispose()


def upsert(
    connection: Connection, table: Table
) -> "sqlite_dialect.Insert | postgresql_dialect.Insert":
    """Return an insert statement with the conflict clauses of the connection's database."""
    if connection.dialect.name == "sqlite":
        return sqlite_dialect.insert(table)
    from sqlalchemy.dialects import postgresql as postgresql_dialect  # noqa: PLC0415 - imports slowly

    return postgresql_dialect.insert(table)


def oldest_rows(table: Table, where: ColumnElement[bool]) -> ColumnElement[bool]:
    """Return a condition for the oldest `SWEEP_ROWS` of the rows that match `where`."""
    return table.c.seq.in_(select(table.c.seq).where(where).order_by(table.c.seq).limit(SWEEP_ROWS))


def sweep_batch(connection: Connection, *changes: Delete | Update) -> bool:
    """Execute statements that change the rows of `oldest_rows`. Return True if one of them changed
    SWEEP_ROWS rows: further rows may then need the change."""
    counts = [connection.execute(change).rowcount for change in changes]
    return max(counts) >= SWEEP_ROWS


def _fetch_one(
    connection: Connection, statement: Executable, convert: Callable[[RowMapping], T | None]
) -> T | None:
    row = connection.execute(statement).mappings().one_or_none()
    return convert(row) if row else None


def page_of_list(
    items: Sequence[Mapping[str, Any]], request: PageRequest
) -> Page[Mapping[str, Any]]:
    """Return a page of `items`, which are sorted from the oldest to the newest. Raises
    BadRequestError."""
    ordered = list(reversed(items)) if request.newest_first else list(items)
    if request.after_id is not None:
        ids = [item["id"] for item in ordered]
        if request.after_id not in ids:
            raise _not_in_list_error(request.after_id)
        ordered = ordered[ids.index(request.after_id) + 1 :]
    return Page(tuple(ordered[: request.limit]), len(ordered) > request.limit)


def _not_in_list_error(after_id: str) -> BadRequestError:
    message = f"Invalid 'after': there is no {after_id!r} in this list."
    return BadRequestError(message, param="after", code="invalid_value")


def check_quota(connection: Connection, owner: str, size: int, quota: int, now: float) -> None:
    """Raise QuotaError if another file of `size` bytes would exceed `MAX_FILES` or the owner's
    `quota` in bytes."""
    queries = (_select_upload_usage(owner, now), _select_container_usage(owner, now))
    sums = [connection.execute(query).one() for query in queries]
    files, used = (sum(column) for column in zip(*sums, strict=True))
    if files >= MAX_FILES:
        raise QuotaError(f"the limit of {MAX_FILES} files is reached")
    if used + size > quota:
        raise QuotaError(f"{used} of {quota} bytes are used")


def _select_upload_usage(owner: str, now: float) -> Select[int, int]:
    """Select the number and the bytes of the owner's uploads."""
    return select(func.count(), func.coalesce(func.sum(FILES.c.bytes), 0)).where(
        FILES.c.owner == owner, FILES.c.deleted_at.is_(None), FILES.c.expires_at > now
    )


def _select_container_usage(owner: str, now: float) -> Select[int, int]:
    """Select the number and the bytes of the files that the owner put into containers."""
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


def delete_beyond_quota(table: Table, owner: str, *, max_rows: int, max_bytes: int) -> Delete:
    """Return the statement that deletes an owner's oldest rows beyond `max_rows` or `max_bytes`.

    The statement never deletes rows without an expiry, nor the newest row with an expiry.
    """
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
