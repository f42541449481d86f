"""Trajectories in the store: their quota and their expiry."""

import json
import random
import sqlite3
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
from sqlalchemy import Connection

from policies.sessions import TrajectorySettings
from proxy.agent.events import ModelCallFinished, ToolCallFinished, ToolCallStarted, TurnStarted
from proxy.models.scripted import call, tool_reply
from proxy.runs.trajectory_recorder import COMPRESSION_LEVEL, stored_texts
from proxy.schemas.trajectory import TrajectoryWriter, read_trajectory
from proxy.store.database import Database
from proxy.store.migrations import STEPS
from proxy.store.store import Store
from proxy.store.trajectories import (
    SWEEP_TRAJECTORIES,
    TOMBSTONE_S,
    StoredTrajectory,
    TrajectoryRepository,
)
from sandbox_runtime.ownership import Owner
from tests.fakes.manual_clock import ManualClock
from tests.fakes.results import SUBMITTED
from tests.fakes.tasks import make_task
from tests.proxy.agent.runs import MemoryArtifactStore
from tests.stores import connected, database_of, open_store

T = TypeVar("T")
MINE, YOURS, LATER = "somebody", "somebody else", "a later owner"
HOUR_S = 3600
PART = b"x" * (300 << 10)
PAPER_RUNS = 2780
"""The runs with a sandbox of one model on the paper's table, see docs/research/evaluate.md."""
RUN_S = 90
"""Seconds from the end of a run to the end of the next: an evaluation takes 2.9 days."""


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    """A store whose trajectories expire after an hour and whose quota is 1 MiB."""
    settings = TrajectorySettings(retention_hours=1, quota_mib=1)
    store = open_store(tmp_path, trajectories=settings, now=clock.time)
    yield store
    store.close()


async def keep(store: Store, run_id: str, *parts: bytes, owner: str = MINE) -> None:
    """Store the trajectory of a run that has ended."""
    for part in parts[:-1]:
        await store.trajectories.append(owner, {run_id: part}, is_last=False)
    await store.trajectories.append(owner, {run_id: parts[-1]}, is_last=True)


async def find(store: Store, run_id: str, owner: str = MINE) -> StoredTrajectory | None:
    return await store.trajectories.find(owner, run_id)


async def reasons(store: Store, *run_ids: str, owner: str = MINE) -> list[str | None]:
    """Return the deletion reason of each trajectory that the store knows."""
    found = [await find(store, run_id, owner) for run_id in run_ids]
    return [each.deletion_reason for each in found if each]


def recorded_run(turns: int) -> bytes:
    """Return the compressed trajectory of a run, with an observation of 8,000 hexadecimal digits in
    each turn."""
    prompt = [{"role": "user", "content": "How many?"}]
    task = make_task("run", MemoryArtifactStore(), "fake-model", prompt)
    writer, digits, known, lines = TrajectoryWriter(task, 0), random.Random(turns), 0, []
    for turn in range(1, turns + 1):
        name, arguments = "execute_bash", {"command": f"xxd -p documents/{turn}"}
        reply = {"role": "assistant", **tool_reply(call(name, **arguments))}
        observation = digits.randbytes(4000).hex()
        for event in (
            TurnStarted(turn),
            ModelCallFinished(known, prompt, {"temperature": 1.0}, 1.0, reply),
            ToolCallStarted(turn, f"call_{turn}", name, arguments),
            ToolCallFinished(turn, f"call_{turn}", name, observation, 0, 1, 0.1),
        ):
            lines += writer.write(float(turn), event)
        known += len(prompt)
        prompt = [reply, {"role": "tool", "content": observation}]
    lines += writer.finish(turns + 1.0, SUBMITTED)
    return zlib.compress(b"\n".join(lines), COMPRESSION_LEVEL)


