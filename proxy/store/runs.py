"""Running runs, the results and summaries of ended runs, and suspended runs.

A client finds a run by its id, by its Idempotency-Key, or by repeating the request.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    ScalarSelect,
    Table,
    delete,
    exists,
    func,
    insert,
    select,
    true,
    update,
)

from proxy.agent.suspended_run import SuspendedRun
from proxy.store.database import Database, delete_beyond_quota, oldest_rows, sweep_batch
from proxy.store.records import ProcessRegistration, PublishedBatch, RunStart, StoredRun
from proxy.store.tables import RUN_EVENTS, RUN_SUMMARIES, RUNS, SUSPENDED_RUNS

MAX_RUNS = 256
MAX_BYTES = 64_000_000
"""`MAX_RUNS` and `MAX_BYTES` are the maximum number and total size of one owner's results. Beyond
them, the oldest results are deleted. The same limits apply separately to suspended runs."""
LOST_KEEP_S = 600
"""Seconds that a lost run is stored."""
SUMMARY_KEEP_S = 24 * 3600
"""Seconds that a run's summary is stored."""
MAX_SUMMARIES = 4096
"""Maximum number of one owner's summaries. Above it, the oldest summaries are deleted."""
MAX_ALL_SUMMARIES = 100_000
"""Maximum number of all owners' summaries. Above it, a sweep deletes the oldest summaries."""
PUBLISHED_KEEP_S = 60
"""Seconds for which the published events of an ended run stay for the processes that follow the
run."""
SUSPENDED_KEEP_S = 7 * 24 * 3600
"""Seconds that a client may take to run its tools."""
_RUN_COLUMNS = [RUNS.c[name] for name in (*StoredRun.__slots__, "process")]
"""The columns from which a StoredRun is read. They do not include the checkpoint, which may be
long, nor the columns that only queries need."""


