"""Containers: what runs produced, and what clients put beside it, under one name."""

import json
import uuid
from collections.abc import Callable, Collection

from sqlalchemy import ColumnElement, Connection, RowMapping, delete, insert, select, update

from policies.sessions import container_id as new_id
from proxy.store.blobs import Blobs
from proxy.store.database import Database, is_full, oldest
from proxy.store.paging import rows_of
from proxy.store.records import Container, ContainerWish, Page, Slice
from proxy.store.tables import CONTAINER_FILES, CONTAINERS


class ContainerShelf:
    """Everybody's containers; each owner sees its own."""

    def __init__(self, database: Database, blobs: Blobs, now: Callable[[], float]) -> None:
        self._database = database
        self._blobs = blobs
        self._now = now

    async def create(
        self, owner: str, wish: ContainerWish, container_id: str | None = None
    ) -> Container:
        """Make a container; one that is there already under that id is left as it is, one that has
        been there is new."""
        container = Container(
            id=container_id or new_id(owner, uuid.uuid4().hex),
            name=wish.name,
            minutes=wish.minutes,
            memory_limit=wish.memory_limit,
            network_policy=wish.network_policy,
            created_at=int(self._now()),
            last_active_at=int(self._now()),
        )

        def work(connection: Connection) -> Container:
            same = CONTAINERS.c.id == container.id
            connection.execute(delete(CONTAINERS).where(same, ~is_live(self._now())))
            if row := connection.execute(select(CONTAINERS).where(same)).mappings().one_or_none():
                return _container(row)
            connection.execute(insert(CONTAINERS), {"owner": owner, **_values(container)})
            return container

        return await self._database.write(work)

    async def use(self, owner: str, container_id: str) -> Container | None:
        """The owner's container, or None; from now on it lives its whole time again."""
        now = int(self._now())
        change = (
            update(CONTAINERS)
            .where(_mine(owner), CONTAINERS.c.id == container_id, is_live(now))
            .values(last_active_at=now, expires_at=now + CONTAINERS.c.minutes * 60)
            .returning(*CONTAINERS.c)
        )

        def work(connection: Connection) -> Container | None:
            row = connection.execute(change).mappings().one_or_none()
            return _container(row) if row else None

        return await self._database.write(work)

    async def page(self, owner: str, asked: Page, name: str | None) -> Slice[Container]:
        """A part of the owner's containers. Raises BadRequestError."""
        wanted = is_live(self._now())
        if name is not None:
            wanted &= CONTAINERS.c.name == name

        def work(connection: Connection) -> Slice[Container]:
            rows, more = rows_of(connection, CONTAINERS, asked, mine=_mine(owner), wanted=wanted)
            return Slice(tuple(map(_container, rows)), more)

        return await self._database.read(work)

    async def delete(self, owner: str, container_id: str) -> bool:
        """Forget a container and its files; whether there was one."""
        now = int(self._now())
        gone = (
            update(CONTAINERS)
            .where(_mine(owner), CONTAINERS.c.id == container_id, is_live(now))
            .values(deleted_at=now)
        )
        files = (
            update(CONTAINER_FILES)
            .where(CONTAINER_FILES.c.container_id == container_id, _FILE_KEPT)
            .values(deleted_at=now)
            .returning(CONTAINER_FILES.c.blob)
        )

        def work(connection: Connection) -> Collection[str] | None:
            found = connection.execute(gone).rowcount
            return connection.execute(files).scalars().all() if found else None

        blobs = await self._database.write(work)
        await self._blobs.remove(list(blobs or ()))
        return blobs is not None

    def expire(self, connection: Connection, now: int, forget_before: int) -> bool:
        """Delete what is past its time, and rows that were deleted long ago."""
        kept = CONTAINERS.c.deleted_at.is_(None)
        past = oldest(CONTAINERS, (CONTAINERS.c.expires_at <= now) & kept)
        dead = select(CONTAINERS.c.id).where(CONTAINERS.c.deleted_at.is_not(None))
        files = oldest(CONTAINER_FILES, CONTAINER_FILES.c.container_id.in_(dead) & _FILE_KEPT)
        # A container's row stays until its files are marked: else nothing would lead to them.
        with_files = select(CONTAINER_FILES.c.container_id).where(_FILE_KEPT)
        empty = CONTAINERS.c.id.not_in(with_files) & (CONTAINERS.c.deleted_at < forget_before)
        long_ago = oldest(CONTAINER_FILES, CONTAINER_FILES.c.deleted_at < forget_before)
        return is_full(
            connection,
            update(CONTAINERS).where(CONTAINERS.c.seq.in_(past)).values(deleted_at=now),
            update(CONTAINER_FILES).where(CONTAINER_FILES.c.seq.in_(files)).values(deleted_at=now),
            delete(CONTAINER_FILES).where(CONTAINER_FILES.c.seq.in_(long_ago)),
            delete(CONTAINERS).where(CONTAINERS.c.seq.in_(oldest(CONTAINERS, empty))),
        )

    def blobs(self, connection: Connection) -> dict[str, int]:
        """The contents that are in use, and how long they are."""
        files = select(CONTAINER_FILES.c.blob, CONTAINER_FILES.c.bytes).where(_FILE_KEPT)
        return {row.blob: row.bytes for row in connection.execute(files)}

    def lose(self, connection: Connection, blobs: Collection[str], now: int) -> None:
        """Delete what has lost its content."""
        for blob in blobs:
            lost = update(CONTAINER_FILES).where(CONTAINER_FILES.c.blob == blob, _FILE_KEPT)
            connection.execute(lost.values(deleted_at=now))


_FILE_KEPT = CONTAINER_FILES.c.deleted_at.is_(None)


def is_live(now: float) -> ColumnElement[bool]:
    """Whether a container is there."""
    return CONTAINERS.c.deleted_at.is_(None) & (CONTAINERS.c.expires_at > now)


def _mine(owner: str) -> ColumnElement[bool]:
    return CONTAINERS.c.owner == owner


def _values(container: Container) -> dict[str, str | int | None]:
    policy = container.network_policy
    return {
        "id": container.id,
        "name": container.name,
        "minutes": container.minutes,
        "memory_limit": container.memory_limit,
        "network_policy": json.dumps(policy) if policy else None,
        "created_at": container.created_at,
        "last_active_at": container.last_active_at,
        "expires_at": container.last_active_at + container.minutes * 60,
    }


def _container(row: RowMapping) -> Container:
    policy = row["network_policy"]
    return Container(
        id=row["id"],
        name=row["name"],
        minutes=row["minutes"],
        memory_limit=row["memory_limit"],
        network_policy=json.loads(policy) if policy else None,
        created_at=row["created_at"],
        last_active_at=row["last_active_at"],
    )
