"""A fake sandbox: files and a small bash in memory, for fast and deterministic tests.

The fake passes the same conformance suite as the real sandboxes. `sleep` takes no time, and a
command that would sleep beyond its timeout is timed out at once. A command that must run until it
is killed, or that must become a job, can read a FIFO without a writer, because a `sleep` ends
before any `wait_s`. Shell syntax that the fake does not support raises UnsupportedShellError.
"""

import asyncio
import hashlib
import itertools
import math
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from policies.isolation import Isolation
from policies.workspace import INPUT_DIR, OUTPUT_DIR, WORKING_DIR
from sandbox_runtime.egress.decision import CheckTarget, OnDecision
from sandbox_runtime.egress.limits import TrafficQuota
from sandbox_runtime.errors import (
    FileMissingError,
    FileSizeLimitError,
    FileTimeoutError,
    JobMissingError,
    NotARegularFileError,
    PathExistsError,
    SandboxError,
    SandboxFileError,
    SandboxGoneError,
    SandboxLostError,
)
from sandbox_runtime.sandbox import (
    LIST_TIMEOUT_S,
    TRANSFER_TIMEOUT_S,
    DirectoryEntry,
    EntryKind,
    ExecResult,
    HashLimits,
    Listing,
    OnOutput,
    OutputCap,
    SandboxReference,
    ShellState,
    Sink,
)
from tests.fakes.memory_command import RunningCommand
from tests.fakes.memory_files import Bytes, Device, Directory, FakeFile, Files
from tests.fakes.memory_machine import INTERRUPTED, KILLED, FakeProcess, FakeShellState, Machine
from tests.fakes.memory_programs import PROGRAMS
from tests.fakes.memory_shell import Shell
from tests.fakes.memory_snapshot import pack, unpack
from tests.fakes.memory_terminal import Terminal

_PIECE_BYTES = 1 << 16
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/root"}
_ids = itertools.count(1)


