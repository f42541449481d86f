"""Containers of OpenAI's API, and their files, which runs and clients add."""

import json
import uuid
from collections.abc import Callable, Collection, Mapping
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    RowMapping,
    delete,
    func,
    insert,
    select,
    true,
    update,
)

from policies.sessions import container_id as new_id
from policies.workspace import input_path
from proxy.store.blobs import Blob, BlobStore
from proxy.store.database import Database, check_quota, oldest_rows, sweep_batch
from proxy.store.records import (
    Container,
    ContainerFile,
    FileSource,
    NewContainer,
    Page,
    PageRequest,
)
from proxy.store.tables import CONTAINER_FILES, CONTAINERS

_FILE_NOT_DELETED = CONTAINER_FILES.c.deleted_at.is_(None)


class ContainerRepository:
    """Stores the containers of all owners. Each owner sees only its own containers."""

    def __init__(self, database: Database, blobs: BlobStore, now: Callable[[], float]) -> None:
        self._database = database
        self._blobs = blobs
        self._now = now

    async def create(
        self, owner: str, new_container: NewContainer, container_id: str | None = None
    ) -> Container:
        """Create a container and return it. If a live container has the same id, return the live
        container instead; an expired container with the same id is replaced, and its files are
        deleted."""
        container = Container(
            id=container_id or new_id(owner, uuid.uuid4().hex),
            name=new_container.name,
            minutes=new_container.minutes,
            memory_limit=new_container.memory_limit,
            network_policy=new_container.network_policy,
            created_at=int(self._now()),
            last_active_at=int(self._now()),
        )

        def transaction(connection: Connection) -> tuple[Container, Collection[str]]:
            same = CONTAINERS.c.id == container.id
            expired = delete(CONTAINERS).where(same, ~_is_live(self._now()))
            is_replaced = connection.execute(expired).rowcount > 0
            if row := connection.execute(select(CONTAINERS).where(same)).mappings().one_or_none():
                return _container(row), ()
            connection.execute(insert(CONTAINERS), {"owner": owner, **_row_values(container)})
            blobs = self._delete_files(connection, container.id) if is_replaced else ()
            return container, blobs

        created, blobs = await self._database.write(transaction)
        await self._blobs.remove(list(blobs))
        return created

    async def touch(self, owner: str, container_id: str) -> Container | None:
        """Postpone the expiry of the owner's container and return the container, or None."""
        now = int(self._now())
        change = (
            update(CONTAINERS)
            .where(_is_container(container_id, owner, now))
            .values(last_active_at=now, expires_at=now + CONTAINERS.c.minutes * 60)
            .returning(*CONTAINERS.c)
        )
        return await self._database.write_one(change, _container)

    async def page(self, owner: str, request: PageRequest, name: str | None) -> Page[Container]:
        """Return a page of the owner's containers. Raises BadRequestError."""
        visible = _is_live(self._now())
        if name is not None:
            visible &= CONTAINERS.c.name == name
        return await self._database.read_page(
            CONTAINERS, request, _container, scope=CONTAINERS.c.owner == owner, visible=visible
        )

    async def delete(self, owner: str, container_id: str) -> bool:
        """Delete a container and its files. Return False if there is no such container."""
        now = int(self._now())
        container = update(CONTAINERS).where(_is_container(container_id, owner, now))

        def transaction(connection: Connection) -> Collection[str] | None:
            found = connection.execute(container.values(deleted_at=now)).rowcount
            return self._delete_files(connection, container_id) if found else None

        blobs = await self._database.write(transaction)
        await self._blobs.remove(list(blobs or ()))
        return blobs is not None

    def expire(self, connection: Connection, now: int, forget_before: int) -> bool:
        """Delete expired containers and their files. See Repository."""
        is_expired = (CONTAINERS.c.expires_at <= now) & CONTAINERS.c.deleted_at.is_(None)
        deleted = select(CONTAINERS.c.id).where(CONTAINERS.c.deleted_at.is_not(None))
        orphans = CONTAINER_FILES.c.container_id.in_(deleted) & _FILE_NOT_DELETED
        # The row of a container stays until its files are marked as deleted: the query for orphans
        # needs the row.
        with_files = select(CONTAINER_FILES.c.container_id).where(_FILE_NOT_DELETED)
        is_empty = CONTAINERS.c.id.not_in(with_files) & (CONTAINERS.c.deleted_at < forget_before)
        old_files = oldest_rows(CONTAINER_FILES, CONTAINER_FILES.c.deleted_at < forget_before)
        return sweep_batch(
            connection,
            update(CONTAINERS).where(oldest_rows(CONTAINERS, is_expired)).values(deleted_at=now),
            update(CONTAINER_FILES)
            .where(oldest_rows(CONTAINER_FILES, orphans))
            .values(deleted_at=now),
            delete(CONTAINER_FILES).where(old_files),
            delete(CONTAINERS).where(oldest_rows(CONTAINERS, is_empty)),
        )

    def blob_sizes(self, connection: Connection) -> dict[str, int]:
        files = select(CONTAINER_FILES.c.blob, CONTAINER_FILES.c.bytes).where(_FILE_NOT_DELETED)
        return {row.blob: row.bytes for row in connection.execute(files)}

    def mark_missing(self, connection: Connection, blobs: Collection[str], now: int) -> None:
        for blob in blobs:
            missing = update(CONTAINER_FILES).where(
                CONTAINER_FILES.c.blob == blob, _FILE_NOT_DELETED
            )
            connection.execute(missing.values(deleted_at=now))

    def _delete_files(self, connection: Connection, container_id: str) -> Collection[str]:
        """Mark all files of a container as deleted. Return the names of their blobs."""
        files = (
            update(CONTAINER_FILES)
            .where(CONTAINER_FILES.c.container_id == container_id, _FILE_NOT_DELETED)
            .values(deleted_at=int(self._now()))
            .returning(CONTAINER_FILES.c.blob)
        )
        return connection.execute(files).scalars().all()


