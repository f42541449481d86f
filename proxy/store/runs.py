"""Runs: those that are running, the results of those that have ended, and suspended ones.

A client finds them by id, by its Idempotency-Key or by repeating its request.
"""

import json
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

from proxy.agent.suspension import SuspendedRun
from proxy.store.database import Database, is_full, oldest, oldest_beyond
from proxy.store.records import StoredRun
from proxy.store.tables import PARKED_RUNS, RUN_SUMMARIES, RUNS
from sandbox_runtime.ownership import Owner

MAX_RUNS = 256
MAX_BYTES = 64_000_000
"""The most runs of one owner, and the most bytes, that are kept; beyond that the oldest goes.
Suspended runs have as much again."""
LOST_S = 600
"""How long a run is kept whose server has died."""
SUMMARY_KEEP_S = 24 * 3600
"""How long a run's summary is kept."""
MAX_SUMMARIES = 4096
"""The most summaries of one owner; beyond that the oldest goes."""
MAX_ALL_SUMMARIES = 100_000
"""The most summaries of all owners together that outlive a sweep."""
PARKED_KEEP_S = 7 * 24 * 3600
"""How long a client may take to run its tools."""


class RunRepository:
    """The runs of all owners; each owner sees its own only."""

    def __init__(self, database: Database, now: Callable[[], float], process: Owner) -> None:
        self._database = database
        self._now = now
        self._process = process

    async def begin(self, run: StoredRun) -> StoredRun | None:
        """Note a run that begins. If its key has one already that can be joined, return that one
        instead."""

        def work(connection: Connection) -> StoredRun | None:
            if run.key and (found := self._first(connection, self._named(run.owner, run.key))):
                return found
            connection.execute(insert(RUNS), self._row(run))
            return None

        return await self._database.write(work)

    async def end(self, run: StoredRun, *, keep_s: float, for_retry: bool) -> None:
        """Keep the result of a run for `keep_s` seconds. With `for_retry`, its client has not got
        the result and may repeat the request."""
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
        """Return the owner's run of that id if it is running or kept, or None."""
        query = select(RUNS).where(RUNS.c.owner == owner, RUNS.c.id == run_id, self._kept())

        def work(connection: Connection) -> StoredRun | None:
            row = connection.execute(query).mappings().one_or_none()
            return self._seen(row) if row else None

        return await self._database.read(work)

    async def named(self, owner: str, key: str) -> StoredRun | None:
        """Return the run of an Idempotency-Key, completed or running in another process, or
        None."""
        query = self._named(owner, key)
        return await self._database.read(lambda connection: self._first(connection, query))

    async def take(
        self, owner: str, fingerprint: str, besides: Collection[str]
    ) -> StoredRun | None:
        """Return a result that was kept for a retry of this request, or None. The caller has it to
        itself."""
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
        """Keep a result for a retry again: the client that took it has not got it."""
        waits = update(RUNS).where(RUNS.c.id == run_id).values(for_retry=True)
        await self._database.write(lambda connection: connection.execute(waits))

    async def forget(self, run_id: str) -> None:
        """Delete a run. Safe to call twice."""
        gone = delete(RUNS).where(RUNS.c.id == run_id)
        await self._database.write(lambda connection: connection.execute(gone))

    async def drop(self, owner: str, run_id: str) -> None:
        """Delete the result of the owner's run; a running one stays."""
        this = (RUNS.c.owner == owner) & (RUNS.c.id == run_id)
        gone = delete(RUNS).where(this, RUNS.c.status != "running")
        await self._database.write(lambda connection: connection.execute(gone))

    async def summarize(self, runs: Callable[[], Sequence[StoredRun]]) -> None:
        """Keep the summaries of these runs, each in place of an earlier one of the same run. `runs`
        is called in the store's thread."""

        def work(connection: Connection) -> None:
            rows = [self._summary(run) for run in runs()]
            connection.execute(insert(RUN_SUMMARIES).prefix_with("OR REPLACE"), rows)
            for owner in {run["owner"] for run in rows}:
                mine = RUN_SUMMARIES.c.owner == owner
                too_many = RUN_SUMMARIES.c.seq <= _newest_beyond(mine, MAX_SUMMARIES)
                connection.execute(delete(RUN_SUMMARIES).where(mine, too_many))

        await self._database.write(work)

    async def summary(self, owner: str, run_id: str) -> StoredRun | None:
        """Return the summary of the owner's run of that id, or None."""
        table = RUN_SUMMARIES.c
        mine = (table.owner == owner) & (table.id == run_id) & (table.expires_at > self._now())

        def work(connection: Connection) -> StoredRun | None:
            row = connection.execute(select(RUN_SUMMARIES).where(mine)).mappings().one_or_none()
            return self._seen({**row, "key": None, "fingerprint": ""}) if row else None

        return await self._database.read(work)

    def expire(self, connection: Connection, now: int, forget_before: int) -> bool:
        """Delete expired runs, and mark the runs of dead servers as lost. See Shelf."""
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
        # The caller knows the runs of this process.
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


class SuspendedRunRepository:
    """The runs that wait for the results of their clients' tools. See `SuspendedRunStore`."""

    def __init__(self, database: Database, now: Callable[[], float]) -> None:
        self._database = database
        self._now = now

    async def save(self, owner: str, parked: SuspendedRun) -> None:
        record = json.dumps(parked.to_json())
        row = {
            "owner": owner,
            "name": parked.run_id,
            "record": record,
            "bytes": len(record),
            "expires_at": int(self._now()) + PARKED_KEEP_S,
        }

        same = (PARKED_RUNS.c.owner == owner) & (PARKED_RUNS.c.name == parked.run_id)

        def work(connection: Connection) -> None:
            connection.execute(delete(PARKED_RUNS).where(same))
            connection.execute(insert(PARKED_RUNS), row)
            connection.execute(
                oldest_beyond(PARKED_RUNS, owner, max_rows=MAX_RUNS, max_bytes=MAX_BYTES)
            )

        await self._database.write(work)

    async def find(self, owner: str, name: str) -> SuspendedRun | None:
        query = select(PARKED_RUNS.c.record).where(
            PARKED_RUNS.c.owner == owner,
            PARKED_RUNS.c.name == name,
            PARKED_RUNS.c.expires_at > self._now(),
        )
        record = await self._database.read(lambda c: c.execute(query).scalar_one_or_none())
        return SuspendedRun.from_json(json.loads(record)) if record else None

    def expire(self, connection: Connection, now: int, forget_before: int) -> bool:
        """Delete expired runs. See Shelf."""
        past = oldest(PARKED_RUNS, PARKED_RUNS.c.expires_at <= now)
        return is_full(connection, delete(PARKED_RUNS).where(PARKED_RUNS.c.seq.in_(past)))


def _newest_beyond(of: ColumnElement[bool], count: int) -> ScalarSelect[int]:
    """Select the newest of these summaries beyond the last `count`."""
    seq = RUN_SUMMARIES.c.seq
    return select(seq).where(of).order_by(seq.desc()).limit(1).offset(count).scalar_subquery()


def _stored(row: Mapping[Any, Any]) -> StoredRun:
    return StoredRun(**{name: row[name] for name in StoredRun.__slots__})
