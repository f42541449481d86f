"""The frame log replays past frames to readers that join later."""

import anyio

from proxy.runs.frame_log import FrameLog


async def test_reader_gets_the_earlier_frames_and_then_new_ones() -> None:
    frame_log = FrameLog()
    frame_log.add(["a", "b"])
    received: list[list[str]] = []

    async def read(first: int) -> None:
        while frames := await frame_log.wait_for_frames(first):
            received.append(list(frames))
            first += len(frames)

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(read, 1)
            await anyio.wait_all_tasks_blocked()
            frame_log.add(["c"])
            await anyio.wait_all_tasks_blocked()
            frame_log.end()
    assert received == [["b"], ["c"]]


async def test_restored_frame_log_has_the_stored_frames_and_the_final_frames() -> None:
    frame_log = FrameLog(max_chars=10)
    frame_log.add(["aaaa", "bbbb", "cccc"])
    restored = FrameLog.from_json(frame_log.to_json(["dd"]))
    with anyio.fail_after(5):
        assert (restored.first_number, await restored.wait_for_frames(0)) == (
            1,
            ["bbbb", "cccc", "dd"],
        )
        assert (await restored.wait_for_frames(3), await restored.wait_for_frames(4)) == (
            ["dd"],
            [],
        )


async def test_oldest_frames_are_dropped_and_the_newest_is_kept() -> None:
    frame_log = FrameLog(max_chars=10)
    frame_log.add(["aaaa", "bbbb", "cccc"])
    assert (frame_log.first_number, frame_log.chars) == (1, 8)
    assert await frame_log.wait_for_frames(0) == ["bbbb", "cccc"]
    assert await frame_log.wait_for_frames(2) == ["cccc"]
    frame_log.add(["d" * 100])
    assert (frame_log.first_number, await frame_log.wait_for_frames(3)) == (3, ["d" * 100])
