"""One run at work, heard by any number of listeners."""

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from proxy.agent.events import (
    AnswerDelta,
    ClientCallStarted,
    Emit,
    Event,
    ReasoningDelta,
    ToolCallStarted,
    TurnStarted,
)
from proxy.agent.result import Result
from proxy.agent.task import Witness
from proxy.errors import ProxyError, RunCancelledError
from proxy.runs.claim import Claim
from proxy.runs.record import Record
from proxy.runs.replay import Replay
from proxy.store.records import RunStatus

MAX_BEHIND = 64
"""How many events all listeners may lag behind before the run waits for one of them."""
Work = Callable[["Run", Emit], Awaitable[Result]]


@dataclass(frozen=True, slots=True)
class Head:
    """What is known of a run from its beginning."""

    id: str
    model: str
    container_id: str
    created: int
    """When, in seconds since 1970."""


class Run:
    """It goes on by itself, in a task of its own; `on_alone` is told whenever nobody listens any
    more, and when it ends with nobody listening."""

    def __init__(
        self,
        head: Head,
        claim: Claim,
        work: Work,
        on_alone: Callable[["Run"], None],
        witness: Witness | None = None,
    ) -> None:
        self.head = head
        self.id = head.id
        self.model = head.model
        self.container_id = head.container_id
        self.claim = claim
        self.witness = witness
        self.created = head.created
        self.heard_out = False
        """Whether somebody has listened to the end."""
        self.why_cancelled = ""
        self.is_kept = False
        """Whether what came of it lies in the store."""
        self.has_ended = False
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
    def status(self) -> RunStatus:
        """How it stands."""
        if not self.has_ended:
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

    def record(self) -> Record:
        """How it stands, with all that is to be kept of it."""
        return replace(self._ended_as(), events=self.past())

    def summary(self) -> Record:
        """How it stands and what it has cost."""
        return self._ended_as().summary()

    def _ended_as(self) -> Record:
        status, error = self.status, None
        if status == "failed":
            failure = self._working.exception()
            error = failure if isinstance(failure, ProxyError) else None
        result = self._working.result() if status == "completed" else None
        return Record(status, (), result, error)

    @property
    def has_spent(self) -> bool:
        """Whether the model has said anything yet."""
        return any(
            isinstance(event, AnswerDelta | ReasoningDelta | ToolCallStarted | ClientCallStarted)
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
        if not self.why_cancelled and not self.has_ended:
            self.why_cancelled = why
            self._working.cancel()

    def on_end(self, call: Callable[[], object]) -> None:
        """Call when nothing of it is at work any more."""
        self._working.add_done_callback(lambda _: call())

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
        if not working.cancelled() and (error := working.exception()):
            _let_go(error)
        self.has_ended = True
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
        self._wanted = 1
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
        if len(self._pending) >= self._wanted:
            self._news.set()

    def wake(self) -> None:
        """The run has ended."""
        self._news.set()

    async def events(self, at_least: int = 1) -> Sequence[Event]:
        """What is new, as soon as it is so many, or all that is left; nothing at the end."""
        self._wanted = at_least
        while len(self._pending) < at_least and not self.run.has_ended:
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
