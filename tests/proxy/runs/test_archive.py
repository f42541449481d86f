"""Checkpoints of runs, and runs that begin after the loss of an earlier run with the same
idempotency key."""

from contextlib import closing
from pathlib import Path

import pytest

from proxy.errors import RunLostError
from proxy.runs.archive import LostRun, RunArchive
from proxy.runs.run import RequestIdentity, RunMetadata
from proxy.store.records import StoredRun
from tests.stores import open_store


async def test_run_begins_anew_if_the_checkpoint_of_the_lost_run_cannot_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(open_store(tmp_path)) as dead:
        await dead.runs.begin(StoredRun("r1", "me", "key", "f1", "running", "m", "cntr_1", 0))
        await dead.runs.save_checkpoint("r1", '{"version": 1}')
    with closing(open_store(tmp_path)) as store:
        found = await RunArchive(store.runs, keep_s=60).begin(
            RunMetadata("r2", "m", "cntr_2", 0), RequestIdentity("me", fingerprint="f1", key="key")
        )
    assert found == (None, LostRun("r1", None))
    assert "run r1: its checkpoint cannot be read" in caplog.text


async def test_run_that_another_process_has_taken_over_stores_no_checkpoint(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as store, closing(open_store(tmp_path)) as other:
        await other.runs.begin(StoredRun("r1", "me", "key", "f1", "running", "m", "cntr_1", 0))
        with pytest.raises(RunLostError):
            await RunArchive(store.runs, keep_s=60).save_checkpoint("r1", None)
