"""The store: consistency after a crash, use by several processes, and sweeps."""

import os
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from sqlalchemy import inspect, text

from policies.default_instruction import KnownInstruction
from policies.tool_support import SUPPORTED, KnownVerdict
from proxy.bootstrap import build_store
from proxy.config import ConfigError, parse
from proxy.errors import QuotaError, StoreError
from proxy.store.blobs import GRACE_S, Blob
from proxy.store.database import MAX_FILES
from proxy.store.migrations import DEFAULT_INSTRUCTIONS, STEPS
from proxy.store.records import NewContainer, PageRequest, StoredUpload
from proxy.store.store import Store
from proxy.store.tables import METADATA
from proxy.store.tool_verdicts import KEEP_S
from tests.fakes.manual_clock import ManualClock
from tests.stores import connected, open_store, overwrite_blob, sqlite_only, stored_blobs

ROOT = Path(__file__).parents[3]
OWNER = "somebody"
HOUR_S = 3600
QWEN = KnownInstruction("You are Qwen.", 5)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    with opened(tmp_path, clock) as found:
        yield found


@contextmanager
def opened(directory: Path, clock: ManualClock) -> Iterator[Store]:
    """Open a store whose clock begins now and is advanced by the test."""
    began = time.time()
    store = open_store(directory, now=lambda: began + clock.time())
    try:
        yield store
    finally:
        store.close()


async def store_blob(store: Store, data: bytes) -> Blob:
    """Store a blob without a row."""
    async with store.blobs.open_writer() as writer:
        await writer.write(data)
        return await writer.commit()


async def uploaded(store: Store, data: bytes, name: str = "a.txt") -> StoredUpload:
    return await store.uploads.add(
        OWNER,
        await store_blob(store, data),
        filename=name,
        purpose="user_data",
        mime_type="text/plain",
        compute_expiry=lambda created_at: created_at + HOUR_S,
        quota=100,
    )


def contents(directory: Path) -> list[bytes]:
    return sorted(stored_blobs(directory).values())


async def names(store: Store) -> list[str]:
    """Return the names of the listed uploads, newest first."""
    page = await store.uploads.page(OWNER, PageRequest(limit=100), None)
    return [upload.filename for upload in page.items]


# Uploads and containers


async def test_upload_is_found_by_its_owner_and_id(store: Store) -> None:
    upload = await uploaded(store, b"hello")
    found = await store.uploads.find(OWNER, upload.id)
    assert found is not None
    assert (found.file_id, found.filename, found.bytes, found.mime_type) == (
        upload.id,
        "a.txt",
        5,
        "text/plain",
    )
    assert b"".join([piece async for piece in found.read()]) == b"hello"
    path = await store.blobs.local_path(upload.blob)
    assert path.stat().st_mode & 0o777 == 0o600
    assert await store.uploads.find("somebody else", upload.id) is None
    assert await store.uploads.find(OWNER, "file-1") is None


async def test_expired_upload_is_not_found_before_a_sweep(store: Store, clock: ManualClock) -> None:
    upload = await uploaded(store, b"a")
    clock.advance(HOUR_S + 1)
    assert await store.uploads.get(OWNER, upload.id) is None
    assert await names(store) == []
    assert not await store.uploads.delete(OWNER, upload.id)
    await uploaded(store, b"x" * 100)  # the expired upload uses no quota


async def test_use_of_a_container_postpones_its_expiry(store: Store, clock: ManualClock) -> None:
    container = await store.containers.create(OWNER, NewContainer("mine", minutes=20))
    for _ in range(3):
        clock.advance(15 * 60)
        used = await store.containers.touch(OWNER, container.id)
        assert used is not None
        assert used.last_active_at - container.created_at == pytest.approx(clock.time(), abs=1)
    clock.advance(20 * 60 + 1)
    assert await store.containers.touch(OWNER, container.id) is None


async def test_expired_container_is_replaced_without_its_files(
    store: Store, clock: ManualClock, tmp_path: Path
) -> None:
    container = await store.containers.create(OWNER, NewContainer("mine", minutes=20))
    put = {"filename": "a", "mime_type": "text/plain", "quota": 100}
    await store.container_files.put(OWNER, container.id, await store_blob(store, b"old"), **put)
    clock.advance(20 * 60 + 1)
    await store.containers.create(OWNER, NewContainer("mine", minutes=20), container.id)
    assert await store.container_files.all(container.id, OWNER, None) == []
    assert contents(tmp_path) == []
    await store.container_files.put(OWNER, container.id, await store_blob(store, b"new"), **put)
    await store.containers.create(OWNER, NewContainer("mine", minutes=20), container.id)
    found = await store.container_files.all(container.id, OWNER, None)
    assert found is not None
    assert [file.bytes for file in found] == [3]