async def test_default_settings_keep_the_trajectories_of_all_runs_of_the_papers_evaluation(
    tmp_path: Path, clock: ManualClock
) -> None:
    defaults, recorded = TrajectorySettings(), [recorded_run(turns) for turns in (2, 6, 24)]
    runs = {f"run-{number}": recorded[number % 3] for number in range(PAPER_RUNS)}
    with closing(open_store(tmp_path, now=clock.time)) as store:
        for run_id, part in runs.items():
            await keep(store, run_id, part)
            clock.advance(RUN_S)
        clock.advance(3 * 24 * HOUR_S)  # until the report is written
        await store.sweep()
        kept = {
            run_id
            for run_id, part in runs.items()
            if (found := await find(store, run_id)) and list(found.parts) == [part]
        }
        oldest = await find(store, "run-0")
        clock.advance(defaults.retention_hours * HOUR_S)
        await store.sweep()
        reasons_later = await reasons(store, *runs)
    assert kept == runs.keys()
    assert oldest is not None
    calls = read_trajectory(oldest.id, oldest.created_at, stored_texts(oldest))["tool_calls"]
    assert [len(each["observation"]) for each in calls] == [8000, 8000]
    assert sum(map(len, runs.values())) / PAPER_RUNS > 50_000
    assert (defaults.quota_mib << 20) / PAPER_RUNS > 1_500_000  # docs/research/sandbox-eval.md
    assert reasons_later == ["expired"] * PAPER_RUNS


async def test_parts_of_a_trajectory_are_returned_in_the_order_of_appending(store: Store) -> None:
    await keep(store, "one", b"a", b"b", b"c")
    found = await find(store, "one")
    assert found is not None
    assert list(found.parts) == [b"a", b"b", b"c"]
    assert (found.id, found.deletion_reason, found.is_lost) == ("one", None, False)
    assert await find(store, "one", YOURS) is None
    assert await find(store, "two") is None


async def test_oldest_trajectories_beyond_the_quota_of_an_owner_are_deleted(store: Store) -> None:
    await keep(store, "theirs", PART * 3, owner=YOURS)
    for run_id in ("one", "two", "three"):
        await keep(store, run_id, PART)
    assert await reasons(store, "one", "two", "three") == [None] * 3
    await keep(store, "four", PART)
    assert await reasons(store, "one", "two", "three", "four") == ["quota", None, None, None]
    await keep(store, "huge", PART * 10)
    assert await reasons(store, "one", "two", "three", "four", "huge") == [*["quota"] * 4, None]
    theirs = await find(store, "theirs", YOURS)
    assert theirs is not None
    assert theirs.deletion_reason is None


async def test_expired_trajectory_leaves_a_tombstone_that_expires_too(
    store: Store, clock: ManualClock
) -> None:
    for number in range(120):  # more than a sweep deletes in one transaction
        await keep(store, f"run-{number}", b"part")
    clock.advance(HOUR_S)
    await store.sweep()
    assert await reasons(store, "run-0", "run-119") == ["expired"] * 2
    clock.advance(TOMBSTONE_S)
    await store.sweep()
    assert [await find(store, run_id) for run_id in ("run-0", "run-119")] == [None, None]


async def test_expiry_of_a_trajectory_counts_from_the_end_of_the_run(
    store: Store, clock: ManualClock
) -> None:
    await store.trajectories.append(MINE, {"one": b""}, is_last=False)
    clock.advance(HOUR_S - 1)
    await store.trajectories.append(MINE, {"one": b"a"}, is_last=True)
    clock.advance(HOUR_S - 1)
    assert await reasons(store, "one") == [None]
    clock.advance(1)
    assert await reasons(store, "one") == ["expired"]


async def test_deleted_trajectory_takes_no_further_parts(store: Store, tmp_path: Path) -> None:
    await store.trajectories.append(MINE, {"one": b""}, is_last=False)
    assert await store.trajectories.delete(YOURS, "one") is False
    assert await store.trajectories.delete(MINE, "one") is True
    assert await store.trajectories.delete(MINE, "one") is False
    await store.trajectories.append(MINE, {"one": b"a"}, is_last=True)
    found = await find(store, "one")
    assert found is not None
    assert (found.deletion_reason, list(found.parts)) == ("deleted", [])
    with connected(tmp_path) as database:
        assert database.exec_driver_sql("SELECT count(*) FROM trajectory_parts").scalar_one() == 0


async def test_running_trajectory_of_a_dead_process_is_found_as_lost(tmp_path: Path) -> None:
    first, second = open_store(tmp_path), open_store(tmp_path)
    await first.trajectories.append(MINE, {"one": b"a"}, is_last=False)
    running = await find(second, "one")
    first.close()
    lost = await find(second, "one")
    second.close()
    assert running is not None
    assert lost is not None
    assert (running.is_lost, lost.is_lost, list(lost.parts)) == (False, True, [b"a"])


