"""One run, and its subscribers: each reads the events from the beginning, at its own pace."""

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
from proxy.agent.task import RunObserver
from proxy.errors import ProxyError, RunCancelledError
from proxy.runs.event_log import EventLog, Record
from proxy.store.records import RunStatus

MAX_BEHIND = 64
"""If all subscribers are this many events behind, the run waits for one of them."""
Work = Callable[["Run", Emit], Awaitable[Result]]


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """The identity of a request, by which a retry finds the run of the first attempt."""

    owner: str
    fingerprint: str
    """A digest of the request: with a key, of the body's meaning; without, of its bytes."""
    key: str | None = None
    """The Idempotency-Key."""
    retry_count: int | None = None
    """The number of the attempt, from 0, if the client's library sends it."""
    stream: bool = False
    detach: bool = False
    """True if the run continues without subscribers."""

    @property
    def has_name(self) -> bool:
        """Return True if a later request can name the run: by the client's key, or, if the run
        continues without subscribers, by its id."""
        return self.key is not None or self.detach

    @property
    def may_come_back(self) -> bool:
        """Return True if a client that disconnects may retry. OpenAI's SDKs do, but not for a
        stream whose head they have received, and the head is sent within seconds."""
        return self.key is not None or (self.retry_count is not None and not self.stream)

    def same_request(self, other: "RequestIdentity") -> bool:
        """Return True if one request may be a retry of the other."""
        return (self.owner, self.fingerprint) == (other.owner, other.fingerprint)


@dataclass(frozen=True, slots=True)
class RunMetadata:
    """What is known of a run when it starts."""

    id: str
    model: str
    container_id: str
    created: int
    """A Unix time in seconds."""


class Run:
    """A run in a task of its own, which starts at once. `on_alone` is called when the last
    subscriber leaves, and when the run ends without subscribers."""

    def __init__(
        self,
        head: RunMetadata,
        claim: RequestIdentity,
        work: Work,
        on_alone: Callable[["Run"], None],
        observer: RunObserver | None = None,
    ) -> None:
        self.head = head
        self.id = head.id
        self.model = head.model
        self.container_id = head.container_id
        self.claim = claim
        self.observer = observer
        self.created = head.created
        self.heard_out = False
        """True if a subscriber has read all events."""
        self.why_cancelled = ""
        self.is_kept = False
        """True if the outcome is in the store."""
        self.has_ended = False
        self._log = EventLog()
        self._listeners: list[Subscriber] = []
        self._on_alone = on_alone
        self._room = asyncio.Event()
        self._working = asyncio.ensure_future(work(self, self._emit))
        self._working.add_done_callback(self._over)

    @property
    def listeners(self) -> int:
        """The number of subscribers."""
        return len(self._listeners)

    @property
    def status(self) -> RunStatus:
        """The status as the store has it."""
        if not self.has_ended:
            return "running"
        if self._working.cancelled():
            return "cancelled"
        return "failed" if self._working.exception() else "completed"

    @property
    def can_be_joined(self) -> bool:
        """Return True if the run has a result, or may still reach one."""
        return not self.why_cancelled and self.status in ("running", "completed")

    def result(self) -> Result:
        """Return the result. Raises the run's own error, RunCancelledError."""
        if self._working.cancelled():
            raise RunCancelledError
        return self._working.result()

    def past(self) -> Sequence[Event]:
        """Return the events so far that are kept."""
        return self._log.events()

    def record(self) -> Record:
        """Return the whole record for the store."""
        return replace(self._ended_as(), events=self.past())

    def summary(self) -> Record:
        """Return the record with only the outcome and the usage."""
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
        """Return True if the model has produced any output."""
        return any(
            isinstance(event, AnswerDelta | ReasoningDelta | ToolCallStarted | ClientCallStarted)
            or (isinstance(event, TurnStarted) and event.turn > 1)
            for event in self.past()
        )

    def listen(self) -> "Subscriber":
        """Subscribe to all events, also to those of the past. The caller must leave again."""
        listener = Subscriber(self, self._log.events(), self._room.set)
        self._listeners.append(listener)
        return listener

    def leave(self, listener: "Subscriber") -> None:
        """Remove a subscriber. Safe to call twice."""
        if listener in self._listeners:
            self._listeners.remove(listener)
            self._room.set()
            if not self._listeners:
                self._on_alone(self)

    def cancel(self, why: str) -> None:
        """Cancel the run. Safe to call twice."""
        if not self.why_cancelled and not self.has_ended:
            self.why_cancelled = why
            self._working.cancel()

    def on_end(self, call: Callable[[], object]) -> None:
        """Call `call` once the run's task has ended."""
        self._working.add_done_callback(lambda _: call())

    async def ended(self) -> None:
        """Return once the run's task has ended."""
        await asyncio.wait({self._working})

    async def _emit(self, event: Event) -> None:
        self._log.add(event)
        for listener in self._listeners:
            listener.hear(event)
        while self._listeners and all(each.behind >= MAX_BEHIND for each in self._listeners):
            self._room.clear()
            await self._room.wait()

    def _over(self, working: asyncio.Future[Result]) -> None:
        if not working.cancelled() and (error := working.exception()):
            _clear_frames(error)
        self.has_ended = True
        for listener in self._listeners:
            listener.wake()
        if not self._listeners:
            self._on_alone(self)


class Subscriber:
    """One subscriber: it receives the past events, then each new one, at its own pace."""

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
        """Unsubscribe. Safe to call twice."""
        self.run.leave(self)

    @property
    def behind(self) -> int:
        """The number of events that wait to be read."""
        return len(self._pending)

    def hear(self, event: Event) -> None:
        """Append an event."""
        self._pending.append(event)
        if len(self._pending) >= self._wanted:
            self._news.set()

    def wake(self) -> None:
        """Let `events` return, because the run has ended."""
        self._news.set()

    async def events(self, at_least: int = 1) -> Sequence[Event]:
        """Wait for at least `at_least` events and return them all. After the run has ended, return
        the rest; an empty list means that there is no more."""
        self._wanted = at_least
        while len(self._pending) < at_least and not self.run.has_ended:
            self._news.clear()
            await self._news.wait()
        taken, self._pending = self._pending, []
        self._on_taken()
        self.run.heard_out |= not taken
        return taken


def _clear_frames(error: BaseException | None) -> None:
    """Free the local variables of the failed frames, because the error may be kept for long."""
    while error:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
