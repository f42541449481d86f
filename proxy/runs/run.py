"""One run at work, heard by any number of listeners."""

import asyncio
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, Self

from proxy.agent.events import (
    AnswerDelta,
    Emit,
    Event,
    ReasoningDelta,
    ToolCallStarted,
    TurnStarted,
)
from proxy.agent.task import Result, Task
from proxy.errors import RunCancelledError
from proxy.runs.claim import Claim
from proxy.runs.replay import Replay

MAX_BEHIND = 64
"""How many events all listeners may lag behind before the run waits for one of them."""
Status = Literal["running", "completed", "failed", "cancelled"]
Work = Callable[["Run", Emit], Awaitable[Result]]


class Run:
    """It goes on by itself, in a task of its own; `on_alone` is told whenever nobody listens any
    more, and when it ends with nobody listening."""

    def __init__(
        self, task: Task, claim: Claim, work: Work, on_alone: Callable[["Run"], None]
    ) -> None:
        self.id = task.run_id
        self.model = task.model
        self.container_id = task.outbox.container_id
        self.claim = claim
        self.witness = task.witness
        self.created = task.created
        self.heard_out = False
        """Whether somebody has listened to the end."""
        self.why_cancelled = ""
        self.chars = 0
        """How much memory it holds, about, once it has ended."""
        self.ended_at: float | None = None
        """On the monotonic clock."""
        self._replay = Replay()
        self._listeners: list[Listener] = []
        self._on_alone = on_alone
        self._room = asyncio.Event()
        self._working = asyncio.ensure_future(work(self, self._emit))
        self._working.add_done_callback(self._over)

    @property
    def listeners(self) -> int:
        """How many listen."""
        return len(self._listeners)

    @property
    def status(self) -> Status:
        """How it stands."""
        if self.ended_at is None:
            return "running"
        if self._working.cancelled():
            return "cancelled"
        return "failed" if self._working.exception() else "completed"

    @property
    def can_be_joined(self) -> bool:
        """Whether it has a result, or may come to one."""
        return not self.why_cancelled and self.status in ("running", "completed")

    def result(self) -> Result:
        """What came of it. Raises what it failed with, RunCancelledError."""
        if self._working.cancelled():
            raise RunCancelledError
        return self._working.result()

    def past(self) -> Sequence[Event]:
        """What has happened, as far as it is kept."""
        return self._replay.events()

    @property
    def has_spent(self) -> bool:
        """Whether the model has said anything yet."""
        return any(
            isinstance(event, AnswerDelta | ReasoningDelta | ToolCallStarted)
            or (isinstance(event, TurnStarted) and event.turn > 1)
            for event in self.past()
        )

    def listen(self) -> "Listener":
        """Hear it from the beginning; to be left again."""
        listener = Listener(self, self._replay.events(), self._room.set)
        self._listeners.append(listener)
        return listener

    def leave(self, listener: "Listener") -> None:
        """Forget a listener. Safe to call twice."""
        if listener in self._listeners:
            self._listeners.remove(listener)
            self._room.set()
            if not self._listeners:
                self._on_alone(self)

    def cancel(self, why: str) -> None:
        """End it now. Safe to call twice."""
        if not self.why_cancelled:
            self.why_cancelled = why
            self._working.cancel()

    async def ended(self) -> None:
        """Return when nothing of it is at work any more."""
        await asyncio.wait({self._working})

    async def _emit(self, event: Event) -> None:
        self._replay.add(event)
        for listener in self._listeners:
            listener.hear(event)
        while self._listeners and all(each.behind >= MAX_BEHIND for each in self._listeners):
            self._room.clear()
            await self._room.wait()

    def _over(self, working: asyncio.Future[Result]) -> None:
        self.chars = self._replay.chars + (self.witness.chars if self.witness else 0)
        if not working.cancelled():
            if error := working.exception():
                _let_go(error)
            else:
                pictures = (artifact.data_url for artifact in working.result().artifacts)
                self.chars += sum(len(url) for url in pictures if url)
        self.ended_at = time.monotonic()
        for listener in self._listeners:
            listener.wake()
        if not self._listeners:
            self._on_alone(self)


class Listener:
    """One client's ear: what has happened, then what happens, each listener at its own pace."""

    def __init__(self, run: Run, past: list[Event], on_taken: Callable[[], None]) -> None:
        self.run = run
        self._pending = past
        self._on_taken = on_taken
        self._news = asyncio.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Listen no more. Safe to call twice."""
        self.run.leave(self)

    @property
    def behind(self) -> int:
        """How many events wait to be taken."""
        return len(self._pending)

    def hear(self, event: Event) -> None:
        """Something has happened."""
        self._pending.append(event)
        self._news.set()

    def wake(self) -> None:
        """The run has ended."""
        self._news.set()

    async def events(self) -> Sequence[Event]:
        """What is new, as soon as there is any; nothing at the end."""
        while not self._pending and self.run.ended_at is None:
            self._news.clear()
            await self._news.wait()
        taken, self._pending = self._pending, []
        self._on_taken()
        self.run.heard_out |= not taken
        return taken


def _let_go(error: BaseException | None) -> None:
    """Free what the failed frames hold: the error may be kept, and the log has the rest."""
    while error:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
