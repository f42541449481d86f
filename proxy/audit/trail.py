"""What follows one run and writes down what it does, before it does it."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor

from proxy.agent.events import Emit, Event, OfChoice, ToolCallStarted, TurnStarted
from proxy.agent.result import Result
from proxy.audit import facts
from proxy.audit.book import Book
from proxy.audit.chain import Fields
from proxy.errors import AuditError

log = logging.getLogger(__name__)
MAX_WAITING = 64
"""How many lines may wait for the disk before the run does."""
NEXT_ACTS = TurnStarted | ToolCallStarted
"""Before these all that was told must be in the file, they themselves too."""


class Trail:
    """One run's. The disk's work is done in threads, in order."""

    def __init__(
        self,
        book: Book,
        threads: Executor,
        *,
        required: bool,
        on_failure: Callable[[], None],
        tasks: set[asyncio.Task[None]],
    ) -> None:
        """`required`: the run fails where it cannot be written down; `tasks` has what is not to be
        dropped while it is at work."""
        self._book = book
        self._threads = threads
        self._required = required
        self._on_failure = on_failure
        self._tasks = tasks
        self._jobs = deque[Callable[[], None]]()
        self._working: asyncio.Task[None] | None = None
        self._fault: OSError | None = None

    async def follow(
        self, request: Fields, work: Callable[[Emit], Awaitable[Result]], emit: Emit
    ) -> Result:
        """See a run through. Raises what it raises, and AuditError."""

        async def hear(event: Event) -> None:
            await self._heard(event)
            await emit(event)

        try:
            self._do(self._book.begin)
            self._write(request)
            await self._written()
            result = await work(hear)
        except BaseException as error:
            await self._end(facts.failed(error))
            raise
        await self._end(facts.ended(result))
        self._check()
        return result

    async def _heard(self, event: Event) -> None:
        if told := facts.happened(event):
            self._write(told)
        bare = event.event if isinstance(event, OfChoice) else event
        if isinstance(bare, NEXT_ACTS):
            await self._written()
        elif len(self._jobs) > MAX_WAITING:
            await self._all_done()

    async def _written(self) -> None:
        await self._all_done()
        self._check()

    async def _end(self, last: Fields) -> None:
        self._write(last)
        self._do(self._book.finish)
        self._do(self._book.close)
        await self._all_done()

    def _check(self) -> None:
        if self._fault and self._required:
            raise AuditError from self._fault

    def _write(self, fields: Fields) -> None:
        if self._fault is None:
            line = self._book.line(fields)
            self._do(lambda: self._book.append(line))

    def _do(self, job: Callable[[], None]) -> None:
        self._jobs.append(job)
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work())
            self._tasks.add(self._working)
            self._working.add_done_callback(self._tasks.discard)

    async def _all_done(self) -> None:
        if self._working:
            await asyncio.wait({self._working})

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while self._jobs:
            job = self._jobs.popleft()
            if self._fault and job != self._book.close:
                continue
            try:
                await loop.run_in_executor(self._threads, job)
            except OSError as error:
                self._fault = error
                self._on_failure()
                log.error("an audit log breaks off: %s", error)
