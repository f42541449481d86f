"""Runs as the store has them: those that have ended, and those at work in other processes."""

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
from proxy.runs.claim import Claim
from proxy.runs.record import Record
from proxy.runs.run import Head, Run
from proxy.store.records import StoredRun
from proxy.store.runs import RunShelf

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.2
"""How soon it is seen that a run has ended that is at work in another process."""
MAX_WAITING = 10_000
"""How many summaries wait for the store; beyond that the oldest is lost."""
SUMMARIZE_EVERY_S = 1.0
"""How long summaries are gathered, for one transaction to write them all."""


class KeptRuns:
    """Puts runs into the store, and tells them again from there."""

    def __init__(self, shelf: RunShelf, keep_s: float) -> None:
        """`keep_s`: how long what came of a run is kept."""
        self._shelf = shelf
        self._keep_s = keep_s
        self._tasks = set[asyncio.Task[None]]()
        self._summaries: dict[str, tuple[str, Head, Record]] = {}
        """By run, those that are not in the store yet."""
        self._closing = asyncio.Event()

    async def begin(self, head: Head, claim: Claim) -> Run | None:
        """Note a run that begins; or the one that is returned has its key already."""
        found = await self._shelf.begin(_at_work(head, claim))
        return self._told_again(found, claim) if found else None

    async def keep(self, run: Run) -> None:
        """Keep what came of it."""
        record = run.record()
        text = await asyncio.to_thread(record.to_json)
        stored = replace(_at_work(run.head, run.claim), status=record.status, record=text)
        for_retry = run.status == "completed" and run.claim.key is None and not run.heard_out
        await self._shelf.end(stored, keep_s=self._keep_s, for_retry=for_retry)

    def note(self, run: Run) -> None:
        """Keep a summary of how each of the run's choices stands now."""
        if not self._summaries:
            self._see_through(self._summarize())
        owner, summary = run.claim.owner, run.summary()
        self._summaries[run.id] = owner, run.head, summary
        for other in summary.result.others if summary.result else ():
            head = replace(run.head, id=other.run_id, container_id=other.container_id)
            self._summaries[head.id] = owner, head, replace(summary, result=other)
        while len(self._summaries) > MAX_WAITING:  # the store is stuck
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
        """Keep it no more."""
        self._see_through(self._shelf.forget(run_id))

    async def drop(self, owner: str, run_id: str) -> None:
        """Keep no more what came of the owner's run, once that has ended."""
        await self._shelf.drop(owner, run_id)

    async def named(self, claim: Claim) -> Run | None:
        """The run that the claim's key stands for, if there is one. Raises IdempotencyError."""
        assert claim.key is not None
        found = await self._shelf.named(claim.owner, claim.key)
        return self._told_again(found, claim) if found else None

    async def retried(self, claim: Claim, besides: Collection[str]) -> Run | None:
        """A result whose client left before it had it, and comes back now."""
        found = await self._shelf.take(claim.owner, claim.fingerprint, besides)
        return self._told_again(found, claim) if found else None

    async def find(self, owner: str, run_id: str) -> tuple[Head, Record] | None:
        """How the owner's run of that id stands."""
        if found := await self._shelf.find(owner, run_id):
            return _head(found), Record.from_json(found.status, found.record)
        if (noted := self._summaries.get(run_id)) and noted[0] == owner:
            return noted[1:]
        if found := await self._shelf.summary(owner, run_id):
            return _head(found), Record.from_json(found.status, found.record).summary()
        return None

    async def aclose(self) -> None:
        """Finish what was begun."""
        self._closing.set()
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _told_again(self, stored: StoredRun, claim: Claim) -> Run:
        if claim.fingerprint != stored.fingerprint:
            raise IdempotencyError
        return Run(_head(stored), claim, partial(self._tell, stored), self._alone)

    async def _tell(self, stored: StoredRun, run: Run, emit: Emit) -> Result:
        while stored.status == "running":
            await asyncio.sleep(LOOK_EVERY_S)
            found = await self._shelf.find(stored.owner, stored.id)
            if found is None or found.status == "cancelled":
                raise RunLostError  # its own client has left it, and this one has not
            stored = found
        record = await asyncio.to_thread(Record.from_json, stored.status, stored.record)
        for event in record.events:
            await emit(event)
        return record.outcome()

    def _alone(self, run: Run) -> None:
        """Nobody listens any more to what is told again."""
        if not run.has_ended:
            run.cancel("the client left")
        elif run.claim.key is None and not run.heard_out:
            self._see_through(self._shelf.give_back(run.id))

    def _see_through(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _at_work(head: Head, claim: Claim) -> StoredRun:
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


def _summarized(noted: Sequence[tuple[str, Head, Record]]) -> list[StoredRun]:
    return [
        replace(
            _at_work(head, Claim(owner, fingerprint="")),
            status=summary.status,
            record="" if summary.status == "running" else summary.to_json(),
        )
        for owner, head, summary in noted
    ]


def _head(stored: StoredRun) -> Head:
    return Head(stored.id, stored.model, stored.container_id, stored.created_at)
