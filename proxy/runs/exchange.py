"""Runs of other processes that share the store: they are cancelled and followed from here, and the
runs of this process from there."""

import asyncio
import json
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import anyio

from proxy.agent.events import Emit, Event, ToolCallStarted, ToolOutput
from proxy.errors import RunElsewhereError, RunLostError
from proxy.runs.event_log import MAX_LIVE_CHARS, event_from_json, event_to_json
from proxy.runs.run import Run
from proxy.store.process_messages import Message, ProcessMessages
from proxy.store.records import StoredRun
from proxy.store.runs import RunRepository

log = logging.getLogger(__name__)

CANCEL_S = 10.0
"""Maximum wait for the end of another process's run that is cancelled, in seconds."""
POLL_S = 0.2
"""Interval at which the state of such a run is read, in seconds."""
FOLLOW_AGAIN_S = 10.0
"""Interval at which a process says again that it follows a run, in seconds. Messages may be
lost."""
LAST_EVENTS_S = 5.0
"""Seconds for which the last events of a run are awaited after it has ended."""
FOLLOWED_S = 3 * FOLLOW_AGAIN_S
"""Seconds for which a run is published after another process said that it follows the run."""


class RunExchange:
    """Cancels and follows the runs of other processes, and lets other processes cancel and follow
    the runs of this one."""

    def __init__(
        self,
        messages: ProcessMessages,
        repository: RunRepository,
        find_local: Callable[[str], Run | None],
    ) -> None:
        """`find_local` returns the run of this process with an id."""
        self._messages = messages
        self._repository = repository
        self._find_local = find_local
        self._tasks = set[asyncio.Task[None]]()
        self._publications: dict[str, _Publication] = {}
        """The runs of this process that others follow, by run id."""
        self._published: dict[str, set[asyncio.Event]] = {}
        """The events that are set when another process has published events of a run."""

    def listen(self) -> None:
        """Process the messages of other processes in the running event loop from now on."""
        loop = asyncio.get_running_loop()
        self._messages.call_on_message(
            lambda message: loop.call_soon_threadsafe(self._receive, message)
        )

    async def cancel(self, run_id: str, find_process: Callable[[], Awaitable[str | None]]) -> None:
        """Cancel a run of another process and wait for its end. `find_process` returns the id of
        the process while the run is running, then None. Raises RunElsewhereError if the other
        process does not react."""
        with anyio.move_on_after(CANCEL_S):
            while process_id := await find_process():
                await self._send(process_id, Message("cancel", run_id))
                await anyio.sleep(POLL_S)
            return
        raise RunElsewhereError

    async def follow(self, stored: StoredRun, emit: Emit) -> bool:
        """Emit the events of another process's run as they come. Return True once all events were
        emitted, False if none was and the run may have ended. Raises RunLostError if the rest will
        not come."""
        has_news = asyncio.Event()
        self._published.setdefault(stored.id, set()).add(has_news)
        try:
            return await self._follow(stored, emit, has_news)
        finally:
            waiting = self._published[stored.id]
            waiting.discard(has_news)
            if not waiting:
                del self._published[stored.id]

    async def aclose(self) -> None:
        """Stop to publish events and to process messages."""
        self._messages.call_on_message(lambda _: None)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _follow(self, stored: StoredRun, emit: Emit, has_news: asyncio.Event) -> bool:
        seq, says_again_at, ended_at = 0, 0.0, math.inf
        while True:
            process_id = await self._repository.process_of(stored.owner, stored.id)
            seq, is_at_end = await self._emit_published(stored.id, seq, emit)
            if is_at_end:
                return True
            if process_id is None:
                if not seq:
                    return False
                ended_at = min(ended_at, time.monotonic())
                if time.monotonic() > ended_at + LAST_EVENTS_S:
                    raise RunLostError
            elif time.monotonic() >= says_again_at:
                await self._send(process_id, Message("follow", stored.id))
                says_again_at = time.monotonic() + FOLLOW_AGAIN_S
            with anyio.move_on_after(1.0):
                await has_news.wait()
            has_news.clear()

    async def _emit_published(self, run_id: str, seq: int, emit: Emit) -> tuple[int, bool]:
        """Emit the events that were published after `seq`. Return the new `seq`, and True if these
        were the last events. Raises RunLostError if the publication has begun anew."""
        for batch in await self._repository.published(run_id, seq):
            if batch.is_first and seq:
                raise RunLostError  # some of its events were emitted already
            seq = batch.seq
            for event in json.loads(batch.events):
                await emit(event_from_json(event))
            if batch.is_last:
                return seq, True
        return seq, False

    def _receive(self, message: Message) -> None:
        if message.kind == "published":
            for has_news in self._published.get(message.run_id, ()):
                has_news.set()
        elif run := self._find_local(message.run_id):
            if message.kind == "cancel":
                run.cancel("a request to another server cancelled it")
            elif publication := self._publications.get(run.id):
                publication.add_follower(message.sender)
            elif not run.has_ended:  # its outcome is about to be stored
                publication = _Publication(run, message.sender)
                self._publications[run.id] = publication
                self._run_in_background(self._publish(publication))

    async def _publish(self, publication: "_Publication") -> None:
        run = publication.run
        try:
            await self._publish_all(publication)
        except Exception:
            log.exception("run %s: its events cannot be published", run.id)
        finally:
            del self._publications[run.id]

    async def _publish_all(self, publication: "_Publication") -> None:
        run, is_first = publication.run, True
        with run.subscribe() as subscriber:
            while publication.is_followed:
                with anyio.move_on_at(publication.followed_until) as timeout:
                    events = await subscriber.events()
                if timeout.cancelled_caught:
                    continue  # somebody may have said again that it follows
                text = json.dumps(publication.to_json(events))
                await self._repository.publish(run.id, text, is_first=is_first, is_last=not events)
                for process_id in publication.followers:
                    await self._send(process_id, Message("published", run.id))
                if not events:
                    return
                is_first = False

    async def _send(self, process_id: str, message: Message) -> None:
        await asyncio.to_thread(self._messages.send, process_id, message)

    def _run_in_background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Publication:
    """A run of this process that other processes follow."""

    def __init__(self, run: Run, follower: str) -> None:
        self.run = run
        self.followers = set[str]()
        """The ids of the processes that follow the run."""
        self.followed_until = 0.0
        """By the event loop's clock."""
        self._live_chars = 0
        """Number of characters of the running command's output that were published."""
        self.add_follower(follower)

    @property
    def is_followed(self) -> bool:
        return asyncio.get_running_loop().time() < self.followed_until

    def add_follower(self, process_id: str) -> None:
        self.followers.add(process_id)
        self.followed_until = asyncio.get_running_loop().time() + FOLLOWED_S

    def to_json(self, events: Sequence[Event]) -> list[dict[str, Any]]:
        """Return the events as JSON values, without the rest of a command's output beyond
        MAX_LIVE_CHARS."""
        values = []
        for event in events:
            if isinstance(event, ToolCallStarted):
                self._live_chars = 0
            elif isinstance(event, ToolOutput):
                self._live_chars += len(event.text)
                if self._live_chars > MAX_LIVE_CHARS:
                    continue
            values.append(event_to_json(event))
        return values
