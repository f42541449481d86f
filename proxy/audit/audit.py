"""The audit logs of runs. A tool call is logged before it is run.

`AuditLogs` creates the logs of a data directory, `RunAuditLog` observes one run, and the functions
of this module make the lines. A line contains no API key, and no long text except commands. Secrets
that the profile redacts are redacted in the lines too.
"""

import asyncio
import hashlib
import json
import logging
import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from proxy.agent.events import (
    ChoiceEvent,
    EgressDecided,
    Event,
    RuleMatched,
    RunStarted,
    ToolCallFinished,
    ToolCallStarted,
    TurnStarted,
)
from proxy.agent.result import Result
from proxy.agent.task import AgentTask
from proxy.audit.audit_log import (
    LAST_LINE_FIELD,
    AuditLogWriter,
    Fields,
    day_directories,
    day_of,
    oldest_kept_day,
)
from proxy.errors import AuditError, ProxyError

log = logging.getLogger(__name__)
THREAD_COUNT = 4
"""Number of threads. They only write audit logs, so that a disk that hangs delays nothing else."""
MAX_QUEUED_JOBS = 64
"""Maximum number of a run's writes that wait for the disk. Above it, the run waits."""
FLUSH_EVENTS = TurnStarted | ToolCallStarted
"""At these events the run waits until its log is written, before it calls the model or a tool."""
LOGGED_EVENTS = frozenset(
    {
        ChoiceEvent,
        RunStarted,
        TurnStarted,
        ToolCallStarted,
        ToolCallFinished,
        EgressDecided,
        RuleMatched,
    }
)
MAX_CHARS = 2_000
"""Maximum length of a tool argument in a line. A longer argument is replaced by its hash and
length; a `command` is always written in full."""


class RunAuditLog:
    """The audit log of one run, as an observer of the run. Threads write its lines, in order."""

    event_types = LOGGED_EVENTS

    def __init__(
        self,
        writer: AuditLogWriter,
        threads: Executor,
        make_request_line: Callable[[], Fields],
        *,
        required: bool,
        on_failure: Callable[[], None],
        tasks: set[asyncio.Task[None]],
    ) -> None:
        """`make_request_line` returns the log's first line. With `required`, the run fails if its
        log cannot be written. `tasks` holds the tasks that write."""
        self._writer = writer
        self._threads = threads
        self._make_request_line = make_request_line
        self._required = required
        self._on_failure = on_failure
        self._tasks = tasks
        self._jobs = deque[Callable[[], None]]()
        self._jobs_task: asyncio.Task[None] | None = None
        self._write_error: OSError | None = None

    async def begin(self) -> None:
        """Create the log and write the line for the request. Raises AuditError."""
        loop = asyncio.get_running_loop()
        # In a thread: hashing the pictures of a request takes long.
        request = await loop.run_in_executor(self._threads, self._make_request_line)
        self._enqueue(self._writer.begin)
        self._enqueue_line(request)
        await self._flush()

    async def on_event(self, event: Event) -> None:
        """Queue the line for an event. At the events of `FLUSH_EVENTS`, wait until all lines are
        written. Raises AuditError."""
        if line := _event_line(event):
            self._enqueue_line(line)
        bare = event.event if isinstance(event, ChoiceEvent) else event
        if isinstance(bare, FLUSH_EVENTS):
            await self._flush()
        elif len(self._jobs) > MAX_QUEUED_JOBS:
            await self._wait_for_jobs()

    async def on_result(self, result: Result) -> None:
        """Write the last line of a run with a result, and close the log. Raises AuditError."""
        await self._close(_result_line(result))
        self._raise_if_failed()

    async def on_error(self, error: BaseException) -> None:
        """Write the last line of a run that failed, and close the log."""
        await self._close(_failure_line(error))

    async def _flush(self) -> None:
        await self._wait_for_jobs()
        self._raise_if_failed()

    async def _close(self, last_line: Fields) -> None:
        self._enqueue_line(last_line)
        self._enqueue(self._writer.finish)
        self._enqueue(self._writer.close)
        await self._wait_for_jobs()

    def _raise_if_failed(self) -> None:
        if self._write_error and self._required:
            raise AuditError from self._write_error

    def _enqueue_line(self, fields: Fields) -> None:
        if self._write_error is None:
            line = self._writer.next_line(fields)
            self._enqueue(lambda: self._writer.append(line))

    def _enqueue(self, job: Callable[[], None]) -> None:
        self._jobs.append(job)
        if self._jobs_task is None or self._jobs_task.done():
            self._jobs_task = asyncio.create_task(self._run_jobs())
            self._tasks.add(self._jobs_task)
            self._jobs_task.add_done_callback(self._tasks.discard)

    async def _wait_for_jobs(self) -> None:
        if self._jobs_task:
            await asyncio.wait({self._jobs_task})

    async def _run_jobs(self) -> None:
        loop = asyncio.get_running_loop()
        while self._jobs:
            job = self._jobs.popleft()
            if self._write_error and job != self._writer.close:
                continue
            try:
                await loop.run_in_executor(self._threads, job)
            except OSError as error:
                self._write_error = error
                self._on_failure()
                log.error("audit log of run %s: cannot be written: %s", self._writer.run_id, error)


