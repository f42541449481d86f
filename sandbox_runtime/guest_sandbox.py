"""`GuestSandbox` is a Sandbox whose operations a guest agent performs at the other end of a
channel. `start_sandbox` starts one."""

import asyncio
import itertools
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar

from policies.isolation import Isolation
from policies.workspace import WORKING_DIR
from sandbox_runtime.backends.base import Backend, LimitEvents
from sandbox_runtime.channel import Channel
from sandbox_runtime.command_output import (
    PRUNE,
    CommandOutput,
    OutputRetention,
    RetainedFiles,
    exec_result,
)
from sandbox_runtime.egress.limits import TrafficQuota
from sandbox_runtime.errors import (
    FileMissingError,
    FileSizeLimitError,
    FileTimeoutError,
    JobMissingError,
    NotARegularFileError,
    PathExistsError,
    SandboxFileError,
)
from sandbox_runtime.protocol import ProtocolError
from sandbox_runtime.reports import (
    CommandReport,
    ListingReader,
    command_report,
    exit_code_and_stderr,
    failure_in,
    is_truncated,
    size_in,
)
from sandbox_runtime.sandbox import (
    LIST_TIMEOUT_S,
    TRANSFER_TIMEOUT_S,
    ExecResult,
    HashLimits,
    Listing,
    OnOutput,
    OutputCap,
    SandboxReference,
    ShellState,
    Sink,
)
from sandbox_runtime.streams import OnConnection, Stream

START_TIMEOUT_S = 60.0
ADOPTION_ANSWER_TIMEOUT_S = 10.0
"""Maximum time until the agent of an adopted sandbox answers on its new connection."""
REPORT_TIMEOUT_S = 4.0
"""Maximum time from a command's timeout to its report; the agent needs about 0.7 s."""
MAX_COUNT_CHARS = 20
"""Maximum length of the output of UNPACK, which prints a count of bytes."""
PING_INTERVAL_S = 10.0
"""The interval of pings. A guest agent that receives nothing for 30 s ends itself."""
BUSY_PING_TIMEOUT_S = 60.0
"""Maximum time for a leased sandbox to answer a ping. It is long because commands may leave the
guest agent little CPU time, and because the operations of the lease have timeouts of their own."""
FILE_ERRORS: Mapping[str, type[SandboxFileError]] = {
    "missing": FileMissingError,
    "exists": PathExistsError,
    "not_regular": NotARegularFileError,
    "too_large": FileSizeLimitError,
}
Read = TypeVar("Read")
_PACK_SCRIPT = f"""
set -- --exclude=./shared
tar --anchored --no-wildcards --sparse -c -f /dev/null -T /dev/null 2>/dev/null &&
    set -- --anchored --no-wildcards --sparse "$@"
exec tar -c -C {WORKING_DIR} "$@" -f - .
"""
PACK = ["sh", "-c", _PACK_SCRIPT]
"""The command that packs a snapshot without the shared directory. Without --anchored and
--no-wildcards, GNU tar would compare the pattern `./shared` with each part of each path, in time
cubic in the depth of the directories. Without --sparse it would send the holes of sparse files
as zeros. Other programs called tar do not have these options."""
UNPACK = ["sh", "-c", f"tar -x -o -p -C {WORKING_DIR} -f - || exit\n{PRUNE}"]
"""The command that unpacks a snapshot and runs PRUNE. With -o, the unpacked files belong to the
sandbox's user, not to the owners in the archive."""


async def start_sandbox(backend: Backend, isolation: Isolation) -> "GuestSandbox":
    """Return a new sandbox, ready for its first command. Raises SandboxStartError."""
    channel = Channel(await backend.start(isolation), max_outage_s=backend.max_outage_s)
    await channel.connect(START_TIMEOUT_S)
    return GuestSandbox(channel)


async def adopt_sandbox(backend: Backend, reference: SandboxReference) -> "GuestSandbox":
    """Return a running sandbox of a dead process, adopted by this one. Raises SandboxStartError:
    its subclass SandboxGoneError if the sandbox is gone or was adopted already."""
    guest = await backend.adopt(reference["guest"])
    channel = Channel(guest, max_outage_s=backend.max_outage_s)
    await channel.connect(ADOPTION_ANSWER_TIMEOUT_S)
    return GuestSandbox(channel, reference)


