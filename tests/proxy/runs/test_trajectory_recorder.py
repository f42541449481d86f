"""The trajectory recorder with a store that is slower than the run, or that hangs."""

import zlib
from collections.abc import Mapping, Sequence

import anyio
import anyio.lowlevel

from policies.sessions import TrajectoryLabels
from proxy.agent.events import ChoiceEvent, ToolCallFinished, ToolCallStarted, TurnStarted
from proxy.errors import RunCancelledError
from proxy.runs.trajectory_recorder import TrajectoryRecorder
from proxy.store.trajectories import TrajectoryRepository
from tests.proxy.agent.test_choices import task

CHOICES, TURNS, SLOWNESS = 3, 6, 50


class SlowRepository(TrajectoryRepository):
    """A repository whose writes let other tasks run many times, and that keeps their texts."""

    def __init__(self) -> None:
        self.texts: list[list[bytes]] = []
        self.most_at_once = 0
        self._at_once = 0

    async def append(
        self,
        owner: str,
        parts: Mapping[str, bytes],
        *,
        is_last: bool,
        labels: TrajectoryLabels = TrajectoryLabels(),
        created_at: int | None = None,
    ) -> None:
        self.texts.append([zlib.decompress(part) for part in parts.values() if part])
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        for _ in range(SLOWNESS):
            await anyio.lowlevel.checkpoint()
        self._at_once -= 1


class HangingRepository(TrajectoryRepository):
    """A repository whose writes never end."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    async def append(
        self,
        owner: str,
        parts: Mapping[str, bytes],
        *,
        is_last: bool,
        labels: TrajectoryLabels = TrajectoryLabels(),
        created_at: int | None = None,
    ) -> None:
        await anyio.sleep_forever()

    async def mark_as_failed(self, owner: str, run_ids: Sequence[str]) -> None:
        self.failed += run_ids


async def play(recorder: TrajectoryRecorder, index: int) -> None:
    """Emit the events of one choice."""
    for turn in range(1, TURNS + 1):
        for event in (
            TurnStarted(turn),
            ToolCallStarted(turn, f"call_{turn}", "execute_bash", {"command": "ls"}),
            ToolCallFinished(turn, f"call_{turn}", "execute_bash", "", 0, 0, 0.1),
        ):
            await recorder.on_event(ChoiceEvent(index, event))


async def play_all(recorder: TrajectoryRecorder) -> None:
    """Emit the events of all choices at once, and the end of the run."""
    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            for index in range(CHOICES):
                group.start_soon(play, recorder, index)
        await recorder.on_error(RunCancelledError())
        await recorder.write()


async def test_trajectory_writes_of_concurrent_choices_do_not_overlap() -> None:
    repository = SlowRepository()
    await play_all(TrajectoryRecorder(repository, "somebody", task(CHOICES), interval_s=0))
    assert len(repository.texts) > CHOICES
    assert repository.most_at_once == 1


async def test_trajectory_is_written_once_if_the_run_ends_within_the_interval() -> None:
    often, once = SlowRepository(), SlowRepository()
    await play_all(TrajectoryRecorder(often, "somebody", task(CHOICES), interval_s=0))
    await play_all(TrajectoryRecorder(once, "somebody", task(CHOICES), interval_s=60))
    ((*choices,),) = once.texts
    assert len(choices) == CHOICES
    assert sum(text.count(b"\n") + 1 for text in choices) == sum(
        text.count(b"\n") + 1 for texts in often.texts for text in texts
    )


async def test_run_does_not_wait_for_a_store_that_hangs() -> None:
    repository = HangingRepository()
    asked = task(CHOICES)
    recorder = TrajectoryRecorder(repository, "somebody", asked, timeout_s=0.01, interval_s=0)
    with anyio.fail_after(30):
        await recorder.on_event(TurnStarted(1))
        await recorder.on_error(RunCancelledError())
        await recorder.write()
    assert repository.failed == [each.run_id for each in (asked, *asked.others)]
