"""Writes what runs do to audit logs, each act before it is done.

`AuditLogs` keeps the logs of a state directory, `RunAuditLog` follows one run, and the functions
below make the lines. A line has no long text, no key, and nothing that the client is not told.
"""

import asyncio
import hashlib
import json
import logging
import shutil
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from proxy.agent.events import (
    ChoiceEvent,
    EgressDecided,
    Emit,
    Event,
    RuleMatched,
    RunStarted,
    ToolCallFinished,
    ToolCallStarted,
    TurnStarted,
)
from proxy.agent.result import Result
from proxy.agent.task import AgentTask
from proxy.audit.audit_log import LAST, AuditLogWriter, Fields, day_of, days, oldest_kept
from proxy.errors import AuditError, ProxyError

log = logging.getLogger(__name__)
THREADS = 4
"""The logs' own threads: a disk that hangs delays nothing else."""
MAX_WAITING = 64
"""The most lines that wait for the disk; then the run waits."""
NEXT_ACTS = TurnStarted | ToolCallStarted
"""Events that must be in the file, with all before them, before the run goes on."""
MAX_CHARS = 2_000
"""A longer argument is written as its hash; a command is always written whole."""


class RunAuditLog:
    """Writes the log of one run. Work on the disk is done in threads, in order."""

    def __init__(
        self,
        book: AuditLogWriter,
        threads: Executor,
        *,
        required: bool,
        on_failure: Callable[[], None],
        tasks: set[asyncio.Task[None]],
    ) -> None:
        """With `required`, the run fails if its log cannot be written. `tasks` holds the tasks that
        are at work."""
        self._book = book
        self._threads = threads
        self._required = required
        self._on_failure = on_failure
        self._tasks = tasks
        self._jobs = deque[Callable[[], None]]()
        self._working: asyncio.Task[None] | None = None
        self._fault: OSError | None = None

    async def follow(
        self, request: Fields, work: Callable[[Emit], Awaitable[Result]], emit: Emit
    ) -> Result:
        """Run `work` and write its log. Raises the errors of `work`, and AuditError."""

        async def hear(event: Event) -> None:
            await self._heard(event)
            await emit(event)

        try:
            self._do(self._book.begin)
            self._write(request)
            await self._written()
            result = await work(hear)
        except BaseException as error:
            await self._end(_failure_line(error))
            raise
        await self._end(_result_line(result))
        self._check()
        return result

    async def _heard(self, event: Event) -> None:
        if told := _event_line(event):
            self._write(told)
        bare = event.event if isinstance(event, ChoiceEvent) else event
        if isinstance(bare, NEXT_ACTS):
            await self._written()
        elif len(self._jobs) > MAX_WAITING:
            await self._all_done()

    async def _written(self) -> None:
        await self._all_done()
        self._check()

    async def _end(self, last: Fields) -> None:
        self._write(last)
        self._do(self._book.finish)
        self._do(self._book.close)
        await self._all_done()

    def _check(self) -> None:
        if self._fault and self._required:
            raise AuditError from self._fault

    def _write(self, fields: Fields) -> None:
        if self._fault is None:
            line = self._book.line(fields)
            self._do(lambda: self._book.append(line))

    def _do(self, job: Callable[[], None]) -> None:
        self._jobs.append(job)
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work())
            self._tasks.add(self._working)
            self._working.add_done_callback(self._tasks.discard)

    async def _all_done(self) -> None:
        if self._working:
            await asyncio.wait({self._working})

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while self._jobs:
            job = self._jobs.popleft()
            if self._fault and job != self._book.close:
                continue
            try:
                await loop.run_in_executor(self._threads, job)
            except OSError as error:
                self._fault = error
                self._on_failure()
                log.error("an audit log breaks off: %s", error)


