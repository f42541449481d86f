"""Storage of the final response by ResponseRecorder, despite cancellations and failures."""

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest

from policies.sessions import ResponseSettings
from proxy.api.response_recorder import ResponseRecorder
from proxy.errors import RunCancelledError
from proxy.runs.frame_log import FrameLog
from proxy.schemas.responses_response import ResponseContext
from proxy.schemas.responses_tools import ResponsesToolSet
from proxy.store.conversations import ResponseQuota
from proxy.store.database import Database
from proxy.store.records import StoredResponse
from proxy.store.responses import ResponseRepository
from tests.stores import database_of

BODY = {"model": "fake-model", "input": "Hello."}


class SlowRepository(ResponseRepository):
    """A repository that stores a final response only after `release` is set, or fails."""

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
    found = Database(database_of(tmp_path))
    yield found
    found.close()


async def started_recorder(
    repository: ResponseRepository, *, background: bool = True
) -> ResponseRecorder:
    context = ResponseContext(
        {**BODY, "background": background}, "1", 0, "cntr_1", "reasoning", ResponsesToolSet()
    )
    recorder = ResponseRecorder(repository, "me", context)
    stored = StoredResponse("resp_1", "cntr_1", "1", recorder.initial_response, worker="somebody")
    await repository.begin("me", stored, [], [])
    return recorder


async def frame_names(recording: FrameLog) -> list[str]:
    """Return the event names of all frames, up to the end of the log."""
    frames: list[str] = []
    with anyio.fail_after(10):
        while new := await recording.wait_for_frames(len(frames)):
            frames += new
    return [frame.split("\n")[0] for frame in frames]


@pytest.mark.parametrize("background", [False, True])
async def test_cancelled_recorder_still_stores_the_final_response(
    background: bool, database: Database
) -> None:
    repository = SlowRepository(database)
    recorder = await started_recorder(repository, background=background)
    ending = asyncio.create_task(recorder.on_error(RunCancelledError()))
    with anyio.fail_after(10):
        await repository.reached.wait()
        ending.cancel()
        repository.release.set()
        with pytest.raises(asyncio.CancelledError):
            await ending
    found = await repository.get("me", "resp_1")
    assert found
    assert (found.worker, found.record["status"]) == (None, "cancelled")
    frames = await repository.frames("me", "resp_1")
    assert (frames is not None) == background
    if frames and recorder.frames:
        assert await frame_names(FrameLog.from_json(frames)) == await frame_names(recorder.frames)


async def test_final_frames_are_sent_after_the_response_is_stored(database: Database) -> None:
    repository = SlowRepository(database)
    recorder = await started_recorder(repository)
    assert recorder.frames
    begin = ["event: response.created", "event: response.in_progress"]
    async with anyio.create_task_group() as group:
        with anyio.fail_after(10):
            group.start_soon(recorder.on_error, RunCancelledError())
            await repository.reached.wait()
            assert len(await recorder.frames.wait_for_frames(0)) == len(begin)
            repository.release.set()
    frames_sent = await frame_names(recorder.frames)
    assert frames_sent == [*begin, "event: error", "event: response.failed"]
    frames = await repository.frames("me", "resp_1")
    assert frames
    assert await frame_names(FrameLog.from_json(frames)) == frames_sent


async def test_recorder_does_not_fail_the_run_if_the_store_fails(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    repository = SlowRepository(database, fails=True)
    recorder = await started_recorder(repository)
    repository.release.set()
    await recorder.on_error(RunCancelledError())
    assert recorder.frames
    assert (await frame_names(recorder.frames))[-1] == "event: response.failed"
    assert "response resp_1 cannot be stored" in caplog.text
