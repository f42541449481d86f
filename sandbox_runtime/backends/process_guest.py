"""A guest that is a child process of the proxy, with one socket for its input and output."""

import asyncio
import logging
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from policies.isolation import Isolation
from sandbox_runtime.backends.base import DataCallback, LimitEvents
from sandbox_runtime.backends.byte_stream import ByteStreamProtocol, StderrTail
from sandbox_runtime.backends.cgroups import Cgroup
from sandbox_runtime.errors import SandboxStartError
from sandbox_runtime.protocol import ProtocolError

logger = logging.getLogger(__name__)

_STDERR_WAIT_S = 1.0
_END_WAIT_S = 10.0


class StderrReader(asyncio.Protocol):
    """Reads a process's standard error to its end; calls `fail` if the process writes too much."""

    def __init__(self, fail: Callable[[ProtocolError], None]) -> None:
        self.complete = asyncio.Event()
        self.tail = StderrTail()
        self._fail = fail

    def data_received(self, data: bytes) -> None:
        try:
            self.tail.add(data)
        except ProtocolError as error:
            self._fail(error)

    def eof_received(self) -> None:
        self.complete.set()

    async def wait(self) -> None:
        """Wait until standard error is closed, but at most _STDERR_WAIT_S: a descendant of the
        process may keep it open."""
        try:
            async with asyncio.timeout(_STDERR_WAIT_S):
                await self.complete.wait()
        except TimeoutError:
            return


Stderr = tuple[asyncio.ReadTransport, StderrReader]


class ProcessGuest:
    """A guest in a child process, which has its own session and, if the host has cgroups, its own
    cgroup."""

    def __init__(
        self,
        id: str,
        process: subprocess.Popen[bytes],
        pidfd: int,
        stdio: ByteStreamProtocol,
        stderr: Stderr,
        cgroup: Cgroup | None,
    ) -> None:
        self._id = id
        self._process = process
        self._stdio = stdio
        self._stderr, self._stderr_reader = stderr
        self._cgroup = cgroup
        self._ended = asyncio.Event()
        self._pidfd = pidfd
        asyncio.get_running_loop().add_reader(self._pidfd, self._reap)

    @property
    def id(self) -> str:
        return self._id

    @property
    def pid(self) -> int:
        return self._process.pid

    async def drain(self) -> None:
        try:
            await self._stdio.drain()
        except BrokenPipeError as error:
            raise BrokenPipeError(f"sandbox {self._id} is gone") from error

    def write(self, data: bytes) -> None:
        self._stdio.write(data)

    def write_control(self, data: bytes) -> None:
        self._stdio.write_control(data)

    async def receive(self, on_data: DataCallback) -> None:
        await self._stdio.receive(on_data)
        await self._stderr_reader.wait()

    async def resize(self, isolation: Isolation) -> None:
        if self._cgroup is None:
            raise SandboxStartError(
                f"the limits of sandbox {self._id} cannot be changed: no cgroup is writable here"
            )
        self._cgroup.set_limits(isolation)

    def limit_events(self) -> LimitEvents | None:
        return self._cgroup.limit_events() if self._cgroup else None

    def reference(self) -> None:
        return None

    def abandon(self) -> None:
        pass

    def diagnostics(self) -> str:
        kills = self._cgroup.limit_events().oom_kills if self._cgroup else 0
        memory = f"memory ran out and {kills} of its processes were killed" if kills else ""
        return "\n".join(filter(None, (self._stderr_reader.tail.text(), memory)))

    async def kill(self) -> None:
        if self._process.returncode is None:
            # The whole group, because bwrap's child outlives bwrap until the sandbox is set up.
            os.killpg(self._process.pid, signal.SIGKILL)
        try:
            async with asyncio.timeout(_END_WAIT_S):
                await self._ended.wait()
        except TimeoutError:
            logger.warning(
                "sandbox %s: process %d does not end after SIGKILL", self._id, self._process.pid
            )
        self._stdio.abort()
        # Standard error is closed once process 1 of the sandbox, which has its other end open, has
        # ended. All other processes of the sandbox end with process 1.
        await self._stderr_reader.wait()
        self._stderr.close()
        if self._cgroup:
            await self._cgroup.remove()

    def _reap(self) -> None:
        if self._process.poll() is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._ended.set()


async def spawn(
    id: str,
    command: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    pass_fds: Sequence[int],
    cgroup: Cgroup | None,
) -> ProcessGuest:
    """Start `command` as a guest. Raises SandboxStartError.

    The calling thread must live as long as the guest: bwrap's --die-with-parent ends the guest with
    the thread.
    """
    with ExitStack() as undo, ExitStack() as child_ends:
        ours, stdio = await _connect_stdio(undo, child_ends)
        stderr, write_end = await _connect_stderr(ours, undo, child_ends)
        # Nothing below awaits, so a cancellation cannot leave a process without an owner.
        try:
            process = subprocess.Popen(  # noqa: ASYNC220 - takes 2 ms, and see the docstring
                command,
                stdin=stdio,
                stdout=stdio,
                stderr=write_end,
                cwd=cwd,
                env=env,
                pass_fds=pass_fds,
                start_new_session=True,
            )
            undo.callback(process.wait)
            undo.callback(process.kill)
            pidfd = os.pidfd_open(process.pid)
        except OSError as error:
            raise SandboxStartError(f"cannot start {command[0]!r}: {error}") from error
        undo.pop_all()
    return ProcessGuest(id, process, pidfd, ours, stderr, cgroup)


async def _connect_stdio(undo: ExitStack, child_ends: ExitStack) -> tuple[ByteStreamProtocol, int]:
    """Return our end of a socket, and the descriptor of the child's end."""
    ours, stdio = socket.socketpair()
    child_ends.enter_context(stdio)
    connect = asyncio.get_running_loop().create_unix_connection
    _, stream = await connect(ByteStreamProtocol, sock=ours)
    undo.callback(stream.abort)
    return stream, stdio.fileno()


async def _connect_stderr(
    stdio: ByteStreamProtocol, undo: ExitStack, child_ends: ExitStack
) -> tuple[Stderr, int]:
    """Return our end of a pipe, and the descriptor of the child's end."""
    read_end, write_end = os.pipe()
    child_ends.callback(os.close, write_end)
    pipe = open(read_end, "rb", buffering=0)  # noqa: ASYNC230, PTH123, SIM115 - no file, no path
    connect = asyncio.get_running_loop().connect_read_pipe
    transport, reader = await connect(lambda: StderrReader(stdio.fail), pipe)
    undo.callback(transport.close)
    return (transport, reader), write_end
