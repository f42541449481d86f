"""Open the stores of tests: in a directory, or in the servers of TEST_POSTGRESQL_URL and
TEST_S3_BUCKET."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.store import S3Store
from sqlalchemy import URL, Connection, create_engine

from proxy.store import postgresql, sqlite
from proxy.store.store import Store
from proxy.store.tables import METADATA

sqlite_only = pytest.mark.skipif(
    "TEST_POSTGRESQL_URL" in os.environ, reason="it is about files, or processes without messages"
)


def open_store(directory: Path, *settings: Any, **options: Any) -> Store:
    """Open the store of a directory. Two stores of one directory share their records."""
    return Store(
        directory,
        *settings,
        database_url=shared_database(directory),
        blobs_url=shared_blobs(directory),
        **options,
    )


def shared_database(directory: Path) -> URL | None:
    """Return the URL of the PostgreSQL database that belongs to a directory; None: the store's
    database is a file in the directory."""
    server = os.environ.get("TEST_POSTGRESQL_URL")
    if server is None:
        return None
    schema = _name_of(directory)
    url = postgresql.database_url(server)
    engine = postgresql.create_pool(url, 1)
    with engine.begin() as connection:
        connection.exec_driver_sql(f"CREATE SCHEMA IF NOT EXISTS {schema}")
    engine.dispose()
    return url.update_query_dict({"options": f"-csearch_path={schema}"})


def shared_blobs(directory: Path) -> str | None:
    """Return the S3 URL for the blobs that belong to a directory; None: they are files in it."""
    bucket = os.environ.get("TEST_S3_BUCKET")
    return f"s3://{bucket}/{_name_of(directory)}" if bucket else None


def _name_of(directory: Path) -> str:
    return "s" + hashlib.sha256(str(directory.resolve()).encode()).hexdigest()[:24]


def database_of(directory: Path) -> URL:
    """Return the URL of the database that belongs to a directory."""
    return shared_database(directory) or sqlite.database_url(directory / "store.sqlite3")


def stored_blobs(directory: Path) -> dict[str, bytes]:
    """Return the contents of all blobs that belong to a directory, by name."""
    if url := shared_blobs(directory):
        bucket = S3Store.from_url(url, client_options={"allow_http": True})
        names = [found["path"] for batch in obstore.list(bucket) for found in batch]
        return {name: bytes(obstore.get(bucket, name).bytes()) for name in names}
    return {path.name: path.read_bytes() for path in (directory / "blobs").iterdir()}


def blob_files(directory: Path) -> Path:
    """Return the folder with the blobs, or with their cached copies, that belong to a directory."""
    return directory / ("blob-cache" if shared_blobs(directory) else "blobs")


def overwrite_blob(directory: Path, name: str, content: bytes | None) -> None:
    """Replace the content of a blob that belongs to a directory, or remove the blob if `content` is
    None, as a fault outside the store would."""
    if url := shared_blobs(directory):
        bucket = S3Store.from_url(url, client_options={"allow_http": True})
        if content is None:
            obstore.delete(bucket, name)
        else:
            obstore.put(bucket, name, content)
    elif content is None:
        (directory / "blobs" / name).unlink()
    else:
        (directory / "blobs" / name).write_bytes(content)


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
