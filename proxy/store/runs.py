"""Runs that may be asked for again: those at work in any process, and what came of the others."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    ScalarSelect,
    Select,
    delete,
    insert,
    select,
    true,
    update,
)

from proxy.store.database import Database, is_full, oldest
from proxy.store.quota import oldest_beyond
from proxy.store.records import StoredRun
from proxy.store.tables import RUN_SUMMARIES, RUNS
from sandbox_runtime.ownership import Owner

MAX_RUNS = 256
MAX_BYTES = 64_000_000
"""How much of one owner's is kept; beyond that the oldest goes."""
LOST_S = 600
"""How long it is told of a run that its server has died."""
SUMMARY_KEEP_S = 24 * 3600
"""How long a run's summary is kept."""
MAX_SUMMARIES = 4096
"""How many summaries of one owner are kept; beyond that the oldest goes."""
MAX_ALL_SUMMARIES = 100_000
"""How many summaries of all owners together outlive a sweep."""


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

    async def summarize(self, runs: Callable[[], Sequence[StoredRun]]) -> None:
        """Keep the summaries of these runs, each in the place of an earlier one of the same run.
        `runs` is called in the store's thread."""

        def work(connection: Connection) -> None:
            rows = [self._summary(run) for run in runs()]
            connection.execute(insert(RUN_SUMMARIES).prefix_with("OR REPLACE"), rows)
            for owner in {run["owner"] for run in rows}:
                mine = RUN_SUMMARIES.c.owner == owner
                too_many = RUN_SUMMARIES.c.seq <= _newest_beyond(mine, MAX_SUMMARIES)
                connection.execute(delete(RUN_SUMMARIES).where(mine, too_many))

        await self._database.write(work)

    async def summary(self, owner: str, run_id: str) -> StoredRun | None:
        """The summary of the owner's run of that id, if it is kept."""
        table = RUN_SUMMARIES.c
        mine = (table.owner == owner) & (table.id == run_id) & (table.expires_at > self._now())

        def work(connection: Connection) -> StoredRun | None:
            row = connection.execute(select(RUN_SUMMARIES).where(mine)).mappings().one_or_none()
            return self._seen({**row, "key": None, "fingerprint": ""}) if row else None

        return await self._database.read(work)

    def expire(self, connection: Connection, now: int, forget_before: int) -> bool:
        """Delete what is past its time, and note whose server has died."""
        at_work = select(RUNS.c.process).where(RUNS.c.status == "running").distinct()
        dead = list(filter(self._process.is_dead, connection.execute(at_work).scalars()))
        lost = update(RUNS).where(RUNS.c.status == "running", RUNS.c.process.in_(dead))
        connection.execute(lost.values(status="lost", expires_at=now + LOST_S))
        past, told = oldest(RUNS, RUNS.c.expires_at <= now), RUN_SUMMARIES.c
        too_many = told.seq <= _newest_beyond(true(), MAX_ALL_SUMMARIES)
        unneeded = oldest(RUN_SUMMARIES, (told.expires_at <= now) | too_many)
        return is_full(
            connection,
            delete(RUNS).where(RUNS.c.seq.in_(past)),
            delete(RUN_SUMMARIES).where(told.seq.in_(unneeded)),
        )

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

    def _seen(self, row: Mapping[Any, Any]) -> StoredRun:
        run = _stored(row)
        lost = run.status == "running" and self._process.is_dead(row["process"])
        return replace(run, status="lost") if lost else run

    def _row(self, run: StoredRun) -> dict[str, object]:
        values = {name: getattr(run, name) for name in StoredRun.__slots__}
        return {**values, "process": self._process.id, "bytes": len(run.record), "for_retry": False}

    def _summary(self, run: StoredRun) -> dict[str, object]:
        values = {name: getattr(run, name) for name in StoredRun.__slots__}
        del values["key"], values["fingerprint"]
        expires_at = int(self._now() + SUMMARY_KEEP_S)
        return {**values, "process": self._process.id, "expires_at": expires_at}


def _newest_beyond(of: ColumnElement[bool], count: int) -> ScalarSelect[int]:
    """The newest of these summaries that is not among the last `count`."""
    seq = RUN_SUMMARIES.c.seq
    return select(seq).where(of).order_by(seq.desc()).limit(1).offset(count).scalar_subquery()


def _stored(row: Mapping[Any, Any]) -> StoredRun:
    return StoredRun(**{name: row[name] for name in StoredRun.__slots__})
