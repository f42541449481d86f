"""The trajectories of captured runs: the model calls, the tool calls and the results, in compressed
parts. Most trajectories have one part; the trajectories of long runs have several."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal, get_args

from sqlalchemy import (
    ColumnElement,
    Connection,
    Insert,
    RowMapping,
    ScalarSelect,
    and_,
    delete,
    func,
    insert,
    select,
    update,
)

from policies.sessions import TrajectoryLabels, TrajectorySettings
from proxy.errors import BadRequestError
from proxy.store.database import SWEEP_ROWS, Database, upsert
from proxy.store.records import Page, PageRequest, ProcessRegistration
from proxy.store.tables import TRAJECTORIES, TRAJECTORY_PARTS, TRAJECTORY_REWARDS

DeletionReason = Literal["expired", "quota", "deleted", "failed"]
"""The reason why a trajectory no longer exists. expired: its retention time is over. quota: newer
trajectories of the same key needed the space. deleted: its client deleted it. failed: the store
failed while it was written."""
_DELETION_REASONS: tuple[DeletionReason, ...] = get_args(DeletionReason)
TOMBSTONE_S = 90 * 24 * 3600
"""Seconds for which the store remembers that a trajectory existed."""
MAX_TRAJECTORIES = 100_000
"""Maximum number of trajectories of one owner, in addition to the quota in bytes. Above it, the
oldest trajectories become tombstones."""
MAX_TOMBSTONES = 100_000
"""Number of tombstones of one owner above which a sweep deletes the oldest tombstones."""
SWEEP_TRAJECTORIES = 50
"""Maximum number of trajectories that are evicted or expire in one transaction. Each may have
megabytes."""
GROWTH_PER_CHECK = 0.01
"""The limits of an owner's trajectories are checked each time the trajectories have grown by this
share of the limits. A check of 20,000 trajectories takes 7 ms."""
MAX_OWNERS = 10_000
"""Maximum number of owners in `TrajectoryRepository._growth`. With `backend.forward_client_key`,
every key of the backend is an owner."""
MAX_REWARDS = 100
"""Maximum number of rewards of one trajectory."""
_REWARD_BYTES = 100
"""Size of a stored reward without its texts."""
_COLUMNS = TRAJECTORIES.c
_IS_LIVE = _COLUMNS.deletion_reason.is_(None)
_IS_RUNNING = _COLUMNS.ended_at.is_(None)
_INSERT_PART = insert(TRAJECTORY_PARTS)


@dataclass(frozen=True, slots=True)
class Reward:
    """A number that says how good a run was, for training."""

    value: float | None
    """None if the trajectory cannot be scored, for example because its sandbox was lost."""
    source: str
    """The name of the grader or person that gave the reward."""
    reason: str
    created_at: int


@dataclass(frozen=True, slots=True)
class StoredTrajectory:
    """A trajectory in the store, or the tombstone of a trajectory that no longer exists."""

    id: str
    created_at: int
    root_run_id: str
    """The run id of the first choice of the same request; `id` itself for the first choice."""
    labels: TrajectoryLabels = TrajectoryLabels()
    parts: Sequence[bytes] = ()
    """The parts in the order in which they were appended; none for a tombstone."""
    deletion_reason: DeletionReason | None = None
    """The reason why the trajectory no longer exists; None if it exists."""
    rewards: Sequence[Reward] = ()
    """The rewards in the order in which they were given."""
    is_running_here: bool = False
    """True if the run was started by this process, which has not stored the end of the run."""
    is_lost: bool = False
    """True if the run ended and its end was not stored."""


@dataclass(frozen=True, slots=True)
class TrajectorySummary:
    """A trajectory in a list, without its parts."""

    id: str
    created_at: int
    ended_at: int | None
    """The time at which the run ended; None if its end is not stored."""
    bytes: int
    """The size of the compressed parts and the rewards."""
    group_id: str | None = None
    task_id: str | None = None
    session_id: str | None = None


class TrajectoryRepository:
    """Stores the trajectories of all owners. Each owner sees only its own trajectories."""

    def __init__(
        self,
        database: Database,
        now: Callable[[], float],
        process: ProcessRegistration,
        settings: TrajectorySettings,
        *,
        max_trajectories: int = MAX_TRAJECTORIES,
        max_tombstones: int = MAX_TOMBSTONES,
    ) -> None:
        self._database = database
        self._now = now
        self._process = process
        self._settings = settings
        self._max_trajectories = max_trajectories
        self._max_tombstones = max_tombstones
        self._insert: Insert | None = None
        """The statement of `append`. It is built once, because building it takes longer than
        executing it."""
        self._growth: dict[str, float] = {}
        """The growth of each owner's trajectories since the last eviction, as a share of their
        limits."""

    async def append(
        self,
        owner: str,
        parts: Mapping[str, bytes],
        *,
        is_last: bool,
        labels: TrajectoryLabels = TrajectoryLabels(),
        created_at: int | None = None,
    ) -> None:
        """Append a part to the trajectory of each choice of a run, unless the trajectory was
        deleted. The keys of `parts` are the run ids of the choices, beginning with the first
        choice; an empty part is not stored. The first call creates the trajectories. `is_last` is
        True if the run has ended."""
        rows = self._new_rows(owner, list(parts), created_at)
        end = {"process": None, "ended_at": int(self._now())} if is_last else {"ended_at": None}
        added = [
            row | asdict(labels) | end | {"bytes": len(part)}
            for row, part in zip(rows, parts.values(), strict=True)
        ]

        def transaction(connection: Connection) -> None:
            change = self._append_statement(connection)
            for row in added:
                if connection.execute(change, row).first() and parts[row["id"]]:
                    part = {"trajectory_id": row["id"], "data": parts[row["id"]]}
                    connection.execute(_INSERT_PART, part)

        await self._database.write(transaction)
        await self._evict_if_due(owner, sum(map(len, parts.values())), len(parts))

    def _append_statement(self, connection: Connection) -> Insert:
        if self._insert is None:
            self._insert = _insert_or_add_size(connection)
        return self._insert

    async def mark_as_failed(self, owner: str, run_ids: Sequence[str]) -> None:
        """Leave tombstones in place of the trajectories of a run's choices, unless the end of the
        run is stored."""
        rows = self._new_rows(owner, run_ids)

        def transaction(connection: Connection) -> None:
            connection.execute(upsert(connection, TRAJECTORIES).on_conflict_do_nothing(), rows)
            self._replace_by_tombstones(
                connection, _is_choice(owner, run_ids[0]) & _IS_RUNNING, "failed"
            )

        await self._database.write(transaction)

    async def evict(self, owner: str) -> None:
        """Delete the owner's trajectories beyond the quota and beyond MAX_TRAJECTORIES, in the
        order in which their runs ended. The newest trajectory and the trajectories of running runs
        stay."""
        while await self._database.write(partial(self._evict_batch, owner=owner)):
            pass  # transactions of requests run between two batches

    async def _evict_if_due(self, owner: str, size: int, count: int = 0) -> None:
        """Call `evict` if the owner's trajectories have grown by GROWTH_PER_CHECK since the last
        call."""
        quota, grown = self._settings.quota_mib << 20, self._growth.get(owner, 1.0)
        self._growth[owner] = grown + size / quota + count / self._max_trajectories
        if self._growth[owner] >= GROWTH_PER_CHECK:
            if len(self._growth) > MAX_OWNERS:
                self._growth.clear()  # all owners are due at their next trajectory
            self._growth[owner] = 0.0
            await self.evict(owner)

    async def find(self, owner: str, run_id: str) -> StoredTrajectory | None:
        """Return the owner's trajectory of a run, or its tombstone. Return None if the run never
        had a trajectory, or if its tombstone is no longer stored."""
        parts = (
            select(TRAJECTORY_PARTS.c.data)
            .where(TRAJECTORY_PARTS.c.trajectory_id == run_id)
            .order_by(TRAJECTORY_PARTS.c.seq)
        )
        rewards = (
            select(TRAJECTORY_REWARDS)
            .where(TRAJECTORY_REWARDS.c.trajectory_id == run_id)
            .order_by(TRAJECTORY_REWARDS.c.seq)
        )

        def transaction(connection: Connection) -> StoredTrajectory | None:
            query = select(TRAJECTORIES).where(_is_trajectory(owner, run_id))
            row = connection.execute(query).mappings().one_or_none()
            if row is None:
                return None
            labels = TrajectoryLabels(row["group_id"], row["task_id"], row["session_id"])
            head = (row["id"], row["created_at"], row["root_run_id"], labels)
            if reason := self._deletion_reason(row):
                return StoredTrajectory(*head, deletion_reason=reason)
            found = connection.execute(parts).scalars().all()
            process = row["process"]
            return StoredTrajectory(
                *head,
                found,
                rewards=[_reward(each) for each in connection.execute(rewards).mappings()],
                is_running_here=process == self._process.id,
                is_lost=process is not None and self._process.is_dead(process),
            )

        # Concurrently: a trajectory may have megabytes.
        return await self._database.read_concurrently(transaction)

    async def add_reward(
        self, owner: str, run_id: str, value: float | None, source: str, reason: str
    ) -> Reward | None:
        """Append a reward to the owner's trajectory of a run. Return None if there is no such
        trajectory. The reward counts against the quota. Raises BadRequestError if the trajectory
        has `MAX_REWARDS` rewards."""
        reward = Reward(value, source, reason, int(self._now()))
        row = {"trajectory_id": run_id, **asdict(reward)}
        count = select(func.count()).where(TRAJECTORY_REWARDS.c.trajectory_id == run_id)
        size = len((source + reason).encode(errors="replace"))
        change = (
            update(TRAJECTORIES)
            .where(_is_trajectory(owner, run_id), _IS_LIVE, ~self._has_expired())
            .values(bytes=_COLUMNS.bytes + _REWARD_BYTES + size)
        )

        def transaction(connection: Connection) -> Reward | None:
            if not connection.execute(change).rowcount:
                return None
            if connection.execute(count).scalar_one() >= MAX_REWARDS:
                raise BadRequestError(
                    f"The trajectory has {MAX_REWARDS} rewards, which is the maximum.",
                    code="too_many_rewards",
                )
            connection.execute(insert(TRAJECTORY_REWARDS), row)
            return reward

        added = await self._database.write(transaction)
        await self._evict_if_due(owner, _REWARD_BYTES + size)
        return added

    async def page(
        self, owner: str, request: PageRequest, labels: TrajectoryLabels = TrajectoryLabels()
    ) -> Page[TrajectorySummary]:
        """Return a page of the owner's trajectories that have `labels`. Raises BadRequestError."""
        wanted = [_COLUMNS[name] == value for name, value in asdict(labels).items() if value]
        return await self._database.read_page(
            TRAJECTORIES,
            request,
            _summary,
            scope=_COLUMNS.owner == owner,
            visible=and_(_IS_LIVE, ~self._has_expired(), *wanted),
        )

    async def delete(self, owner: str, run_id: str) -> bool:
        """Delete the owner's trajectory of a run. If the run belongs to the first choice of a
        request, delete the trajectories of the other choices too. Return False if there is no
        trajectory."""
        named = _is_trajectory(owner, run_id) | _is_choice(owner, run_id)
        return (
            await self._database.write(lambda c: self._replace_by_tombstones(c, named, "deleted"))
            > 0
        )

    def expire(self, connection: Connection, now: int, forget_before: int) -> bool:
        """Delete expired trajectories and old tombstones, and mark the runs of dead processes as
        ended. See Repository."""
        running = select(_COLUMNS.process).where(_IS_LIVE, _IS_RUNNING).distinct()
        dead = list(filter(self._process.is_dead, connection.execute(running).scalars()))
        lost = update(TRAJECTORIES).where(_IS_LIVE, _IS_RUNNING, _COLUMNS.process.in_(dead))
        connection.execute(lost.values(ended_at=now))
        expired = ~_IS_RUNNING & (_COLUMNS.expires_at <= now)
        removed = self._replace_by_tombstones(connection, expired, "expired", SWEEP_TRAJECTORIES)
        old = _COLUMNS.deleted_at <= now - TOMBSTONE_S
        forgotten = [
            _delete_tombstones(connection, where)
            for where in (old, *self._surplus_tombstones(connection))
        ]
        return removed >= SWEEP_TRAJECTORIES or max(forgotten) >= SWEEP_ROWS

    def _evict_batch(self, connection: Connection, owner: str) -> bool:
        """Delete a batch of the owner's trajectories. Return True if more may have to be
        deleted."""
        quota = self._settings.quota_mib << 20
        live = (_COLUMNS.owner == owner) & _IS_LIVE
        sums = select(func.coalesce(func.sum(_COLUMNS.bytes), 0), func.count()).where(live)
        total, count = connection.execute(sums).one()
        if total <= quota and count <= self._max_trajectories:
            return False  # the query below takes 2 ms for 3,000 trajectories
        newest_first = (_IS_RUNNING.desc(), _COLUMNS.ended_at.desc(), _COLUMNS.seq.desc())
        counted = (
            select(
                _COLUMNS.seq,
                _COLUMNS.ended_at,
                func.row_number()
                .over(partition_by=_IS_RUNNING, order_by=newest_first)
                .label("number"),
                func.sum(_COLUMNS.bytes).over(order_by=newest_first).label("total"),
            )
            .where(live)
            .subquery()
        )
        is_beyond = (counted.c.total > quota) | (counted.c.number > self._max_trajectories)
        beyond = select(counted.c.seq).where(
            counted.c.number > 1, counted.c.ended_at.is_not(None), is_beyond
        )
        where = _COLUMNS.seq.in_(beyond)
        return (
            self._replace_by_tombstones(connection, where, "quota", SWEEP_TRAJECTORIES)
            >= SWEEP_TRAJECTORIES
        )

    def _replace_by_tombstones(
        self,
        connection: Connection,
        where: ColumnElement[bool],
        reason: DeletionReason,
        limit: int | None = None,
    ) -> int:
        """Replace the trajectories that match `where` by tombstones, at most the `limit` oldest of
        them. Return their number. A tombstone has no parts and no rewards."""
        oldest_first = (_COLUMNS.ended_at, _COLUMNS.seq)
        query = select(_COLUMNS.id).where(where, _IS_LIVE).order_by(*oldest_first).limit(limit)
        ids = connection.execute(query).scalars().all()
        if not ids:
            return 0
        parts = delete(TRAJECTORY_PARTS).where(TRAJECTORY_PARTS.c.trajectory_id.in_(ids))
        connection.execute(parts)
        rewards = delete(TRAJECTORY_REWARDS).where(TRAJECTORY_REWARDS.c.trajectory_id.in_(ids))
        connection.execute(rewards)
        change = update(TRAJECTORIES).where(_COLUMNS.id.in_(ids))
        now = int(self._now())
        connection.execute(change.values(deletion_reason=reason, deleted_at=now, bytes=0))
        return len(ids)

    def _surplus_tombstones(self, connection: Connection) -> list[ColumnElement[bool]]:
        """Return a condition for each owner that has too many tombstones. The condition matches the
        owner's oldest tombstones beyond the maximum."""
        counts = select(_COLUMNS.owner).where(~_IS_LIVE).group_by(_COLUMNS.owner)
        crowded = counts.having(func.count() > self._max_tombstones)
        return [
            (_COLUMNS.owner == owner)
            & (_COLUMNS.seq <= _seq_beyond_newest(owner, self._max_tombstones))
            for owner in connection.execute(crowded).scalars().all()
        ]

    def _new_rows(
        self, owner: str, run_ids: Sequence[str], created_at: int | None = None
    ) -> list[dict[str, Any]]:
        now = int(self._now())
        return [
            {
                "id": run_id,
                "root_run_id": run_ids[0],
                "owner": owner,
                "process": self._process.id,
                "bytes": 0,
                "created_at": now if created_at is None else created_at,
                "expires_at": self._expiry(now),
            }
            for run_id in run_ids
        ]

    def _deletion_reason(self, row: Mapping[Any, Any]) -> DeletionReason | None:
        if row["deletion_reason"]:
            return next(each for each in _DELETION_REASONS if each == row["deletion_reason"])
        has_expired = row["ended_at"] is not None and row["expires_at"] <= self._now()
        return "expired" if has_expired else None

    def _has_expired(self) -> ColumnElement[bool]:
        return ~_IS_RUNNING & (_COLUMNS.expires_at <= int(self._now()))

    def _expiry(self, now: int) -> int:
        return now + int(self._settings.retention_hours * 3600)


