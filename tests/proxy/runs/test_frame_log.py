"""The frame log replays past frames to readers that join later."""

import anyio

from proxy.runs.frame_log import FrameLog


async def test_reader_gets_past_frames_and_then_new_ones() -> None:
    recording = FrameLog()
    recording.add(["a", "b"])
    heard: list[list[str]] = []

    async def read(first: int) -> None:
        while frames := await recording.since(first):
            heard.append(list(frames))
            first += len(frames)

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(read, 1)
            await anyio.wait_all_tasks_blocked()
            recording.add(["c"])
            await anyio.wait_all_tasks_blocked()
            recording.end()
    assert heard == [["b"], ["c"]]


async def test_recorded_frames_are_replayed_with_the_latest_ones() -> None:
    recording = FrameLog(max_chars=10)
    recording.add(["aaaa", "bbbb", "cccc"])
    again = FrameLog.from_json(recording.to_json(["dd"]))
    with anyio.fail_after(5):
        assert (again.first, await again.since(0)) == (1, ["bbbb", "cccc", "dd"])
        assert (await again.since(3), await again.since(4)) == (["dd"], [])


async def test_beyond_its_size_the_oldest_go_and_the_newest_stays() -> None:
    recording = FrameLog(max_chars=10)
    recording.add(["aaaa", "bbbb", "cccc"])
    assert (recording.first, recording.chars) == (1, 8)
    assert await recording.since(0) == ["bbbb", "cccc"]
    assert await recording.since(2) == ["cccc"]
    recording.add(["d" * 100])
    assert (recording.first, await recording.since(3)) == (3, ["d" * 100])