class AuditLogs:
    """The audit logs in one directory, `root`, which is created with the first log."""

    def __init__(
        self,
        root: Path,
        *,
        keep_days: float,
        key: bytes | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """With a `key`, the lines have HMACs, so that a log can be forged only with the key."""
        self._root = root
        self._keep_days = keep_days
        self._key = key
        self._now = now
        self._threads = ThreadPoolExecutor(THREAD_COUNT, thread_name_prefix="audit")
        self._tasks = set[asyncio.Task[None]]()
        self._last_sweep_day = ""
        self.failures = 0
        """Number of failed writes to audit logs."""

    def create_run_log(self, task: AgentTask, owner: str, fingerprint: str) -> RunAuditLog:
        """Return the log of a run that is about to start."""
        today = day_of(self._now())
        is_first_of_day, self._last_sweep_day = self._last_sweep_day != today, today
        return RunAuditLog(
            AuditLogWriter(self._root / today, task.run_id, self._key, self._now),
            self._threads,
            partial(self._sweep_and_make_request_line, is_first_of_day, task, owner, fingerprint),
            required=task.profile.audit.required,
            on_failure=self._count_failure,
            tasks=self._tasks,
        )

    def _sweep_and_make_request_line(
        self, is_first_of_day: bool, task: AgentTask, owner: str, fingerprint: str
    ) -> Fields:
        """Return the line for the request. At the first request of a day, sweep the logs."""
        if is_first_of_day:
            self._sweep()
        return _request_line(task, owner, fingerprint)

    async def aclose(self) -> None:
        """Wait until all logs are written."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        self._threads.shutdown()

    def _count_failure(self) -> None:
        self.failures += 1

    def _sweep(self) -> None:
        """Remove the logs of days that are older than `keep_days`."""
        oldest = oldest_kept_day(self._now(), self._keep_days)
        for day in day_directories(self._root):
            if day.name < oldest:
                shutil.rmtree(day, ignore_errors=True)
                log.info(
                    "deleted the audit logs of %s: they are older than audit.retention_days",
                    day.name,
                )


def _request_line(task: AgentTask, owner: str, fingerprint: str) -> Fields:
    """Return the line for the request."""
    return {
        "kind": "request",
        "run": task.run_id,
        "owner": owner,
        "model": task.model,
        "profile": task.profile.name,
        "policies": _hash_json(asdict(task.profile)),
        "container": task.artifact_store.container_id,
        "choices": 1 + len(task.others),
        "client_tools": [
            str(tool.get("function", {}).get("name")) for tool in task.request.client_tools
        ],
        "body": fingerprint,
        "messages": [_hash_json(message) for message in task.input.messages],
        "files": {file.path: file.identity for file in task.input.files},
    }


def _event_line(event: Event) -> Fields | None:
    """Return the line for an event, or None if the event is not logged."""
    match event:
        case ChoiceEvent(index, of):
            line = _event_line(of)
            return {**line, "choice": index} if line else None
        case RunStarted(_, prompt) if prompt:
            return {"kind": "prompt", "sha256": prompt}
        case ToolCallStarted(step, call_id, name, arguments):
            logged = {key: _logged_argument(key, value) for key, value in arguments.items()}
            call = {"step": step, "call": call_id, "tool": name}
            return {"kind": "call", **call, "arguments": logged}
        case ToolCallFinished():
            return _outcome_line(event)
        case EgressDecided(decision):
            return {"kind": "egress", **asdict(decision)}
        case RuleMatched():
            return {"kind": "rule", **asdict(event)}
    return None


def _result_line(result: Result) -> Fields:
    """Return the last line of a run with a result: the result and the files of each choice."""
    return {
        "kind": "result",
        LAST_LINE_FIELD: True,
        "choices": [_choice_result(choice) for choice in (result, *result.others)],
    }


def _failure_line(error: BaseException) -> Fields:
    """Return the last line of a run that failed."""
    details = {"error": type(error).__name__}
    if isinstance(error, ProxyError):
        details |= {"code": error.code or "", "message": error.message}
    return {"kind": "failure", LAST_LINE_FIELD: True, **details}


def _outcome_line(event: ToolCallFinished) -> Fields:
    return {
        "kind": "outcome",
        "step": event.step,
        "exit_code": event.exit_code,
        "ms": round(event.duration_s * 1000),
        "observation": _hash(event.observation),
        "chars": len(event.observation),
    }


def _choice_result(result: Result) -> dict[str, Any]:
    files = [
        {"path": file.path, "bytes": file.bytes, "sha256": file.sha256, "id": file.file_id}
        for file in result.artifacts
    ]
    return {
        "run": result.run_id,
        "stop_reason": str(result.stop_reason),
        "finish_reason": result.finish_reason,
        "answer": _hash(result.answer),
        "usage": result.usage,
        "tally": result.stats.counts(),
        "files": files,
        "left_out": [file.path for file in result.skipped_files],
        "warnings": [warning.code for warning in result.warnings],
    }


def _logged_argument(name: str, value: object) -> Any:
    if isinstance(value, str):
        if name == "command" or len(value) <= MAX_CHARS:
            return value
        return {"sha256": _hash(value), "chars": len(value)}
    if value is None or isinstance(value, bool | int | float):
        return value
    return {"type": type(value).__name__}


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _hash_json(value: Mapping[str, Any]) -> str:
    return _hash(json.dumps(value, sort_keys=True, default=str))