class ContainerFileRepository:
    """Stores the files in the containers of all owners."""

    def __init__(self, database: Database, blobs: BlobStore, now: Callable[[], float]) -> None:
        self._database = database
        self._blobs = blobs
        self._now = now

    async def add_artifact(
        self, owner: str, container_id: str, blob: Blob, *, file_id: str, path: str, mime_type: str
    ) -> None:
        """Store a file that a run has produced, in place of the owner's file with the same id. No
        quota applies."""
        same = delete(CONTAINER_FILES).where(
            CONTAINER_FILES.c.id == file_id, CONTAINER_FILES.c.owner == owner
        )

        def transaction(connection: Connection) -> list[str]:
            blobs = connection.execute(same.returning(CONTAINER_FILES.c.blob)).scalars().all()
            fields = {"id": file_id, "container_id": container_id, "path": path}
            self._insert(connection, owner, blob, **fields, mime_type=mime_type, source="assistant")
            return list(blobs)

        async with self._blobs.remove_on_error(blob):
            replaced = await self._database.write(transaction)
        await self._blobs.remove(replaced)

    async def put(
        self,
        owner: str,
        container_id: str,
        blob: Blob,
        *,
        filename: str,
        mime_type: str,
        quota: int,
    ) -> ContainerFile:
        """Store a client's file under a path that is not in use. Raises QuotaError."""
        file_id = f"cfile_{uuid.uuid4().hex}"
        paths = select(CONTAINER_FILES.c.path).where(
            CONTAINER_FILES.c.container_id == container_id, _FILE_NOT_DELETED
        )

        def transaction(connection: Connection) -> ContainerFile:
            check_quota(connection, owner, blob.bytes, quota, self._now())
            path = input_path(filename, set(connection.execute(paths).scalars()))
            fields = {"id": file_id, "container_id": container_id, "path": path}
            return self._insert(
                connection, owner, blob, **fields, mime_type=mime_type, source="user"
            )

        async with self._blobs.remove_on_error(blob):
            return await self._database.write(transaction)

    async def get(self, container_id: str, file_id: str, owner: str | None) -> ContainerFile | None:
        """Return a file, or None if it does not exist or its blob is missing or has another size.
        If `owner` is None, the file may belong to any owner."""
        query = select(CONTAINER_FILES).where(
            self._is_live_file(container_id, owner), CONTAINER_FILES.c.id == file_id
        )

        def convert(row: RowMapping) -> ContainerFile | None:
            intact = self._blobs.is_intact(row["blob"], row["bytes"])
            return _container_file(row) if intact else None

        return await self._database.read_one(query, convert)

    async def page(
        self, owner: str, container_id: str, request: PageRequest, directory: str | None
    ) -> Page[ContainerFile]:
        """Return a page of a container's files. Raises BadRequestError."""
        table = CONTAINER_FILES
        return await self._database.read_page(
            table,
            request,
            _container_file,
            scope=(table.c.owner == owner) & (table.c.container_id == container_id),
            visible=self._is_live_file(container_id, owner) & _is_under(directory),
        )

    async def all(
        self, container_id: str, owner: str | None, directory: str | None
    ) -> list[ContainerFile] | None:
        """Return the files of a container at `directory` and below it, or all files if it is None,
        sorted by path. Return None if the container does not exist."""
        container = select(CONTAINERS.c.id).where(_is_container(container_id, owner, self._now()))
        query = select(CONTAINER_FILES).where(
            self._is_live_file(container_id, owner), _is_under(directory)
        )

        def transaction(connection: Connection) -> list[ContainerFile] | None:
            if connection.execute(container).one_or_none() is None:
                return None
            rows = connection.execute(query.order_by(CONTAINER_FILES.c.path)).mappings()
            return [_container_file(row) for row in rows]

        return await self._database.read(transaction)

    async def delete(self, owner: str, container_id: str, file_id: str) -> bool:
        """Delete a file. Return False if there is no such file."""
        change = (
            update(CONTAINER_FILES)
            .where(self._is_live_file(container_id, owner), CONTAINER_FILES.c.id == file_id)
            .values(deleted_at=int(self._now()))
            .returning(CONTAINER_FILES.c.blob)
        )
        blobs = await self._database.write(
            lambda connection: connection.execute(change).scalars().all()
        )
        await self._blobs.remove(blobs)
        return bool(blobs)

    def _is_live_file(self, container_id: str, owner: str | None) -> ColumnElement[bool]:
        container = select(CONTAINERS.c.id).where(_is_container(container_id, owner, self._now()))
        return CONTAINER_FILES.c.container_id.in_(container) & _FILE_NOT_DELETED

    def _insert(
        self, connection: Connection, owner: str, blob: Blob, *, source: FileSource, **fields: str
    ) -> ContainerFile:
        row = {
            **fields,
            "bytes": blob.bytes,
            "sha256": blob.sha256,
            "blob": blob.name,
            "source": source,
            "created_at": int(self._now()),
        }
        connection.execute(insert(CONTAINER_FILES), {"owner": owner, **row})
        return _container_file(row)


