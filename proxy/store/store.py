"""The store: everything that outlives a request, under one directory.

Each kind of thing has a shelf with its queries. `Store` builds the shelves and sweeps them.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Protocol

from sqlalchemy import Connection

from policies.sessions import ResponseSettings, SessionSettings
from proxy.errors import StoreError
from proxy.store.blobs import BlobStore
from proxy.store.containers import ContainerFileRepository, ContainerRepository
from proxy.store.conversations import ConversationRepository, ResponseQuota
from proxy.store.database import SWEEP_ROWS, Database, require_quota
from proxy.store.responses import ResponseRepository
from proxy.store.runs import RunRepository, SuspendedRunRepository
from proxy.store.spending import SpendingRepository
from proxy.store.tool_verdicts import ToolVerdictRepository
from proxy.store.uploads import UploadRepository
from proxy.store.workspaces import WorkspaceRepository
from sandbox_runtime.ownership import Owner

log = logging.getLogger(__name__)

SWEEP_EVERY_S = 300
FORGET_AFTER_S = 3600
"""How long a deleted row stays, so that a client can continue a list after it."""


class Repository(Protocol):
    """Things of one kind that expire."""

    def expire(self, connection: Connection, now: int, forget_before: int) -> bool:
        """Delete some of the expired things, and some rows that were deleted before
        `forget_before`. Return True if there may be more."""


class BlobRepository(Repository, Protocol):
    """Things whose contents are files beside the database."""

    def blobs(self, connection: Connection) -> dict[str, int]:
        """Return the blobs in use and their sizes."""

    def mark_missing(self, connection: Connection, blobs: Collection[str], now: int) -> None:
        """Delete the things whose blobs are missing."""


class Store:
    """Uploads, containers, workspaces, responses, runs, spending and tool verdicts. Several
    processes may share one directory."""

    def __init__(
        self,
        directory: Path,
        sessions: SessionSettings = SessionSettings(),
        responses: ResponseSettings = ResponseSettings(),
        *,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Open the store in a directory, or create it. Raises StoreError."""
        self.directory = directory
        self.now = now
        self._ends = ExitStack()
        self.blobs = BlobStore(directory / "blobs")
        self._database = Database(directory / "store.sqlite3")
        self.uploads = UploadRepository(self._database, self.blobs, now)
        self.containers = ContainerRepository(self._database, self.blobs, now)
        self.container_files = ContainerFileRepository(self._database, self.blobs, now)
        self.workspaces = WorkspaceRepository(self._database, self.blobs, now, sessions)
        self.suspended_runs = SuspendedRunRepository(self._database, now)
        self.spending = SpendingRepository(self._database, now)
        self.tool_verdicts = ToolVerdictRepository(self._database, now)
        quota = ResponseQuota(responses.quota_mib << 20)
        self.responses = ResponseRepository(self._database, now, responses, quota)
        self.conversations = ConversationRepository(self._database, now, responses, quota)
        self.worker = self._begin_work()
        """This process, as other processes see whether it is alive."""
        self.runs = RunRepository(self._database, now, self.worker)
        self._with_blobs: tuple[BlobRepository, ...] = (
            self.uploads,
            self.containers,
            self.workspaces,
        )
        self._shelves: tuple[Repository, ...] = (
            *self._with_blobs,
            self.suspended_runs,
            self.responses,
            self.conversations,
            self.runs,
            self.spending,
            self.tool_verdicts,
        )

    async def require_quota(self, owner: str, size: int, quota: int) -> None:
        """Raise QuotaError if a file of that size would exceed the owner's quota."""
        await self._database.read(
            lambda connection: require_quota(connection, owner, size, quota, self.now())
        )

    async def sweep(self) -> None:
        """Remove expired things, blobs without a row and rows without their blob."""
        now = int(self.now())
        for shelf in self._shelves:
            expire = partial(shelf.expire, now=now, forget_before=now - FORGET_AFTER_S)
            while await self._database.write(expire):
                pass  # requests' transactions run in between
        known = await self._database.read_concurrently(self._known)
        missing = await asyncio.to_thread(self.blobs.sweep, known, now)
        while missing:
            some = {missing.pop() for _ in range(min(len(missing), SWEEP_ROWS))}
            await self._database.write(partial(self._lose, blobs=some, now=now))
        await asyncio.to_thread(self.worker.forget_dead)

    async def sweep_forever(self) -> None:
        """Sweep at once and every few minutes, until cancelled."""
        while True:
            try:
                await self.sweep()
            except Exception:
                log.exception("the store could not be swept")
            await asyncio.sleep(SWEEP_EVERY_S)

    def close(self) -> None:
        """Finish the transactions begun and close the files. Safe to call twice."""
        self._database.close()
        self._ends.close()

    def _begin_work(self) -> Owner:
        try:
            worker = Owner(self.directory)
        except OSError as error:
            raise StoreError(str(error)) from error
        self._ends.callback(worker.release)
        return worker

    def _known(self, connection: Connection) -> dict[str, int]:
        known: dict[str, int] = {}
        for shelf in self._with_blobs:
            known |= shelf.blobs(connection)
        return known

    def _lose(self, connection: Connection, blobs: Collection[str], now: int) -> None:
        for shelf in self._with_blobs:
            shelf.mark_missing(connection, blobs, now)