def _insert_or_add_size(connection: Connection) -> Insert:
    """Return the statement that inserts a trajectory, or adds the size of a part to a trajectory
    that exists. The statement returns no row if the trajectory was deleted."""
    row = upsert(connection, TRAJECTORIES)
    return row.on_conflict_do_update(
        index_elements=[_COLUMNS.id],
        set_={
            "bytes": _COLUMNS.bytes + row.excluded.bytes,
            **{name: row.excluded[name] for name in ("process", "expires_at", "ended_at")},
        },
        where=_IS_LIVE & (_COLUMNS.owner == row.excluded.owner),
    ).returning(_COLUMNS.seq)


def _reward(row: RowMapping) -> Reward:
    return Reward(row["value"], row["source"], row["reason"], row["created_at"])


def _summary(row: RowMapping) -> TrajectorySummary:
    names = ("id", "created_at", "ended_at", "bytes", "group_id", "task_id", "session_id")
    return TrajectorySummary(*(row[name] for name in names))


def _is_trajectory(owner: str, run_id: str) -> ColumnElement[bool]:
    return (_COLUMNS.owner == owner) & (_COLUMNS.id == run_id)


def _is_choice(owner: str, root_run_id: str) -> ColumnElement[bool]:
    return (_COLUMNS.owner == owner) & (_COLUMNS.root_run_id == root_run_id)


def _delete_tombstones(connection: Connection, where: ColumnElement[bool]) -> int:
    """Delete the oldest tombstones that match `where`, at most SWEEP_ROWS. Return their number."""
    tombstones = select(_COLUMNS.seq).where(where, ~_IS_LIVE)
    oldest = tombstones.order_by(_COLUMNS.deleted_at, _COLUMNS.seq).limit(SWEEP_ROWS)
    return connection.execute(delete(TRAJECTORIES).where(_COLUMNS.seq.in_(oldest))).rowcount


def _seq_beyond_newest(owner: str, count: int) -> ScalarSelect[int]:
    """Select the `seq` of the owner's newest tombstone that is not among the `count` newest."""
    tombstones = select(_COLUMNS.seq).where(_COLUMNS.owner == owner, ~_IS_LIVE)
    return tombstones.order_by(_COLUMNS.seq.desc()).limit(1).offset(count).scalar_subquery()