def _is_live(now: float) -> ColumnElement[bool]:
    return CONTAINERS.c.deleted_at.is_(None) & (CONTAINERS.c.expires_at > now)


def _row_values(container: Container) -> dict[str, str | int | None]:
    policy = container.network_policy
    return {
        **{name: getattr(container, name) for name in Container.__slots__},
        "network_policy": json.dumps(policy) if policy else None,
        "expires_at": container.last_active_at + container.minutes * 60,
    }


def _container(row: RowMapping) -> Container:
    fields = {name: row[name] for name in Container.__slots__}
    policy = fields["network_policy"]
    return Container(**{**fields, "network_policy": json.loads(policy) if policy else None})


def _is_container(container_id: str, owner: str | None, now: float) -> ColumnElement[bool]:
    found = (CONTAINERS.c.id == container_id) & _is_live(now)
    return found if owner is None else found & (CONTAINERS.c.owner == owner)


def _is_under(directory: str | None) -> ColumnElement[bool]:
    """Return a condition for `directory` and the paths below it, or for all paths if `directory` is
    None."""
    if directory is None:
        return true()
    path = CONTAINER_FILES.c.path
    bare = directory.rstrip("/")
    return (path == bare) | (func.substr(path, 1, len(bare) + 1) == f"{bare}/")


def _container_file(row: Mapping[Any, Any]) -> ContainerFile:
    return ContainerFile(**{name: row[name] for name in ContainerFile.__slots__})
