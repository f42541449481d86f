"""Lets processes that share a store cancel and follow each other's runs. To follow a run is to read
its events, which the run's process publishes in the store."""

import asyncio
import json
import logging
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from functools import partial
from typing import TypeVar

import anyio

from proxy.agent.events import Emit, Event, ToolCallStarted, ToolOutput
from proxy.errors import RunInOtherProcessError, RunLostError, StoreUnavailableError
from proxy.runs.event_log import MAX_LIVE_CHARS, event_from_json, event_to_json
from proxy.runs.frame_log import FrameLog, FrameRecorder, frames_from_json, frames_to_json
from proxy.runs.run import Run
from proxy.store.process_messages import Message, MessageKind, ProcessMessenger
from proxy.store.records import StoredRun
from proxy.store.runs import RunRepository

log = logging.getLogger(__name__)

T = TypeVar("T")
CANCEL_S = 10.0
"""Maximum wait for the end of another process's run that is cancelled, in seconds."""
POLL_S = 0.2
"""Interval at which a process repeats its message to cancel a run, until the run has ended, in
seconds."""
ASK_AGAIN_S = 2.0
"""Interval at which a process repeats its message that it follows a run, until the first events or
frames have arrived, in seconds."""
FOLLOW_AGAIN_S = 10.0
"""Interval at which a process repeats its message that it follows a run, once events or frames
have arrived, in seconds. Messages may be lost, and a run is published only while its followers
repeat their messages: see `FOLLOWED_S`."""
LAST_EVENTS_S = 5.0
"""Seconds to wait for the last events of a run after the run has ended."""
FOLLOWED_S = 3 * FOLLOW_AGAIN_S
"""Seconds for which a run is published after the latest message that another process follows it."""