class GuestSandbox:
    """A running sandbox; see `Sandbox`."""

    def __init__(self, channel: Channel, adopted: SandboxReference | None = None) -> None:
        """`adopted` is the reference with which the sandbox was adopted, if it was."""
        self._channel = channel
        self._report_timeout_s = REPORT_TIMEOUT_S + channel.max_outage_s
        self._ids = itertools.count(1)
        self._jobs: dict[str, _Job] = {}
        self._last_limit_events = LimitEvents()
        self.traffic = TrafficQuota()
        self._retention = OutputRetention()
        self._generation = 0
        """Number of processes that have adopted the sandbox; the ids of commands contain it."""
        self._keeps_results = False
        self._kept_ids: list[str] = []
        """The ids of the commands whose final results were returned, but are kept for a process
        that adopts the sandbox."""
        if adopted:
            self._generation = adopted["generation"] + 1
            self._jobs = {id: _Job.from_json(job) for id, job in adopted["jobs"].items()}
            self._retention = OutputRetention(adopted["retained_bytes"])

    @property
    def id(self) -> str:
        return self._channel.guest.id

    @property
    def lost(self) -> str | None:
        """The reason why the sandbox cannot be used any more; None while it can be used."""
        return self._channel.lost

    async def ping(self, timeout_s: float) -> None:
        """Return when the guest agent answers. If it does not answer in time (see `Channel.ping`),
        end the sandbox and raise SandboxLostError."""
        await self._channel.ping(timeout_s)

    async def resize(self, isolation: Isolation) -> None:
        """Set memory, cpus and pids of the running sandbox. Raises SandboxStartError."""
        await self._channel.guest.resize(isolation)

    def set_connection_handler(self, on_connection: OnConnection | None) -> None:
        """Call `on_connection` for each connection that a program in the sandbox opens. If it is
        None, close all such connections."""
        self._channel.set_connection_handler(on_connection)

    async def exec(
        self,
        command: str,
        *,
        timeout_s: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = b"",
        cap: OutputCap = OutputCap(),
        shell_state: ShellState = "snapshot",
        on_output: OnOutput | None = None,
        wait_s: float | None = None,
        command_id: str | None = None,
    ) -> ExecResult:
        id = command_id or self._new_id()
        files = self._retention.reserve(cap, command_id)
        request = {
            "op": "exec",
            "id": id,
            "command": command,
            "timeout_s": timeout_s,
            "wait_s": wait_s,
            "cwd": cwd,
            "env": dict(env or {}),
            "stdin": "terminal" if stdin is None else "data" if stdin else "none",
            "max_bytes": cap.max_bytes,
            "max_lines": cap.max_lines,
            "keep": files.name,
            "max_kept_bytes": files.bytes_left,
            "shell_state": shell_state,
        }
        reading_s = timeout_s if wait_s is None else min(timeout_s, wait_s)
        output = CommandOutput(cap, on_output)
        stream = await self._read_output(
            request, output, reading_s, stdin or b"", end_of_input=True
        )
        if failure := await self._parse_report(failure_in, stream):
            self._retention.release(files)
            return _not_started_result(failure.message)
        report = await self._parse_report(command_report, stream)
        job = _Job(0, cap, files, is_named=command_id is not None)
        return self._finish_reading(id, job, report, output)

    async def wait(
        self,
        job_id: str,
        *,
        wait_s: float,
        typed_bytes: bytes = b"",
        end_of_input: bool = False,
        on_output: OnOutput | None = None,
    ) -> ExecResult:
        job = self._find_job(job_id)
        request = {"op": "attach", "id": job_id, "reading": job.next_reading, "wait_s": wait_s}
        output = CommandOutput(job.cap, on_output)
        stream = await self._read_output(
            request, output, wait_s, typed_bytes, end_of_input=end_of_input
        )
        if await self._parse_report(failure_in, stream):
            self._jobs.pop(job_id, None)
            raise JobMissingError(f"the sandbox has no job {job_id!r} any more")
        report = await self._parse_report(command_report, stream)
        return self._finish_reading(job_id, job, report, output)

    async def stop(self, job_id: str) -> None:
        self._find_job(job_id)
        try:
            request = {"op": "stop", "id": job_id}
            async with (
                asyncio.timeout(self._report_timeout_s),
                self._operation(request, None) as stream,
            ):
                if await stream.receive():
                    raise ProtocolError("the agent sent data that was not requested")
        except TimeoutError:
            await self._kill("the agent did not stop a job in time")
        await self._parse_report(failure_in, stream)

    def reference(self) -> SandboxReference | None:
        guest = self._channel.guest.reference()
        if guest is None or self.lost:
            return None
        self._keeps_results = True
        return {
            "guest": guest,
            "generation": self._generation,
            "jobs": {id: job.to_json() for id, job in self._jobs.items()},
            "retained_bytes": self._retention.used_bytes,
        }

    def abandon(self) -> None:
        self._channel.guest.abandon()

    def forget_results(self) -> None:
        for id in self._kept_ids:
            self._channel.acknowledge(id)
        self._kept_ids.clear()

    def _new_id(self) -> str:
        number = next(self._ids)
        return f"c{self._generation}-{number}" if self._generation else f"c{number}"

    def _find_job(self, job_id: str) -> "_Job":
        try:
            return self._jobs[job_id]
        except KeyError:
            known = ", ".join(self._jobs) or "none"
            raise JobMissingError(f"there is no job {job_id!r} (running: {known})") from None

    async def _read_output(
        self,
        request: Mapping[str, object],
        output: CommandOutput,
        reading_s: float,
        stdin: bytes,
        *,
        end_of_input: bool,
    ) -> Stream:
        """Send `stdin`, read output until the reading ends (see `protocol`), and return the stream
        with its report. Kill the guest if it sends too much output, or if no report arrives within
        the sum of `reading_s`, REPORT_TIMEOUT_S and the longest outage."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + reading_s + self._report_timeout_s
        try:
            async with (
                asyncio.timeout_at(deadline) as timeout,
                self._operation(request, None) as stream,
            ):
                if stdin:
                    await stream.send(stdin)
                if end_of_input and (stdin or request["op"] == "attach"):
                    await stream.finish_input()
                while piece := await stream.receive():
                    arrived = clock()
                    timeout.reschedule(None)  # the time spent in on_output does not count
                    if not await output.add(*piece):
                        await self._kill("the agent sent more output than allowed")
                    deadline += clock() - arrived
                    timeout.reschedule(deadline)
        except TimeoutError:
            if timeout.expired():
                await self._kill("the agent did not end a command in time")
            raise
        return stream

    def _finish_reading(
        self, id: str, job: "_Job", report: CommandReport, output: CommandOutput
    ) -> ExecResult:
        """Return the result of a reading (see `protocol`). Keep the job if its command still runs,
        else forget it."""
        result = exec_result(id, report, output, job.files, self._new_limit_events(report))
        kept_bytes = sum(output.kept_bytes for output in report.outputs.values())
        files = job.files.with_added_bytes(kept_bytes)
        if report.running:
            self._jobs[id] = replace(job, next_reading=report.reading + 1, files=files)
        else:
            self._jobs.pop(id, None)
            if job.is_named and self._keeps_results:
                self._kept_ids.append(id)
            else:
                self._channel.acknowledge(id)
            self._retention.release(files)
        return result

    def _new_limit_events(self, report: CommandReport) -> LimitEvents:
        """Return how often limits were hit since the last reading. The host's counters are used if
        it has any, otherwise the agent's."""
        now, before = self._channel.guest.limit_events(), self._last_limit_events
        if now is None:
            return LimitEvents(report.oom_kills, report.pids_refused)
        self._last_limit_events = now
        return LimitEvents(
            oom_kills=now.oom_kills - before.oom_kills,
            pids_refused=now.pids_refused - before.pids_refused,
        )

    async def put(
        self,
        path: str,
        source: AsyncIterable[bytes],
        *,
        new: bool = False,
        timeout_s: float = TRANSFER_TIMEOUT_S,
    ) -> int:
        request = {"op": "put", "path": path, "new": new}
        async with self._operation(request, timeout_s, more=True) as stream:
            async for data in source:
                await stream.send(data, more=True)
            await stream.finish_input()
            if await stream.receive():
                raise ProtocolError("the agent sent data that was not requested")
        return await self._reported_size(stream)

    async def get(
        self, path: str, sink: Sink, *, max_bytes: int, timeout_s: float = TRANSFER_TIMEOUT_S
    ) -> int:
        request = {"op": "get", "path": path, "max_bytes": max_bytes}
        received = 0
        async with self._operation(request, timeout_s) as stream:
            while piece := await stream.receive():
                received += len(piece[1])
                if received > max_bytes:
                    raise ProtocolError("the agent sent more of a file than was requested")
                await sink(piece[1])
        if await self._reported_size(stream) != received:
            await self._kill("the agent sent less of a file than it reports")
        return received

    async def list(
        self,
        path: str,
        *,
        max_entries: int = 10_000,
        max_depth: int | None = None,
        hashes: HashLimits | None = None,
        timeout_s: float = LIST_TIMEOUT_S,
    ) -> Listing:
        hash_bytes, hash_s = (hashes.max_file_bytes, hashes.timeout_s) if hashes else (None, None)
        bounds = {"max_entries": max_entries, "max_depth": max_depth, "hash_bytes": hash_bytes}
        request = {"op": "list", "path": path, **bounds, "hash_s": hash_s}
        listing = ListingReader(max_entries)
        async with self._operation(request, timeout_s) as stream:
            while piece := await stream.receive():
                await listing.feed(piece[1])
            entries = listing.finish()
        await self._raise_if_file_error(stream)
        return Listing(entries, truncated=await self._parse_report(is_truncated, stream))

    async def snapshot(self, sink: Sink, *, max_bytes: int) -> int:
        size = 0
        async with self._operation({"op": "pipe", "argv": PACK}, TRANSFER_TIMEOUT_S) as stream:
            await stream.finish_input()
            while piece := await stream.receive():
                size += len(piece[1])
                if size > max_bytes:
                    raise FileSizeLimitError(f"the workspace is larger than {max_bytes} bytes")
                await sink(piece[1])
        # 1: a background process changed a file while tar read it.
        await self._raise_if_failed("packing the workspace", stream, accepted_codes=(0, 1))
        return size

    async def restore(self, source: AsyncIterable[bytes]) -> None:
        async with self._operation({"op": "pipe", "argv": UNPACK}, TRANSFER_TIMEOUT_S) as stream:
            async for data in source:
                await stream.send(data)
            await stream.finish_input()
            printed = b""
            while piece := await stream.receive():
                printed += piece[1]
                if len(printed) > MAX_COUNT_CHARS:
                    raise ProtocolError("the agent sent more data than a count of bytes")
        await self._raise_if_failed("unpacking the workspace", stream, accepted_codes=(0,))
        self._retention.count_restored_files(printed)

    @asynccontextmanager
    async def _operation(
        self, request: Mapping[str, object], timeout_s: float | None, *, more: bool = False
    ) -> AsyncIterator[Stream]:
        """Open an operation, and reset it if the block ends early. Pass `more` if input follows at
        once.

        Raises FileTimeoutError after `timeout_s`, and SandboxLostError for a ProtocolError in the
        block."""
        try:
            async with asyncio.timeout(timeout_s) as timeout:
                stream = await self._channel.open(request, more=more)
                try:
                    yield stream
                finally:
                    self._channel.reset(stream.number)
        except ProtocolError as error:  # outside the timeout, which must not interrupt the kill
            await self._kill(str(error))
        except TimeoutError as error:
            if not timeout.expired():
                raise
            raise FileTimeoutError(f"{request['op']} took longer than {timeout_s} s") from error

    async def _raise_if_failed(
        self, action: str, stream: Stream, *, accepted_codes: tuple[int, ...]
    ) -> None:
        await self._raise_if_file_error(stream)
        exit_code, stderr = await self._parse_report(exit_code_and_stderr, stream)
        if exit_code not in accepted_codes:
            raise SandboxFileError(f"{action} failed: {stderr.strip()}")

    async def close(self) -> None:
        await self._channel.close()

    async def _reported_size(self, stream: Stream) -> int:
        await self._raise_if_file_error(stream)
        return await self._parse_report(size_in, stream)

    async def _raise_if_file_error(self, stream: Stream) -> None:
        if failure := await self._parse_report(failure_in, stream):
            raise FILE_ERRORS.get(failure.code, SandboxFileError)(failure.message)

    async def _parse_report(
        self, parse: Callable[[Mapping[str, object]], Read], stream: Stream
    ) -> Read:
        """Return what `parse` parses from a stream's report. If the report is invalid, kill the
        guest and raise SandboxLostError."""
        try:
            return parse(stream.report)
        except ProtocolError as error:
            await self._kill(str(error))

    async def _kill(self, why: str) -> NoReturn:
        await self._channel.fail(why)
        raise self._channel.lost_error()


@dataclass(frozen=True, slots=True)
class _Job:
    """A command that runs as a job."""

    next_reading: int
    cap: OutputCap
    files: RetainedFiles
    """The files that keep the command's full output."""
    is_named: bool
    """True if the caller has given the command its id."""

    def to_json(self) -> list[object]:
        """Return the job as the value that `from_json` reads."""
        cap, files = self.cap, self.files
        caps = [cap.max_bytes, cap.max_lines, cap.retention_directory, cap.max_kept_bytes]
        return [self.next_reading, caps, [files.name, files.bytes_left], self.is_named]

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> "_Job":
        next_reading, cap, files, is_named = value
        return cls(next_reading, OutputCap(*cap), RetainedFiles(*files), is_named)


def _not_started_result(message: str) -> ExecResult:
    text = f"{message}\n"
    return ExecResult(126, "", text, False, False, 0.0, 0, len(text), text.count("\n"))