async def test_concurrent_uploads_never_exceed_the_quota(store: Store) -> None:
    refused = 0

    async def upload() -> None:
        nonlocal refused
        try:
            await uploaded(store, b"x" * 30)
        except QuotaError:
            refused += 1

    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            for _ in range(10):
                tasks.start_soon(upload)
    assert (len(await names(store)), refused) == (3, 7)
    assert sum(map(len, contents(store.directory))) == 90


# Sweeps and crashes


async def test_sweep_deletes_expired_uploads_and_containers(
    store: Store, clock: ManualClock, tmp_path: Path
) -> None:
    await uploaded(store, b"old")
    container = await store.containers.create(OWNER, NewContainer("mine", minutes=1))
    put = {"filename": "a", "mime_type": "text/plain", "quota": 100}
    await store.container_files.put(OWNER, container.id, await store_blob(store, b"inside"), **put)
    clock.advance(HOUR_S + 60)
    await uploaded(store, b"new", "new.txt")
    await store.sweep()
    assert contents(tmp_path) == [b"new"]
    assert await names(store) == ["new.txt"]


@sqlite_only
async def test_blob_without_a_row_is_swept_after_the_grace_time(
    store: Store, clock: ManualClock, tmp_path: Path
) -> None:
    await store_blob(store, b"lost")
    (tmp_path / "blobs" / "0.part").write_bytes(b"half")
    await store.sweep()
    assert contents(tmp_path) == [b"half", b"lost"]
    clock.advance(HOUR_S + 60)
    await store.sweep()
    assert contents(tmp_path) == []


@pytest.mark.parametrize("content", [None, b"", b"hel", b"hello, hello"])
async def test_upload_with_an_incomplete_blob_is_not_found(
    content: bytes | None, store: Store
) -> None:
    upload = await uploaded(store, b"hello")
    await uploaded(store, b"other", "other.txt")
    overwrite_blob(store.directory, upload.blob, content)
    assert await store.uploads.get(OWNER, upload.id) is None
    await store.sweep()
    assert await names(store) == ["other.txt"]


async def test_upload_list_continues_after_a_deleted_upload(
    store: Store, clock: ManualClock
) -> None:
    uploads = [await uploaded(store, b"a", name) for name in "abc"]
    await store.uploads.delete(OWNER, uploads[1].id)
    await store.sweep()
    page = await store.uploads.page(OWNER, PageRequest(limit=1, after_id=uploads[1].id), None)
    assert [upload.filename for upload in page.items] == ["a"]


async def test_cancelled_upload_leaves_a_complete_file_or_none(store: Store) -> None:
    for _ in range(20):
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(uploaded, store, b"x")
                await anyio.lowlevel.checkpoint()
                scope.cancel()
    for upload in (await store.uploads.page(OWNER, PageRequest(limit=100), None)).items:
        assert store.blobs.is_intact(upload.blob, 1)


WRITER = """
import asyncio, sys
from pathlib import Path
from tests.stores import open_store

async def main():
    store = open_store(Path(sys.argv[1]))
    print("open", flush=True)
    for number in range(int(sys.argv[2])):
        async with store.blobs.open_writer() as writer:
            await writer.write(b"x")
            blob = await writer.commit()
        await store.uploads.add(
            "somebody", blob, filename=str(number), purpose="user_data",
            mime_type="text/plain", compute_expiry=lambda at: at + 3600, quota=10**9,
        )
        await store.sweep()
    store.close()

asyncio.run(main())
"""


async def test_concurrent_processes_can_create_a_store_and_lose_nothing(tmp_path: Path) -> None:
    async def write() -> None:
        command = [sys.executable, "-c", WRITER, str(tmp_path), "20"]
        await anyio.run_process(command, env={**os.environ, "PYTHONPATH": str(ROOT)})

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(write)
    with opened(tmp_path, ManualClock()) as store:
        await store.sweep()
        assert sorted(await names(store)) == sorted(3 * [str(number) for number in range(20)])
        assert contents(tmp_path) == [b"x"] * 60


async def test_killed_process_leaves_a_consistent_store(tmp_path: Path, clock: ManualClock) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path), "1000000"]
    with anyio.fail_after(60):
        async with await anyio.open_process(
            command, env={**os.environ, "PYTHONPATH": str(ROOT)}
        ) as process:
            assert process.stdout is not None
            await process.stdout.receive()
            while len(stored_blobs(tmp_path)) < 5:  # noqa: ASYNC110 - another process sets no event
                await anyio.sleep(0.01)
            process.kill()
    with opened(tmp_path, clock) as store:
        clock.advance(HOUR_S - 60)
        await store.sweep()
        page = await store.uploads.page(OWNER, PageRequest(limit=10_000), None)
        assert len(page.items) >= 4
        assert all(store.blobs.is_intact(upload.blob, 1) for upload in page.items)


# The schema


