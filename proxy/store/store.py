"""The store: all data that outlives a request, as records in a database and as blobs.

Each repository contains the queries for one kind of record. `Store` builds the repositories and
sweeps them.
"""

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Protocol

from sqlalchemy import URL, Connection, select

from policies.sessions import ResponseSettings, SessionSettings, TrajectorySettings
from proxy.errors import StoreError
from proxy.store import sqlite
from proxy.store.blobs import BlobStore
from proxy.store.containers import ContainerFileRepository, ContainerRepository
from proxy.store.conversations import ConversationRepository, ResponseQuota
from proxy.store.database import SWEEP_ROWS, Database, check_quota, upsert
from proxy.store.process_lease import ProcessLease
from proxy.store.process_messages import ProcessMessenger
from proxy.store.records import ProcessRegistration
from proxy.store.responses import ResponseRepository
from proxy.store.runs import RunRepository, SuspendedRunRepository
from proxy.store.spending import SpendingRepository
from proxy.store.tables import SECRETS
from proxy.store.tool_verdicts import ToolVerdictRepository
from proxy.store.trajectories import TrajectoryRepository
from proxy.store.uploads import UploadRepository
from proxy.store.workspaces import WorkspaceRepository
from sandbox_runtime.ownership import Owner

log = logging.getLogger(__name__)

SWEEP_EVERY_S = 300
LINK_KEY_BYTES = 32
FORGET_AFTER_S = 3600
"""Seconds that a deleted row stays in its table, so that a client can request the page after the
row's id."""


class Repository(Protocol):
    """Stores records of one kind, which expire."""

    def expire(self, connection: Connection, now: int, forget_before: int) -> bool:
        """Delete a batch of expired records, and a batch of rows that were marked as deleted before
        `forget_before`. Return True if more records or rows may remain."""


class BlobRepository(Repository, Protocol):
    """Stores records whose contents are blobs."""

    def blob_sizes(self, connection: Connection) -> dict[str, int]:
        """Return the blobs in use and their sizes."""

    def mark_missing(self, connection: Connection, blobs: Collection[str], now: int) -> None:
        """Delete the records of these blobs, whose files are missing."""


