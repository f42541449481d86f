"""All runs of this process: they are started here, found for retries, stored and cancelled."""

import asyncio
import logging
from collections import deque
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from functools import partial
from weakref import WeakValueDictionary

import anyio

from proxy.agent.agent import Agent
from proxy.agent.events import Emit, Event
from proxy.agent.result import Result
from proxy.agent.suspension import SuspendedRunStore
from proxy.agent.task import AgentTask, RunObserver
from proxy.audit.audit import AuditLogs
from proxy.errors import (
    RESTART_S,
    IdempotencyError,
    ProxyError,
    RunCancelledError,
    RunLostError,
    SandboxUnavailableError,
    internal_error,
)
from proxy.metrics import Metrics
from proxy.models.tool_support import ToolVerdicts
from proxy.runs.archive import RunArchive
from proxy.runs.event_log import Record
from proxy.runs.run import RequestIdentity, Run, RunMetadata, Subscriber
from proxy.store.runs import RunRepository
from sandbox_runtime import errors

log = logging.getLogger(__name__)

GRACE_S = 10.0
"""How long a run continues for a client that disconnected and may retry: OpenAI's SDKs close the
connection and retry 0.5 to 8 s later."""
KEEP_S = 600.0
"""How long a result is kept for retries."""
REMEMBERED_FAILURES = 1024
SERVER_STOPS = "the server stops"


