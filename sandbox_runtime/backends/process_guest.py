"""A guest that is a child process of ours: one socket for its input and output."""

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
from sandbox_runtime.backends.base import Pressure, Take
from sandbox_runtime.backends.byte_stream import Duplex, StderrTail
from sandbox_runtime.backends.cgroups import Cgroup
from sandbox_runtime.errors import SandboxStartError
from sandbox_runtime.protocol import ProtocolError

logger = logging.getLogger(__name__)

_STDERR_WAIT_S = 1.0
_END_WAIT_S = 10.0


class StderrReader(asyncio.Protocol):
    """Reads a process's standard error to its end; too much is for `refuse`."""

    def __init__(self, refuse: Callable[[ProtocolError], None]) -> None:
        self.complete = asyncio.Event()
        self.tail = StderrTail()
        self._refuse = refuse

    def data_received(self, data: bytes) -> None:
        try:
            self.tail.add(data)
        except ProtocolError as error:
            self._refuse(error)

    def eof_received(self) -> None:
        self.complete.set()

    async def wait(self) -> None:
        """Until all is read; not for long, as somebody may hold the pipe open."""
        try:
            async with asyncio.timeout(_STDERR_WAIT_S):
                await self.complete.wait()
        except TimeoutError:
            return


Stderr = tuple[asyncio.ReadTransport, StderrReader]


class ProcessGuest:
    """A child process in its own session and, where there are any, its own cgroup."""

    def __init__(
        self,
        id: str,
        process: subprocess.Popen[bytes],
        pidfd: int,
        stdio: Duplex,
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

    async def listen(self, take: Take) -> None:
        await self._stdio.listen(take)
        await self._stderr_reader.wait()

    async def limit(self, isolation: Isolation) -> None:
        if self._cgroup is None:
            raise SandboxStartError(
                f"the limits of sandbox {self._id} cannot be changed: no cgroup can be written here"
            )
        self._cgroup.limit(isolation)

    def pressure(self) -> Pressure | None:
        return self._cgroup.pressure() if self._cgroup else None

    def last_words(self) -> str:
        kills = self._cgroup.pressure().oom_kills if self._cgroup else 0
        memory = f"memory ran out and {kills} of its processes were killed" if kills else ""
        return "\n".join(filter(None, (self._stderr_reader.tail.text(), memory)))

    async def kill(self) -> bool:
        if self._process.returncode is None:
            # The group, since bwrap's child is not yet tied to its parent while it sets up.
            os.killpg(self._process.pid, signal.SIGKILL)
        try:
            async with asyncio.timeout(_END_WAIT_S):
                await self._ended.wait()
        except TimeoutError:
            logger.warning("sandbox %s: process %d does not end", self._id, self._process.pid)
        self._stdio.abort()
        # Process 1 of the sandbox holds the other end: its end is the end of all.
        await self._stderr_reader.wait()
        self._stderr.close()
        if self._cgroup:
            await self._cgroup.remove()
        return self._ended.is_set() and self._stderr_reader.complete.is_set()

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

    Call it in a thread that lives as long as the guest: the kernel ends one with the other.
    """
    with ExitStack() as undo, ExitStack() as theirs:
        ours, stdio = await _connect_stdio(undo, theirs)
        stderr, write_end = await _connect_stderr(ours, undo, theirs)
        # Nothing below waits, so no cancellation leaves a process without an owner.
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


async def _connect_stdio(undo: ExitStack, theirs: ExitStack) -> tuple[Duplex, int]:
    """Our end of a socket, and theirs."""
    ours, stdio = socket.socketpair()
    theirs.enter_context(stdio)
    connect = asyncio.get_running_loop().create_unix_connection
    _, duplex = await connect(Duplex, sock=ours)
    undo.callback(duplex.abort)
    return duplex, stdio.fileno()


async def _connect_stderr(stdio: Duplex, undo: ExitStack, theirs: ExitStack) -> tuple[Stderr, int]:
    """Our end of a pipe, and theirs."""
    read_end, write_end = os.pipe()
    theirs.callback(os.close, write_end)
    pipe = open(read_end, "rb", buffering=0)  # noqa: ASYNC230, PTH123, SIM115 - no file, no path
    connect = asyncio.get_running_loop().connect_read_pipe
    transport, reader = await connect(lambda: StderrReader(stdio.refuse), pipe)
    undo.callback(transport.close)
    return (transport, reader), write_end