class RunRepository:
    """Stores the runs of all owners. Each owner sees only its own runs."""

    def __init__(
        self,
        database: Database,
        now: Callable[[], float],
        process: ProcessRegistration,
        *,
        is_shared: bool = False,
    ) -> None:
        """`is_shared` is True if processes of other machines may use the same database. They may
        find this process dead although it lives."""
        self._database = database
        self._now = now
        self._process = process
        self._is_shared = is_shared

    async def begin(self, run: StoredRun) -> RunStart:
        """Store a run that begins, unless a stored run with the same Idempotency-Key can be joined.
        Return the stored runs with that key.

        The new row gets a copy of the returned checkpoint, which is needed if this process dies
        before the new run has stored a checkpoint of its own. The lost run keeps its checkpoint,
        which is needed if the new run cannot start and the new row is deleted.
        """

        def transaction(connection: Connection) -> RunStart:
            found = self._find_by_key(connection, run.owner, run.key)
            if found.joinable:
                return found
            lost = found.earlier
            if lost and lost.status == "lost" and lost.fingerprint == run.fingerprint:
                query = select(RUNS.c.checkpoint).where(RUNS.c.id == lost.id)
                found = found._replace(checkpoint=connection.execute(query).scalar_one())
            row = {**self._row(run), "checkpoint": found.checkpoint}
            connection.execute(insert(RUNS), row)
            return found

        return await self._database.write(transaction)

    @property
    def is_shared(self) -> bool:
        """True if processes of other machines may use the same database."""
        return self._is_shared

    async def save_checkpoint(self, run_id: str, checkpoint: str | None) -> bool:
        """Store a checkpoint of a run that is running in this process, in place of an earlier one;
        None removes the earlier one. Return False if other processes have found this process
        dead."""
        is_own = (RUNS.c.status == "running") & (RUNS.c.process == self._process.id)
        change = update(RUNS).where(RUNS.c.id == run_id, is_own).values(checkpoint=checkpoint)
        changed = await self._database.write(lambda connection: connection.execute(change).rowcount)
        return bool(changed)

    async def end(self, run: StoredRun, *, keep_s: float, for_retry: bool) -> None:
        """Store the result of a run for `keep_s` seconds. If other processes have found this
        process dead, store nothing, because one of them may have begun the run again.

        `for_retry` is True if the client has not received the result and may repeat its request.
        """
        expires_at = int(self._now() + keep_s)
        row = {**self._row(run), "for_retry": for_retry, "expires_at": expires_at}
        is_run = RUNS.c.id == run.id
        lost = (RUNS.c.status == "lost") | (RUNS.c.process != self._process.id)

        def transaction(connection: Connection) -> None:
            if self._is_shared and connection.execute(select(RUNS.c.seq).where(is_run, lost)).all():
                return
            _replace_row(connection, RUNS, is_run, row)

        await self._database.write(transaction)

    async def find(self, owner: str, run_id: str) -> StoredRun | None:
        """Return the owner's run with that id, or None."""
        named = (RUNS.c.owner == owner) & (RUNS.c.id == run_id)
        query = select(*_RUN_COLUMNS).where(named, self._is_live())
        return await self._database.read_one(query, self._run_from_row)

    async def find_by_key(self, owner: str, key: str) -> StoredRun | None:
        """Return the newest run with this Idempotency-Key that a request can join, or None. A run
        can be joined if it is completed, or if another process is still running it."""
        found = await self._database.read(lambda c: self._find_by_key(c, owner, key))
        return found.joinable

    async def take_for_retry(
        self, owner: str, fingerprint: str, excluded_ids: Collection[str]
    ) -> StoredRun | None:
        """Return the oldest result that waits for a retry of this request, or None.

        No other caller gets the same result before `return_for_retry`. Runs with an id in
        `excluded_ids` are skipped.
        """
        waiting = select(RUNS.c.seq).where(
            RUNS.c.owner == owner,
            RUNS.c.fingerprint == fingerprint,
            RUNS.c.for_retry,
            RUNS.c.id.not_in(list(excluded_ids)),
            self._is_live(),
        )
        first = waiting.order_by(RUNS.c.seq).limit(1).scalar_subquery()
        taken = update(RUNS).where(RUNS.c.seq == first).values(for_retry=False).returning(*RUNS.c)
        return await self._database.write_one(taken, _stored_run)

    async def return_for_retry(self, run_id: str) -> None:
        """Make a result that `take_for_retry` has returned available again, because the client did
        not receive it."""
        change = update(RUNS).where(RUNS.c.id == run_id).values(for_retry=True)
        await self._database.write(lambda connection: connection.execute(change))

    async def delete(self, run_id: str) -> None:
        """Delete a run. Safe to call twice."""
        change = delete(RUNS).where(RUNS.c.id == run_id)
        await self._database.write(lambda connection: connection.execute(change))

    async def delete_ended(self, owner: str, run_id: str) -> None:
        """Delete the owner's run unless it is running in a living process."""
        named = (RUNS.c.owner == owner) & (RUNS.c.id == run_id)
        running = select(RUNS.c.process).where(named, RUNS.c.status == "running")

        def transaction(connection: Connection) -> None:
            process_id = connection.execute(running).scalar_one_or_none()
            if process_id is None or self._process.is_dead(process_id):
                connection.execute(delete(RUNS).where(named))

        await self._database.write(transaction)

    async def process_of(self, owner: str, run_id: str) -> str | None:
        """Return the id of the living process in which the owner's run is running, or None."""

        def transaction(connection: Connection) -> str | None:
            for table in (RUNS, RUN_SUMMARIES):
                row = (table.c.owner == owner) & (table.c.id == run_id)
                query = select(table.c.process).where(row, table.c.status == "running")
                if found := connection.execute(query).scalar_one_or_none():
                    return None if self._process.is_dead(found) else str(found)
            return None

        return await self._database.read(transaction)

    async def ids_running_elsewhere(self, owner: str, container_id: str) -> set[str]:
        """Return the ids of the owner's runs in a container that are running in other living
        processes."""

        def transaction(connection: Connection) -> set[str]:
            running = set[str]()
            for table in (RUNS, RUN_SUMMARIES):
                query = select(table.c.id, table.c.process).where(
                    table.c.owner == owner,
                    table.c.container_id == container_id,
                    table.c.status == "running",
                    table.c.process != self._process.id,
                )
                for run_id, process_id in connection.execute(query):
                    if not self._process.is_dead(process_id):
                        running.add(run_id)
            return running

        return await self._database.read(transaction)

    async def publish(
        self, publication_id: str, content: str, *, is_first: bool, is_last: bool
    ) -> None:
        """Store events of a run, or frames of its response, as JSON, for the processes that follow
        the run. `publication_id` begins with the id of the run. If `is_first` is True, an earlier
        publication is deleted."""
        row = {
            "run_id": publication_id,
            "events": content,
            "is_first": is_first,
            "is_last": is_last,
            "created_at": int(self._now()),
        }

        def transaction(connection: Connection) -> None:
            if is_first:
                connection.execute(delete(RUN_EVENTS).where(RUN_EVENTS.c.run_id == publication_id))
            connection.execute(insert(RUN_EVENTS), row)

        await self._database.write(transaction)

    async def unpublish(self, publication_id: str) -> None:
        """Delete a publication."""
        change = delete(RUN_EVENTS).where(RUN_EVENTS.c.run_id == publication_id)
        await self._database.write(lambda connection: connection.execute(change))

    async def published_batches(self, publication_id: str, after_seq: int) -> list[PublishedBatch]:
        """Return the batches of a publication whose `seq` is above `after_seq`, in order."""
        table = RUN_EVENTS.c
        query = select(table.seq, table.events, table.is_first, table.is_last).where(
            table.run_id == publication_id, table.seq > after_seq
        )
        rows = await self._database.read(lambda c: c.execute(query.order_by(table.seq)).all())
        return [PublishedBatch(*row) for row in rows]

    async def store_summaries(self, runs: Callable[[], Sequence[StoredRun]]) -> None:
        """Store the summaries that `runs` returns, each in place of an earlier summary of the same
        run. Delete each owner's oldest summaries beyond `MAX_SUMMARIES`. `runs` is called in one
        of the store's threads."""

        def transaction(connection: Connection) -> None:
            rows = [self._summary_row(run) for run in runs()]
            ids = [row["id"] for row in rows]
            connection.execute(delete(RUN_SUMMARIES).where(RUN_SUMMARIES.c.id.in_(ids)))
            connection.execute(insert(RUN_SUMMARIES), rows)
            for owner in {run["owner"] for run in rows}:
                of_owner = RUN_SUMMARIES.c.owner == owner
                too_many = RUN_SUMMARIES.c.seq <= _seq_beyond_newest(of_owner, MAX_SUMMARIES)
                connection.execute(delete(RUN_SUMMARIES).where(of_owner, too_many))

        await self._database.write(transaction)

    async def summary(self, owner: str, run_id: str) -> StoredRun | None:
        """Return the summary of the owner's run with that id, or None."""
        table = RUN_SUMMARIES.c
        query = select(RUN_SUMMARIES).where(
            table.owner == owner, table.id == run_id, table.expires_at > self._now()
        )
        return await self._database.read_one(
            query, lambda row: self._run_from_row({**row, "key": None, "fingerprint": ""})
        )

    def expire(self, connection: Connection, now: int, forget_before: int) -> bool:
        """Delete expired runs and summaries, and old publications of ended runs. Mark the runs of
        dead processes as lost. See Repository."""
        running = select(RUNS.c.process).where(RUNS.c.status == "running").distinct()
        dead = list(filter(self._process.is_dead, connection.execute(running).scalars()))
        lost = update(RUNS).where(RUNS.c.status == "running", RUNS.c.process.in_(dead))
        connection.execute(lost.values(status="lost", expires_at=now + LOST_KEEP_S))
        # A publication of frames has the id of its run and a suffix.
        run_id = func.substr(RUN_EVENTS.c.run_id, 1, func.length(RUNS.c.id))
        is_running = exists().where(RUNS.c.id == run_id, RUNS.c.status == "running")
        unread = RUN_EVENTS.c.created_at < now - PUBLISHED_KEEP_S
        connection.execute(delete(RUN_EVENTS).where(unread, ~is_running))
        summaries = RUN_SUMMARIES.c
        too_many = summaries.seq <= _seq_beyond_newest(true(), MAX_ALL_SUMMARIES)
        return sweep_batch(
            connection,
            delete(RUNS).where(oldest_rows(RUNS, RUNS.c.expires_at <= now)),
            delete(RUN_SUMMARIES).where(
                oldest_rows(RUN_SUMMARIES, (summaries.expires_at <= now) | too_many)
            ),
        )

    def _is_live(self) -> ColumnElement[bool]:
        return RUNS.c.expires_at.is_(None) | (RUNS.c.expires_at > self._now())

    def _find_by_key(self, connection: Connection, owner: str, key: str | None) -> RunStart:
        """Return the stored runs with the key, except runs that are running in this process: the
        caller knows them."""
        if key is None:
            return RunStart(None, None)
        running_here = (RUNS.c.status == "running") & (RUNS.c.process == self._process.id)
        query = select(*_RUN_COLUMNS).where(
            RUNS.c.owner == owner, RUNS.c.key == key, ~running_here, self._is_live()
        )
        rows = connection.execute(query.order_by(RUNS.c.seq.desc())).mappings()
        runs = [self._run_from_row(row) for row in rows]
        joinable = (run for run in runs if run.status in ("running", "completed"))
        others = (run for run in runs if run.status not in ("running", "completed"))
        return RunStart(next(joinable, None), next(others, None))

    def _run_from_row(self, row: Mapping[Any, Any]) -> StoredRun:
        """Return the run of a row. The status of a running run whose process is dead becomes
        `lost`."""
        run = _stored_run(row)
        lost = run.status == "running" and self._process.is_dead(row["process"])
        return replace(run, status="lost") if lost else run

    def _row(self, run: StoredRun) -> dict[str, object]:
        values = {name: getattr(run, name) for name in StoredRun.__slots__}
        return {**values, "process": self._process.id, "bytes": len(run.record), "for_retry": False}

    def _summary_row(self, run: StoredRun) -> dict[str, object]:
        values = {name: getattr(run, name) for name in StoredRun.__slots__}
        del values["key"], values["fingerprint"]
        expires_at = int(self._now() + SUMMARY_KEEP_S)
        return {**values, "process": self._process.id, "expires_at": expires_at}


