"""The run manager: starts the runs of this process, finds the run of a retried request, stores the
outcomes of runs, and cancels runs."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from functools import partial
from weakref import WeakValueDictionary

import anyio

from policies.headers import ResponseHeader
from policies.redaction import SecretFinder
from proxy.agent.agent import Agent
from proxy.agent.events import ALL_EVENTS, ChoiceEvent, Emit, Event, ModelCallFinished
from proxy.agent.loop import TAKEN_OVER
from proxy.agent.redactor import Redactor
from proxy.agent.result import Result, RunWarning
from proxy.agent.suspended_run import SuspendedRunStore
from proxy.agent.task import AgentTask, RunObserver, WeightVersion
from proxy.audit.audit import AuditLogs, RunAuditLog
from proxy.errors import (
    BUSY_RETRY_AFTER_S,
    IdempotencyError,
    PausedError,
    ProxyError,
    RunInOtherProcessError,
    RunLostError,
    SandboxUnavailableError,
)
from proxy.metrics import Metrics
from proxy.models.tool_support import ToolVerdicts
from proxy.runs.archive import POLL_S, SUMMARIZE_EVERY_S, LostRun, RunArchive
from proxy.runs.event_log import RunRecord
from proxy.runs.exchange import CrossProcessRuns
from proxy.runs.run import RequestIdentity, Run, RunMetadata, Subscriber
from proxy.runs.trajectory_recorder import MAX_WRITE_S, TrajectoryRecorder
from proxy.store.process_messages import ProcessMessenger
from proxy.store.runs import RunRepository
from proxy.store.trajectories import StoredTrajectory, TrajectoryRepository
from sandbox_runtime import errors

log = logging.getLogger(__name__)

GRACE_S = 10.0
"""Seconds for which a run continues after the disconnect of a client that may retry. OpenAI's SDKs
close the connection and retry 0.5 to 8 s later."""
KEEP_S = 600.0
"""Seconds for which a result is stored for retries."""
STORED_WITHIN_S = 2 * SUMMARIZE_EVERY_S
"""Seconds for which a run that has ended may still be stored as running."""
MAX_REMEMBERED_FAILURES = 1024
SERVER_STOPS = "the server stops"
PROCESS_LOST = "other servers have found this one dead"


class RunManager:
    """Starts and cancels runs, finds the run of a retried request, and stores the outcomes of
    runs."""

    def __init__(
        self,
        agent: Agent,
        suspended_runs: SuspendedRunStore,
        repository: RunRepository,
        audit_logs: AuditLogs | None = None,
        tool_verdicts: ToolVerdicts | None = None,
        metrics: Metrics | None = None,
        trajectories: TrajectoryRepository | None = None,
        messages: ProcessMessenger | None = None,
        *,
        grace_s: float = GRACE_S,
        keep_s: float = KEEP_S,
    ) -> None:
        self.agent = agent
        self.metrics = metrics or Metrics()
        self.audit_logs = audit_logs
        if audit_logs:
            self.metrics.register_audit_failures(lambda: audit_logs.failures)
        self._tool_verdicts = tool_verdicts or ToolVerdicts()
        self._suspended_runs = suspended_runs
        self._trajectories = trajectories
        self._recorders: dict[str, TrajectoryRecorder] = {}
        """The trajectory recorders of runs that are running or being stored, by run id."""
        self._runs: dict[str, Run] = {}
        """The runs that are running, have subscribers, or are being stored: by id, oldest first."""
        self._repository = repository
        self._exchange = (
            CrossProcessRuns(messages, repository, self._runs.get) if messages else None
        )
        self._archive = RunArchive(repository, keep_s, self._exchange)
        self._grace_s = grace_s
        self._save_tasks: dict[str, asyncio.Task[None]] = {}
        self._grace_timers: dict[str, asyncio.TimerHandle] = {}
        self._locks: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        self._paused_until = 0.0
        """End of the pause, by time.monotonic."""
        self.weight_version = WeightVersion()
        self._failed_requests: deque[tuple[str, str]] = deque(maxlen=MAX_REMEMBERED_FAILURES)
        """Owner and fingerprint of requests whose run failed. A retry of such a request starts a
        new run and does not join the run of an equal request."""

    def listen(self) -> None:
        """Let other processes that share the store cancel and follow the runs of this process. Call
        this method in the event loop of the runs."""
        if self._exchange:
            self._exchange.listen()

    def lock(self, identity: RequestIdentity) -> AbstractAsyncContextManager[None]:
        """Return a lock that requests with the same idempotency key share. A request holds the lock
        while it joins a run or starts one. Requests without a key do not wait."""
        if identity.key is None:
            return nullcontext()
        return self._locks.setdefault((identity.owner, identity.key), asyncio.Lock())

    def pause(self, timeout_s: float) -> None:
        """Start no runs for `timeout_s` seconds, or until `resume`. A second pause replaces the
        first one."""
        self._paused_until = time.monotonic() + timeout_s

    def resume(self, weight_version: str | None = None) -> None:
        """End the pause. `weight_version` is the version of the weights from now on; None keeps the
        version."""
        self._paused_until = 0.0
        if weight_version is not None:
            self.weight_version.value = weight_version

    @property
    def pause_ends_in_s(self) -> float:
        """Seconds until the pause ends by itself; 0 without a pause."""
        return max(0.0, self._paused_until - time.monotonic())

    @property
    def runs_at_work(self) -> int:
        """The number of runs that have not ended."""
        return len(self._running_runs())

    def require_no_pause(self) -> None:
        """Raise PausedError during a pause."""
        if ends_in_s := self.pause_ends_in_s:
            raise PausedError(ends_in_s)

    async def join(self, identity: RequestIdentity) -> Subscriber | None:
        """Subscribe to the run that the request retries, or return None if there is none. The
        caller must unsubscribe. Raises IdempotencyError if the run with the request's idempotency
        key answers a different request."""
        found = await self._find(identity)
        return self._resubscribe(found) if found else None

    async def start(self, identity: RequestIdentity, task: AgentTask) -> Subscriber:
        """Start a run and subscribe to it. If another process has meanwhile started a run with the
        same idempotency key, discard the task and subscribe to the other run. The caller must
        unsubscribe.

        Raises IdempotencyError, PausedError."""
        metadata = RunMetadata(
            task.run_id, task.model, task.artifact_store.container_id, task.created
        )
        lost_run = None
        if identity.can_be_found_later:
            joined, lost_run = await self._begin(metadata, identity, task)
            if joined:
                return self._resubscribe(joined)
            if self._has_checkpoints(identity, task):
                task = replace(
                    task,
                    save_checkpoint=partial(self._archive.save_checkpoint, metadata.id),
                    checkpoint=lost_run and lost_run.checkpoint,
                )
        try:
            self.require_no_pause()  # the pause may have begun while the task was prepared
        except PausedError:
            if identity.can_be_found_later:
                self._archive.delete_in_background(metadata.id)
            await task.discard()
            raise
        work = partial(self._execute_run, task, lost_run and lost_run.id)
        run = Run(metadata, identity, work, self._on_unsubscribed, task.observer)
        if task.body_memory:
            task.body_memory.retain()
            run.on_end(task.body_memory.release)
        self._runs[run.id] = run
        self._archive.store_summary(run)
        return run.subscribe()

    async def _begin(
        self, metadata: RunMetadata, identity: RequestIdentity, task: AgentTask
    ) -> tuple[Run | None, LostRun | None]:
        """Store the start of a run. Return two values: the stored run with the same idempotency key
        that the request joins, or None; and the lost run that the new run continues or repeats, or
        None. If there is a run to join, discard the task."""
        try:
            joined, lost_run = await self._archive.begin(metadata, identity)
        except BaseException:
            await task.discard()
            raise
        if joined:
            await task.discard()
        return joined, lost_run

    def _has_checkpoints(self, identity: RequestIdentity, task: AgentTask) -> bool:
        """Return True if another server can take over the run: the client can retry by idempotency
        key, and the other server can adopt the sandbox. Three kinds of runs are excluded: runs with
        a trajectory, because it must be complete; runs with several choices, because each choice
        has a sandbox of its own; and single calls, which have no sandbox."""
        return (
            self._archive.is_shared
            and identity.key is not None
            and self.agent.workspaces.can_adopt
            and task.capture == "none"
            and not task.others
            and not task.is_single_call
        )

    def get(self, owner: str, run_id: str) -> Run | None:
        """Return the owner's run if it is in this process's memory, or None. A run stays there
        until it has ended, its last subscriber has left and its outcome is stored if necessary."""
        run = self._runs.get(run_id)
        return run if run and run.identity.owner == owner else None

    async def find(self, owner: str, run_id: str) -> tuple[RunMetadata, RunRecord] | None:
        """Return the metadata and the record of the owner's run, or None."""
        if run := self.get(owner, run_id):
            return run.metadata, run.record()
        return await self._archive.find(owner, run_id)

    async def delete_contents(self, owner: str, run_id: str) -> None:
        """Delete the trajectory of the owner's run, and its outcome if the run has ended. Its
        summary stays. The idempotency key of the run can then be used again. A client that still
        reads the run gets the rest."""
        await self.delete_trajectory(owner, run_id)
        if saving := self._save_tasks.get(run_id):
            await asyncio.wait({saving})
        run = self.get(owner, run_id)
        if run and run.has_ended:
            run.is_deleted = True
            await self._archive.delete(run_id)
        else:
            await self._archive.delete_ended(owner, run_id)

    async def trajectory(self, owner: str, run_id: str) -> StoredTrajectory | None:
        """Return the trajectory of the owner's run, or its tombstone. Return None if no trajectory
        of the run was kept."""
        if self._trajectories is None:
            return None
        await self.write_trajectories(owner, run_id)
        found = await self._trajectories.find(owner, run_id)
        if not self._is_lost(found):
            return found
        # The run may have ended meanwhile.
        found = await self._trajectories.find(owner, run_id)
        return replace(found, is_lost=True) if found and self._is_lost(found) else found

    async def delete_trajectory(self, owner: str, run_id: str) -> bool:
        """Delete the trajectory of the owner's run, and those of its other choices. Later turns of
        a run in progress are not stored. Return False if there is no trajectory."""
        if self._trajectories is None:
            return False
        await self.write_trajectories(owner, run_id)
        return await self._trajectories.delete(owner, run_id)

    async def write_trajectories(self, owner: str, run_id: str | None = None) -> None:
        """Store the recorded part of the trajectories of all the owner's runs, or of the run with
        `run_id`. For all runs, wait at most MAX_WRITE_S."""
        found = [
            recorder
            for recorder in self._recorders.values()
            if recorder.owner == owner and run_id in (None, *recorder.run_ids)
        ]
        with anyio.move_on_after(MAX_WRITE_S if run_id is None else None):
            for recorder in found:  # oldest run first: listings keep the order of the first writes
                await recorder.write()

    async def cancel_elsewhere(
        self, run_id: str, find_process: Callable[[], Awaitable[str | None]]
    ) -> None:
        """Cancel a run of another process and wait for its end. `find_process` returns the id of
        the process while the run is running, then None.

        If the processes cannot exchange messages, cancel nothing: only wait, at most
        STORED_WITHIN_S seconds, in case the run has ended and its end is not stored yet. Raises
        RunInOtherProcessError if the other process does not react or cannot be reached.
        """
        if self._exchange:
            await self._exchange.cancel(run_id, find_process)
            return
        with anyio.move_on_after(STORED_WITHIN_S):
            while await find_process():  # noqa: ASYNC110 - another process ends the run
                await anyio.sleep(POLL_S)
            return
        raise RunInOtherProcessError

    def follow_frames(
        self, run_id: str, find_process: Callable[[], Awaitable[str | None]]
    ) -> AsyncGenerator[tuple[int, Sequence[str]]]:
        """Return the frames of a stored response whose run is in another process, as they come: see
        CrossProcessRuns.follow_frames. Raises RunInOtherProcessError if the other process cannot be
        reached."""
        if self._exchange is None:
            raise RunInOtherProcessError
        return self._exchange.follow_frames(run_id, find_process)

    async def process_of(self, owner: str, run_id: str) -> str | None:
        """Return the id of the living process in which the owner's run is running, or None."""
        return await self._repository.process_of(owner, run_id)

    async def cancel_in_container(self, owner: str, container_id: str) -> None:
        """Cancel the owner's runs in a container that is being deleted, and wait for their end.
        Raises RunInOtherProcessError if another process has such a run and does not react or cannot
        be reached."""
        running = [
            run
            for run in self._running_runs()
            if (run.identity.owner, run.container_id) == (owner, container_id)
        ]
        for run in running:
            run.cancel("its container was deleted")
        for run in running:
            await run.wait_until_ended()
        for run_id in await self._repository.ids_running_elsewhere(owner, container_id):
            await self.cancel_elsewhere(run_id, partial(self.process_of, owner, run_id))

    async def stop(self, timeout_s: float = 0) -> None:
        """Wait up to `timeout_s` seconds for the runs to end. Then cancel the runs that have not
        ended, and wait for their end. Their subscribers get RunLostError."""
        with anyio.move_on_after(timeout_s):
            for run in self._running_runs():
                await run.wait_until_ended()
        running = self._running_runs()
        for run in running:
            run.cancel(SERVER_STOPS)
        for run in running:
            await run.wait_until_ended()

    def cancel_all_as_lost(self) -> None:
        """Cancel all runs, because other processes have found this process dead and may take its
        runs over or begin them again. Leave the sandboxes of the runs to these processes. The
        subscribers of the runs get RunLostError."""
        self.agent.workspaces.abandon_sandboxes()  # before `cancel`, which would end the commands
        for run in self._running_runs():
            run.cancel(PROCESS_LOST)

    async def aclose(self) -> None:
        """Cancel all runs and wait until their outcomes are stored."""
        await self.stop()
        for grace in self._grace_timers.values():
            grace.cancel()
        while self._save_tasks:
            await asyncio.wait(self._save_tasks.values())
        await asyncio.gather(*(recorder.write() for recorder in self._recorders.values()))
        if self._exchange:
            await self._exchange.aclose()
        await self._archive.aclose()
        if self.audit_logs:
            await self.audit_logs.aclose()

    def _is_lost(self, stored: StoredTrajectory | None) -> bool:
        """Return True if a trajectory is marked as running in this process, but its run is not
        running: the end of the run could not be stored."""
        if stored is None or not stored.is_running_here:
            return False
        run = self._runs.get(stored.root_run_id)
        return run is None or run.has_ended

    def _running_runs(self) -> list[Run]:
        return [run for run in self._runs.values() if not run.has_ended]

    # Finding

    async def _find(self, identity: RequestIdentity) -> Run | None:
        if identity.key is not None:
            return self._find_by_key(identity) or await self._archive.find_by_key(identity)
        if identity.retry_count:
            return await self._find_for_retry(identity)
        return None

    def _find_by_key(self, identity: RequestIdentity) -> Run | None:
        for run in self._runs.values():
            named = (run.identity.owner, run.identity.key) == (identity.owner, identity.key)
            if named and run.can_be_joined:
                if run.identity.fingerprint != identity.fingerprint:
                    raise IdempotencyError
                return run
        return None

    async def _find_for_retry(self, identity: RequestIdentity) -> Run | None:
        """Return the run that a request without a key retries, or None. Samplers send many equal
        requests at once, and each must get a run of its own. A run without subscribers is therefore
        preferred to a run whose subscriber may already be gone."""
        if run := self._find_unsubscribed_run(identity):
            return run
        if stored := await self._archive.find_for_retry(identity, excluded_ids=self._runs.keys()):
            return stored
        if run := self._find_unsubscribed_run(identity):  # its client has disconnected meanwhile
            return run
        request = (identity.owner, identity.fingerprint)
        if request in self._failed_requests:
            self._failed_requests.remove(request)
            return None
        running = (run for run in self._retriable_runs(identity) if run.status == "running")
        return min(running, key=lambda run: run.subscriber_count, default=None)

    def _find_unsubscribed_run(self, identity: RequestIdentity) -> Run | None:
        return next(
            (run for run in self._retriable_runs(identity) if not run.subscriber_count), None
        )

    def _retriable_runs(self, identity: RequestIdentity) -> list[Run]:
        return [run for run in self._runs.values() if _can_be_retried(run, identity)]

    def _resubscribe(self, run: Run) -> Subscriber:
        log.info("run %s: a client has subscribed again", run.id)
        if grace := self._grace_timers.pop(run.id, None):
            grace.cancel()
        return run.subscribe()

    # Running

    async def _execute_run(
        self, task: AgentTask, lost_run_id: str | None, run: Run, emit: Emit
    ) -> Result:
        """Return the result of a run. Each event passes the redaction, then the observers in the
        order of their list, then the subscribers. The result or the error of the run takes the same
        path. If the run repeats a lost run, its result says so."""
        log.info("run %s started, model %s", run.id, run.model)
        audit_log = self._audit_log(task, run.identity)
        recorder = self._trajectory_recorder(task, run.identity.owner)
        observers = [audit_log, self.metrics.start_run(task), recorder, task.observer]
        unfinished = deque(observer for observer in observers if observer)
        if recorder:
            self._recorders[run.id] = recorder
        try:
            if audit_log:
                await audit_log.begin()
            result = await self._run_agent(task, unfinished, emit)
            result = await self._store_suspended_runs(run.identity.owner, result)
            result = _with_restart_warning(result, lost_run_id)
            while unfinished:
                await unfinished.popleft().on_result(result)
        except BaseException as error:
            failure = _log_and_map_error(run, error)
            for observer in unfinished:
                await observer.on_error(failure)
            if failure is error:
                raise
            raise failure from error
        finally:
            if recorder:
                recorder.on_written(lambda: self._recorders.pop(run.id, None))
        log.info(
            "run %s ended: %s, %d turns, %d steps, %d ms",
            result.run_id,
            result.stop_reason,
            result.stats.turns,
            result.steps,
            result.stats.wall_ms,
        )
        self._tool_verdicts.note_run(run.identity.owner, result)
        return result

    def _audit_log(self, task: AgentTask, identity: RequestIdentity) -> RunAuditLog | None:
        if not task.profile.audit.enabled:
            return None
        assert self.audit_logs, "a server whose profiles have an audit log has a directory for it"
        return self.audit_logs.create_run_log(task, identity.owner, identity.fingerprint)

    def _trajectory_recorder(self, task: AgentTask, owner: str) -> TrajectoryRecorder | None:
        if task.capture == "none" or self._trajectories is None:
            return None
        return TrajectoryRecorder(self._trajectories, owner, task)

    async def _run_agent(
        self, task: AgentTask, observers: Iterable[RunObserver], emit: Emit
    ) -> Result:
        """Return the redacted result of the agent. Pass each redacted event to `observers` and,
        except for a ModelCallFinished, to `emit`."""
        by_type: dict[type, list[RunObserver]] = {
            kind: [observer for observer in observers if kind in observer.event_types]
            for kind in ALL_EVENTS
        }

        async def publish(event: Event) -> None:
            for observer in by_type[type(event)]:
                await observer.on_event(event)
            match event:
                case ModelCallFinished() | ChoiceEvent(event=ModelCallFinished()):
                    pass  # only observers receive it
                case _:
                    await emit(event)

        secrets = SecretFinder(task.profile.redaction)
        if not secrets:
            return await self.agent.answer(task, publish)
        redactor = Redactor(secrets)

        async def redact(event: Event) -> None:
            for redacted in redactor.redact_event(event):
                await publish(redacted)

        return redactor.redact_result(await self.agent.answer(task, redact))

    async def _store_suspended_runs(self, owner: str, result: Result) -> Result:
        """Store the suspended runs of a result. Return the result without the suspended runs."""
        if not (result.suspended_run or result.others):
            return result
        for each in (*result.others, result):
            if each.suspended_run:
                await self._suspended_runs.save(owner, each.suspended_run)
        others = [replace(each, suspended_run=None) for each in result.others]
        return replace(result, suspended_run=None, others=others)

    # Ending

    def _on_unsubscribed(self, run: Run) -> None:
        """Store a run that has ended. Cancel a run that still runs, unless it is detached. If the
        client may retry, cancel the run only after a grace period."""
        if run.has_ended:
            self._store_and_drop(run)
        elif not run.identity.detach:
            if run.identity.may_be_retried:
                loop = asyncio.get_running_loop()
                reason = "the client disconnected and did not retry"
                self._grace_timers[run.id] = loop.call_later(self._grace_s, run.cancel, reason)
            else:
                run.cancel("the client disconnected")

    def _store_and_drop(self, run: Run) -> None:
        """Store the outcome of a run that has ended, if a later request can ask for the outcome.
        Then drop the run from memory."""
        if grace := self._grace_timers.pop(run.id, None):
            grace.cancel()
        if run.id in self._save_tasks:
            return  # `_save` calls this function again
        if run.status == "failed" and run.identity.retry_count is not None and not run.is_stored:
            self._failed_requests.append((run.identity.owner, run.identity.fingerprint))
        must_be_stored = _must_be_stored(run)
        if must_be_stored and not run.is_stored:
            self._save_tasks[run.id] = asyncio.create_task(self._save(run))
            return
        self._runs.pop(run.id, None)
        self._archive.store_summary(run)
        if run.is_stored and not must_be_stored:
            self._archive.delete_in_background(run.id)

    async def _save(self, run: Run) -> None:
        try:
            await self._archive.store(run)
        except Exception:
            log.exception("run %s: its outcome cannot be stored", run.id)
            self._archive.delete_in_background(run.id)
        run.is_stored = True
        del self._save_tasks[run.id]
        if not run.subscriber_count:
            self._store_and_drop(run)