async def test_trajectory_of_a_running_run_is_neither_evicted_nor_expired(
    store: Store, clock: ManualClock
) -> None:
    await store.trajectories.append(MINE, {"running": PART * 2}, is_last=False)
    await keep(store, "one", PART * 2)
    await keep(store, "two", PART)
    assert await reasons(store, "running", "one", "two") == [None, "quota", None]
    await store.trajectories.append(MINE, {"running too": PART * 2}, is_last=False)
    assert await reasons(store, "running", "running too", "two") == [None, None, None]
    clock.advance(HOUR_S)
    await store.sweep()
    assert await reasons(store, "running", "two") == [None, "expired"]
    await store.trajectories.append(MINE, {"running": PART}, is_last=True)
    assert await reasons(store, "running") == [None]


async def test_trajectory_that_ended_first_is_evicted_first(
    store: Store, clock: ManualClock
) -> None:
    await store.trajectories.append(MINE, {"long": b""}, is_last=False)
    clock.advance(1)
    await keep(store, "short", PART * 2)
    clock.advance(1)
    await store.trajectories.append(MINE, {"long": PART * 2}, is_last=True)
    assert await reasons(store, "long", "short") == [None, "quota"]


async def test_eviction_of_trajectories_continues_over_several_transactions(store: Store) -> None:
    small = b"x" * (10 << 10)
    names = [f"run-{number}" for number in range(SWEEP_TRAJECTORIES + 20)]
    for run_id in names:
        await keep(store, run_id, small)
    await keep(store, "huge", PART * 10)
    assert await reasons(store, *names, "huge") == [*["quota"] * len(names), None]


