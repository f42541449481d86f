"""A sandbox without a computer: files and a small bash in memory, for fast and exact tests.

It passes the same conformance suite as the real ones. `sleep` takes no time, and a command that
would sleep beyond its timeout is timed out at once; a command that must last until it is killed can
read a FIFO that nobody writes. Shell it does not know is refused with UnsupportedShellError.
"""

import asyncio
import codecs
import itertools
import re
from collections.abc import AsyncIterable, AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any

from policies.isolation import Isolation
from policies.workspace import INPUT_DIR, OUTPUT_DIR, WORKING_DIR
from sandbox_runtime.errors import (
    FileMissingError,
    FileTooLargeError,
    NotARegularFileError,
    SandboxFileError,
    SandboxLostError,
    SandboxStartError,
)
from sandbox_runtime.sandbox import (
    Entry,
    EntryKind,
    ExecResult,
    Listing,
    OnOutput,
    OutputCap,
    ShellState,
    Sink,
    StreamName,
)
from tests.fakes.memory_files import Bytes, Device, Directory, File, Files
from tests.fakes.memory_machine import Io, Machine, Process, State
from tests.fakes.memory_programs import PROGRAMS
from tests.fakes.memory_shell import Shell

_CUT_CHARACTER = re.compile(rb"^[\x80-\xbf]{1,3}")
_PIECE_BYTES = 1 << 16
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/root"}
_ids = itertools.count(1)


class Captured:
    """One output stream of a command: its head as it comes, its tail, and how much there was."""

    def __init__(self, name: StreamName, cap: OutputCap, on_output: OnOutput | None) -> None:
        self.bytes = 0
        self._name = name
        self._on_output = on_output
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._lines = 0
        self._tail_bytes = cap.max_bytes // 2
        self._tail_lines = cap.max_lines // 2
        self._room = cap.max_bytes - self._tail_bytes
        self._room_lines = cap.max_lines - self._tail_lines
        self._head = b""
        self._tail = bytearray()
        self._open = True

    async def write(self, data: bytes) -> None:
        if not self._open:
            return
        self.bytes += len(data)
        self._lines += data.count(b"\n")
        head = b"" if self._tail else self._to_head(data)
        self._head += head
        self._tail += data[len(head) :]
        if len(self._tail) > 4 * self._tail_bytes:
            del self._tail[: -self._tail_bytes]
        if self._on_output and (text := self._decoder.decode(head)):
            await self._on_output(self._name, text)

    def _to_head(self, data: bytes) -> bytes:
        lines = data[: self._room].split(b"\n")
        head = b"\n".join(lines[: self._room_lines])
        if len(lines) > self._room_lines:
            head += b"\n" if self._room_lines else b""
        self._room -= len(head)
        self._room_lines -= head.count(b"\n")
        return head

    def close(self) -> None:
        """What a background process writes from now on is lost."""
        self._open = False

    @property
    def truncated(self) -> bool:
        return len(self._head) + len(self._shown_tail()) < self.bytes

    def _shown_tail(self) -> bytes:
        tail = bytes(self._tail[-self._tail_bytes :])
        if len(self._head) + len(tail) < self.bytes:
            tail = _CUT_CHARACTER.sub(b"", tail)
        lines = tail.split(b"\n")
        last = [lines.pop()] if lines[-1] == b"" else []
        return b"\n".join(lines[-self._tail_lines :] + last)

    def text(self) -> str:
        tail = self._shown_tail()
        left_out = self.bytes - len(self._head) - len(tail)
        if left_out == 0:
            return (self._head + tail).decode(errors="replace")
        whole_characters = codecs.getincrementaldecoder("utf-8")("replace")
        head = whole_characters.decode(self._head)
        separator = "" if not head or head.endswith("\n") else "\n"
        lines = self._lines - self._head.count(b"\n") - tail.count(b"\n")
        marker = f"[... {left_out} bytes, {lines} lines left out ...]"
        return f"{head}{separator}{marker}\n{tail.decode(errors='replace')}"


