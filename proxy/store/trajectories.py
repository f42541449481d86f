"""The trajectories of runs: what the models and the tools of captured runs did, in compressed parts
that are appended while a run goes on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from sqlalchemy import (
    ColumnElement,
    Connection,
    ScalarSelect,
    delete,
    func,
    insert,
    select,
    true,
    update,
)

from policies.sessions import TrajectorySettings
from proxy.store.database import Database
from proxy.store.tables import TRAJECTORIES, TRAJECTORY_PARTS
from sandbox_runtime.ownership import Owner

Gone = Literal["expired", "quota", "deleted"]
"""Why a trajectory no longer exists: its retention is over, newer trajectories of the same key
needed the space, or its client deleted it."""
_GONE: tuple[Gone, ...] = get_args(Gone)
TOMBSTONE_S = 90 * 24 * 3600
"""Seconds for which the store remembers that a trajectory existed."""
MAX_TRAJECTORIES = 100_000
"""Maximum number of trajectories of one owner, beside the quota in bytes."""
MAX_ROWS = 200_000
"""Number of trajectories and tombstones of all owners above which a sweep forgets the oldest
tombstones."""
SWEEP_TRAJECTORIES = 50
"""Maximum number of trajectories that a sweep deletes in one transaction. Each may have
megabytes."""


@dataclass(frozen=True, slots=True)
class StoredTrajectory:
    """A trajectory of the store, or the tombstone of one that no longer exists."""

    id: str
    created_at: int
    parts: Sequence[bytes] = ()
    """The parts in the order in which they were appended; none if the trajectory is gone."""
    gone: Gone | None = None
    """Why the trajectory no longer exists; None if it does."""
    is_lost: bool = False
    """True if the process of the run ended before the run did."""


class TrajectoryRepository:
    """The trajectories of all owners. Each owner sees only its own."""

    def __init__(
        self,
        database: Database,
        now: Callable[[], float],
        process: Owner,
        settings: TrajectorySettings,
    ) -> None:
        self._database = database
        self._now = now
        self._process = process
        self._settings = settings

    async def begin(self, owner: str, run_ids: Sequence[str]) -> None:
        """Store empty trajectories of runs that start."""
        now = int(self._now())
        rows = [
            {
                "id": run_id,
                "owner": owner,
                "process": self._process.id,
                "bytes": 0,
                "created_at": now,
                "expires_at": self._expiry(now),
            }
            for run_id in run_ids
        ]
        await self._database.write(lambda c: c.execute(insert(TRAJECTORIES), rows))

    async def append(self, owner: str, run_id: str, part: bytes, *, is_last: bool) -> None:
        """Append a part, unless the trajectory was deleted. `is_last` is True if the run has ended:
        then delete the owner's oldest trajectories beyond the quota."""
        now = int(self._now())
        named = _of(owner, run_id) & TRAJECTORIES.c.gone.is_(None)
        change = update(TRAJECTORIES).where(named)
        change = change.values(
            bytes=TRAJECTORIES.c.bytes + len(part),
            expires_at=self._expiry(now),
            process=None if is_last else self._process.id,
        )

        def transaction(connection: Connection) -> None:
            if connection.execute(change).rowcount:
                row = {"trajectory_id": run_id, "data": part}
                connection.execute(insert(TRAJECTORY_PARTS), row)
                if is_last:
                    self._evict(connection, owner)

        await self._database.write(transaction)

    async def find(self, owner: str, run_id: str) -> StoredTrajectory | None:
        """Return the owner's trajectory of a run, or its tombstone. Return None if the run never
        had a trajectory, or if its tombstone is no longer stored."""
        parts = (
            select(TRAJECTORY_PARTS.c.data)
            .where(TRAJECTORY_PARTS.c.trajectory_id == run_id)
            .order_by(TRAJECTORY_PARTS.c.seq)
        )

        def transaction(connection: Connection) -> StoredTrajectory | None:
            query = select(TRAJECTORIES).where(_of(owner, run_id))
            row = connection.execute(query).mappings().one_or_none()
            if row is None:
                return None
            gone = next((each for each in _GONE if each == row["gone"]), None)
            if gone is None and row["expires_at"] <= self._now():
                gone = "expired"
            if gone:
                return StoredTrajectory(row["id"], row["created_at"], gone=gone)
            is_lost = row["process"] is not None and self._process.is_dead(row["process"])
            found = connection.execute(parts).scalars().all()
            return StoredTrajectory(row["id"], row["created_at"], found, is_lost=is_lost)

        return await self._database.read(transaction)

    async def delete(self, owner: str, run_id: str) -> bool:
        """Delete the owner's trajectory of a run. Return False if there is none."""
        named = _of(owner, run_id) & TRAJECTORIES.c.gone.is_(None)
        return await self._database.write(lambda c: self._remove(c, named, "deleted")) > 0

    def expire(self, connection: Connection, now: int, forget_before: int) -> bool:
        """Delete expired trajectories and old tombstones. See Repository."""
        table = TRAJECTORIES.c
        expired = table.gone.is_(None) & (table.expires_at <= now)
        old = table.gone.is_not(None) & (table.deleted_at <= now - TOMBSTONE_S)
        too_many = table.gone.is_not(None) & (table.seq <= _newest_beyond(MAX_ROWS))
        removed = self._remove(connection, _oldest(expired), "expired")
        forgotten = delete(TRAJECTORIES).where(_oldest(old | too_many))
        return max(removed, connection.execute(forgotten).rowcount) >= SWEEP_TRAJECTORIES

    def _evict(self, connection: Connection, owner: str) -> None:
        """Delete the owner's oldest trajectories beyond the quota and beyond MAX_TRAJECTORIES, but
        never the newest one."""
        table = TRAJECTORIES.c
        quota = self._settings.quota_mib << 20
        live = (table.owner == owner) & table.gone.is_(None)
        sums = select(func.sum(table.bytes), func.count()).where(live)
        total, count = connection.execute(sums).one()
        if total <= quota and count <= MAX_TRAJECTORIES:
            return  # the query below takes 2 ms for 3,000 trajectories
        newest_first = table.seq.desc()
        counted = (
            select(
                table.seq,
                func.row_number().over(order_by=newest_first).label("number"),
                func.sum(table.bytes).over(order_by=newest_first).label("total"),
            )
            .where(live)
            .subquery()
        )
        is_beyond = (counted.c.total > quota) | (counted.c.number > MAX_TRAJECTORIES)
        beyond = select(counted.c.seq).where(counted.c.number > 1, is_beyond)
        self._remove(connection, table.seq.in_(beyond), "quota")

    def _remove(self, connection: Connection, where: ColumnElement[bool], gone: Gone) -> int:
        """Delete the parts of trajectories, and leave tombstones. Return the number of
        trajectories."""
        ids = connection.execute(select(TRAJECTORIES.c.id).where(where)).scalars().all()
        if not ids:
            return 0
        parts = delete(TRAJECTORY_PARTS).where(TRAJECTORY_PARTS.c.trajectory_id.in_(ids))
        connection.execute(parts)
        change = update(TRAJECTORIES).where(TRAJECTORIES.c.id.in_(ids))
        connection.execute(change.values(gone=gone, deleted_at=int(self._now()), bytes=0))
        return len(ids)

    def _expiry(self, now: int) -> int:
        return now + int(self._settings.retention_hours * 3600)


def _of(owner: str, run_id: str) -> ColumnElement[bool]:
    return (TRAJECTORIES.c.owner == owner) & (TRAJECTORIES.c.id == run_id)


def _oldest(where: ColumnElement[bool]) -> ColumnElement[bool]:
    """Return a condition for the oldest `SWEEP_TRAJECTORIES` trajectories that match `where`."""
    seq = TRAJECTORIES.c.seq
    return seq.in_(select(seq).where(where).order_by(seq).limit(SWEEP_TRAJECTORIES))


def _newest_beyond(count: int) -> ScalarSelect[int]:
    """Select the `seq` of the newest trajectory after skipping the `count` newest."""
    seq = TRAJECTORIES.c.seq
    query = select(seq).where(true()).order_by(seq.desc()).limit(1).offset(count)
    return query.scalar_subquery()