class SuspendedRunRepository:
    """Stores the runs that wait for the results of the clients' tools. See `SuspendedRunStore`."""

    def __init__(self, database: Database, now: Callable[[], float]) -> None:
        self._database = database
        self._now = now

    async def save(self, owner: str, suspended_run: SuspendedRun) -> None:
        record = json.dumps(suspended_run.to_json())
        row = {
            "owner": owner,
            "name": suspended_run.key,
            "record": record,
            "bytes": len(record),
            "expires_at": int(self._now()) + SUSPENDED_KEEP_S,
        }
        same = (SUSPENDED_RUNS.c.owner == owner) & (SUSPENDED_RUNS.c.name == suspended_run.key)
        await self._database.write(
            lambda connection: _replace_row(connection, SUSPENDED_RUNS, same, row)
        )

    async def find(self, owner: str, key: str) -> SuspendedRun | None:
        query = select(SUSPENDED_RUNS.c.record).where(
            SUSPENDED_RUNS.c.owner == owner,
            SUSPENDED_RUNS.c.name == key,
            SUSPENDED_RUNS.c.expires_at > self._now(),
        )
        return await self._database.read_one(
            query, lambda row: SuspendedRun.from_json(json.loads(row["record"]))
        )

    def expire(self, connection: Connection, now: int, forget_before: int) -> bool:
        """Delete expired suspended runs. See Repository."""
        expired = oldest_rows(SUSPENDED_RUNS, SUSPENDED_RUNS.c.expires_at <= now)
        return sweep_batch(connection, delete(SUSPENDED_RUNS).where(expired))


def _replace_row(
    connection: Connection, table: Table, where: ColumnElement[bool], row: Mapping[str, Any]
) -> None:
    """Insert a row in place of the rows that match `where`. Delete the owner's oldest rows beyond
    `MAX_RUNS` and `MAX_BYTES`."""
    connection.execute(delete(table).where(where))
    connection.execute(insert(table), row)
    connection.execute(
        delete_beyond_quota(table, row["owner"], max_rows=MAX_RUNS, max_bytes=MAX_BYTES)
    )


def _seq_beyond_newest(where: ColumnElement[bool], count: int) -> ScalarSelect[int]:
    """Select the `seq` of the newest matching summary that is not among the `count` newest."""
    seq = RUN_SUMMARIES.c.seq
    return select(seq).where(where).order_by(seq.desc()).limit(1).offset(count).scalar_subquery()


def _stored_run(row: Mapping[Any, Any]) -> StoredRun:
    return StoredRun(**{name: row[name] for name in StoredRun.__slots__})
