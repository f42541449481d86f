"""Stored runs, their limits and their expiry."""

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from proxy.agent.suspended_run import SuspendedCall, SuspendedRun
from proxy.store.database import SWEEP_ROWS
from proxy.store.migrations import STEPS
from proxy.store.records import StoredRun
from proxy.store.runs import LOST_KEEP_S, MAX_BYTES, MAX_RUNS, MAX_SUMMARIES, SUMMARY_KEEP_S
from proxy.store.store import Store
from tests.fakes.manual_clock import ManualClock
from tests.stores import connected, open_store

OWNER = "somebody"
KEEP_S = 600.0
RUN = StoredRun("r1", OWNER, "key", "f1", "running", "m", "cntr_1", 0)
ENDED = replace(RUN, status="completed", record="{}")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    with closing(open_store(tmp_path, now=clock.time)) as found:
        yield found


async def end(store: Store, run: StoredRun, *, for_retry: bool = False) -> None:
    await store.runs.end(run, keep_s=KEEP_S, for_retry=for_retry)


async def test_run_is_found_while_running_and_until_it_expires(
    store: Store, clock: ManualClock
) -> None:
    assert (await store.runs.begin(RUN)).joinable is None
    assert await store.runs.find(OWNER, "r1") == RUN
    assert await store.runs.find("somebody else", "r1") is None
    await end(store, ENDED)
    clock.advance(KEEP_S - 1)
    assert await store.runs.find(OWNER, "r1") == await store.runs.find_by_key(OWNER, "key") == ENDED
    clock.advance(1)
    assert await store.runs.find(OWNER, "r1") is None
    assert await store.runs.find_by_key(OWNER, "key") is None


async def test_idempotency_key_has_one_run_in_all_processes(tmp_path: Path, store: Store) -> None:
    with closing(open_store(tmp_path, now=lambda: 0)) as other:
        assert (await store.runs.begin(RUN)).joinable is None
        assert (await other.runs.begin(replace(RUN, id="r2"))).joinable == RUN
        assert (
            await other.runs.begin(replace(RUN, id="r2", owner="somebody else"))
        ).joinable is None
        failed = replace(RUN, status="failed")
        await end(store, failed)
        assert await other.runs.begin(replace(RUN, id="r3")) == (None, failed, None)


async def test_running_run_of_a_dead_process_has_the_status_lost(
    tmp_path: Path, store: Store, clock: ManualClock
) -> None:
    other = open_store(tmp_path, now=clock.time)
    await other.runs.begin(RUN)
    other.close()
    assert await store.runs.find_by_key(OWNER, "key") is None
    for _ in range(2):
        found = await store.runs.find(OWNER, "r1")
        assert found
        assert found.status == "lost"
        await store.sweep()
    clock.advance(LOST_KEEP_S)
    await store.sweep()
    assert await store.runs.find(OWNER, "r1") is None


async def lose(directory: Path, clock: ManualClock, run: StoredRun, checkpoint: str) -> None:
    """Store a run of a process that dies after it has stored a checkpoint of the run."""
    with closing(open_store(directory, now=clock.time)) as other:
        await other.runs.begin(run)
        assert await other.runs.save_checkpoint(run.id, checkpoint)


async def test_retry_gets_the_last_checkpoint_of_a_dead_process_until_the_run_expires(
    tmp_path: Path, store: Store, clock: ManualClock
) -> None:
    with closing(open_store(tmp_path, now=clock.time)) as other:
        await other.runs.begin(RUN)
        assert await other.runs.save_checkpoint("r1", "an earlier turn")
        assert await other.runs.save_checkpoint("r1", "a turn")
        assert not await store.runs.save_checkpoint("r1", "of another process")
    found = await store.runs.begin(replace(RUN, id="r2"))
    assert found == (None, replace(RUN, status="lost"), "a turn")
    await store.runs.delete("r2")
    await store.sweep()
    clock.advance(LOST_KEEP_S)
    assert await store.runs.begin(replace(RUN, id="r3")) == (None, None, None)


async def test_retry_gets_a_checkpoint_again_if_the_run_that_got_it_could_not_start(
    tmp_path: Path, store: Store, clock: ManualClock
) -> None:
    await lose(tmp_path, clock, RUN, "a turn")
    for _ in range(2):
        found = await store.runs.begin(replace(RUN, id="r2"))
        assert found == (None, replace(RUN, status="lost"), "a turn")
        await store.runs.delete("r2")


