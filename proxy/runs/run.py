"""One run, and its subscribers: each reads the run's events from the start of the event log on, at
its own pace."""

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
from proxy.runs.event_log import EventLog, RunRecord
from proxy.store.records import RunStatus

MAX_BEHIND = 64
"""Back-pressure: the run waits while all subscribers have this many unread events or more."""
Work = Callable[["Run", Emit], Awaitable[Result]]
"""Emits the events of a run and returns its result: `RunManager._execute_run` for a new run, or
`RunArchive._replay_events` for a stored run that a retry joins."""


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """Identifies a request, so that a retry finds the run of the first attempt."""

    owner: str
    fingerprint: str
    """SHA-256 of the path, the session, some headers and the body. With an idempotency key, the
    parsed body is hashed, without the fields that only change how the response is sent; else the
    bytes of the body."""
    key: str | None = None
    """The Idempotency-Key."""
    retry_count: int | None = None
    """The number of retries before this attempt; None if the client does not send the number."""
    stream: bool = False
    """True if the client asked for a stream."""
    detach: bool = False
    """True if the run continues without subscribers."""

    @property
    def can_be_found_later(self) -> bool:
        """True if a later request can name the run: by its idempotency key, or, if the run
        continues without subscribers, by its id."""
        return self.key is not None or self.detach

    @property
    def may_be_retried(self) -> bool:
        """True if a client that disconnects may retry. OpenAI's SDKs do not retry a stream once
        they have received the response headers, which the proxy sends within seconds."""
        return self.key is not None or (self.retry_count is not None and not self.stream)

    def is_same_request(self, other: "RequestIdentity") -> bool:
        """Return True if `other` may be a retry of this request."""
        return (self.owner, self.fingerprint) == (other.owner, other.fingerprint)


@dataclass(frozen=True, slots=True)
class RunMetadata:
    """The properties of a run that are known at its start."""

    id: str
    model: str
    container_id: str
    created: int
    """Time at which the run was created, in seconds since 1970."""


