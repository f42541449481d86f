"""Runs that may be asked for again: those at work in any process, and what came of the others."""

from collections.abc import Callable, Collection
from dataclasses import replace

from sqlalchemy import ColumnElement, Connection, RowMapping, Select, delete, insert, select, update

from proxy.store.database import Database
from proxy.store.quota import oldest_beyond
from proxy.store.records import StoredRun
from proxy.store.tables import RUNS
from sandbox_runtime.ownership import Owner

MAX_RUNS = 256
MAX_BYTES = 64_000_000
"""How much of one owner's is kept; beyond that the oldest goes."""
LOST_S = 600
"""How long it is told of a run that its server has died."""


class RunShelf:
    """Everybody's runs; each owner sees its own."""

    def __init__(self, database: Database, now: Callable[[], float], process: Owner) -> None:
        self._database = database
        self._now = now
        self._process = process

    async def begin(self, run: StoredRun) -> StoredRun | None:
        """Note a run that begins; unless its key has one already that can be joined, which is
        returned."""

        def work(connection: Connection) -> StoredRun | None:
            if run.key and (found := self._first(connection, self._named(run.owner, run.key))):
                return found
            connection.execute(insert(RUNS), self._row(run))
            return None

        return await self._database.write(work)

    async def end(self, run: StoredRun, *, keep_s: float, for_retry: bool) -> None:
        """Keep what came of a run for so long; `for_retry`: its client has not heard of it, and may
        ask for the same once more."""
        row = {
            **self._row(run),
            "for_retry": for_retry,
            "expires_at": int(self._now() + keep_s),
        }

        def work(connection: Connection) -> None:
            connection.execute(delete(RUNS).where(RUNS.c.id == run.id))
            connection.execute(insert(RUNS), row)
            connection.execute(
                oldest_beyond(RUNS, run.owner, max_rows=MAX_RUNS, max_bytes=MAX_BYTES)
            )

        await self._database.write(work)

    async def find(self, owner: str, run_id: str) -> StoredRun | None:
        """The owner's run of that id, if it is at work or kept."""
        query = select(RUNS).where(RUNS.c.owner == owner, RUNS.c.id == run_id, self._kept())

        def work(connection: Connection) -> StoredRun | None:
            row = connection.execute(query).mappings().one_or_none()
            return self._seen(row) if row else None

        return await self._database.read(work)

    async def named(self, owner: str, key: str) -> StoredRun | None:
        """The run that the owner's key stands for: one with a result, or at work elsewhere."""
        query = self._named(owner, key)
        return await self._database.read(lambda connection: self._first(connection, query))

    async def take(
        self, owner: str, fingerprint: str, besides: Collection[str]
    ) -> StoredRun | None:
        """A result whose client may ask for the same once more; from now on it is the caller's."""
        waiting = select(RUNS.c.seq).where(
            RUNS.c.owner == owner,
            RUNS.c.fingerprint == fingerprint,
            RUNS.c.for_retry,
            RUNS.c.id.not_in(list(besides)),
            self._kept(),
        )
        first = waiting.order_by(RUNS.c.seq).limit(1).scalar_subquery()
        taken = update(RUNS).where(RUNS.c.seq == first).values(for_retry=False).returning(*RUNS.c)

        def work(connection: Connection) -> StoredRun | None:
            row = connection.execute(taken).mappings().one_or_none()
            return _stored(row) if row else None

        return await self._database.write(work)

    async def give_back(self, run_id: str) -> None:
        """Nobody has heard what was taken."""
        waits = update(RUNS).where(RUNS.c.id == run_id).values(for_retry=True)
        await self._database.write(lambda connection: connection.execute(waits))

    async def forget(self, run_id: str) -> None:
        """Keep it no more. Safe to call twice."""
        gone = delete(RUNS).where(RUNS.c.id == run_id)
        await self._database.write(lambda connection: connection.execute(gone))

    async def drop(self, owner: str, run_id: str) -> None:
        """Keep no more what came of the owner's run; one at work stays."""
        this = (RUNS.c.owner == owner) & (RUNS.c.id == run_id)
        gone = delete(RUNS).where(this, RUNS.c.status != "running")
        await self._database.write(lambda connection: connection.execute(gone))

    def expire(self, connection: Connection, now: int, forget_before: int) -> None:
        """Delete what is past its time, and note whose server has died."""
        connection.execute(delete(RUNS).where(RUNS.c.expires_at <= now))
        at_work = select(RUNS.c.process).where(RUNS.c.status == "running").distinct()
        dead = list(filter(self._process.is_dead, connection.execute(at_work).scalars()))
        lost = update(RUNS).where(RUNS.c.status == "running", RUNS.c.process.in_(dead))
        connection.execute(lost.values(status="lost", expires_at=now + LOST_S))

    def _kept(self) -> ColumnElement[bool]:
        return RUNS.c.expires_at.is_(None) | (RUNS.c.expires_at > self._now())

    def _named(self, owner: str, key: str) -> Select[tuple[object, ...]]:
        # What is at work in this process need not be looked for here.
        elsewhere = (RUNS.c.status == "running") & (RUNS.c.process != self._process.id)
        joinable = elsewhere | (RUNS.c.status == "completed")
        mine = (RUNS.c.owner == owner) & (RUNS.c.key == key)
        return select(RUNS).where(mine, joinable, self._kept()).order_by(RUNS.c.seq.desc())

    def _first(self, connection: Connection, query: Select[tuple[object, ...]]) -> StoredRun | None:
        seen = (self._seen(row) for row in connection.execute(query).mappings())
        return next((run for run in seen if run.status != "lost"), None)

    def _seen(self, row: RowMapping) -> StoredRun:
        run = _stored(row)
        lost = run.status == "running" and self._process.is_dead(row["process"])
        return replace(run, status="lost") if lost else run

    def _row(self, run: StoredRun) -> dict[str, object]:
        values = {name: getattr(run, name) for name in StoredRun.__slots__}
        return {**values, "process": self._process.id, "bytes": len(run.record), "for_retry": False}


def _stored(row: RowMapping) -> StoredRun:
    return StoredRun(**{name: row[name] for name in StoredRun.__slots__})
