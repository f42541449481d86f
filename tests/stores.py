"""Open the stores of tests: with SQLite, or with the PostgreSQL server of TEST_POSTGRESQL_URL."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, create_engine

from proxy.store import postgresql, sqlite
from proxy.store.store import Store
from proxy.store.tables import METADATA


def open_store(directory: Path, *settings: Any, **options: Any) -> Store:
    """Open the store of a directory. Two stores of one directory share their records."""
    return Store(directory, *settings, database_url=shared_database(directory), **options)


def shared_database(directory: Path) -> URL | None:
    """Return the URL of the PostgreSQL database that belongs to a directory; None: the store's
    database is a file in the directory."""
    server = os.environ.get("TEST_POSTGRESQL_URL")
    if server is None:
        return None
    schema = "s" + hashlib.sha256(str(directory.resolve()).encode()).hexdigest()[:24]
    url = postgresql.database_url(server)
    engine = postgresql.create_pool(url, 1)
    with engine.begin() as connection:
        connection.exec_driver_sql(f"CREATE SCHEMA IF NOT EXISTS {schema}")
    engine.dispose()
    return url.update_query_dict({"options": f"-csearch_path={schema}"})


def database_of(directory: Path) -> URL:
    """Return the URL of the database that belongs to a directory."""
    return shared_database(directory) or sqlite.database_url(directory / "store.sqlite3")


@contextmanager
def connected(directory: Path) -> Iterator[Connection]:
    """Connect to the database that belongs to a directory, as another process would. Each statement
    is a transaction."""
    engine = create_engine(database_of(directory), isolation_level="AUTOCOMMIT")
    try:
        with engine.connect() as connection:
            yield connection
    finally:
        engine.dispose()


@contextmanager
def writes_blocked(directory: Path) -> Iterator[None]:
    """Let all transactions that write wait until the end of the block."""
    with connected(directory) as connection:
        if connection.dialect.name == "sqlite":
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        else:
            connection.exec_driver_sql("BEGIN")
            tables = ", ".join(METADATA.tables)
            connection.exec_driver_sql(f"LOCK TABLE {tables} IN EXCLUSIVE MODE")
        try:
            yield
        finally:
            connection.exec_driver_sql("ROLLBACK")