class MemorySandbox:
    """A Sandbox in memory."""

    def __init__(self, files: Mapping[str, bytes] | None = None) -> None:
        self._id = f"memory-{next(_ids)}"
        self._machine = Machine()
        self._closed = False
        self._state = _first_state()
        for directory in (WORKING_DIR, INPUT_DIR, OUTPUT_DIR, "/root", "/tmp", "/dev"):
            self._files.make_directories(directory)
        self._files.add("/dev/null", Device("null"))
        self._files.add("/dev/zero", Device("zero"))
        for path, data in (files or {}).items():
            self._files.make_directories(path.rpartition("/")[0] or "/")
            self._files.add(path, File(bytearray(data)))

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
        stdin: bytes = b"",
        cap: OutputCap = OutputCap(),
        shell_state: ShellState = "snapshot",
        on_output: OnOutput | None = None,
    ) -> ExecResult:
        self._check_alive()
        process = Process(self._machine, timeout_s)
        state = self._state.copy() if shell_state == "snapshot" else _first_state()
        state.variables |= dict(env or {})
        state.exported |= set(env or {})
        stdout = Captured("stdout", cap, on_output)
        stderr = Captured("stderr", cap, on_output)
        shell = Shell(process, state, PROGRAMS)
        io = Io(Bytes(stdin), stdout, stderr)
        exit_code = await self._finish(process, _run(shell, command, cwd, io))
        stdout.close()
        stderr.close()
        if shell_state == "snapshot" and not cwd and not env and not process.signal:
            self._state = state
        return ExecResult(
            exit_code=exit_code,
            stdout=stdout.text(),
            stderr=stderr.text(),
            timed_out=process.timed_out,
            truncated=stdout.truncated or stderr.truncated,
            duration_s=process.used_s,
            stdout_bytes=stdout.bytes,
            stderr_bytes=stderr.bytes,
        )

    async def _finish(self, process: Process, work: Coroutine[Any, Any, int]) -> int:
        """Run a command to its end; who stops waiting for it kills it."""
        task = process.start(work)
        try:
            await asyncio.wait({task})
        finally:
            if not task.done() or process.timed_out:
                process.end_session()
        if self._closed:
            raise SandboxLostError(f"{self._id} is closed")
        return 128 + process.signal if process.signal else task.result()

    async def put(self, path: str, source: AsyncIterable[bytes]) -> int:
        self._check_alive()
        data = bytearray()
        async for piece in source:
            data += piece
            await asyncio.sleep(0)
        self._check_alive()
        place = self._files.locate(path, follow=False)
        old = self._files.nodes.get(place)
        if isinstance(old, Directory):
            raise NotARegularFileError(f"{path} is a directory")
        try:
            self._files.make_directories(place.rpartition("/")[0] or "/")
        except OSError as error:
            raise SandboxFileError(f"{path}: {error.strerror}") from error
        self._files.nodes[place] = File(data, old.mode if isinstance(old, File) else 0o644)
        return len(data)

    async def get(self, path: str, sink: Sink, *, max_bytes: int) -> int:
        self._check_alive()
        node = self._files.find(path, follow=False)
        if node is None:
            raise FileMissingError(f"{path} does not exist")
        if not isinstance(node, File):
            raise NotARegularFileError(f"{path} is not a regular file")
        if len(node.data) > max_bytes:
            raise FileTooLargeError(f"{path} has {len(node.data)} bytes")
        data = bytes(node.data)
        for start in range(0, len(data), _PIECE_BYTES):
            await sink(data[start : start + _PIECE_BYTES])
        return len(data)

    async def list(
        self, path: str, *, max_entries: int = 10_000, max_depth: int | None = None
    ) -> Listing:
        self._check_alive()
        node = self._files.find(path, follow=False)
        if node is None:
            raise FileMissingError(f"{path} does not exist")
        if not isinstance(node, Directory):
            raise NotARegularFileError(f"{path} is no directory")
        names = self._files.below(path)
        if max_depth is not None:
            names = [name for name in names if name.count("/") < max_depth]
        entries = tuple(self._entry(path, name) for name in names[:max_entries])
        return Listing(entries, truncated=len(names) > max_entries)

    def _entry(self, path: str, name: str) -> Entry:
        node = self._files.find(f"{path}/{name}", follow=False)
        kind: EntryKind = "directory" if isinstance(node, Directory) else "other"
        if isinstance(node, File):
            return Entry(name, "file", len(node.data))
        return Entry(name, kind, 0)

    async def close(self) -> None:
        self._closed = True
        for process in list(self._machine.living.values()):
            if process is not None:
                process.end()

    def _check_alive(self) -> None:
        if self._closed:
            raise SandboxLostError(f"{self._id} is closed")
        if self._machine.fault is not None:
            raise self._machine.fault


class MemoryLease:
    """A claim to a MemorySandbox, or to the reason why there is none."""

    def __init__(self, sandbox: MemorySandbox | SandboxStartError) -> None:
        self._sandbox = sandbox

    async def sandbox(self) -> MemorySandbox:
        if isinstance(self._sandbox, SandboxStartError):
            raise self._sandbox
        return self._sandbox


class MemorySandboxes:
    """A Sandboxes that counts what it lends, or fails as it is told."""

    def __init__(self, failure: SandboxStartError | None = None) -> None:
        self.lent: list[MemorySandbox] = []
        self._failure = failure

    @property
    def opened(self) -> int:
        return len(self.lent)

    @property
    def closed(self) -> int:
        return sum(sandbox.closed for sandbox in self.lent)

    @asynccontextmanager
    async def lease(self, isolation: Isolation) -> AsyncIterator[MemoryLease]:
        if self._failure is not None:
            yield MemoryLease(self._failure)
            return
        sandbox = MemorySandbox()
        self.lent.append(sandbox)
        try:
            yield MemoryLease(sandbox)
        finally:
            await sandbox.close()


def _first_state() -> State:
    return State(WORKING_DIR, dict(_ENVIRONMENT), set(_ENVIRONMENT))


async def _run(shell: Shell, command: str, cwd: str | None, io: Io) -> int:
    if cwd is not None and await shell.call(["cd", cwd], io) != 0:
        return 1
    return await shell.run_script(command, io)
