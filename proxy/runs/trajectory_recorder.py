"""The trajectory recorder: observes a run whose request captures it, and stores its trajectory."""

import asyncio
import logging
import time
import zlib
from collections.abc import Sequence

from proxy.agent.events import ChoiceEvent, Event, TurnStarted
from proxy.agent.result import Result
from proxy.agent.task import AgentTask
from proxy.schemas.trajectory import CAPTURED_EVENTS, TrajectoryWriter
from proxy.store.trajectories import StoredTrajectory, TrajectoryRepository

log = logging.getLogger(__name__)

COMPRESSION = 1
"""zlib's fastest level: source code in JSON shrinks to a third."""
STORE_TIMEOUT_S = 10.0
"""Maximum wait for one transaction of the store, in seconds."""
CANNOT_STORE = "run %s: its trajectory cannot be stored"
Moment = tuple[float, Event]
"""An event, and the seconds from the start of the run to the event."""


class TrajectoryRecorder:
    """A RunObserver that stores the trajectory of each choice of a run.

    The events of a turn are written after the turn, in threads, while the run continues. If the
    store is slower than the run, the run waits at the end of the next turn, so that at most two
    turns of each choice are in memory. If the store fails, the error is logged, the run continues
    without a trajectory, and the trajectory is marked as failed at the end of the run.
    """

    event_types = CAPTURED_EVENTS

    def __init__(
        self,
        repository: TrajectoryRepository,
        owner: str,
        task: AgentTask,
        timeout_s: float = STORE_TIMEOUT_S,
    ) -> None:
        self._repository = repository
        self._timeout_s = timeout_s
        self._owner = owner
        self._tasks = [task, *task.others]
        self._run_ids = [each.run_id for each in self._tasks]
        self._writers: list[TrajectoryWriter] = []
        """The writer of each choice, from `begin` on."""
        self._began = time.monotonic()
        self._pending: list[list[Moment]] = [[] for _ in self._tasks]
        """The events that are not written yet, by choice."""
        self._writing: asyncio.Task[None] | None = None
        self._has_failed = False

    async def begin(self) -> None:
        """Store that the trajectories exist."""
        try:
            self._writers = [
                TrajectoryWriter(task, choice) for choice, task in enumerate(self._tasks)
            ]
            async with asyncio.timeout(self._timeout_s):
                await self._repository.begin(self._owner, self._run_ids, self._tasks[0].labels)
        except Exception:
            log.exception(CANNOT_STORE, self._run_ids[0])
            self._has_failed = True

    async def on_event(self, event: Event) -> None:
        index = 0
        if isinstance(event, ChoiceEvent):
            index, event = event.index, event.event
        if type(event) not in CAPTURED_EVENTS or self._has_failed:
            return
        self._pending[index].append((self._elapsed_s(), event))
        if isinstance(event, TurnStarted) and event.turn > 1:
            await self._wait_for_write()
            pending, self._pending = self._pending, [[] for _ in self._pending]
            self._writing = asyncio.create_task(self._write(pending))

    async def on_result(self, result: Result) -> None:
        await self._finish([result, *result.others])

    async def on_error(self, error: BaseException) -> None:
        await self._finish([error] * len(self._tasks))

    async def _finish(self, ends: Sequence[Result | BaseException]) -> None:
        """Write the rest, before a client learns of the end of the run."""
        finishing = asyncio.ensure_future(self._write_rest(ends))
        try:
            await asyncio.shield(finishing)
        except asyncio.CancelledError:
            await finishing  # else the trajectory would count as running until the server stops
            raise

    async def _write_rest(self, ends: Sequence[Result | BaseException]) -> None:
        await self._wait_for_write()
        await self._write(self._pending, ends)
        try:
            async with asyncio.timeout(self._timeout_s):
                if self._has_failed:
                    await self._repository.fail(self._owner, self._run_ids)
                else:
                    await self._repository.evict(self._owner)
        except Exception:
            log.exception("run %s: trajectories cannot be deleted", self._run_ids[0])

    async def _wait_for_write(self) -> None:
        # Several choices may wait at once, and the first one that continues starts the next write.
        while self._writing and not self._writing.done():
            await asyncio.wait({self._writing})

    async def _write(
        self, pending: list[list[Moment]], ends: Sequence[Result | BaseException] = ()
    ) -> None:
        if self._has_failed:
            return
        is_last = bool(ends)
        try:
            parts = await asyncio.to_thread(self._encode, pending, ends)
            for run_id, part in zip(self._run_ids, parts, strict=True):
                if part:
                    async with asyncio.timeout(self._timeout_s):
                        await self._repository.append(self._owner, run_id, part, is_last=is_last)
        except Exception:
            log.exception(CANNOT_STORE, self._run_ids[0])
            self._has_failed = True

    def _encode(
        self, pending: Sequence[Sequence[Moment]], ends: Sequence[Result | BaseException]
    ) -> list[bytes]:
        """Return the part of each choice; an empty part for a choice without events."""
        elapsed_s = self._elapsed_s()
        parts = []
        for index, writer in enumerate(self._writers):
            lines = [line for at_s, event in pending[index] for line in writer.write(at_s, event)]
            if ends:
                lines += writer.finish(elapsed_s, ends[index])
            text = "\n".join(lines)
            parts.append(zlib.compress(text.encode(), COMPRESSION) if text else b"")
        return parts

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began


def stored_texts(stored: StoredTrajectory) -> list[str]:
    """Return the texts of a stored trajectory's parts."""
    return [zlib.decompress(part).decode() for part in stored.parts]