class RunManager:
    """Starts runs, finds them again for retries, and stores their outcomes."""

    def __init__(
        self,
        agent: Agent,
        parked: SuspendedRunStore,
        shelf: RunRepository,
        ledger: AuditLogs | None = None,
        tool_verdicts: ToolVerdicts | None = None,
        metrics: Metrics | None = None,
        *,
        grace_s: float = GRACE_S,
        keep_s: float = KEEP_S,
    ) -> None:
        self.agent = agent
        self.metrics = metrics or Metrics()
        self.ledger = ledger
        if ledger:
            self.metrics.read_audit_failures(lambda: ledger.failures)
        self._tool_verdicts = tool_verdicts or ToolVerdicts()
        self._parked = parked
        self._archive = RunArchive(shelf, keep_s)
        self._grace_s = grace_s
        self._runs: dict[str, Run] = {}
        """By id, oldest first: the runs that work, have subscribers, or are being stored."""
        self._saving: dict[str, asyncio.Task[None]] = {}
        self._graces: dict[str, asyncio.TimerHandle] = {}
        self._locks: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        self._failed: deque[tuple[str, str]] = deque(maxlen=REMEMBERED_FAILURES)
        """Owner and fingerprint of requests whose run failed: a retry of one starts a new run, and
        does not join the run of an equal request."""

    def one_at_a_time(self, claim: RequestIdentity) -> AbstractAsyncContextManager[None]:
        """Let one request with this claim's key at a time join a run or start one. Requests
        without a key wait for nobody."""
        if claim.key is None:
            return nullcontext()
        return self._locks.setdefault((claim.owner, claim.key), asyncio.Lock())

    async def join(self, claim: RequestIdentity) -> Subscriber | None:
        """Subscribe to the run that a request is a retry of, or return None. The caller must leave
        it again. Raises IdempotencyError."""
        found = await self._find(claim)
        return self._listen(found) if found else None

    async def start(self, claim: RequestIdentity, task: AgentTask) -> Subscriber:
        """Start a run and subscribe to it, or to the run that another process has started for this
        key meanwhile; the task is then discarded. The caller must leave it again.

        Raises IdempotencyError."""
        head = RunMetadata(task.run_id, task.model, task.artifact_store.container_id, task.created)
        if claim.has_name and (found := await self._begin(head, claim, task)):
            return self._listen(found)
        work = partial(self._witnessed, task.observer) if task.observer else self._work
        run = Run(head, claim, partial(work, task), self._on_alone, task.observer)
        if task.body_memory:
            task.body_memory.keep()
            run.on_end(task.body_memory.release)
        self._runs[run.id] = run
        self._archive.note(run)
        return run.listen()

    async def _begin(
        self, head: RunMetadata, claim: RequestIdentity, task: AgentTask
    ) -> Run | None:
        """Store that a run starts. If another run has the key already, return that one instead."""
        try:
            found = await self._archive.begin(head, claim)
        except BaseException:
            self._archive.forget(head.id)
            await task.discard()
            raise
        if found:
            await task.discard()
        return found

    def get(self, owner: str, run_id: str) -> Run | None:
        """Return the owner's run if this process works on it, or did until just now."""
        run = self._runs.get(run_id)
        return run if run and run.claim.owner == owner else None

    async def find(self, owner: str, run_id: str) -> tuple[RunMetadata, Record] | None:
        """Return what is known of the owner's run, or None."""
        if run := self.get(owner, run_id):
            return run.head, run.record()
        return await self._archive.find(owner, run_id)

    async def forget(self, owner: str, run_id: str) -> None:
        """Remove the outcome of the owner's run from the store, which makes its key free again."""
        if saving := self._saving.get(run_id):
            await asyncio.wait({saving})
        await self._archive.drop(owner, run_id)

    async def cancel_in(self, owner: str, container_id: str) -> None:
        """Cancel the owner's runs in a container that is being deleted."""
        at_work = [
            run
            for run in self._at_work()
            if (run.claim.owner, run.container_id) == (owner, container_id)
        ]
        for run in at_work:
            run.cancel("its container was deleted")
        for run in at_work:
            await run.ended()

    async def stop(self, patience_s: float = 0) -> None:
        """Wait `patience_s` for the runs to end, then cancel them: their subscribers get errors."""
        with anyio.move_on_after(patience_s):
            for run in self._at_work():
                await run.ended()
        at_work = self._at_work()
        for run in at_work:
            run.cancel(SERVER_STOPS)
        for run in at_work:
            await run.ended()

    async def aclose(self) -> None:
        """Cancel all runs, and finish storing the outcomes."""
        await self.stop()
        for grace in self._graces.values():
            grace.cancel()
        while self._saving:
            await asyncio.wait(self._saving.values())
        await self._archive.aclose()
        if self.ledger:
            await self.ledger.aclose()

    def _at_work(self) -> list[Run]:
        return [run for run in self._runs.values() if not run.has_ended]

    # Finding

    async def _find(self, claim: RequestIdentity) -> Run | None:
        if claim.key is not None:
            return self._find_by_key(claim) or await self._archive.named(claim)
        if claim.retry_count:
            return await self._find_retried(claim)
        return None

    def _find_by_key(self, claim: RequestIdentity) -> Run | None:
        for run in self._runs.values():
            named = (run.claim.owner, run.claim.key) == (claim.owner, claim.key)
            if named and run.can_be_joined:
                if run.claim.fingerprint != claim.fingerprint:
                    raise IdempotencyError
                return run
        return None

    async def _find_retried(self, claim: RequestIdentity) -> Run | None:
        """Find the run of a retry without a key. Samplers send many equal requests at once, and
        each must get a run of its own; so a run whose client has left comes first, and one whose
        client may only seem to be there comes last."""
        if left := self._find_left(claim):
            return left
        if kept := await self._archive.retried(claim, besides=self._runs.keys()):
            return kept
        if left := self._find_left(claim):  # its client has left meanwhile
            return left
        request = (claim.owner, claim.fingerprint)
        if request in self._failed:
            self._failed.remove(request)
            return None
        at_work = (run for run in self._same(claim) if run.status == "running")
        return min(at_work, key=lambda run: run.listeners, default=None)

    def _find_left(self, claim: RequestIdentity) -> Run | None:
        return next((run for run in self._same(claim) if not run.listeners), None)

    def _same(self, claim: RequestIdentity) -> list[Run]:
        return [run for run in self._runs.values() if _can_be_retried(run, claim)]

    def _listen(self, run: Run) -> Subscriber:
        log.info("run %s: its client is back", run.id)
        if grace := self._graces.pop(run.id, None):
            grace.cancel()
        return run.listen()

    # Working

    async def _witnessed(
        self, observer: RunObserver, task: AgentTask, run: Run, emit: Emit
    ) -> Result:
        """Do the work of a run; `observer` receives each event before the subscribers do."""

        async def both(event: Event) -> None:
            observer.heard(event)
            await emit(event)

        try:
            result = await self._work(task, run, both)
        except ProxyError as error:
            await observer.failed(error)
            raise
        except asyncio.CancelledError:
            await observer.failed(RunCancelledError())
            raise
        except Exception:
            await observer.failed(internal_error())
            raise
        await observer.ended(result)
        return result

    async def _work(self, task: AgentTask, run: Run, emit: Emit) -> Result:
        log.info("run %s started, model %s", run.id, run.model)
        try:
            result = await self.metrics.follow(task, partial(self._act, task, run.claim), emit)
            for each in (*result.others, result):
                if each.parked:
                    await self._parked.save(run.claim.owner, each.parked)
            result = _unparked(result)
        except ProxyError as error:
            log.warning("run %s failed: %s", run.id, error)
            _discourage_retry(error, run)
            raise
        except errors.SandboxError as error:
            log.warning("run %s failed: %s", run.id, error)
            raise _unavailable(error) from error
        except asyncio.CancelledError:
            log.info("run %s ended: %s", run.id, run.why_cancelled or SERVER_STOPS)
            if run.why_cancelled != SERVER_STOPS:
                raise
            lost = RunLostError()
            lost.headers["Retry-After"] = str(RESTART_S)
            raise lost from None
        except Exception:
            log.exception("run %s failed", run.id)
            raise
        log.info(
            "run %s ended: %s, %d steps, %d ms",
            result.run_id,
            result.stop_reason,
            result.stats.tool_calls,
            result.stats.wall_ms,
        )
        self._tool_verdicts.note_run(run.claim.owner, result)
        return result

    async def _act(self, task: AgentTask, claim: RequestIdentity, emit: Emit) -> Result:
        """Run the agent, with an audit log if the profile has one."""
        work = partial(self.agent.answer, task)
        if not task.profile.audit.enabled:
            return await work(emit)
        assert self.ledger, "a server whose profiles have an audit log has a directory for it"
        return await self.ledger.follow(task, claim.owner, claim.fingerprint, work, emit)

    # Ending

    def _on_alone(self, run: Run) -> None:
        """Settle or cancel a run whose last subscriber has left."""
        if run.has_ended:
            self._settle(run)
        elif not run.claim.detach:
            if run.claim.may_come_back:
                loop = asyncio.get_running_loop()
                left = "the client left, and did not come back"
                self._graces[run.id] = loop.call_later(self._grace_s, run.cancel, left)
            else:
                run.cancel("the client left")

    def _settle(self, run: Run) -> None:
        """Store a run that has ended, or forget it."""
        if grace := self._graces.pop(run.id, None):
            grace.cancel()
        if run.id in self._saving:
            return  # `_save` settles it again
        if run.status == "failed" and run.claim.retry_count is not None and not run.is_kept:
            self._failed.append((run.claim.owner, run.claim.fingerprint))
        is_worth_keeping = _is_worth_keeping(run)
        if is_worth_keeping and not run.is_kept:
            self._saving[run.id] = asyncio.create_task(self._save(run))
            return
        self._runs.pop(run.id, None)
        self._archive.note(run)
        if run.is_kept and not is_worth_keeping:
            self._archive.forget(run.id)

    async def _save(self, run: Run) -> None:
        try:
            await self._archive.keep(run)
        except Exception:
            log.exception("what came of run %s cannot be kept", run.id)
            self._archive.forget(run.id)
        run.is_kept = True
        del self._saving[run.id]
        if not run.listeners:
            self._settle(run)


def _can_be_retried(run: Run, claim: RequestIdentity) -> bool:
    return (
        run.claim.key is None
        and run.claim.retry_count is not None
        and run.claim.same_request(claim)
        and not run.heard_out
        and run.can_be_joined
    )


def _is_worth_keeping(run: Run) -> bool:
    if run.claim.has_name:
        return True
    return run.status == "completed" and run.claim.may_come_back and not run.heard_out


def _unavailable(error: errors.SandboxError) -> SandboxUnavailableError:
    if isinstance(error, errors.NoFreeSandboxError):
        return SandboxUnavailableError(str(error), retry_after_s=error.retry_after_s)
    return SandboxUnavailableError(str(error))


def _discourage_retry(error: ProxyError, run: Run) -> None:
    """Tell the client not to retry if the model would produce the same output again; OpenAI's SDKs
    obey. A lost sandbox or a stopped server is not handled here: its `Retry-After` invites one."""
    if run.has_spent:
        error.headers["x-should-retry"] = "false"


def _unparked(result: Result) -> Result:
    """Return the result without its suspended runs, which are stored."""
    if not (result.parked or result.others):
        return result
    others = [replace(each, parked=None) for each in result.others]
    return replace(result, parked=None, others=others)
