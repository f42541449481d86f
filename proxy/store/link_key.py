"""The key that signs the links to files. All processes that share a store have the same key."""

import secrets
import uuid
from contextlib import suppress
from pathlib import Path

from sqlalchemy import Connection, select

from proxy.store.database import upsert
from proxy.store.tables import SECRETS

KEY_BYTES = 32


def file_key(path: Path) -> bytes:
    """Return the key in a file, which is created if it does not exist. Raises OSError."""
    if not path.exists():
        # A hard link to a complete file, because several processes may create the key at once.
        finished = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
        finished.touch(mode=0o600)
        finished.write_bytes(secrets.token_bytes(KEY_BYTES))
        with suppress(FileExistsError):
            path.hardlink_to(finished)
        finished.unlink()
    return path.read_bytes()


def database_key(connection: Connection) -> bytes:
    """Return the key in the database, which is created if it does not exist."""
    row = {"name": "link-key", "value": secrets.token_bytes(KEY_BYTES)}
    connection.execute(upsert(connection, SECRETS).values(row).on_conflict_do_nothing())
    query = select(SECRETS.c.value).where(SECRETS.c.name == row["name"])
    return bytes(connection.execute(query).scalar_one())
