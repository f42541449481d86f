"""The trajectory recorder with a store that is slower than the run, or that hangs."""

from collections.abc import Sequence

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
    """A repository whose writes let other tasks run many times, and that counts them."""

    def __init__(self) -> None:
        self.appended = 0
        self.most_at_once = 0
        self._at_once = 0

    async def begin(
        self, owner: str, run_ids: Sequence[str], labels: TrajectoryLabels = TrajectoryLabels()
    ) -> None:
        assert len(run_ids) == CHOICES

    async def append(self, owner: str, run_id: str, part: bytes, *, is_last: bool) -> None:
        self.appended += 1
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        for _ in range(SLOWNESS):
            await anyio.lowlevel.checkpoint()
        self._at_once -= 1

    async def evict(self, owner: str) -> None:
        assert self._at_once == 0


class HangingRepository(TrajectoryRepository):
    """A repository whose first write never ends."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    async def begin(
        self, owner: str, run_ids: Sequence[str], labels: TrajectoryLabels = TrajectoryLabels()
    ) -> None:
        await anyio.sleep_forever()

    async def fail(self, owner: str, run_ids: Sequence[str]) -> None:
        self.failed += run_ids


async def test_parts_of_concurrent_choices_are_written_one_after_the_other() -> None:
    repository = SlowRepository()
    recorder = TrajectoryRecorder(repository, "somebody", task(CHOICES))

    async def play(index: int) -> None:
        for turn in range(1, TURNS + 1):
            for event in (
                TurnStarted(turn),
                ToolCallStarted(turn, f"call_{turn}", "execute_bash", {"command": "ls"}),
                ToolCallFinished(turn, f"call_{turn}", "execute_bash", "", 0, 0, 0.1),
            ):
                await recorder.on_event(ChoiceEvent(index, event))

    with anyio.fail_after(30):
        await recorder.begin()
        async with anyio.create_task_group() as group:
            for index in range(CHOICES):
                group.start_soon(play, index)
        await recorder.on_error(RunCancelledError())
    assert repository.appended > CHOICES
    assert repository.most_at_once == 1


async def test_run_does_not_wait_for_a_store_that_hangs() -> None:
    repository = HangingRepository()
    asked = task(CHOICES)
    recorder = TrajectoryRecorder(repository, "somebody", asked, timeout_s=0.01)
    with anyio.fail_after(30):
        await recorder.begin()
        await recorder.on_event(TurnStarted(1))
        await recorder.on_error(RunCancelledError())
    assert repository.failed == [each.run_id for each in (asked, *asked.others)]
