"""SQLite as the store's database: one file, for the processes of one machine."""

import os
import sqlite3
from pathlib import Path

from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError

THREADS = 1
"""Number of threads for transactions. One is enough, because SQLite has one writer. An asyncio
driver is three times as slow as a thread."""
BUSY_MS = 10_000
"""Maximum wait for another process's transaction, in milliseconds."""
PRAGMAS = (
    f"busy_timeout = {BUSY_MS}",  # first, because the next one may have to wait
    "journal_mode = WAL",
    "synchronous = NORMAL",
)


def database_url(path: Path) -> URL:
    """Return the URL of a database file."""
    return URL.create("sqlite", database=str(path))


def open_engine(url: URL) -> Engine:
    """Return an engine for the file, which is created if it is missing. Raises OSError."""
    assert url.database
    fd = os.open(url.database, os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.close(fd)  # SQLite's other files copy the mode
    # Every use ends in commit or rollback: the pool's own rollback would cost 0.1 ms for nothing.
    engine = create_engine(url, pool_reset_on_return=None)
    event.listen(engine, "connect", _on_connect)
    event.listen(engine, "begin", _on_begin)
    return engine


def read_engine(engine: Engine) -> Engine:
    """Return the engine for transactions that only read."""
    return engine


def write_engine(engine: Engine) -> Engine:
    """Return the engine for transactions that may write."""
    return engine.execution_options(writes=True)


def migration_engine(engine: Engine) -> Engine:
    """Return the engine for the transaction that migrates the schema."""
    return write_engine(engine)


def is_conflict(error: DBAPIError) -> bool:
    """Return False: a transaction waits for the transactions of other processes."""
    return False


def is_unavailable(error: DBAPIError) -> bool:
    """Return False: the database is a file."""
    return False


def schema_version(connection: Connection) -> int:
    """Return the number of migration steps that were applied. The caller's transaction, which may
    write, locks the database until it ends."""
    return int(connection.exec_driver_sql("PRAGMA user_version").scalar_one())


def set_schema_version(connection: Connection, version: int) -> None:
    """Store the number of migration steps that were applied."""
    connection.exec_driver_sql(f"PRAGMA user_version = {version}")


def adapt_statement(statement: str) -> str:
    """Return a statement of a migration step unchanged, because the steps are written for
    SQLite."""
    return statement


def _on_connect(connection: sqlite3.Connection, _record: object) -> None:
    connection.isolation_level = (
        None  # `_on_begin` begins transactions: sqlite3 would begin too late
    )
    for pragma in PRAGMAS:
        connection.execute(f"PRAGMA {pragma}")


def _on_begin(connection: Connection) -> None:
    # With BEGIN, a transaction that reads first and then writes fails if another process writes
    # meanwhile. BEGIN IMMEDIATE waits for the other process instead.
    writes = connection.get_execution_options().get("writes")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
