"""The run archive: stores the outcomes of runs, and replays stored runs, including runs of other
processes."""

import asyncio
import logging
from collections.abc import Collection, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import anyio

from proxy.agent.checkpoint import Checkpoint
from proxy.agent.events import Emit
from proxy.agent.result import Result
from proxy.errors import IdempotencyError, RunLostError, StoreUnavailableError
from proxy.runs.event_log import RunRecord
from proxy.runs.exchange import CrossProcessRuns
from proxy.runs.run import RequestIdentity, Run, RunMetadata
from proxy.store.records import RunStart, StoredRun
from proxy.store.runs import RunRepository

log = logging.getLogger(__name__)

POLL_S = 0.2
"""Interval at which the store is polled for the end of another process's run, in seconds."""
MAX_WAITING_SUMMARIES = 10_000
"""Maximum number of summaries that wait to be written. Beyond it, the oldest are dropped."""
SUMMARIZE_EVERY_S = 1.0
"""Seconds for which summaries are collected for one transaction."""


class LostRun(NamedTuple):
    """A run that has no result because its server died or was stopped."""

    id: str
    checkpoint: Checkpoint | None
    """The checkpoint from which the new run goes on, if the process of the new run can adopt the
    sandbox. None if the lost run has no readable checkpoint or answers a different request."""


