"""Snapshots of the files of conversations, one for each state that a run has left."""

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence

from sqlalchemy import ColumnElement, Connection, case, delete, func, insert, select

from policies.sessions import Session, SessionSettings, SessionState
from proxy.store.blobs import Blob, Blobs
from proxy.store.database import Database, is_full, oldest
from proxy.store.tables import WORKSPACES
from sandbox_runtime.errors import FileMissingError
from sandbox_runtime.sandbox import Sink

MAX_STATES = 8
"""The most states of one conversation, which can branch so far back."""


class WorkspaceRepository:
    """See `SnapshotStore`."""

    def __init__(
        self,
        database: Database,
        blobs: Blobs,
        now: Callable[[], float],
        settings: SessionSettings,
    ) -> None:
        self._database = database
        self._blobs = blobs
        self._now = now
        self._settings = settings

    async def save(self, state: SessionState, write: Callable[[Sink], Awaitable[int]]) -> None:
        async with self._blobs.new() as writer:
            await write(writer.take)
            blob = await writer.keep()
        await self._keep(state, blob)

    async def alias(self, state: SessionState, of: SessionState) -> None:
        blob = await self._blob(of)
        if blob and state != of:
            await self._keep(state, await self._blobs.copy(blob))

    async def newest(self, session: Session) -> str | None:
        newest = select(WORKSPACES.c.state).where(_of(session), self._live()).order_by(_LATEST)
        return await self._database.read(lambda c: c.execute(newest).scalars().first())

    async def known(self, session: Session, names: Sequence[str]) -> set[str]:
        if not names:
            return set()
        known = select(WORKSPACES.c.state).where(
            _of(session), WORKSPACES.c.state.in_(names), self._live()
        )
        return await self._database.read(lambda c: set(c.execute(known).scalars()))

    async def read(self, state: SessionState) -> AsyncIterator[bytes]:
        blob = await self._blob(state)
        if blob is None:
            raise FileMissingError(f"the files of {state.session.name} are kept no more")
        async for piece in self._blobs.read(blob.name):
            yield piece

    async def discard(self, session: Session) -> None:
        gone = delete(WORKSPACES).where(_of(session)).returning(WORKSPACES.c.blob)
        blobs = await self._database.write(lambda c: c.execute(gone).scalars().all())
        await self._blobs.remove(blobs)

    def expire(self, connection: Connection, now: int, forget_before: int) -> bool:
        """Delete expired snapshots; the sweep removes their blobs. See Shelf."""
        past = oldest(WORKSPACES, WORKSPACES.c.expires_at <= now)
        return is_full(connection, delete(WORKSPACES).where(WORKSPACES.c.seq.in_(past)))

    def blobs(self, connection: Connection) -> dict[str, int]:
        """Return the blobs in use and their sizes."""
        rows = connection.execute(select(WORKSPACES.c.blob, WORKSPACES.c.bytes))
        return {row.blob: row.bytes for row in rows}

    def lose(self, connection: Connection, blobs: Collection[str], now: int) -> None:
        """Delete the snapshots of missing blobs."""
        for blob in blobs:
            connection.execute(delete(WORKSPACES).where(WORKSPACES.c.blob == blob))

    async def _blob(self, state: SessionState) -> Blob | None:
        query = select(WORKSPACES).where(
            _of(state.session), WORKSPACES.c.state == state.name, self._live()
        )

        def work(connection: Connection) -> Blob | None:
            row = connection.execute(query).one_or_none()
            if row is None or not self._blobs.is_whole(row.blob, row.bytes):
                return None
            return Blob(row.blob, row.bytes, row.sha256)

        return await self._database.read(work)

    async def _keep(self, state: SessionState, blob: Blob) -> None:
        now = int(self._now())
        row = {
            "owner": state.session.owner,
            "session": state.session.name,
            "state": state.name,
            "blob": blob.name,
            "bytes": blob.bytes,
            "sha256": blob.sha256,
            "expires_at": now + int(self._settings.keep_hours * 3600),
        }

        def work(connection: Connection) -> list[str]:
            before = delete(WORKSPACES).where(_of(state.session), WORKSPACES.c.state == state.name)
            gone = list(connection.execute(before.returning(WORKSPACES.c.blob)).scalars())
            connection.execute(insert(WORKSPACES), row)
            return gone + self._make_room(connection, state.session)

        async with self._blobs.claimed(blob):
            gone = await self._database.write(work)
        await self._blobs.remove(gone)

    def _make_room(self, connection: Connection, session: Session) -> list[str]:
        """Delete the oldest states beyond the bounds of a conversation and of its owner; return
        their blobs."""
        older = select(WORKSPACES.c.seq).where(_of(session)).order_by(_LATEST).offset(MAX_STATES)
        # The newest is kept whatever its size. A content with several names counts once, since it
        # is on the disk once.
        again = func.row_number().over(partition_by=WORKSPACES.c.sha256, order_by=_LATEST)
        once = (
            select(WORKSPACES.c.seq, case((again == 1, WORKSPACES.c.bytes), else_=0).label("bytes"))
            .where(WORKSPACES.c.owner == session.owner)
            .subquery()
        )
        total = func.sum(once.c.bytes).over(order_by=once.c.seq.desc())
        sizes = select(once.c.seq, once.c.bytes, total.label("total")).subquery()
        quota = self._settings.quota_mib << 20
        beyond = select(sizes.c.seq).where(sizes.c.total > quota, sizes.c.total > sizes.c.bytes)
        many = WORKSPACES.c.seq.in_(older) | WORKSPACES.c.seq.in_(beyond)
        gone = delete(WORKSPACES).where(many).returning(WORKSPACES.c.blob)
        return list(connection.execute(gone).scalars())

    def _live(self) -> ColumnElement[bool]:
        return WORKSPACES.c.expires_at > self._now()


_LATEST = WORKSPACES.c.seq.desc()


def _of(session: Session) -> ColumnElement[bool]:
    return (WORKSPACES.c.owner == session.owner) & (WORKSPACES.c.session == session.name)