class MemorySandbox:
    """A Sandbox in memory."""

    def __init__(self, files: Mapping[str, bytes] | None = None) -> None:
        self._id = f"memory-{next(_ids)}"
        self._machine = Machine()
        self._commands: dict[str, RunningCommand] = {}
        self._command_ids = itertools.count(1)
        self._closed = False
        self.traffic = TrafficQuota()
        self._state = _first_state()
        for directory in (WORKING_DIR, INPUT_DIR, OUTPUT_DIR, "/root", "/tmp", "/dev"):
            self._files.make_directories(directory)
        self._files.add("/dev/null", Device("null"))
        self._files.add("/dev/zero", Device("zero"))
        for path, data in (files or {}).items():
            self._files.make_directories(path.rpartition("/")[0] or "/")
            self._files.add(path, FakeFile(bytearray(data)))

    @property
    def id(self) -> str:
        return self._id

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def _files(self) -> Files:
        return self._machine.files

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
        self._check_alive()
        id = command_id or f"c{next(self._command_ids)}"
        if id not in self._commands:
            is_shared = shell_state == "snapshot"
            state = self._state.copy() if is_shared else _first_state()
            state.variables |= dict(env or {})
            state.exported |= set(env or {})
            process = FakeProcess(self._machine, timeout_s)
            reader = Terminal() if stdin is None else Bytes(stdin)
            started = self._commands[id] = RunningCommand(id, process, reader, cap, self._files)
            keeps_state = is_shared and not cwd and not env
            shell = Shell(process, state, PROGRAMS)
            process.start(self._run(started, shell, command, cwd, keeps_state=keeps_state))
        return await self._deliver_reading(id, math.inf if wait_s is None else wait_s, on_output)

    async def _run(
        self,
        command: RunningCommand,
        shell: Shell,
        script: str,
        cwd: str | None,
        *,
        keeps_state: bool,
    ) -> int:
        before = self._state
        if cwd is not None and await shell.call(["cd", cwd], command.io) != 0:
            return 1
        exit_code = await shell.run_script(script, command.io)
        # A job must not replace the state of commands that ended after its start.
        if keeps_state and not (command.is_job and self._state is not before):
            self._state = shell.state
        return exit_code

    async def wait(
        self,
        job_id: str,
        *,
        wait_s: float,
        typed_bytes: bytes = b"",
        end_of_input: bool = False,
        on_output: OnOutput | None = None,
    ) -> ExecResult:
        self._job(job_id).begin_reading(typed_bytes, end_of_input=end_of_input)
        return await self._deliver_reading(job_id, wait_s, on_output)

    async def stop(self, job_id: str) -> None:
        self._job(job_id).process.end_session(INTERRUPTED)

    def _job(self, job_id: str) -> RunningCommand:
        self._check_alive()
        command = self._commands.get(job_id)
        if command is None or not command.is_job:
            raise JobMissingError(f"there is no job {job_id!r}")
        return command

    async def _deliver_reading(
        self, id: str, wait_s: float, on_output: OnOutput | None
    ) -> ExecResult:
        """Return the result of a reading. A caller that is cancelled kills the command."""
        command = self._commands[id]
        result: ExecResult | None = None
        try:
            result = await command.deliver_reading(wait_s, on_output)
        finally:
            if result is None:
                command.process.end_session(KILLED)
            if result is None or not result.running:
                self._commands.pop(id, None)
        if self._closed:
            raise self._gone()
        return result

    async def put(
        self,
        path: str,
        source: AsyncIterable[bytes],
        *,
        new: bool = False,
        timeout_s: float = TRANSFER_TIMEOUT_S,
    ) -> int:
        self._check_alive()
        data = bytearray()
        async with _in_time(timeout_s):
            async for piece in source:
                data += piece
                await asyncio.sleep(0)
        self._check_alive()
        place = self._files.locate(path, follow=False)
        old = self._files.nodes.get(place)
        if new and old is not None:
            raise PathExistsError(f"{path} exists")
        if isinstance(old, Directory):
            raise NotARegularFileError(f"{path} is a directory")
        try:
            self._files.make_directories(place.rpartition("/")[0] or "/")
        except OSError as error:
            raise SandboxFileError(f"{path}: {error.strerror}") from error
        self._files.nodes[place] = FakeFile(data, old.mode if isinstance(old, FakeFile) else 0o644)
        return len(data)

    async def get(
        self, path: str, sink: Sink, *, max_bytes: int, timeout_s: float = TRANSFER_TIMEOUT_S
    ) -> int:
        self._check_alive()
        node = self._files.find(path, follow=False)
        if node is None:
            raise FileMissingError(f"{path} does not exist")
        if not isinstance(node, FakeFile):
            raise NotARegularFileError(f"{path} is not a regular file")
        if len(node.data) > max_bytes:
            raise FileSizeLimitError(f"{path} has {len(node.data)} bytes")
        data = bytes(node.data)
        async with _in_time(timeout_s):
            for start in range(0, len(data), _PIECE_BYTES):
                await sink(data[start : start + _PIECE_BYTES])
        return len(data)

    async def list(
        self,
        path: str,
        *,
        max_entries: int = 10_000,
        max_depth: int | None = None,
        hashes: HashLimits | None = None,
        timeout_s: float = LIST_TIMEOUT_S,
    ) -> Listing:
        self._check_alive()
        async with _in_time(timeout_s):
            pass
        node = self._files.find(path, follow=False)
        if node is None:
            raise FileMissingError(f"{path} does not exist")
        if not isinstance(node, Directory):
            raise NotARegularFileError(f"{path} is no directory")
        names = self._files.below(path)
        if max_depth is not None:
            names = [name for name in names if name.count("/") < max_depth]
        entries = tuple(self._entry(path, name, hashes) for name in names[:max_entries])
        return Listing(entries, truncated=len(names) > max_entries)

    def _entry(self, path: str, name: str, hashes: HashLimits | None) -> DirectoryEntry:
        node = self._files.find(f"{path}/{name}", follow=False)
        kind: EntryKind = "directory" if isinstance(node, Directory) else "other"
        if isinstance(node, FakeFile):
            is_hashed = hashes and hashes.timeout_s > 0
            if not hashes or not is_hashed or len(node.data) > hashes.max_file_bytes:
                return DirectoryEntry(name, "file", len(node.data))
            digest = hashlib.sha256(node.data).hexdigest()
            return DirectoryEntry(name, "file", len(node.data), digest)
        return DirectoryEntry(name, kind, 0)

    async def snapshot(self, sink: Sink, *, max_bytes: int) -> int:
        self._check_alive()
        packed = pack(self._files, WORKING_DIR)
        if len(packed) > max_bytes:
            raise FileSizeLimitError(f"the workspace is larger than {max_bytes} bytes")
        for start in range(0, len(packed), _PIECE_BYTES):
            await sink(packed[start : start + _PIECE_BYTES])
        return len(packed)

    async def restore(self, source: AsyncIterable[bytes]) -> None:
        self._check_alive()
        packed = b"".join([piece async for piece in source])
        self._check_alive()
        unpack(self._files, WORKING_DIR, packed)

    def reference(self) -> SandboxReference | None:
        return None

    def abandon(self) -> None:
        pass

    def forget_results(self) -> None:
        pass

    async def close(self) -> None:
        self._closed = True
        for process in list(self._machine.living.values()):
            if process is not None:
                process.end(KILLED)

    def _gone(self) -> SandboxLostError:
        return SandboxLostError(f"{self._id} is closed")

    def _check_alive(self) -> None:
        if self._closed:
            raise self._gone()
        if self._machine.fault is not None:
            raise self._machine.fault


