"""The runs in the store: those that have ended, and those that another process works on."""

import asyncio
import logging
from collections.abc import Collection, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import anyio

from proxy.agent.events import Emit
from proxy.agent.result import Result
from proxy.errors import IdempotencyError, RunLostError
from proxy.runs.event_log import Record
from proxy.runs.run import RequestIdentity, Run, RunMetadata
from proxy.store.records import StoredRun
from proxy.store.runs import RunRepository

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.2
"""How often the store is asked whether a run of another process has ended."""
MAX_WAITING = 10_000
"""How many summaries wait for the store; beyond that the oldest is dropped."""
SUMMARIZE_EVERY_S = 1.0
"""How long summaries are collected for one transaction."""


class RunArchive:
    """Writes runs to the store, and replays them from there."""

    def __init__(self, shelf: RunRepository, keep_s: float) -> None:
        """`keep_s` is how long the outcome of a run is kept."""
        self._shelf = shelf
        self._keep_s = keep_s
        self._tasks = set[asyncio.Task[None]]()
        self._summaries: dict[str, tuple[str, RunMetadata, Record]] = {}
        """By run id: the owner and the summary of runs that wait to be written."""
        self._closing = asyncio.Event()

    async def begin(self, head: RunMetadata, claim: RequestIdentity) -> Run | None:
        """Note a run that starts. If another run has the key already, return that one instead."""
        found = await self._shelf.begin(_running(head, claim))
        return self._replay(found, claim) if found else None

    async def keep(self, run: Run) -> None:
        """Store the outcome of a run."""
        record = run.record()
        text = await asyncio.to_thread(record.to_json)
        stored = replace(_running(run.head, run.claim), status=record.status, record=text)
        for_retry = run.status == "completed" and run.claim.key is None and not run.heard_out
        await self._shelf.end(stored, keep_s=self._keep_s, for_retry=for_retry)

    def note(self, run: Run) -> None:
        """Store a summary of each of the run's choices soon."""
        if not self._summaries:
            self._start(self._summarize())
        owner, summary = run.claim.owner, run.summary()
        self._summaries[run.id] = owner, run.head, summary
        for other in summary.result.others if summary.result else ():
            head = replace(run.head, id=other.run_id, container_id=other.container_id)
            self._summaries[head.id] = owner, head, replace(summary, result=other)
        while len(self._summaries) > MAX_WAITING:  # the store is too slow
            del self._summaries[next(iter(self._summaries))]

    async def _summarize(self) -> None:
        while self._summaries:
            with anyio.move_on_after(SUMMARIZE_EVERY_S):
                await self._closing.wait()
            noted = list(self._summaries.items())
            try:
                await self._shelf.summarize(partial(_summarized, [each for _, each in noted]))
            except Exception:
                log.exception("the summaries of %d runs cannot be kept", len(noted))
            for run_id, each in noted:
                if self._summaries.get(run_id) is each:
                    del self._summaries[run_id]

    def forget(self, run_id: str) -> None:
        """Remove a run from the store."""
        self._start(self._shelf.delete(run_id))

    async def drop(self, owner: str, run_id: str) -> None:
        """Remove the outcome of the owner's run, if the run has ended."""
        await self._shelf.delete_ended(owner, run_id)

    async def named(self, claim: RequestIdentity) -> Run | None:
        """Return the run with the claim's key, or None. Raises IdempotencyError."""
        assert claim.key is not None
        found = await self._shelf.find_by_key(claim.owner, claim.key)
        return self._replay(found, claim) if found else None

    async def retried(self, claim: RequestIdentity, besides: Collection[str]) -> Run | None:
        """Return a run whose client disconnected before it had the result, or None."""
        found = await self._shelf.take_for_retry(claim.owner, claim.fingerprint, besides)
        return self._replay(found, claim) if found else None

    async def find(self, owner: str, run_id: str) -> tuple[RunMetadata, Record] | None:
        """Return what is known of the owner's run, or None."""
        if found := await self._shelf.find(owner, run_id):
            return _head(found), Record.from_json(found.status, found.record)
        if (noted := self._summaries.get(run_id)) and noted[0] == owner:
            return noted[1:]
        if found := await self._shelf.summary(owner, run_id):
            return _head(found), Record.from_json(found.status, found.record).summary()
        return None

    async def aclose(self) -> None:
        """Finish all writes."""
        self._closing.set()
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _replay(self, stored: StoredRun, claim: RequestIdentity) -> Run:
        if claim.fingerprint != stored.fingerprint:
            raise IdempotencyError
        return Run(_head(stored), claim, partial(self._emit_stored, stored), self._on_alone)

    async def _emit_stored(self, stored: StoredRun, run: Run, emit: Emit) -> Result:
        while stored.status == "running":
            await asyncio.sleep(LOOK_EVERY_S)
            found = await self._shelf.find(stored.owner, stored.id)
            if found is None or found.status == "cancelled":
                raise RunLostError  # its own client has left, and this one has not
            stored = found
        record = await asyncio.to_thread(Record.from_json, stored.status, stored.record)
        for event in record.events:
            await emit(event)
        return record.outcome()

    def _on_alone(self, run: Run) -> None:
        """Return an unread result to the store once its last subscriber has left."""
        if not run.has_ended:
            run.cancel("the client left")
        elif run.claim.key is None and not run.heard_out:
            self._start(self._shelf.return_for_retry(run.id))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _running(head: RunMetadata, claim: RequestIdentity) -> StoredRun:
    return StoredRun(
        id=head.id,
        owner=claim.owner,
        key=claim.key,
        fingerprint=claim.fingerprint,
        status="running",
        model=head.model,
        container_id=head.container_id,
        created_at=head.created,
    )


def _summarized(noted: Sequence[tuple[str, RunMetadata, Record]]) -> list[StoredRun]:
    return [
        replace(
            _running(head, RequestIdentity(owner, fingerprint="")),
            status=summary.status,
            record="" if summary.status == "running" else summary.to_json(),
        )
        for owner, head, summary in noted
    ]


def _head(stored: StoredRun) -> RunMetadata:
    return RunMetadata(stored.id, stored.model, stored.container_id, stored.created_at)