async def test_retry_gets_the_old_checkpoint_if_the_resumed_run_dies_before_saving_a_new_one(
    tmp_path: Path, store: Store, clock: ManualClock
) -> None:
    await lose(tmp_path, clock, RUN, "a turn")
    with closing(open_store(tmp_path, now=clock.time)) as other:
        await other.runs.begin(replace(RUN, id="r2"))
    lost = replace(RUN, id="r2", status="lost")
    assert await store.runs.begin(replace(RUN, id="r3")) == (None, lost, "a turn")


async def test_retry_gets_no_checkpoint_if_the_resumed_run_has_removed_it(
    tmp_path: Path, store: Store, clock: ManualClock
) -> None:
    await lose(tmp_path, clock, RUN, "a turn")
    with closing(open_store(tmp_path, now=clock.time)) as other:
        await other.runs.begin(replace(RUN, id="r2"))
        assert await other.runs.save_checkpoint("r2", None)
    lost = replace(RUN, id="r2", status="lost")
    assert await store.runs.begin(replace(RUN, id="r3")) == (None, lost, None)


async def test_request_that_reuses_an_idempotency_key_neither_gets_nor_removes_the_checkpoint(
    tmp_path: Path, store: Store, clock: ManualClock
) -> None:
    await lose(tmp_path, clock, RUN, "a turn")
    lost = replace(RUN, status="lost")
    another = replace(RUN, id="r2", fingerprint="f2")
    assert await store.runs.begin(another) == (None, lost, None)
    await store.runs.delete("r2")
    assert await store.runs.begin(replace(RUN, id="r3")) == (None, lost, "a turn")


async def test_checkpoint_is_gone_once_a_run_has_its_result(store: Store) -> None:
    await store.runs.begin(RUN)
    await store.runs.save_checkpoint("r1", "a turn")
    failed = replace(RUN, status="failed", record="{}")
    await end(store, failed)
    assert await store.runs.begin(replace(RUN, id="r2")) == (None, failed, None)


async def test_unfinished_run_is_deleted_only_if_its_process_is_dead(
    tmp_path: Path, store: Store, clock: ManualClock
) -> None:
    with closing(open_store(tmp_path, now=clock.time)) as other:
        await other.runs.begin(RUN)
        await store.runs.delete_ended(OWNER, "r1")
        assert await store.runs.find(OWNER, "r1") == RUN
    await store.runs.delete_ended("somebody else", "r1")
    assert await store.runs.find(OWNER, "r1")
    await store.runs.delete_ended(OWNER, "r1")
    assert await store.runs.find(OWNER, "r1") is None


async def test_checkpoints_of_lost_runs_displace_no_results(
    tmp_path: Path, store: Store, clock: ManualClock
) -> None:
    result = replace(ENDED, key="another key")
    await end(store, result)
    await lose(tmp_path, clock, replace(RUN, id="r2"), "x" * (MAX_BYTES + 1))
    await store.sweep()
    await end(store, replace(result, id="r3"))
    assert await store.runs.find(OWNER, "r1") == result


async def test_undelivered_result_is_given_to_one_retry_only_unless_it_is_put_back(
    store: Store,
) -> None:
    result = replace(ENDED, key=None)
    await end(store, result, for_retry=True)
    assert await store.runs.take_for_retry(OWNER, "f1", excluded_ids=["r1"]) is None
    assert await store.runs.take_for_retry(OWNER, "f1", excluded_ids=[]) == result
    assert await store.runs.take_for_retry(OWNER, "f1", excluded_ids=[]) is None
    await store.runs.return_for_retry("r1")
    assert await store.runs.take_for_retry(OWNER, "f1", excluded_ids=[]) == result


