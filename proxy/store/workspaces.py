"""Snapshots of the files of sessions."""

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence

from sqlalchemy import ColumnElement, Connection, RowMapping, case, delete, func, insert, select

from policies.sessions import Session, SessionSettings, SessionState
from proxy.store.blobs import Blob, BlobStore
from proxy.store.database import Database, oldest_rows, sweep_batch
from proxy.store.tables import WORKSPACES
from sandbox_runtime.errors import FileMissingError
from sandbox_runtime.sandbox import Sink

MAX_STATES = 8
"""Maximum number of snapshots of one session. A conversation can continue from each of them."""


class WorkspaceRepository:
    """Stores the snapshots of all owners. See `SnapshotStore`."""

    def __init__(
        self,
        database: Database,
        blobs: BlobStore,
        now: Callable[[], float],
        settings: SessionSettings,
    ) -> None:
        self._database = database
        self._blobs = blobs
        self._now = now
        self._settings = settings

    async def save(self, state: SessionState, write: Callable[[Sink], Awaitable[int]]) -> None:
        async with self._blobs.open_writer() as writer:
            await write(writer.write)
            blob = await writer.commit()
        await self._add(state, blob)

    async def alias(self, state: SessionState, target: SessionState) -> None:
        blob = await self._find_blob(target)
        if blob and state != target:
            await self._add(state, await self._blobs.copy(blob))

    async def newest_state_name(self, session: Session) -> str | None:
        newest = (
            select(WORKSPACES.c.state)
            .where(_in_session(session), self._is_live())
            .order_by(_NEWEST_FIRST)
        )
        return await self._database.read(lambda c: c.execute(newest).scalars().first())

    async def stored_names(self, session: Session, names: Sequence[str]) -> set[str]:
        if not names:
            return set()
        known = select(WORKSPACES.c.state).where(
            _in_session(session), WORKSPACES.c.state.in_(names), self._is_live()
        )
        return await self._database.read(lambda c: set(c.execute(known).scalars()))

    async def read(self, state: SessionState) -> AsyncIterator[bytes]:
        blob = await self._find_blob(state)
        if blob is None:
            raise FileMissingError(f"the snapshot of {state.session.name} no longer exists")
        async for piece in self._blobs.read(blob.name):
            yield piece

    async def discard(self, session: Session) -> None:
        rows = delete(WORKSPACES).where(_in_session(session)).returning(WORKSPACES.c.blob)
        blobs = await self._database.write(lambda c: c.execute(rows).scalars().all())
        await self._blobs.remove(blobs)

    def expire(self, connection: Connection, now: int, forget_before: int) -> bool:
        """Delete expired snapshots. See Repository."""
        expired = oldest_rows(WORKSPACES, WORKSPACES.c.expires_at <= now)
        return sweep_batch(connection, delete(WORKSPACES).where(expired))

    def blob_sizes(self, connection: Connection) -> dict[str, int]:
        rows = connection.execute(select(WORKSPACES.c.blob, WORKSPACES.c.bytes))
        return {row.blob: row.bytes for row in rows}

    def mark_missing(self, connection: Connection, blobs: Collection[str], now: int) -> None:
        for blob in blobs:
            connection.execute(delete(WORKSPACES).where(WORKSPACES.c.blob == blob))

    async def _find_blob(self, state: SessionState) -> Blob | None:
        query = select(WORKSPACES).where(
            _in_session(state.session), WORKSPACES.c.state == state.name, self._is_live()
        )

        def convert(row: RowMapping) -> Blob | None:
            blob = Blob(row["blob"], row["bytes"], row["sha256"])
            return blob if self._blobs.is_intact(blob.name, blob.bytes) else None

        return await self._database.read_one(query, convert)

    async def _add(self, state: SessionState, blob: Blob) -> None:
        now = int(self._now())
        row = {
            "owner": state.session.owner,
            "session": state.session.name,
            "state": state.name,
            "blob": blob.name,
            "bytes": blob.bytes,
            "sha256": blob.sha256,
            "expires_at": now + int(self._settings.retention_hours * 3600),
        }

        def transaction(connection: Connection) -> list[str]:
            same = delete(WORKSPACES).where(
                _in_session(state.session), WORKSPACES.c.state == state.name
            )
            replaced = list(connection.execute(same.returning(WORKSPACES.c.blob)).scalars())
            connection.execute(insert(WORKSPACES), row)
            return replaced + self._evict(connection, state.session)

        async with self._blobs.remove_on_error(blob):
            unused = await self._database.write(transaction)
        await self._blobs.remove(unused)

    def _evict(self, connection: Connection, session: Session) -> list[str]:
        """Delete the oldest snapshots beyond `MAX_STATES` of the session and beyond the owner's
        quota. Return the names of their blobs."""
        too_many = (
            select(WORKSPACES.c.seq)
            .where(_in_session(session))
            .order_by(_NEWEST_FIRST)
            .offset(MAX_STATES)
        )
        # The newest snapshot stays, whatever its size. Snapshots with the same content count once,
        # because their blobs may be links to one file.
        copy_number = func.row_number().over(
            partition_by=WORKSPACES.c.sha256, order_by=_NEWEST_FIRST
        )
        counted = (
            select(
                WORKSPACES.c.seq,
                case((copy_number == 1, WORKSPACES.c.bytes), else_=0).label("bytes"),
            )
            .where(WORKSPACES.c.owner == session.owner)
            .subquery()
        )
        total = func.sum(counted.c.bytes).over(order_by=counted.c.seq.desc())
        sizes = select(counted.c.seq, counted.c.bytes, total.label("total")).subquery()
        quota = self._settings.quota_mib << 20
        too_large = select(sizes.c.seq).where(sizes.c.total > quota, sizes.c.total > sizes.c.bytes)
        beyond = WORKSPACES.c.seq.in_(too_many) | WORKSPACES.c.seq.in_(too_large)
        evicted = delete(WORKSPACES).where(beyond).returning(WORKSPACES.c.blob)
        return list(connection.execute(evicted).scalars())

    def _is_live(self) -> ColumnElement[bool]:
        return WORKSPACES.c.expires_at > self._now()


_NEWEST_FIRST = WORKSPACES.c.seq.desc()


def _in_session(session: Session) -> ColumnElement[bool]:
    return (WORKSPACES.c.owner == session.owner) & (WORKSPACES.c.session == session.name)
