"""Checkpoints of runs, and runs that begin after the loss of an earlier run with the same
idempotency key."""

import asyncio
from contextlib import closing
from pathlib import Path

import anyio
import pytest

from proxy.errors import RunLostError
from proxy.runs.archive import LostRun, RunArchive
from proxy.runs.run import RequestIdentity, RunMetadata
from proxy.store.records import StoredRun
from tests.stores import open_store, writes_blocked

RUN = RunMetadata("r2", "m", "cntr_2", 0)
REQUEST = RequestIdentity("me", fingerprint="f1", key="key")


async def test_run_begins_anew_if_the_checkpoint_of_the_lost_run_cannot_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(open_store(tmp_path)) as dead:
        await dead.runs.begin(StoredRun("r1", "me", "key", "f1", "running", "m", "cntr_1", 0))
        await dead.runs.save_checkpoint("r1", '{"version": 1}')
    with closing(open_store(tmp_path)) as store:
        found = await RunArchive(store.runs, keep_s=60).begin(RUN, REQUEST)
    assert found == (None, LostRun("r1", None))
    assert "run r1: its checkpoint cannot be read" in caplog.text


async def test_run_is_removed_if_its_start_is_cancelled_during_the_database_write(
    tmp_path: Path,
) -> None:
    with closing(open_store(tmp_path)) as store:
        archive = RunArchive(store.runs, keep_s=60)
        with writes_blocked(tmp_path):
            start = asyncio.create_task(archive.begin(RUN, REQUEST))
            await anyio.wait_all_tasks_blocked()
            start.cancel()
            await asyncio.wait([start])
        await archive.aclose()
        assert start.cancelled()
        assert await store.runs.find("me", RUN.id) is None


async def test_run_that_another_process_has_taken_over_stores_no_checkpoint(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as store, closing(open_store(tmp_path)) as other:
        await other.runs.begin(StoredRun("r1", "me", "key", "f1", "running", "m", "cntr_1", 0))
        with pytest.raises(RunLostError):
            await RunArchive(store.runs, keep_s=60).save_checkpoint("r1", None)
