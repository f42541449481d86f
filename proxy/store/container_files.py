"""The files of containers."""

import uuid
from collections.abc import Callable

from sqlalchemy import ColumnElement, Connection, RowMapping, delete, func, insert, select, update

from policies.workspace import input_path
from proxy.store.blobs import Blob, Blobs
from proxy.store.containers import is_live
from proxy.store.database import Database
from proxy.store.paging import rows_of
from proxy.store.quota import require_room
from proxy.store.records import ContainerFile, Maker, Page, Slice
from proxy.store.tables import CONTAINER_FILES, CONTAINERS


class ContainerFileShelf:
    """Everybody's files of containers; each owner sees its own."""

    def __init__(self, database: Database, blobs: Blobs, now: Callable[[], float]) -> None:
        self._database = database
        self._blobs = blobs
        self._now = now

    async def produce(
        self, owner: str, container_id: str, blob: Blob, *, file_id: str, path: str, mime_type: str
    ) -> None:
        """Keep what a run has made, in the place of what it made there before."""
        file = self._file(file_id, container_id, path, mime_type, blob, "assistant")
        before = delete(CONTAINER_FILES).where(
            CONTAINER_FILES.c.id == file_id, CONTAINER_FILES.c.owner == owner
        )

        def work(connection: Connection) -> list[str]:
            blobs = connection.execute(before.returning(CONTAINER_FILES.c.blob)).scalars().all()
            connection.execute(insert(CONTAINER_FILES), {"owner": owner, **_values(file)})
            return list(blobs)

        async with self._blobs.claimed(blob):
            replaced = await self._database.write(work)
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
        """Keep what a client puts in, under a path of its own. Raises QuotaError."""
        file_id = f"cfile_{uuid.uuid4().hex}"
        paths = select(CONTAINER_FILES.c.path).where(
            CONTAINER_FILES.c.container_id == container_id, _KEPT
        )

        def work(connection: Connection) -> ContainerFile:
            require_room(connection, owner, blob.bytes, quota, self._now())
            path = input_path(filename, set(connection.execute(paths).scalars()))
            file = self._file(file_id, container_id, path, mime_type, blob, "user")
            connection.execute(insert(CONTAINER_FILES), {"owner": owner, **_values(file)})
            return file

        async with self._blobs.claimed(blob):
            return await self._database.write(work)

    async def get(self, container_id: str, file_id: str, owner: str | None) -> ContainerFile | None:
        """A file, or None; the owner's alone, or with no owner given anybody's."""
        query = select(CONTAINER_FILES).where(
            self._live(container_id, owner), CONTAINER_FILES.c.id == file_id
        )

        def work(connection: Connection) -> ContainerFile | None:
            row = connection.execute(query).mappings().one_or_none()
            if row is None or not self._blobs.is_whole(row["blob"], row["bytes"]):
                return None
            return _file(row)

        return await self._database.read(work)

    async def page(
        self, owner: str, container_id: str, asked: Page, under: str | None
    ) -> Slice[ContainerFile]:
        """A part of a container's files. Raises BadRequestError."""
        mine = (CONTAINER_FILES.c.owner == owner) & (CONTAINER_FILES.c.container_id == container_id)
        wanted = self._live(container_id, owner) & _below(under)

        def work(connection: Connection) -> Slice[ContainerFile]:
            rows, more = rows_of(connection, CONTAINER_FILES, asked, mine=mine, wanted=wanted)
            return Slice(tuple(map(_file, rows)), more)

        return await self._database.read(work)

    async def all(
        self, container_id: str, owner: str | None, under: str | None
    ) -> list[ContainerFile] | None:
        """A container's files by path; None where there is no such container."""
        container = select(CONTAINERS.c.id).where(_open(container_id, owner, self._now()))
        query = select(CONTAINER_FILES).where(self._live(container_id, owner), _below(under))

        def work(connection: Connection) -> list[ContainerFile] | None:
            if connection.execute(container).one_or_none() is None:
                return None
            rows = connection.execute(query.order_by(CONTAINER_FILES.c.path)).mappings()
            return [_file(row) for row in rows]

        return await self._database.read(work)

    async def delete(self, owner: str, container_id: str, file_id: str) -> bool:
        """Forget a file; whether there was one."""
        change = (
            update(CONTAINER_FILES)
            .where(self._live(container_id, owner), CONTAINER_FILES.c.id == file_id)
            .values(deleted_at=int(self._now()))
            .returning(CONTAINER_FILES.c.blob)
        )
        blobs = await self._database.write(lambda c: c.execute(change).scalars().all())
        await self._blobs.remove(blobs)
        return bool(blobs)

    def _live(self, container_id: str, owner: str | None) -> ColumnElement[bool]:
        container = select(CONTAINERS.c.id).where(_open(container_id, owner, self._now()))
        return CONTAINER_FILES.c.container_id.in_(container) & _KEPT

    def _file(
        self,
        file_id: str,
        container_id: str,
        path: str,
        mime_type: str,
        blob: Blob,
        source: Maker,
    ) -> ContainerFile:
        return ContainerFile(
            id=file_id,
            container_id=container_id,
            path=path,
            mime_type=mime_type,
            bytes=blob.bytes,
            sha256=blob.sha256,
            blob=blob.name,
            source=source,
            created_at=int(self._now()),
        )


_KEPT = CONTAINER_FILES.c.deleted_at.is_(None)


def _open(container_id: str, owner: str | None, now: float) -> ColumnElement[bool]:
    found = (CONTAINERS.c.id == container_id) & is_live(now)
    return found if owner is None else found & (CONTAINERS.c.owner == owner)


def _below(directory: str | None) -> ColumnElement[bool]:
    """Whether a path is the given one or lies below it."""
    if directory is None:
        return CONTAINER_FILES.c.path.is_not(None)
    place = directory.rstrip("/")
    begins = func.substr(CONTAINER_FILES.c.path, 1, len(place) + 1)
    return (CONTAINER_FILES.c.path == place) | (begins == f"{place}/")


def _values(file: ContainerFile) -> dict[str, str | int]:
    return {name: getattr(file, name) for name in ContainerFile.__slots__}


def _file(row: RowMapping) -> ContainerFile:
    return ContainerFile(**{name: row[name] for name in ContainerFile.__slots__})