class Run:
    """One run, in an asyncio task that starts at once. The run calls `on_unsubscribed` when the
    last subscriber has left, and when it ends without subscribers."""

    def __init__(
        self,
        metadata: RunMetadata,
        identity: RequestIdentity,
        work: Work,
        on_unsubscribed: Callable[["Run"], None],
        observer: RunObserver | None = None,
    ) -> None:
        self.metadata = metadata
        self.id = metadata.id
        self.model = metadata.model
        self.container_id = metadata.container_id
        self.identity = identity
        self.observer = observer
        self.created = metadata.created
        self.is_fully_read = False
        """True once a subscriber has read all events."""
        self.cancel_reason = ""
        self.is_stored = False
        """True once the outcome has been stored, or could not be stored. It is not stored again."""
        self.is_deleted = False
        """True once a client has deleted the outcome. The outcome is not stored again."""
        self.has_ended = False
        self._log = EventLog()
        self._subscribers: list[Subscriber] = []
        self._on_unsubscribed = on_unsubscribed
        self._space_freed = asyncio.Event()
        self._task = asyncio.ensure_future(work(self, self._emit))
        self._task.add_done_callback(self._on_done)

    @property
    def subscriber_count(self) -> int:
        """The number of subscribers."""
        return len(self._subscribers)

    @property
    def status(self) -> RunStatus:
        """The status, as it is stored."""
        if not self.has_ended:
            return "running"
        if self._task.cancelled():
            return "cancelled"
        return "failed" if self._task.exception() else "completed"

    @property
    def can_be_joined(self) -> bool:
        """True if the run has a result or is still running, and was neither cancelled nor
        deleted."""
        if self.cancel_reason or self.is_deleted:
            return False
        return self.status in ("running", "completed")

    def result(self) -> Result:
        """Return the result of a run that has ended. Raises the error of the run, or
        RunCancelledError if it was cancelled."""
        if self._task.cancelled():
            raise RunCancelledError
        return self._task.result()

    def past_events(self) -> Sequence[Event]:
        """Return the events in the event log. The log drops the oldest events of long runs."""
        return self._log.events()

    def record(self) -> RunRecord:
        """Return the record: the events so far, and the outcome if the run has ended."""
        return replace(self._outcome_record(), events=self.past_events())

    def summary(self) -> RunRecord:
        """Return the record without events and texts."""
        return self._outcome_record().summary()

    def _outcome_record(self) -> RunRecord:
        status, error = self.status, None
        if status == "failed":
            failure = self._task.exception()
            error = failure if isinstance(failure, ProxyError) else None
        result = self._task.result() if status == "completed" else None
        return RunRecord(status, (), result, error)

    @property
    def has_output(self) -> bool:
        """True if the model has produced output."""
        return any(
            isinstance(event, AnswerDelta | ReasoningDelta | ToolCallStarted | ClientCallStarted)
            or (isinstance(event, TurnStarted) and event.turn > 1)
            for event in self.past_events()
        )

    def subscribe(self) -> "Subscriber":
        """Subscribe to the events in the event log and to all later events. The caller must
        unsubscribe."""
        subscriber = Subscriber(self, self._log.events(), self._space_freed.set)
        self._subscribers.append(subscriber)
        return subscriber

    def unsubscribe(self, subscriber: "Subscriber") -> None:
        """Remove a subscriber. Safe to call twice."""
        if subscriber in self._subscribers:
            self._subscribers.remove(subscriber)
            self._space_freed.set()
            if not self._subscribers:
                self._on_unsubscribed(self)

    def cancel(self, reason: str) -> None:
        """Cancel the run, and do not wait for its end. `reason` becomes `cancel_reason`. Do nothing
        if the run has ended or was cancelled before."""
        if not self.cancel_reason and not self.has_ended:
            self.cancel_reason = reason
            self._task.cancel()

    def on_end(self, callback: Callable[[], object]) -> None:
        """Call `callback` once the run has ended."""
        self._task.add_done_callback(lambda _: callback())

    async def wait_until_ended(self) -> None:
        """Wait until the run has ended."""
        await asyncio.wait({self._task})

    async def _emit(self, event: Event) -> None:
        self._log.add(event)
        for subscriber in self._subscribers:
            subscriber.receive(event)
        while self._subscribers and all(
            each.unread_count >= MAX_BEHIND for each in self._subscribers
        ):
            self._space_freed.clear()
            await self._space_freed.wait()

    def _on_done(self, task: asyncio.Future[Result]) -> None:
        if not task.cancelled() and (error := task.exception()):
            _clear_traceback(error)
        self.has_ended = True
        for subscriber in self._subscribers:
            subscriber.wake()
        if not self._subscribers:
            self._on_unsubscribed(self)


class Subscriber:
    """Reads the events of a run at its own pace, from the first event in the event log on."""

    def __init__(self, run: Run, past_events: list[Event], on_read: Callable[[], None]) -> None:
        self.run = run
        self._pending = past_events
        self._on_read = on_read
        self._min_unread = 1
        self._wake_up = asyncio.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.unsubscribe()

    def unsubscribe(self) -> None:
        """Unsubscribe. Safe to call twice."""
        self.run.unsubscribe(self)

    @property
    def unread_count(self) -> int:
        """The number of unread events."""
        return len(self._pending)

    def receive(self, event: Event) -> None:
        """Append an event to the unread events."""
        self._pending.append(event)
        if len(self._pending) >= self._min_unread:
            self._wake_up.set()

    def wake(self) -> None:
        """Wake `events`, because the run has ended."""
        self._wake_up.set()

    async def events(self, min_count: int = 1) -> Sequence[Event]:
        """Wait for at least `min_count` unread events and return all unread events. Once the run
        has ended, return the remaining events without waiting. An empty list means that the run has
        ended and all events are read."""
        self._min_unread = min_count
        while len(self._pending) < min_count and not self.run.has_ended:
            self._wake_up.clear()
            await self._wake_up.wait()
        unread, self._pending = self._pending, []
        self._on_read()
        self.run.is_fully_read |= not unread
        return unread


def _clear_traceback(error: BaseException | None) -> None:
    """Free the local variables in the traceback of an error, which may stay in memory for
    minutes."""
    while error:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