class CrossProcessRuns:
    """Cancels and follows the runs of other processes, and lets other processes cancel and follow
    the runs of this process."""

    def __init__(
        self,
        messages: ProcessMessenger,
        repository: RunRepository,
        find_local: Callable[[str], Run | None],
    ) -> None:
        """`find_local` returns the run of this process with a given id, or None."""
        self._messages = messages
        self._repository = repository
        self._find_local = find_local
        self._tasks = set[asyncio.Task[None]]()
        self._publications: dict[str, _Publication] = {}
        """The publications of runs of this process that other processes follow, by publication
        id."""
        self._publication_events: dict[str, set[asyncio.Event]] = {}
        """The asyncio events of the followers in this process, by publication id. They are set when
        another process has published a part."""

    def listen(self) -> None:
        """Process the messages of other processes in the running event loop from now on."""
        loop = asyncio.get_running_loop()
        self._messages.call_on_message(
            lambda message: loop.call_soon_threadsafe(self._receive, message)
        )

    async def cancel(self, run_id: str, find_process: Callable[[], Awaitable[str | None]]) -> None:
        """Cancel a run of another process and wait for its end. `find_process` returns the id of
        the process while the run is running, then None. Raises RunInOtherProcessError if the other
        process does not react."""
        with anyio.move_on_after(CANCEL_S):
            while process_id := await find_process():
                await self._send(process_id, Message("cancel", run_id))
                await anyio.sleep(POLL_S)
            return
        raise RunInOtherProcessError

    async def follow(self, stored: StoredRun, emit: Emit) -> bool:
        """Emit the events of another process's run as they come, except for event types that this
        release does not know. Return True once all events were emitted. Return False if the run is
        no longer running in a living process and none of its events was published. Raises
        RunLostError if some events were emitted and the others do not come."""
        find_process = partial(self._repository.process_of, stored.owner, stored.id)
        has_events = False
        message = Message("follow", stored.id)
        async with aclosing(self._batches(message, find_process)) as batches:
            async for events in batches:
                has_events = True
                for stored_event in json.loads(events):
                    if event := event_from_json(stored_event):
                        await emit(event)
        return has_events

    async def follow_frames(
        self, run_id: str, find_process: Callable[[], Awaitable[str | None]]
    ) -> AsyncGenerator[tuple[int, Sequence[str]]]:
        """Yield the frames of a stored response whose run is in another process, as they come:
        batches of frames, each with the number of its first frame. Frames may come again. Yield
        nothing if the run is no longer running there and no frame was published. `find_process`
        returns the id of the process while the run is running, then None. Raises RunLostError if
        some frames were yielded and the others do not come."""
        message = Message("follow_frames", run_id)
        async with aclosing(self._batches(message, find_process)) as batches:
            async for frames in batches:
                yield frames_from_json(frames)

    async def aclose(self) -> None:
        """Stop publishing events and processing messages."""
        self._messages.call_on_message(lambda _: None)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _batches(
        self, message: Message, find_process: Callable[[], Awaitable[str | None]]
    ) -> AsyncGenerator[str]:
        """Ask the process of a run to publish the events or the frames that `message` names. Yield
        each published part, as JSON. Yield nothing if the run is no longer running and no part was
        published. Raises RunLostError if some parts were yielded and the others do not come."""
        publication_id, seq, timing = _publication_id(message), 0, _FollowTiming()
        with self._publication_event(publication_id) as has_news:
            while True:
                process_id = await find_process()
                for batch in await self._repository.published_batches(publication_id, seq):
                    if batch.is_first and seq and message.kind == "follow":
                        raise RunLostError  # the publication began again; events have no numbers
                    seq = batch.seq
                    yield batch.content
                    if batch.is_last:
                        return
                if process_id is None:
                    if not seq:
                        return
                    timing.raise_if_parts_overdue()
                elif timing.is_time_to_ask(is_begun=seq > 0):
                    await self._send(process_id, message)
                with anyio.move_on_after(1.0):
                    await has_news.wait()
                has_news.clear()

    @contextmanager
    def _publication_event(self, publication_id: str) -> Iterator[asyncio.Event]:
        """Yield an asyncio event that is set whenever another process has published a part."""
        has_news = asyncio.Event()
        self._publication_events.setdefault(publication_id, set()).add(has_news)
        try:
            yield has_news
        finally:
            waiting = self._publication_events[publication_id]
            waiting.discard(has_news)
            if not waiting:
                del self._publication_events[publication_id]

    def _receive(self, message: Message) -> None:
        if message.kind == "published":
            for has_news in self._publication_events.get(message.run_id, ()):
                has_news.set()
        elif run := self._find_local(message.run_id):
            if message.kind == "cancel":
                run.cancel("a request to another server cancelled it")
            elif publication := self._publications.get(_publication_id(message)):
                publication.add_follower(message.sender)
            elif not run.has_ended:  # else its outcome is about to be stored
                publication = _Publication(_publication_id(message), message.sender)
                self._publications[publication.id] = publication
                self._run_in_background(self._publish(run, publication, message.kind))

    async def _publish(self, run: Run, publication: "_Publication", kind: MessageKind) -> None:
        try:
            if kind == "follow":
                await self._publish_events(run, publication)
            elif isinstance(run.observer, FrameRecorder) and run.observer.frames:
                await self._publish_frames(run.observer.frames, publication)
        except Exception:
            log.exception("run %s: its events cannot be published", run.id)
        finally:
            del self._publications[publication.id]
            if not publication.is_complete:  # a later publication starts with the first part
                with suppress(StoreUnavailableError):
                    await self._repository.unpublish(publication.id)

    async def _publish_events(self, run: Run, publication: "_Publication") -> None:
        live_output = _LiveOutputLimiter()
        with run.subscribe() as subscriber:
            while (events := await publication.read_while_followed(subscriber.events)) is not None:
                text = json.dumps([event_to_json(event) for event in live_output.cut(events)])
                await self._write(publication, text, is_last=not events)

    async def _publish_frames(self, frame_log: FrameLog, publication: "_Publication") -> None:
        number = frame_log.first_number
        while (
            frames := await publication.read_while_followed(
                partial(frame_log.wait_for_frames, number)
            )
        ) is not None:
            number = max(number, frame_log.first_number)
            await self._write(publication, frames_to_json(number, frames), is_last=not frames)
            number += len(frames)

    async def _write(self, publication: "_Publication", text: str, *, is_last: bool) -> None:
        is_first = not publication.is_begun
        await self._repository.publish(publication.id, text, is_first=is_first, is_last=is_last)
        publication.is_begun, publication.is_complete = True, is_last
        for process_id in tuple(publication.followers):
            with suppress(StoreUnavailableError):  # followers look again after a second
                await self._send(process_id, Message("published", publication.id))

    async def _send(self, process_id: str, message: Message) -> None:
        await asyncio.to_thread(self._messages.send, process_id, message)

    def _run_in_background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _publication_id(message: Message) -> str:
    """Return the id under which the events of a run, or the frames of its response, are stored."""
    return message.run_id if message.kind == "follow" else f"{message.run_id}.frames"


