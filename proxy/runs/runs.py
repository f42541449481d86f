"""All runs of this server: those at work, and those whose result may still be asked for."""

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from weakref import WeakValueDictionary

from proxy.agent import choices
from proxy.agent.agent import Agent
from proxy.agent.events import Emit, Event
from proxy.agent.parking import ParkedRuns
from proxy.agent.task import Result, Task, Witness
from proxy.errors import (
    IdempotencyError,
    ProxyError,
    RunCancelledError,
    SandboxUnavailableError,
    internal_error,
    interrupted,
)
from proxy.run_counts import RunCounts
from proxy.runs.claim import Claim
from proxy.runs.run import Listener, Run
from sandbox_runtime import errors

log = logging.getLogger(__name__)

GRACE_S = 10.0
"""How long a run goes on for a client that left and may come back: OpenAI's SDKs drop a connection
before they ask again, 0.5 to 8 s later."""
KEEP_S = 600.0
"""How long a result is kept for whoever asks again."""
MAX_KEPT = 256
MAX_KEPT_CHARS = 64_000_000
REMEMBERED_FAILURES = 1024
SERVER_STOPS = "the server stops"

MakeTask = Callable[[str], Awaitable[Task]]
"""The task of a request, for a run of that id."""


class Runs:
    """Begins runs, finds them again, and sees each to its end."""

    def __init__(
        self, agent: Agent, parked: ParkedRuns, *, grace_s: float = GRACE_S, keep_s: float = KEEP_S
    ) -> None:
        self.agent = agent
        self.counts = RunCounts()
        self._parked = parked
        self._grace_s = grace_s
        self._keep_s = keep_s
        self._runs: dict[str, Run] = {}
        """By id, oldest first: those at work or listened to, and those kept."""
        self._graces: dict[str, asyncio.TimerHandle] = {}
        self._locks: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        self._failed: deque[tuple[str, str]] = deque(maxlen=REMEMBERED_FAILURES)
        """Requests that were told of a failure: a retry of one is no retry of its twin."""

    async def enter(self, claim: Claim, make_task: MakeTask) -> Listener:
        """Listen to the run that a request repeats, else to a new one; to be left again.

        Raises IdempotencyError, and what `make_task` raises.
        """
        async with self._one_at_a_time(claim):
            if found := self._find(claim):
                log.info("run %s: its client is back", found.id)
                return self._listen(found)
            task = await make_task(uuid.uuid4().hex)
            work = partial(self._before, task.witness) if task.witness else self._work
            run = Run(task, claim, partial(work, task), self._alone)
            self._runs[run.id] = run
            return run.listen()

    def get(self, owner: str, run_id: str) -> Run | None:
        """A run of that owner, if it is at work or kept."""
        self._forget_old()
        run = self._runs.get(run_id)
        return run if run and run.claim.owner == owner else None

    async def aclose(self) -> None:
        """End all that are at work."""
        at_work = [run for run in self._runs.values() if run.ended_at is None]
        for run in at_work:
            run.cancel(SERVER_STOPS)
        for run in at_work:
            await run.ended()
        for grace in self._graces.values():
            grace.cancel()

    # Finding

    def _one_at_a_time(self, claim: Claim) -> "asyncio.Lock | nullcontext[None]":
        if claim.key is None:
            return nullcontext()
        return self._locks.setdefault((claim.owner, claim.key), asyncio.Lock())

    def _find(self, claim: Claim) -> Run | None:
        self._forget_old()
        if claim.key is not None:
            return self._find_by_key(claim)
        if claim.retry_count:
            return self._find_retried(claim)
        return None

    def _find_by_key(self, claim: Claim) -> Run | None:
        for run in self._runs.values():
            named = (run.claim.owner, run.claim.key) == (claim.owner, claim.key)
            if named and run.can_be_joined:
                if run.claim.fingerprint != claim.fingerprint:
                    raise IdempotencyError
                return run
        return None

    def _find_retried(self, claim: Claim) -> Run | None:
        """The run that its client has left, for many ask for the same at once, as samplers do, and
        each must get a run of its own. A client that is not known to have left comes last."""
        same = [run for run in self._runs.values() if _can_be_retried(run, claim)]
        for run in same:
            if not run.listeners:
                return run
        request = (claim.owner, claim.fingerprint)
        if request in self._failed:
            self._failed.remove(request)
            return None
        at_work = (run for run in same if run.status == "running")
        return min(at_work, key=lambda run: run.listeners, default=None)

    def _listen(self, run: Run) -> Listener:
        if grace := self._graces.pop(run.id, None):
            grace.cancel()
        return run.listen()

    # Going on

    async def _before(self, witness: Witness, task: Task, run: Run, emit: Emit) -> Result:
        """Work, with somebody who hears of everything first."""

        async def both(event: Event) -> None:
            witness.heard(event)
            await emit(event)

        try:
            result = await self._work(task, run, both)
        except ProxyError as error:
            await witness.failed(error)
            raise
        except asyncio.CancelledError:
            stops = run.why_cancelled == SERVER_STOPS
            await witness.failed(interrupted() if stops else RunCancelledError())
            raise
        except Exception:
            await witness.failed(internal_error())
            raise
        await witness.ended(result)
        return result

    async def _work(self, task: Task, run: Run, emit: Emit) -> Result:
        log.info("run %s started, model %s", run.id, run.model)
        try:
            result = await self.counts.of(choices.run(self.agent, task, emit))
            for each in (result, *result.others):
                if each.parked:
                    await self._parked.save(run.claim.owner, each.run_id, each.parked)
            others = [replace(each, parked=None) for each in result.others]
            result = replace(result, parked=None, others=others)
        except ProxyError as error:
            log.warning("run %s failed: %s", run.id, error)
            _warn_of_repetition(error, run)
            raise
        except errors.SandboxUnavailableError as error:
            log.warning("run %s found no sandbox: %s", run.id, error)
            told = SandboxUnavailableError(str(error), retry_after_s=error.retry_after_s)
            _warn_of_repetition(told, run)
            raise told from error
        except errors.SandboxError as error:
            log.warning("run %s failed: %s", run.id, error)
            told = SandboxUnavailableError(str(error))
            _warn_of_repetition(told, run)
            raise told from error
        except asyncio.CancelledError:
            log.info("run %s ended: %s", run.id, run.why_cancelled or SERVER_STOPS)
            raise
        except Exception:
            log.exception("run %s failed", run.id)
            raise
        _log_end(result)
        return result

    # Ending

    def _alone(self, run: Run) -> None:
        """Nobody listens to it any more."""
        if run.ended_at is not None:
            self._settle(run)
        elif not run.claim.detach:
            if run.claim.may_come_back:
                loop = asyncio.get_running_loop()
                left = "the client left, and did not come back"
                self._graces[run.id] = loop.call_later(self._grace_s, run.cancel, left)
            else:
                run.cancel("the client left")

    def _settle(self, run: Run) -> None:
        """Keep a run that has ended, or forget it."""
        if grace := self._graces.pop(run.id, None):
            grace.cancel()
        if run.status == "failed" and run.claim.retry_count is not None:
            self._failed.append((run.claim.owner, run.claim.fingerprint))
        if not _is_worth_keeping(run):
            self._runs.pop(run.id, None)
        self._forget_old()

    def _forget_old(self) -> None:
        kept = [run for run in self._runs.values() if run.ended_at and not run.listeners]
        oldest = time.monotonic() - self._keep_s
        count, chars = len(kept), sum(run.chars for run in kept)
        for run in kept:
            too_many = count > MAX_KEPT or chars > MAX_KEPT_CHARS
            if too_many or (run.ended_at or 0) <= oldest:
                del self._runs[run.id]
                count, chars = count - 1, chars - run.chars


def _can_be_retried(run: Run, claim: Claim) -> bool:
    return (
        run.claim.key is None
        and run.claim.retry_count is not None
        and run.claim.same_request(claim)
        and not run.heard_out
        and run.can_be_joined
    )


def _is_worth_keeping(run: Run) -> bool:
    if run.claim.detach:
        return True
    if run.status != "completed":
        return False
    return run.claim.key is not None or (run.claim.may_come_back and not run.heard_out)


def _warn_of_repetition(error: ProxyError, run: Run) -> None:
    """Have the client not ask again where the model would say it all twice; OpenAI's SDKs obey."""
    if run.has_spent:
        error.headers["x-should-retry"] = "false"


def _log_end(result: Result) -> None:
    log.info(
        "run %s ended: %s, %d steps, %d ms",
        result.run_id,
        result.stop_reason,
        result.tally.tool_calls,
        result.tally.wall_ms,
    )
