"""The database: one file, one thread, whole transactions."""

import asyncio
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from sqlalchemy import (
    URL,
    ColumnElement,
    Connection,
    Delete,
    Engine,
    Select,
    Table,
    Update,
    create_engine,
    event,
    select,
)
from sqlalchemy.exc import DBAPIError

from proxy.store.errors import StoreError
from proxy.store.migrations import migrate

T = TypeVar("T")

BUSY_MS = 10_000
"""How long a transaction waits for another process's."""
SWEEP_ROWS = 500
"""How many rows of a table a sweep changes in one transaction: requests wait for no more."""
PRAGMAS = (
    f"busy_timeout = {BUSY_MS}",  # first: the next one may have to wait too
    "journal_mode = WAL",
    "synchronous = NORMAL",
)


class Database:
    """Rows that outlive the process; several processes may have the same file open."""

    def __init__(self, path: Path) -> None:
        """Opens the file, and makes or brings up to date what is in it. Raises StoreError."""
        try:
            self._engine = _engine(path)
            self._writing = self._engine.execution_options(writes=True)
            with self._writing.begin() as connection:
                migrate(connection)
        except (DBAPIError, OSError, StoreError) as error:
            raise StoreError(f"{path}: {getattr(error, 'orig', None) or error}") from error
        # One thread: SQLite has one writer, and a loop of its own costs thrice the time (README).
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")

    async def read(self, work: Callable[[Connection], T]) -> T:
        """Look something up."""
        return await self._run(self._engine, work)

    async def write(self, work: Callable[[Connection], T]) -> T:
        """Change something, wholly or not at all."""
        return await self._run(self._writing, work)

    async def read_aside(self, work: Callable[[Connection], T]) -> T:
        """Look up much at once, while the others go on."""
        return await asyncio.to_thread(_in_transaction, self._engine, work)

    async def _run(self, engine: Engine, work: Callable[[Connection], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, _in_transaction, engine, work
        )

    def close(self) -> None:
        """Finish what was begun, and close the file. Safe to call twice."""
        self._thread.shutdown()
        self._engine.dispose()


def oldest(table: Table, where: ColumnElement[bool]) -> Select[int]:
    """The `seq` of the rows that a sweep changes in one transaction."""
    return select(table.c.seq).where(where).order_by(table.c.seq).limit(SWEEP_ROWS)


def is_full(connection: Connection, *changes: Delete | Update) -> bool:
    """Make changes to `oldest` rows; whether one of them may have left some."""
    counts = [connection.execute(change).rowcount for change in changes]
    return max(counts) >= SWEEP_ROWS


def _in_transaction(engine: Engine, work: Callable[[Connection], T]) -> T:
    with engine.begin() as connection:
        return work(connection)


def _engine(path: Path) -> Engine:
    os.close(os.open(path, os.O_CREAT | os.O_CLOEXEC, 0o600))  # its companions take its mode
    # Every use ends in commit or rollback: the pool's own rollback, 0.1 ms, has nothing to do.
    engine = create_engine(URL.create("sqlite", database=str(path)), pool_reset_on_return=None)
    event.listen(engine, "connect", _prepare)
    event.listen(engine, "begin", _begin)
    return engine


def _prepare(connection: sqlite3.Connection, _record: object) -> None:
    connection.isolation_level = None  # _begin begins: sqlite3 itself would begin too late
    for pragma in PRAGMAS:
        connection.execute(f"PRAGMA {pragma}")


def _begin(connection: Connection) -> None:
    # A transaction that reads first and writes then cannot wait for another writer: it fails.
    writes = connection.get_execution_options().get("writes")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