class RunArchive:
    """Writes runs to the store and replays runs from the store."""

    def __init__(
        self, repository: RunRepository, keep_s: float, exchange: CrossProcessRuns | None = None
    ) -> None:
        """Outcomes are stored for `keep_s` seconds. With `exchange`, runs of other processes are
        followed while they run."""
        self._exchange = exchange
        self._repository = repository
        self._keep_s = keep_s
        self._tasks = set[asyncio.Task[None]]()
        self._summaries: dict[str, tuple[str, RunMetadata, RunRecord]] = {}
        """The summaries that wait to be written: owner, metadata and record, by run id."""
        self._closing_event = asyncio.Event()

    async def begin(
        self, metadata: RunMetadata, identity: RequestIdentity
    ) -> tuple[Run | None, "LostRun | None"]:
        """Store the start of a run, unless a stored run with the same idempotency key can be
        joined. Return two values: a replay of the run to join, or None; and the lost run that the
        new run continues or repeats, or None. Raises IdempotencyError if the run to join answers a
        different request. If this method raises an error, the run is removed from the store."""
        insertion = asyncio.create_task(self._repository.begin(_stored_run(metadata, identity)))
        try:
            found = await asyncio.shield(insertion)
            if found.joinable:
                return self._replay(found.joinable, identity), None
            if found.earlier is None or not await asyncio.to_thread(_is_lost, found.earlier):
                return None, None
            return None, LostRun(found.earlier.id, await _parse_checkpoint(found))
        except BaseException:
            self._run_in_background(self._delete_after(insertion, metadata.id))
            raise

    @property
    def is_shared(self) -> bool:
        """True if processes of other machines may use the same store."""
        return self._repository.is_shared

    async def save_checkpoint(self, run_id: str, checkpoint: Checkpoint | None) -> bool:
        """Store a checkpoint of a run of this process; see `SaveCheckpoint`. Raises RunLostError if
        other processes have found this process dead, because one of them may go on with the run."""
        text = await asyncio.to_thread(checkpoint.to_json) if checkpoint else None
        try:
            is_stored = await self._repository.save_checkpoint(run_id, text)
        except StoreUnavailableError as error:
            log.warning("run %s: its checkpoint cannot be stored: %s", run_id, error)
            return False
        if not is_stored:
            raise RunLostError
        return text is not None

    async def store(self, run: Run) -> None:
        """Store the outcome of a run."""
        record = run.record()
        text = await asyncio.to_thread(record.to_json)
        stored = replace(_stored_run(run.metadata, run.identity), status=record.status, record=text)
        for_retry = run.status == "completed" and run.identity.key is None and not run.is_fully_read
        await self._repository.end(stored, keep_s=self._keep_s, for_retry=for_retry)

    def store_summary(self, run: Run) -> None:
        """Queue a summary of each of the run's choices for the next transaction."""
        if not self._summaries:
            self._run_in_background(self._write_summaries())
        owner, summary = run.identity.owner, run.summary()
        self._summaries[run.id] = owner, run.metadata, summary
        for other in summary.result.others if summary.result else ():
            metadata = replace(run.metadata, id=other.run_id, container_id=other.container_id)
            self._summaries[metadata.id] = owner, metadata, replace(summary, result=other)
        while len(self._summaries) > MAX_WAITING_SUMMARIES:  # the store is too slow
            del self._summaries[next(iter(self._summaries))]

    async def _write_summaries(self) -> None:
        while self._summaries:
            with anyio.move_on_after(SUMMARIZE_EVERY_S):
                await self._closing_event.wait()
            waiting = list(self._summaries.items())
            try:
                await self._repository.store_summaries(
                    partial(_stored_summaries, [each for _, each in waiting])
                )
            except StoreUnavailableError as error:
                log.warning(
                    "the summaries of %d runs cannot be stored yet: %s", len(waiting), error
                )
                if self._closing_event.is_set():
                    return
                continue
            except Exception:
                log.exception("the summaries of %d runs cannot be stored", len(waiting))
            for run_id, each in waiting:
                if self._summaries.get(run_id) is each:
                    del self._summaries[run_id]

    def delete_in_background(self, run_id: str) -> None:
        """Start to remove a run from the store, and do not wait until it is removed."""
        self._run_in_background(self.delete(run_id))

    async def delete(self, run_id: str) -> None:
        """Remove a run from the store."""
        await self._repository.delete(run_id)

    async def delete_ended(self, owner: str, run_id: str) -> None:
        """Remove the outcome of the owner's run from the store, if the run has ended."""
        await self._repository.delete_ended(owner, run_id)

    async def find_by_key(self, identity: RequestIdentity) -> Run | None:
        """Return a replay of the stored run with the request's idempotency key, or None. Raises
        IdempotencyError if the stored run answers a different request."""
        assert identity.key is not None
        found = await self._repository.find_by_key(identity.owner, identity.key)
        return self._replay(found, identity) if found else None

    async def find_for_retry(
        self, identity: RequestIdentity, excluded_ids: Collection[str]
    ) -> Run | None:
        """Return a replay of a run of the same request whose client disconnected before reading the
        result, or None. Runs whose ids are in `excluded_ids` are not considered."""
        found = await self._repository.take_for_retry(
            identity.owner, identity.fingerprint, excluded_ids
        )
        return self._replay(found, identity) if found else None

    async def find(self, owner: str, run_id: str) -> tuple[RunMetadata, RunRecord] | None:
        """Return the metadata and the record of the owner's run, or None. The record is a summary
        if the store has nothing else of the run."""
        if found := await self._repository.find(owner, run_id):
            return _metadata(found), RunRecord.from_json(found.status, found.record)
        if (waiting := self._summaries.get(run_id)) and waiting[0] == owner:
            return waiting[1:]
        if found := await self._repository.summary(owner, run_id):
            return _metadata(found), RunRecord.from_json(found.status, found.record).summary()
        return None

    async def aclose(self) -> None:
        """Wait until all writes are done."""
        self._closing_event.set()
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _replay(self, stored: StoredRun, identity: RequestIdentity) -> Run:
        if identity.fingerprint != stored.fingerprint:
            raise IdempotencyError
        return Run(
            _metadata(stored), identity, partial(self._replay_events, stored), self._on_unsubscribed
        )

    async def _replay_events(self, stored: StoredRun, run: Run, emit: Emit) -> Result:
        is_emitted = self._exchange is not None and await self._exchange.follow(stored, emit)
        while stored.status == "running":
            await asyncio.sleep(POLL_S)
            found = await self._repository.find(stored.owner, stored.id)
            if found is None or found.status == "cancelled":
                raise RunLostError  # cancelled or deleted, although this client still waits
            stored = found
        record = await asyncio.to_thread(RunRecord.from_json, stored.status, stored.record)
        for event in () if is_emitted else record.events:
            await emit(event)
        return record.outcome()

    def _on_unsubscribed(self, run: Run) -> None:
        """Cancel a replay that still waits for the end of the run. Return an unread result to the
        store, so that another retry may read it."""
        if not run.has_ended:
            run.cancel("the client disconnected")
        elif run.identity.key is None and not run.is_fully_read:
            self._run_in_background(self._repository.return_for_retry(run.id))

    async def _delete_after(self, insertion: asyncio.Task[RunStart], run_id: str) -> None:
        """Wait until the run is inserted, then remove it from the store. A cancellation does not
        stop the insertion."""
        await asyncio.wait([insertion])
        await self.delete(run_id)

    def _run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _parse_checkpoint(found: RunStart) -> Checkpoint | None:
    """Return the checkpoint of the lost run, or None if there is none that can be read."""
    if found.earlier is None or found.checkpoint is None:
        return None
    checkpoint = await asyncio.to_thread(Checkpoint.from_json, found.checkpoint)
    if checkpoint is None:
        log.warning("run %s: its checkpoint cannot be read", found.earlier.id)
    return checkpoint


def _is_lost(stored: StoredRun) -> bool:
    """Return True if a run has no result because its server died or was stopped."""
    error = RunRecord.from_json(stored.status, stored.record).error
    return stored.status == "lost" or (error is not None and error.code == RunLostError().code)


def _stored_run(metadata: RunMetadata, identity: RequestIdentity) -> StoredRun:
    return StoredRun(
        id=metadata.id,
        owner=identity.owner,
        key=identity.key,
        fingerprint=identity.fingerprint,
        status="running",
        model=metadata.model,
        container_id=metadata.container_id,
        created_at=metadata.created,
    )


def _stored_summaries(
    waiting_summaries: Sequence[tuple[str, RunMetadata, RunRecord]],
) -> list[StoredRun]:
    return [
        replace(
            _stored_run(metadata, RequestIdentity(owner, fingerprint="")),
            status=summary.status,
            record="" if summary.status == "running" else summary.to_json(),
        )
        for owner, metadata, summary in waiting_summaries
    ]


def _metadata(stored: StoredRun) -> RunMetadata:
    return RunMetadata(stored.id, stored.model, stored.container_id, stored.created_at)