class Store:
    """Contains and sweeps all repositories. Several processes may share one store."""

    def __init__(
        self,
        directory: Path,
        sessions: SessionSettings = SessionSettings(),
        responses: ResponseSettings = ResponseSettings(),
        trajectories: TrajectorySettings = TrajectorySettings(),
        *,
        database_url: URL | None = None,
        blobs_url: str | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Open the store in a directory, or create it. The records are in an SQLite database in
        the directory, or in the PostgreSQL database of `database_url`; the blobs are files in the
        directory, or in the S3 bucket of `blobs_url`. Raises StoreError."""
        self.directory = directory
        self.now = now
        self._exit_stack = ExitStack()
        self.blobs = _open_blobs(directory, blobs_url)
        self._url = database_url or sqlite.database_url(directory / "store.sqlite3")
        self._is_shared = database_url is not None
        """True if processes of other machines may use the same database."""
        self._database = Database(self._url)
        self.uploads = UploadRepository(self._database, self.blobs, now)
        self.containers = ContainerRepository(self._database, self.blobs, now)
        self.container_files = ContainerFileRepository(self._database, self.blobs, now)
        self.workspaces = WorkspaceRepository(self._database, self.blobs, now, sessions)
        self.suspended_runs = SuspendedRunRepository(self._database, now)
        self.spending = SpendingRepository(self._database, now)
        self.tool_verdicts = ToolVerdictRepository(self._database)
        quota = ResponseQuota(responses.quota_mib << 20)
        self.responses = ResponseRepository(self._database, now, responses, quota)
        self.conversations = ConversationRepository(self._database, now, responses, quota)
        self.link_key = self._read_link_key()
        """The key that signs the links to files."""
        self.process = self._register_process()
        """This process as an owner of runs. Other processes can tell whether it is alive."""
        self.messages = self._open_messenger()
        """Sends messages to other processes and receives their messages; None with SQLite."""
        self.runs = RunRepository(self._database, now, self.process, is_shared=self._is_shared)
        self.trajectories = TrajectoryRepository(self._database, now, self.process, trajectories)
        self._blob_repositories: tuple[BlobRepository, ...] = (
            self.uploads,
            self.containers,
            self.workspaces,
        )
        self._repositories: tuple[Repository, ...] = (
            *self._blob_repositories,
            self.suspended_runs,
            self.responses,
            self.conversations,
            self.runs,
            self.trajectories,
            self.spending,
            self.tool_verdicts,
        )

    async def check(self) -> None:
        """Raise StoreUnavailableError if the database cannot be reached."""
        await self._database.read(lambda connection: connection.execute(select(1)))

    async def check_quota(self, owner: str, size: int, quota: int) -> None:
        """Raise QuotaError if a file of `size` bytes would exceed the owner's `quota` in bytes, or
        the maximum number of files."""
        await self._database.read(
            lambda connection: check_quota(connection, owner, size, quota, self.now())
        )

    def call_when_found_dead(self, callback: Callable[[], object]) -> None:
        """Call `callback`, in a thread, each time other processes have found this process dead
        although it lives. Other processes may then begin its runs again."""
        if isinstance(self.process, ProcessLease):
            self.process.on_lost = callback

    async def is_process_dead(self, process_id: str) -> bool:
        """Return True if the process has ended, or if other processes have found it dead. Raises
        StoreUnavailableError."""
        return await self._database.read_concurrently(lambda _: self.process.is_dead(process_id))

    async def sweep(self) -> None:
        """Delete expired records, blobs without a record, records without a blob, and the lock
        files or database rows of dead processes."""
        now = int(self.now())
        for repository in self._repositories:
            expire = partial(repository.expire, now=now, forget_before=now - FORGET_AFTER_S)
            while await self._database.write(expire):
                pass  # transactions of requests run between two batches
        known = await self._database.read_concurrently(self._known_blobs)
        missing = await asyncio.to_thread(self.blobs.sweep, known, now)
        while missing:
            batch = {missing.pop() for _ in range(min(len(missing), SWEEP_ROWS))}
            await self._database.write(partial(self._mark_missing, blobs=batch, now=now))
        await asyncio.to_thread(self.process.remove_dead_records)

    async def sweep_forever(self) -> None:
        """Sweep now and every `SWEEP_EVERY_S` seconds, until cancelled."""
        while True:
            try:
                await self.sweep()
            except Exception:
                log.exception("the store could not be swept")
            await asyncio.sleep(SWEEP_EVERY_S)

    def close(self) -> None:
        """Finish the running transactions and close the files. Safe to call twice."""
        self._database.close()
        self._exit_stack.close()

    def _read_link_key(self) -> bytes:
        """Return the key that signs the links to files. All processes that share a store have the
        same key."""
        if self._is_shared:
            return self._database.write_blocking(_link_key_in_database)
        try:
            return _link_key_in_file(self.directory / "link-key")
        except OSError as error:
            raise StoreError(str(error)) from error

    def _register_process(self) -> ProcessRegistration:
        process: ProcessRegistration
        try:
            process = ProcessLease(self._url) if self._is_shared else Owner(self.directory)
        except OSError as error:
            raise StoreError(str(error)) from error
        self._exit_stack.callback(process.release)
        return process

    def _open_messenger(self) -> ProcessMessenger | None:
        if not self._is_shared:
            return None
        messages = ProcessMessenger(self._url, self.process)
        self._exit_stack.callback(messages.close)
        return messages

    def _known_blobs(self, connection: Connection) -> dict[str, int]:
        known: dict[str, int] = {}
        for repository in self._blob_repositories:
            known |= repository.blob_sizes(connection)
        return known

    def _mark_missing(self, connection: Connection, blobs: Collection[str], now: int) -> None:
        for repository in self._blob_repositories:
            repository.mark_missing(connection, blobs, now)


def _open_blobs(directory: Path, url: str | None) -> BlobStore:
    if url is None:
        return BlobStore(directory / "blobs")
    try:
        from proxy.store.s3 import S3BlobStore  # noqa: PLC0415 - optional
    except ModuleNotFoundError as error:
        raise StoreError(
            f"{error.name} is not installed: pip install 'llm-sandbox-proxy[s3]'"
        ) from error
    return S3BlobStore(url, directory / "blob-cache")


def _link_key_in_file(path: Path) -> bytes:
    """Return the link key in a file, which is created if it does not exist. Raises OSError."""
    if not path.exists():
        # A hard link to a complete file, because several processes may create the key at once.
        finished = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
        finished.touch(mode=0o600)
        finished.write_bytes(secrets.token_bytes(LINK_KEY_BYTES))
        with suppress(FileExistsError):
            path.hardlink_to(finished)
        finished.unlink()
    return path.read_bytes()


def _link_key_in_database(connection: Connection) -> bytes:
    """Return the link key in the database, which is created if it does not exist."""
    row = {"name": "link-key", "value": secrets.token_bytes(LINK_KEY_BYTES)}
    connection.execute(upsert(connection, SECRETS).values(row).on_conflict_do_nothing())
    query = select(SECRETS.c.value).where(SECRETS.c.name == row["name"])
    return bytes(connection.execute(query).scalar_one())