@pytest.mark.parametrize(("runs", "chars"), [(MAX_RUNS + 1, 1), (3, MAX_BYTES // 2)])
async def test_oldest_results_beyond_the_limits_are_deleted(
    runs: int, chars: int, store: Store
) -> None:
    await store.runs.begin(replace(RUN, id="running"))
    await end(store, replace(ENDED, id="theirs", owner="somebody else"))
    for n in range(runs):
        await end(store, replace(ENDED, id=str(n), record="x" * chars))
    mine = [await store.runs.find(OWNER, name) for name in ("running", "0", "1", str(runs - 1))]
    assert [found is not None for found in mine] == [True, False, True, True]
    assert await store.runs.find("somebody else", "theirs")


async def test_newest_result_is_kept_even_if_it_exceeds_the_size_limit(store: Store) -> None:
    for name in ("1", "2"):
        await end(store, replace(ENDED, id=name, record="x" * (MAX_BYTES + 1)))
    assert await store.runs.find(OWNER, "1") is None
    assert await store.runs.find(OWNER, "2")


async def test_oldest_suspended_runs_beyond_the_limit_are_deleted(store: Store) -> None:
    message = {"role": "user", "content": "x" * (MAX_BYTES * 2 // 5)}
    for name in ("1", "2", "3"):
        calls = [SuspendedCall(f"call_{name}_1", "c", "weather")]
        await store.suspended_runs.save(
            OWNER, SuspendedRun([message], 0, calls, calls_are_text=False, resume_from=None)
        )
    found = [await store.suspended_runs.find(OWNER, name) for name in ("1", "2", "3")]
    assert [each is not None for each in found] == [False, True, True]


async def test_suspended_runs_survive_the_migration_of_their_table(tmp_path: Path) -> None:
    record = '{"messages": [], "ours_from": 0, "calls": [], "as_text": false, "workspace": null}'
    with closing(sqlite3.connect(tmp_path / "store.sqlite3")) as before:
        for statement in [statement for step in STEPS[:3] for statement in step]:
            before.execute(statement)
        row = ("r1", OWNER, record, 1)
        before.execute("INSERT INTO parked_runs VALUES (?, ?, ?, ?)", row)
        before.execute("PRAGMA user_version = 3")
        before.commit()
    with closing(Store(tmp_path, now=lambda: 0)) as store:
        assert await store.suspended_runs.find(OWNER, "r1") == SuspendedRun(
            [], 0, [], calls_are_text=False, resume_from=None
        )


async def summarize(store: Store, *runs: StoredRun) -> None:
    await store.runs.store_summaries(lambda: runs)


async def test_latest_summary_of_a_run_replaces_earlier_ones(store: Store) -> None:
    begun = replace(RUN, key=None, fingerprint="")
    await summarize(store, begun, replace(begun, id="r2"))
    await summarize(store, ended := replace(begun, status="completed", record="{}"))
    assert await store.runs.summary(OWNER, "r1") == ended
    assert await store.runs.summary("somebody else", "r1") is None


async def test_running_summary_of_a_dead_process_is_found_as_lost(
    tmp_path: Path, store: Store
) -> None:
    with closing(open_store(tmp_path)) as other:
        await summarize(other, RUN)
        found = await store.runs.summary(OWNER, "r1")
        assert found
        assert found.status == "running"
    found = await store.runs.summary(OWNER, "r1")
    assert found
    assert found.status == "lost"


async def test_summaries_are_limited_for_each_owner_separately(store: Store) -> None:
    await summarize(store, replace(RUN, id="other", owner="somebody else"))
    await summarize(store, *(replace(RUN, id=f"r{n}") for n in range(MAX_SUMMARIES + 2)))
    found = [await store.runs.summary(OWNER, f"r{n}") for n in (0, 1, 2, MAX_SUMMARIES + 1)]
    assert [run is None for run in found] == [True, True, False, False]
    assert await store.runs.summary("somebody else", "other")


async def test_sweep_deletes_expired_summaries(
    tmp_path: Path, store: Store, clock: ManualClock
) -> None:
    await summarize(store, RUN)
    clock.advance(SUMMARY_KEEP_S)
    await store.sweep()
    with connected(tmp_path) as database:
        assert database.exec_driver_sql("SELECT count(*) FROM run_summaries").scalar_one() == 0


async def test_store_runs_other_queries_between_the_batches_of_a_sweep(
    tmp_path: Path, store: Store, clock: ManualClock
) -> None:
    total = 3 * SWEEP_ROWS
    await summarize(store, *(replace(RUN, id=f"r{n}") for n in range(total)))
    clock.advance(SUMMARY_KEEP_S)
    sweeping = asyncio.create_task(store.sweep())
    counts = set()
    with connected(tmp_path) as database:
        query = "SELECT count(*) FROM run_summaries"
        while not sweeping.done():
            await store.runs.summary(OWNER, "another")
            counts.add(database.exec_driver_sql(query).scalar_one())
    await sweeping
    assert counts & set(range(1, total))
    assert min(counts) == 0
