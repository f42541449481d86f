"""The end of a response is kept, whatever happens while it is written down."""

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest

from policies.sessions import ResponseSettings
from proxy.api.response_recorder import ResponseRecorder
from proxy.errors import RunCancelledError
from proxy.runs.recording import FrameLog
from proxy.schemas.responses_response import ResponseContext
from proxy.schemas.responses_tools import AskedTools
from proxy.store.conversations import ResponseQuota
from proxy.store.database import Database
from proxy.store.records import StoredResponse
from proxy.store.responses import ResponseRepository

BODY = {"model": "fake-model", "input": "Hello."}


class SlowShelf(ResponseRepository):
    """Writes an end down only when `release` is set, and fails if told to."""

    def __init__(self, database: Database, *, fails: bool = False) -> None:
        settings = ResponseSettings()
        super().__init__(database, lambda: 0, settings, ResponseQuota(settings.quota_mib << 20))
        self.reached = asyncio.Event()
        self.release = asyncio.Event()
        self._fails = fails

    async def end(
        self, owner: str, response_id: str, record: Mapping[str, Any], frames: str | None = None
    ) -> None:
        self.reached.set()
        await self.release.wait()
        if self._fails:
            raise OSError("no space left on device")
        await super().end(owner, response_id, record, frames)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    found = Database(tmp_path / "store.sqlite3")
    yield found
    found.close()


async def begun(shelf: ResponseRepository, *, background: bool = True) -> ResponseRecorder:
    asked = ResponseContext(
        {**BODY, "background": background}, "1", 0, "cntr_1", "reasoning", AskedTools()
    )
    kept = ResponseRecorder(shelf, "me", asked)
    stored = StoredResponse("resp_1", "cntr_1", "1", kept.begun, worker="somebody")
    await shelf.begin("me", stored, [], [])
    return kept


async def heard(recording: FrameLog) -> list[str]:
    """All of it, up to its end."""
    frames: list[str] = []
    with anyio.fail_after(10):
        while new := await recording.since(len(frames)):
            frames += new
    return [frame.split("\n")[0] for frame in frames]


@pytest.mark.parametrize("background", [False, True])
async def test_who_is_interrupted_while_it_writes_the_end_down_writes_it_all_the_same(
    background: bool, database: Database
) -> None:
    shelf = SlowShelf(database)
    kept = await begun(shelf, background=background)
    ending = asyncio.create_task(kept.failed(RunCancelledError()))
    with anyio.fail_after(10):
        await shelf.reached.wait()
        ending.cancel()
        shelf.release.set()
        with pytest.raises(asyncio.CancelledError):
            await ending
    found = await shelf.get("me", "resp_1")
    assert found
    assert (found.worker, found.record["status"]) == (None, "cancelled")
    frames = await shelf.frames("me", "resp_1")
    assert (frames is not None) == background
    if frames and kept.frames:
        assert await heard(FrameLog.from_json(frames)) == await heard(kept.frames)


async def test_nobody_hears_the_end_of_a_response_before_it_is_kept(database: Database) -> None:
    shelf = SlowShelf(database)
    kept = await begun(shelf)
    assert kept.frames
    begin = ["event: response.created", "event: response.in_progress"]
    async with anyio.create_task_group() as group:
        with anyio.fail_after(10):
            group.start_soon(kept.failed, RunCancelledError())
            await shelf.reached.wait()
            assert len(await kept.frames.since(0)) == len(begin)
            shelf.release.set()
    told = await heard(kept.frames)
    assert told == [*begin, "event: error", "event: response.failed"]
    frames = await shelf.frames("me", "resp_1")
    assert frames
    assert await heard(FrameLog.from_json(frames)) == told


async def test_a_store_that_fails_does_not_fail_the_run(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    shelf = SlowShelf(database, fails=True)
    kept = await begun(shelf)
    shelf.release.set()
    await kept.failed(RunCancelledError())
    assert kept.frames
    assert (await heard(kept.frames))[-1] == "event: response.failed"
    assert "response resp_1 cannot be stored" in caplog.text
