"""Where the logs of all runs are begun, and the oldest go."""

import asyncio
import logging
import shutil
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from proxy.agent.events import Emit
from proxy.agent.result import Result
from proxy.agent.task import Task
from proxy.audit import facts
from proxy.audit.book import Book
from proxy.audit.day import day_of, days, oldest_kept
from proxy.audit.trail import Trail

log = logging.getLogger(__name__)
THREADS = 4
"""Of its own: a disk that hangs holds up nothing else."""


class Ledger:
    """The audit logs of a state directory; nothing is made there before the first."""

    def __init__(
        self,
        root: Path,
        *,
        keep_days: float,
        key: bytes | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`key`: who does not have it can forge no log."""
        self._root = root
        self._keep_days = keep_days
        self._key = key
        self._now = now
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="audit")
        self._tasks = set[asyncio.Task[None]]()
        self._swept = ""
        self.failures = 0
        """How many logs broke off, for the disk refused them."""

    async def follow(
        self,
        task: Task,
        owner: str,
        fingerprint: str,
        work: Callable[[Emit], Awaitable[Result]],
        emit: Emit,
    ) -> Result:
        """See a run through that is written down. Raises what it raises, and AuditError."""
        loop, today = asyncio.get_running_loop(), day_of(self._now())
        if self._swept != today:
            self._swept = today
            await loop.run_in_executor(self._threads, self._sweep)
        request = await loop.run_in_executor(
            self._threads, facts.request, task, owner, fingerprint
        )  # pictures in messages make it long
        trail = Trail(
            Book(self._root / today, task.run_id, self._key, self._now),
            self._threads,
            required=task.profile.audit.required,
            on_failure=self._failed,
            tasks=self._tasks,
        )
        return await trail.follow(request, work, emit)

    async def aclose(self) -> None:
        """Finish what was begun."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        self._threads.shutdown()

    def _failed(self) -> None:
        self.failures += 1

    def _sweep(self) -> None:
        """Remove the days that are older than they are kept."""
        oldest = oldest_kept(self._now(), self._keep_days)
        for day in days(self._root):
            if day.name < oldest:
                shutil.rmtree(day, ignore_errors=True)
                log.info("the audit logs of %s are kept no more", day.name)