class MemoryLease:
    """A lease of a MemorySandbox, or of the error that its start raises."""

    command_id = None

    def __init__(
        self,
        sandbox: MemorySandbox | SandboxError,
        renew: Callable[[], MemorySandbox] | None = None,
    ) -> None:
        self._sandbox = sandbox
        self._renew = renew

    async def sandbox(self) -> MemorySandbox:
        if isinstance(self._sandbox, SandboxError):
            raise self._sandbox
        if self._sandbox.closed and self._renew:
            self._sandbox = self._renew()
        return self._sandbox


class MemorySandboxes:
    """Leases fake sandboxes and records them, or fails with `failure`."""

    can_adopt = False

    def __init__(
        self,
        failure: SandboxError | None = None,
        make_sandbox: Callable[[], MemorySandbox] = MemorySandbox,
    ) -> None:
        self.leased: list[MemorySandbox] = []
        self._failure = failure
        self._make_sandbox = make_sandbox

    @property
    def opened(self) -> int:
        return len(self.leased)

    @property
    def closed(self) -> int:
        return sum(sandbox.closed for sandbox in self.leased)

    @asynccontextmanager
    async def lease(
        self,
        isolation: Isolation,
        on_decision: OnDecision | None = None,
        check_target: CheckTarget | None = None,
        owner: str = "",
        adopted: SandboxReference | None = None,
    ) -> AsyncIterator[MemoryLease]:
        """Lease a sandbox. Its programs open no connections, so `on_decision` is never called. No
        sandbox can be adopted."""
        failure = SandboxGoneError("it was in another process") if adopted else self._failure
        if failure is not None:
            yield MemoryLease(failure)
            return
        mine: list[MemorySandbox] = []

        def renew() -> MemorySandbox:
            mine.append(self._make_sandbox())
            self.leased.append(mine[-1])
            return mine[-1]

        try:
            yield MemoryLease(renew(), renew)
        finally:
            for sandbox in mine:
                await sandbox.close()


@asynccontextmanager
async def _in_time(timeout_s: float) -> AsyncIterator[None]:
    """Raise FileTimeoutError if the block takes longer than the timeout."""
    try:
        async with asyncio.timeout(timeout_s) as timeout:
            await asyncio.sleep(0)
            yield
    except TimeoutError as error:
        if not timeout.expired():
            raise
        raise FileTimeoutError(f"given up after {timeout_s:g} s") from error


def _first_state() -> FakeShellState:
    return FakeShellState(WORKING_DIR, dict(_ENVIRONMENT), set(_ENVIRONMENT))
