"""The trajectory recorder: observes a run and stores its trajectory, if the request or the profile
asks for one."""

import asyncio
import logging
import time
import zlib
from collections.abc import Callable, Sequence

import anyio

from proxy.agent.events import ChoiceEvent, Event, TurnStarted
from proxy.agent.result import Result
from proxy.agent.task import AgentTask
from proxy.schemas.trajectory import CAPTURED_EVENTS, TrajectoryWriter
from proxy.store.trajectories import StoredTrajectory, TrajectoryRepository

log = logging.getLogger(__name__)

COMPRESSION_LEVEL = 1
"""zlib's fastest level: source code in JSON shrinks to a third."""
SMALL_BYTES = 256 << 10
"""A text up to this size is compressed on the event loop, in at most 3 ms."""
STORE_TIMEOUT_S = 10.0
"""Maximum wait for one transaction of the store, in seconds."""
MAX_WRITE_S = 2 * STORE_TIMEOUT_S
"""Maximum time of one write, in seconds: if its transaction fails, another one marks the trajectory
as failed."""
LAST_WRITE_DELAY_S = 0.1
"""Maximum time by which the last write is postponed, in seconds, so that the answer comes first."""
WRITE_INTERVAL_S = 1.0
"""Minimum time between two writes of a run in progress, in seconds."""
CANNOT_STORE = "run %s: its trajectory cannot be stored"


class TrajectoryRecorder:
    """A RunObserver that stores the trajectory of each choice of a run.

    The lines of the events are in memory until they are written: at the end of the run, when a
    client reads the trajectory, and at the start of a turn if the last write is at least
    WRITE_INTERVAL_S ago. The run waits for a write at the start of a turn, so that lines do not
    accumulate while the store is slow. The run does not wait for the write at its end; requests for
    the trajectory do. If the store fails, the error is logged, the run continues without a
    trajectory, and the trajectory is marked as failed at the end of the run.
    """

    event_types = CAPTURED_EVENTS

    def __init__(
        self,
        repository: TrajectoryRepository,
        owner: str,
        task: AgentTask,
        *,
        timeout_s: float = STORE_TIMEOUT_S,
        interval_s: float = WRITE_INTERVAL_S,
    ) -> None:
        self.owner = owner
        self.run_ids = [each.run_id for each in (task, *task.others)]
        """The ids of the run's choices."""
        self._repository = repository
        self._task = task
        self._timeout_s = timeout_s
        self._interval_s = interval_s
        self._writers = [
            TrajectoryWriter(each, choice) for choice, each in enumerate((task, *task.others))
        ]
        """The writer of each choice."""
        self._lines: list[list[bytes]] = [[] for _ in self._writers]
        """The lines that are not stored yet, by choice."""
        self._started_at = time.monotonic()
        self._last_write_s = 0.0
        """Seconds from the start of the run to the last write."""
        self._write_task: asyncio.Task[None] | None = None
        """The latest write. Each write waits for the one before it."""
        self._request_event = asyncio.Event()
        """Set once a client has asked for the trajectory."""
        self._has_failed = False
        self._has_ended = False

    async def on_event(self, event: Event) -> None:
        index = 0
        if isinstance(event, ChoiceEvent):
            index, event = event.index, event.event
        if type(event) not in CAPTURED_EVENTS or self._has_failed:
            return
        at_s = self._elapsed_s()
        try:
            # A thread would not help: the encoder holds the GIL. A model call encodes the same
            # texts on the event loop.
            self._lines[index] += self._writers[index].write(at_s, event)
        except Exception:
            log.exception(CANNOT_STORE, self.run_ids[0])
            self._stop_recording()
        if isinstance(event, TurnStarted) and at_s - self._last_write_s >= self._interval_s:
            await self.write()

    async def on_result(self, result: Result) -> None:
        self._start_write([result, *result.others])

    async def on_error(self, error: BaseException) -> None:
        self._start_write([error] * len(self._writers))

    async def write(self) -> None:
        """Store the lines so far, and wait for earlier writes."""
        self._request_event.set()
        await asyncio.shield(self._start_write())

    def on_written(self, callback: Callable[[], object]) -> None:
        """Call `callback` once the latest write has ended."""
        if self._write_task:
            self._write_task.add_done_callback(lambda _: callback())
        else:
            callback()

    def _start_write(self, ends: Sequence[Result | BaseException] = ()) -> asyncio.Task[None]:
        """Start to store the lines so far. `ends` has the result or error of each choice; it is
        empty while the run goes on."""
        self._write_task = asyncio.create_task(self._write(self._write_task, ends))
        return self._write_task

    async def _write(
        self, previous: asyncio.Task[None] | None, ends: Sequence[Result | BaseException]
    ) -> None:
        if previous:
            await asyncio.wait({previous})
        if ends:
            with anyio.move_on_after(LAST_WRITE_DELAY_S):
                await self._request_event.wait()
        if self._has_ended:
            return
        self._has_ended = bool(ends)
        if not self._has_failed:
            await self._append(ends)
        if self._has_failed and ends:
            await self._mark_as_failed()

    async def _append(self, ends: Sequence[Result | BaseException]) -> None:
        self._last_write_s = self._elapsed_s()
        try:
            for lines, writer, end in zip(self._lines, self._writers, ends, strict=False):
                lines += writer.finish(self._last_write_s, end)
            pending, self._lines = self._lines, [[] for _ in self._lines]
            parts = {
                run_id: await _compress(b"\n".join(lines))
                for run_id, lines in zip(self.run_ids, pending, strict=True)
            }
            async with asyncio.timeout(self._timeout_s):
                await self._repository.append(
                    self.owner,
                    parts,
                    labels=self._task.labels,
                    created_at=self._task.created,
                    is_last=bool(ends),
                )
        except Exception:
            log.exception(CANNOT_STORE, self.run_ids[0])
            self._stop_recording()

    def _stop_recording(self) -> None:
        """Record nothing more."""
        self._has_failed = True
        self._lines = [[] for _ in self._lines]

    async def _mark_as_failed(self) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._repository.mark_as_failed(self.owner, self.run_ids)
        except Exception:
            log.exception("run %s: its trajectory cannot be marked as failed", self.run_ids[0])

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started_at


async def _compress(text: bytes) -> bytes:
    """Return a text in compressed form, as a part of a stored trajectory. An empty text gives an
    empty part."""
    if len(text) > SMALL_BYTES:
        return await asyncio.to_thread(zlib.compress, text, COMPRESSION_LEVEL)
    return zlib.compress(text, COMPRESSION_LEVEL) if text else b""


def stored_texts(stored: StoredTrajectory) -> list[str]:
    """Return the texts of a stored trajectory's parts."""
    return [zlib.decompress(part).decode() for part in stored.parts]