def test_database_migrations_create_the_tables_that_the_code_declares(
    store: Store, tmp_path: Path
) -> None:
    with connected(tmp_path) as database:
        found = inspect(database)
        tables = {
            table: [(each["name"], each["type"].compile(database.dialect)) for each in columns]
            for table in set(found.get_table_names()) - {"sqlite_sequence", "schema_version"}
            if (columns := found.get_columns(table))
        }
        spelled = {"FLOAT": "DOUBLE PRECISION"} if database.dialect.name == "postgresql" else {}
        expected = {
            name: [
                (column.name, spelled.get(kind, kind))
                for column in table.columns
                if (kind := column.type.compile(database.dialect))
            ]
            for name, table in METADATA.tables.items()
        }
    assert tables == expected


async def test_oldest_schema_is_migrated(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "store.sqlite3")) as old:
        for statement in STEPS[0]:
            old.execute(statement)
        old.execute(
            "INSERT INTO files VALUES (1, 'file-1', ?, 'a', 'batch', 'text/plain', 1, '', 'b',"
            " 1, 99999999999, NULL)",
            [OWNER],
        )
        old.execute("PRAGMA user_version = 1")
        old.commit()
    with closing(Store(tmp_path)) as store:
        assert await names(store) == ["a"]
        await store.containers.create(OWNER, NewContainer("mine", minutes=1))


@sqlite_only
async def test_tool_verdicts_survive_the_migration_that_adds_default_instructions(
    tmp_path: Path,
) -> None:
    verdict = KnownVerdict(SUPPORTED, "1.0", 1e12)
    with closing(Store(tmp_path)) as store:
        await store.tool_verdicts.save("b", "m", verdict)
    with closing(sqlite3.connect(tmp_path / "store.sqlite3")) as old:
        old.execute("ALTER TABLE runs DROP COLUMN checkpoint")
        old.execute("DROP TABLE default_instructions")
        old.execute(f"PRAGMA user_version = {STEPS.index(DEFAULT_INSTRUCTIONS)}")
        old.commit()
    with closing(Store(tmp_path)) as store:
        assert await store.tool_verdicts.all("b") == {"m": verdict}
        assert await store.tool_verdicts.default_instructions("b") == {}
        await store.tool_verdicts.save_default_instruction("b", "m", QWEN)
        assert await store.tool_verdicts.default_instructions("b") == {"m": QWEN}


async def test_default_instruction_is_stored_per_backend_and_model(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as store:
        save = store.tool_verdicts.save_default_instruction
        await save("b", "m", KnownInstruction("old", 0))
        await save("b", "m", QWEN)
        await save("b", "gone", QWEN)
        await store.tool_verdicts.delete_default_instruction("b", "gone")
        await save("other", "m", KnownInstruction("y", 0))
    with closing(open_store(tmp_path)) as store:
        assert await store.tool_verdicts.default_instructions("b") == {"m": QWEN}


async def test_old_default_instruction_expires(store: Store, clock: ManualClock) -> None:
    known = KnownInstruction("You are Qwen.", clock.time())
    await store.tool_verdicts.save_default_instruction("b", "m", known)
    clock.advance(KEEP_S + 1)
    await store.sweep()
    assert await store.tool_verdicts.default_instructions("b") == {}


def test_store_with_a_newer_schema_version_is_rejected(tmp_path: Path, store: Store) -> None:
    newer = {
        "sqlite": "PRAGMA user_version = 999",
        "postgresql": "UPDATE schema_version SET version = 999",
    }
    with connected(tmp_path) as database:
        database.exec_driver_sql(newer[database.dialect.name])
    with pytest.raises(StoreError, match="it was written by a newer version"):
        open_store(tmp_path)


def test_file_that_is_not_a_database_is_reported_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "store.sqlite3").write_bytes(b"no database at all" * 100)
    config = parse({"server": {"data_dir": str(tmp_path)}}, "test")
    with pytest.raises(ConfigError) as raised:
        build_store(config)
    assert str(raised.value) == (
        f"server.data_dir: {tmp_path}/store.sqlite3: file is not a database"
    )


def test_directory_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    (tmp_path / "blobs").write_bytes(b"")
    with pytest.raises(StoreError, match=r"File exists: .*blobs"):
        Store(tmp_path)


async def test_slowly_written_blob_is_not_swept(store: Store, clock: ManualClock) -> None:
    async with store.blobs.open_writer() as writer:
        await writer.write(b"a")
        clock.advance(2 * GRACE_S)
        await store.sweep()
        blob = await writer.commit()
    assert store.blobs.is_intact(blob.name, 1)


async def test_empty_files_count_toward_the_limit_of_files(tmp_path: Path, store: Store) -> None:
    many = """
        INSERT INTO files (id, owner, filename, purpose, mime_type, bytes, sha256, blob,
                           created_at, expires_at)
        WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < :count)
        SELECT CAST(i AS TEXT), :owner, '', '', '', 0, '', '', 0, 9999999999 FROM n
    """
    with connected(tmp_path) as database:
        database.execute(text(many), {"count": MAX_FILES - 1, "owner": OWNER})
    await uploaded(store, b"")
    with pytest.raises(QuotaError, match="10000 files"):
        await uploaded(store, b"")
    await store.check_quota("somebody else", 1, 1)
