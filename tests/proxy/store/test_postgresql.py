"""A store in PostgreSQL: processes of several machines, and a server that ends."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import URL, select

from policies.budgets import DailyBudget, Expense
from proxy.bootstrap import build_store
from proxy.config import ConfigError, parse
from proxy.errors import StoreError, StoreUnavailableError
from proxy.store import postgresql
from proxy.store.process_lease import ProcessLease
from proxy.store.records import StoredRun
from proxy.store.store import Store
from proxy.store.tables import PROCESSES
from tests.postgresql import PostgresqlServer, new_database, server_for_tests

OWNER = "somebody"
RUN = StoredRun("r1", OWNER, "key", "f1", "running", "m", "cntr_1", 0)
SLOWLY = 1000.0
"""An interval of renewals, in seconds, within which no test ends."""
TIMEOUT_S = 20


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresqlServer]:
    with server_for_tests() as found:
        yield found


@pytest.fixture
def url(server: PostgresqlServer, tmp_path: Path) -> URL:
    """Return the URL of an empty database."""
    return new_database(server, tmp_path.name)


@pytest.fixture
def store(url: URL, tmp_path: Path) -> Iterator[Store]:
    with closing(Store(tmp_path, database_url=url)) as found:
        yield found


def execute(url: URL, statement: str) -> None:
    engine = postgresql.create_pool(url, 1)
    with engine.begin() as connection:
        connection.exec_driver_sql(statement)
    engine.dispose()


@contextmanager
def released_at_end(lease: ProcessLease) -> Iterator[ProcessLease]:
    """Give up the lease at the end of the block."""
    try:
        yield lease
    finally:
        lease.release()


def process_ids(url: URL) -> list[str]:
    """Return the ids of the processes that have a row."""
    engine = postgresql.create_pool(url, 1)
    with engine.connect() as connection:
        found = list(connection.scalars(select(PROCESSES.c.id)))
    engine.dispose()
    return found


EXPIRE_ALL = "UPDATE processes SET expires_at = 0"


# Processes


def test_process_is_alive_until_it_gives_up_its_lease(store: Store, url: URL) -> None:
    with released_at_end(ProcessLease(url, renew_s=SLOWLY)) as other:
        assert not store.process.is_dead(other.id)
        assert not other.is_dead(store.process.id)
    assert store.process.is_dead(other.id)
    assert store.process.is_dead("unknown")


def test_process_whose_lease_has_expired_counts_as_dead(store: Store, url: URL) -> None:
    observer = ProcessLease(url, lease_s=0, renew_s=SLOWLY)
    with released_at_end(observer), released_at_end(ProcessLease(url, renew_s=SLOWLY)) as cut_off:
        execute(url, EXPIRE_ALL)
        assert observer.is_dead(cut_off.id)


def test_process_stays_alive_if_the_database_was_down_when_its_lease_was_to_be_renewed(
    store: Store, url: URL
) -> None:
    observer = ProcessLease(url, lease_s=SLOWLY, renew_s=SLOWLY)
    with released_at_end(observer), released_at_end(ProcessLease(url, renew_s=SLOWLY)) as cut_off:
        execute(url, EXPIRE_ALL)  # the server was started less than SLOWLY seconds ago
        assert not observer.is_dead(cut_off.id)


def test_process_that_was_found_dead_continues_under_a_new_id(store: Store, url: URL) -> None:
    observer = ProcessLease(url, lease_s=0, renew_s=SLOWLY)
    lost = threading.Event()
    with released_at_end(observer), released_at_end(ProcessLease(url, renew_s=SLOWLY)) as cut_off:
        cut_off.on_lost = lost.set
        before = cut_off.id
        execute(url, EXPIRE_ALL)
        assert observer.is_dead(before)
        cut_off.renew()
        assert lost.is_set()
        assert observer.is_dead(before)
        assert cut_off.id != before


def test_forget_dead_deletes_the_row_of_a_process_whose_lease_expired_long_ago(
    store: Store, url: URL
) -> None:
    observer = ProcessLease(url, lease_s=0, renew_s=SLOWLY)
    with released_at_end(observer), released_at_end(ProcessLease(url, renew_s=SLOWLY)) as killed:
        execute(url, f"UPDATE processes SET expires_at = 0 WHERE id = '{killed.id}'")
        observer.remove_dead_records()
        assert killed.id not in process_ids(url)
        assert {store.process.id, observer.id} <= set(process_ids(url))


def test_expired_process_rows_are_kept_shortly_after_the_database_server_has_started(
    store: Store, url: URL
) -> None:
    observer = ProcessLease(url, lease_s=SLOWLY, renew_s=SLOWLY)
    with released_at_end(observer), released_at_end(ProcessLease(url, renew_s=SLOWLY)) as cut_off:
        execute(url, EXPIRE_ALL)  # the server was started less than SLOWLY seconds ago
        observer.remove_dead_records()
        assert cut_off.id in process_ids(url)


async def test_result_of_a_process_that_was_found_dead_is_not_stored(
    store: Store, url: URL, tmp_path: Path
) -> None:
    assert (await store.runs.begin(RUN)).joinable is None
    execute(url, f"UPDATE processes SET is_dead = true WHERE id = '{store.process.id}'")
    with closing(Store(tmp_path, database_url=url)) as other:
        again = replace(RUN, id="r2")
        assert (await other.runs.begin(again)).joinable is None
        late = replace(RUN, status="completed", record="late")
        await other.sweep()
        await store.runs.end(late, keep_s=60, for_retry=False)
        assert await other.runs.find_by_key(OWNER, "key") is None
        await other.runs.end(replace(again, status="completed"), keep_s=60, for_retry=False)
        found = await store.runs.find_by_key(OWNER, "key")
    assert found is not None
    assert (found.id, found.status) == ("r2", "completed")


# Concurrent transactions


async def test_several_processes_never_exceed_a_budget(url: URL, tmp_path: Path) -> None:
    taken = 0

    async def take(store: Store) -> None:
        nonlocal taken
        account = store.spending.account(OWNER, DailyBudget(runs=10))
        reservation = await account.take(Expense(runs=1))
        taken += reservation.exhausted_kind is None

    with (
        closing(Store(tmp_path, database_url=url)) as one,
        closing(Store(tmp_path, database_url=url)) as two,
    ):
        async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as tasks:
            for store in [one, two] * 15:
                tasks.create_task(take(store))
        assert (await one.spending.spent_today(OWNER)).runs == taken == 10


async def test_concurrent_requests_with_one_idempotency_key_begin_runs_in_one_process(
    url: URL, tmp_path: Path
) -> None:
    with (
        closing(Store(tmp_path, database_url=url)) as one,
        closing(Store(tmp_path, database_url=url)) as two,
    ):
        async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as tasks:
            begun = [
                tasks.create_task(store.runs.begin(replace(RUN, id=f"r{number}")))
                for number, store in enumerate([one, two] * 8)
            ]
    # Each process knows its own runs, so only those of the other process are found.
    new = [number for number, task in enumerate(begun) if task.result().joinable is None]
    assert new
    assert len({number % 2 for number in new}) == 1


# The server


async def test_stopped_database_server_is_reported_and_used_again_after_its_restart(
    server: PostgresqlServer, store: Store
) -> None:
    assert (await store.runs.begin(RUN)).joinable is None
    server.stop()
    try:
        with pytest.raises(StoreUnavailableError) as raised:
            await store.runs.find(OWNER, "r1")
        with pytest.raises(StoreUnavailableError):
            await store.is_process_dead("another")
    finally:
        server.start()
    assert (raised.value.status, raised.value.headers["Retry-After"]) == (503, "5")
    assert await store.runs.find(OWNER, "r1") == RUN


async def test_sweep_keeps_the_published_events_and_frames_of_a_running_run(
    store: Store, url: URL
) -> None:
    assert (await store.runs.begin(RUN)).joinable is None
    published = (RUN.id, f"{RUN.id}.frames", "ended.frames")
    for publication_id in published:
        await store.runs.publish(publication_id, "[]", is_first=True, is_last=False)
    execute(url, "UPDATE run_events SET created_at = 0")
    await store.sweep()
    found = [bool(await store.runs.published_batches(each, 0)) for each in published]
    assert found == [True, True, False]


async def test_transaction_that_conflicts_at_every_attempt_raises_store_unavailable_error(
    url: URL, store: Store
) -> None:
    execute(
        url,
        "CREATE FUNCTION conflict() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE EXCEPTION 'conflict' USING ERRCODE = '40001'; END $$;"
        "CREATE TRIGGER always BEFORE INSERT ON runs FOR EACH ROW EXECUTE FUNCTION conflict()",
    )
    with pytest.raises(StoreUnavailableError):
        await store.runs.begin(RUN)


def test_unreachable_database_server_is_reported_without_its_password(
    tmp_path: Path,
) -> None:
    setting = {"database_url": "postgresql://proxy:secret@127.0.0.1:1/proxy"}
    config = parse({"server": {"data_dir": str(tmp_path)}, "store": setting}, "test")
    with pytest.raises(ConfigError) as raised:
        build_store(config)
    first, *_ = str(raised.value).splitlines()
    assert first.startswith("store: postgresql")
    assert "Connection refused" in str(raised.value)
    assert "secret" not in str(raised.value)


def test_newer_schema_is_rejected(store: Store, url: URL, tmp_path: Path) -> None:
    execute(url, "UPDATE schema_version SET version = 999")
    with pytest.raises(StoreError, match="it was written by a newer version"):
        Store(tmp_path, database_url=url)


async def test_characters_that_the_database_cannot_store_become_question_marks(
    store: Store,
) -> None:
    upload = replace(RUN, key="a\0b\ud800", model="\0")
    assert (await store.runs.begin(upload)).joinable is None
    found = await store.runs.find(OWNER, "r1")
    assert found is not None
    assert (found.key, found.model) == ("a?b?", "?")