class _FollowTiming:
    """Decides when a process that follows a run of another process repeats its message, and when it
    gives up waiting for the last parts."""

    def __init__(self) -> None:
        self._asked_at = -math.inf
        self._ended_at: float | None = None

    def is_time_to_ask(self, *, is_begun: bool) -> bool:
        """Return True if the other process is to be told that this process follows the run: at the
        first call, every ASK_AGAIN_S seconds until the first part has arrived, and then every
        FOLLOW_AGAIN_S seconds."""
        now_s = time.monotonic()
        if now_s < self._asked_at + (FOLLOW_AGAIN_S if is_begun else ASK_AGAIN_S):
            return False
        self._asked_at = now_s
        return True

    def raise_if_parts_overdue(self) -> None:
        """Raise RunLostError if LAST_EVENTS_S seconds have passed since the first call. The caller
        polls, and calls this method each time that the run has ended but its last parts are still
        missing."""
        self._ended_at = self._ended_at or time.monotonic()
        if time.monotonic() > self._ended_at + LAST_EVENTS_S:
            raise RunLostError


class _Publication:
    """A run of this process that other processes follow: its followers, and how far its events, or
    the frames of its response, have been published."""

    def __init__(self, publication_id: str, follower: str) -> None:
        self.id = publication_id
        self.followers = set[str]()
        """The ids of the processes that follow the publication."""
        self.is_begun = False
        """True once the first part is published."""
        self.is_complete = False
        """True once the last part is published."""
        self._followed_until = 0.0
        """End of the publication by the event loop's clock, unless a follower repeats its
        message."""
        self.add_follower(follower)

    def add_follower(self, process_id: str) -> None:
        self.followers.add(process_id)
        self._followed_until = asyncio.get_running_loop().time() + FOLLOWED_S

    async def read_while_followed(
        self, read: Callable[[], Awaitable[Sequence[T]]]
    ) -> Sequence[T] | None:
        """Return the result of `read`. Return None if the last part is published, or if no follower
        has repeated its message in time. `read` may be cancelled and called again."""
        while not self.is_complete and asyncio.get_running_loop().time() < self._followed_until:
            with anyio.move_on_at(self._followed_until):
                return await read()
        return None


class _LiveOutputLimiter:
    """Cuts the output of running commands to the length that a run's event log keeps."""

    def __init__(self) -> None:
        self._chars = 0
        """Number of characters of the running command's output."""

    def cut(self, events: Sequence[Event]) -> list[Event]:
        """Return the next events, without a command's output beyond MAX_LIVE_CHARS."""
        kept = []
        for event in events:
            if isinstance(event, ToolCallStarted):
                self._chars = 0
            elif isinstance(event, ToolOutput):
                self._chars += len(event.text)
                if self._chars > MAX_LIVE_CHARS:
                    continue
            kept.append(event)
        return kept