def _with_restart_warning(result: Result, lost_run_id: str | None) -> Result:
    """Return the result of a run, with a warning if the run repeats a lost run."""
    if lost_run_id is None or any(each.code == TAKEN_OVER.code for each in result.warnings):
        return result
    message = (
        f"The server of this request's first run, {lost_run_id}, ended before there was a result."
        " This answer is from a new run. What the first run did outside of its sandbox may have"
        " happened twice."
    )
    return replace(result, warnings=(RunWarning("run_restarted", message), *result.warnings))


def _can_be_retried(run: Run, identity: RequestIdentity) -> bool:
    return (
        run.identity.key is None
        and run.identity.retry_count is not None
        and run.identity.is_same_request(identity)
        and not run.is_fully_read
        and run.can_be_joined
    )


def _must_be_stored(run: Run) -> bool:
    """Return True if a later request can ask for the outcome of a run that has ended."""
    if run.is_deleted:
        return False
    if run.identity.can_be_found_later:
        return True
    return run.status == "completed" and run.identity.may_be_retried and not run.is_fully_read


def _log_and_map_error(run: Run, error: BaseException) -> BaseException:
    """Log the error that ends a run. Return the error that its client gets."""
    match error:
        case ProxyError():
            log.warning("run %s failed: %s", run.id, error)
            if run.has_output:
                # The model would produce the same output again. OpenAI's SDKs obey this header.
                error.headers[ResponseHeader.SHOULD_RETRY] = "false"
        case errors.SandboxError():
            log.warning("run %s failed: %s", run.id, error)
            return _unavailable_error(error)
        case asyncio.CancelledError():
            log.info("run %s ended: %s", run.id, run.cancel_reason or SERVER_STOPS)
            if run.cancel_reason in (SERVER_STOPS, PROCESS_LOST):
                lost = RunLostError()
                lost.headers[ResponseHeader.RETRY_AFTER] = str(BUSY_RETRY_AFTER_S)
                return lost
        case _:
            log.exception("run %s failed", run.id)
    return error


def _unavailable_error(error: errors.SandboxError) -> SandboxUnavailableError:
    if isinstance(error, errors.NoFreeSandboxError | errors.NoCapacityError):
        return SandboxUnavailableError(str(error), retry_after_s=error.retry_after_s)
    return SandboxUnavailableError(str(error))