class AuditLogs:
    """The audit logs of a state directory, which is created with the first log."""

    def __init__(
        self,
        root: Path,
        *,
        keep_days: float,
        key: bytes | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """With a `key`, nobody without it can forge a log."""
        self._root = root
        self._keep_days = keep_days
        self._key = key
        self._now = now
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="audit")
        self._tasks = set[asyncio.Task[None]]()
        self._swept = ""
        self.failures = 0
        """How many logs broke off because the disk refused them."""

    async def follow(
        self,
        task: AgentTask,
        owner: str,
        fingerprint: str,
        work: Callable[[Emit], Awaitable[Result]],
        emit: Emit,
    ) -> Result:
        """Run `work` and write its log. Raises the errors of `work`, and AuditError."""
        loop, today = asyncio.get_running_loop(), day_of(self._now())
        if self._swept != today:
            self._swept = today
            await loop.run_in_executor(self._threads, self._sweep)
        request = await loop.run_in_executor(
            self._threads, _request_line, task, owner, fingerprint
        )  # in a thread: hashing pictures in messages takes long
        trail = RunAuditLog(
            AuditLogWriter(self._root / today, task.run_id, self._key, self._now),
            self._threads,
            required=task.profile.audit.required,
            on_failure=self._failed,
            tasks=self._tasks,
        )
        return await trail.follow(request, work, emit)

    async def aclose(self) -> None:
        """Wait until all logs are written."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        self._threads.shutdown()

    def _failed(self) -> None:
        self.failures += 1

    def _sweep(self) -> None:
        """Remove the days that are older than `keep_days`."""
        oldest = oldest_kept(self._now(), self._keep_days)
        for day in days(self._root):
            if day.name < oldest:
                shutil.rmtree(day, ignore_errors=True)
                log.info("the audit logs of %s are kept no more", day.name)


def _request_line(task: AgentTask, owner: str, fingerprint: str) -> Fields:
    """Return the line for the request."""
    return {
        "kind": "request",
        "run": task.run_id,
        "owner": owner,
        "model": task.model,
        "profile": task.profile.name,
        "policies": _hash_of(asdict(task.profile)),
        "container": task.artifact_store.container_id,
        "choices": 1 + len(task.others),
        "client_tools": [
            str(tool.get("function", {}).get("name")) for tool in task.request.client_tools
        ],
        "body": fingerprint,
        "messages": [_hash_of(message) for message in task.input.messages],
        "files": {file.path: file.identity for file in task.input.files},
    }


def _event_line(event: Event) -> Fields | None:
    """Return the line for an event, or None."""
    match event:
        case ChoiceEvent(index, of):
            told = _event_line(of)
            return {**told, "choice": index} if told else None
        case RunStarted(_, prompt) if prompt:
            return {"kind": "prompt", "sha256": prompt}
        case ToolCallStarted(step, call_id, name, arguments):
            told = {each: _argument(each, value) for each, value in arguments.items()}
            call = {"step": step, "call": call_id, "tool": name}
            return {"kind": "call", **call, "arguments": told}
        case ToolCallFinished():
            return _outcome_line(event)
        case EgressDecided(decision):
            return {"kind": "egress", **asdict(decision)}
        case RuleMatched():
            return {"kind": "rule", **asdict(event)}
    return None


def _result_line(result: Result) -> Fields:
    """Return the last line of a run with a result, which lists all its files."""
    return {
        "kind": "result",
        LAST: True,
        "choices": [_choice_result(each) for each in (result, *result.others)],
    }


def _failure_line(error: BaseException) -> Fields:
    """Return the last line of a run that failed."""
    told = {"error": type(error).__name__}
    if isinstance(error, ProxyError):
        told |= {"code": error.code or "", "message": error.message}
    return {"kind": "failure", LAST: True, **told}


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


def _argument(name: str, value: object) -> Any:
    if isinstance(value, str):
        if name == "command" or len(value) <= MAX_CHARS:
            return value
        return {"sha256": _hash(value), "chars": len(value)}
    if value is None or isinstance(value, bool | int | float):
        return value
    return {"type": type(value).__name__}


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _hash_of(value: Mapping[str, Any]) -> str:
    return _hash(json.dumps(value, sort_keys=True, default=str))