class CountingDatabase(Database):
    """A database that counts the trajectories after each write."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.counts: list[int] = []

    async def write(self, transaction: Callable[[Connection], T]) -> T:
        def counted(connection: Connection) -> T:
            result = transaction(connection)
            query = "SELECT count(*) FROM trajectories WHERE deletion_reason IS NULL"
            self.counts.append(connection.exec_driver_sql(query).scalar_one())
            return result

        return await super().write(counted)


@pytest.mark.parametrize("is_evicted", [True, False], ids=["evicted", "expired"])
async def test_transaction_deletes_a_bounded_number_of_trajectories(
    is_evicted: bool, tmp_path: Path, clock: ManualClock
) -> None:
    database, process = CountingDatabase(database_of(tmp_path)), Owner(tmp_path)
    settings = TrajectorySettings(retention_hours=1)
    unlimited = TrajectoryRepository(database, clock.time, process, settings)
    repository = TrajectoryRepository(database, clock.time, process, settings, max_trajectories=10)
    count = 2 * SWEEP_TRAJECTORIES + 20
    for run_id in map(str, range(count)):
        await unlimited.append(MINE, {run_id: b"part"}, is_last=True)
    database.counts.clear()
    if is_evicted:
        await repository.evict(MINE)
        left = 10
    else:
        clock.advance(HOUR_S)
        sweep = partial(repository.expire, now=int(clock.time()), forget_before=0)
        while await database.write(sweep):
            pass
        left = 0
    batches = [count - SWEEP_TRAJECTORIES, count - 2 * SWEEP_TRAJECTORIES, left]
    assert database.counts == batches
    database.close()
    process.release()


async def test_lost_trajectory_is_deleted_after_its_expiry(
    tmp_path: Path, clock: ManualClock
) -> None:
    settings = TrajectorySettings(retention_hours=1)
    first, second = (open_store(tmp_path, trajectories=settings, now=clock.time) for _ in range(2))
    await first.trajectories.append(MINE, {"one": b""}, is_last=False)
    first.close()
    clock.advance(HOUR_S - 1)
    await second.sweep()
    lost = await find(second, "one")
    clock.advance(1)
    await second.sweep()
    assert lost is not None
    assert (lost.is_lost, lost.deletion_reason) == (True, None)
    assert await reasons(second, "one") == ["expired"]
    second.close()


async def test_owner_with_too_many_trajectories_loses_only_its_own_oldest_ones(
    tmp_path: Path, clock: ManualClock
) -> None:
    database, process = Database(database_of(tmp_path)), Owner(tmp_path)
    repository = TrajectoryRepository(
        database,
        clock.time,
        process,
        TrajectorySettings(),
        max_trajectories=2,
        max_tombstones=1,
    )
    await repository.append(MINE, {"running": b""}, is_last=False)
    for owner, count in ((YOURS, 2), (MINE, 5), (LATER, 2)):
        for number in range(count):
            run_id = f"{owner} {number}"
            await repository.append(owner, {run_id: b"part"}, is_last=True)
    for owner in (YOURS, LATER):
        await repository.delete(owner, f"{owner} 0")
    sweep = partial(repository.expire, now=int(clock.time()), forget_before=0)
    assert await database.write(sweep) is False
    found = {
        owner: [await repository.find(owner, f"{owner} {number}") for number in range(5)]
        for owner in (MINE, YOURS, LATER)
    }
    known = {
        owner: [each.deletion_reason if each else "unknown" for each in stored]
        for owner, stored in found.items()
    }
    assert known[MINE] == ["unknown", "unknown", "quota", None, None]
    assert known[YOURS] == known[LATER] == ["deleted", None, "unknown", "unknown", "unknown"]
    assert await repository.find(MINE, "running") is not None
    database.close()
    process.release()


async def test_deletion_of_the_first_choice_deletes_the_other_choices_too(store: Store) -> None:
    choices = ["first", "second", "third"]
    await store.trajectories.append(MINE, dict.fromkeys(choices, b""), is_last=False)
    await store.trajectories.append(MINE, {"unrelated": b""}, is_last=False)
    assert await store.trajectories.delete(MINE, "second") is True
    assert await reasons(store, *choices) == [None, "deleted", None]
    assert await store.trajectories.delete(MINE, "first") is True
    assert await reasons(store, *choices, "unrelated") == [*["deleted"] * 3, None]


async def test_trajectories_that_could_not_be_stored_leave_tombstones(store: Store) -> None:
    choices = ["complete", "deleted", "begun"]
    await store.trajectories.append(MINE, dict.fromkeys(choices, b""), is_last=False)
    await store.trajectories.append(MINE, {"complete": b"part"}, is_last=True)
    await store.trajectories.append(MINE, {"begun": b"part"}, is_last=False)
    await store.trajectories.delete(MINE, "deleted")
    await store.trajectories.mark_as_failed(MINE, choices)
    await store.trajectories.mark_as_failed(MINE, ["never begun"])
    assert await reasons(store, *choices) == [None, "deleted", "failed"]
    assert await reasons(store, "never begun") == ["failed"]
    begun = await find(store, "begun")
    assert begun is not None
    assert list(begun.parts) == []


async def test_trajectories_of_the_first_release_survive_the_migration(tmp_path: Path) -> None:
    lines: list[dict[str, object]] = [
        {"kind": "run", "model": "m", "choice": 1},
        {"kind": "message", "message": {"role": "user", "content": "How many?"}},
        {"kind": "model_call", "turn": 1, "kept": 0, "added": [0], "reply": None, "settings": 0},
        {"kind": "end", "duration_s": 2.0, "status": "completed"},
    ]
    part = zlib.compress("\n".join(map(json.dumps, lines)).encode())
    first_release = [statement for step in STEPS[:10] for statement in step]
    rows = [
        (1, "ended", MINE, None, None, len(part), 10, 9_000, None),
        (2, "lost", MINE, "dead process", None, len(part), 20, 9_000, None),
        (3, "deleted", MINE, None, "deleted", 0, 30, 9_000, 40),
    ]
    with closing(sqlite3.connect(tmp_path / "store.sqlite3")) as before:
        for statement in first_release:
            before.execute(statement)
        before.executemany("INSERT INTO trajectories VALUES (?,?,?,?,?,?,?,?,?)", rows)
        for run_id in ("ended", "lost"):
            insert = "INSERT INTO trajectory_parts (trajectory_id, data) VALUES (?, ?)"
            before.execute(insert, (run_id, part))
        before.execute("PRAGMA user_version = 10")
        before.commit()
    clock = ManualClock()
    with closing(Store(tmp_path, now=lambda: 100 + clock.time())) as store:
        await store.sweep()
        assert await reasons(store, "ended", "lost", "deleted") == [None, None, "deleted"]
        ended, lost = await find(store, "ended"), await find(store, "lost")
        assert ended is not None
        assert lost is not None
        assert (ended.is_lost, lost.is_lost) == (False, True)
        trajectory = read_trajectory(ended.id, ended.created_at, stored_texts(ended))
        assert (trajectory["status"], trajectory["choice"], trajectory["segments"]) == (
            *("completed", 1),
            [[0]],
        )
        await keep(store, "new", b"part")
        clock.advance(10_000)
        await store.sweep()
        assert await reasons(store, "ended", "lost", "new") == ["expired", "expired", None]
        assert await store.trajectories.delete(MINE, "new") is True
