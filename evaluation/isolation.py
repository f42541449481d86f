"""Runs a grading in a process of its own, with a timeout and a memory limit, so that no answer can
crash or hang the report. Defines the errors of graders.

A server (evaluation/isolation_server.py) forks the processes of gradings. It starts with the first
grading and ends with this process. multiprocessing's own server would import the main script again
for each grading, and a script without the line `if __name__ == "__main__":` would run again.
"""

import atexit
import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal, TypeVar

TIMEOUT_S = 30.0
"""Timeout of one grading, in seconds."""
START_TIMEOUT_S = 120.0
"""Maximum time until the process of a grading starts. The first one waits for the imports of the
server."""
MAX_MEMORY_BYTES = 4 * 2**30
"""Maximum address space of the process of one grading."""
_SERVER_PROGRAM = """
import sys
sys.path[:] = sys.argv[3:]
from evaluation.isolation_server import serve
serve(int(sys.argv[1]), sys.argv[2].split())
"""
_Result = TypeVar("_Result")


ErrorKind = Literal["ungradable", "judge failure", "grader failure"]


class GraderError(Exception):
    """The grading of one answer exceeded its timeout or its memory, or failed.

    The answer counts as wrong, so that an answer that crashes its grader is not left out of the
    accuracy. After an error of a subclass, the answer has no grade.
    """

    kind: ErrorKind = "grader failure"

    def __init__(self, reason: str) -> None:
        """Make an error whose message is its kind and the reason."""
        super().__init__(f"{self.kind}: {reason}")
        self.reason = reason


class UngradableError(GraderError):
    """No answer to the sample can be graded here: a package or a data file of the grader is
    missing, the grader cannot read the sample, or the report has no judge."""

    kind: ErrorKind = "ungradable"


class UnreadableSampleError(UngradableError):
    """The grader cannot read the right answer of the sample."""


@dataclass(frozen=True, slots=True)
class GradingRequest:
    """A request to the process that grades: the function call to make, and the parts of this
    process's state that the call depends on."""

    call: bytes
    """The function and its arguments, pickled."""
    directory: str
    """The working directory."""
    path: Sequence[str]
    """`sys.path`."""
    argv: Sequence[str]
    """`sys.argv`."""


class _Server:
    """The server of the gradings. The first grading starts it, and the next grading starts it again
    if it has ended."""

    def __init__(self) -> None:
        self.modules: Sequence[str] = ()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def fork(self, connection: Connection, status: Connection) -> None:
        """Let the server fork a process that reads a request from `connection`. The server reports
        the start and the exit code of the process to `status`, and kills it when the other end of
        `status` is closed."""
        fds = [connection.fileno(), status.fileno()]
        with self._lock:
            try:
                socket.send_fds(self._control or self._start(), [b"0"], fds)
            except ConnectionError:  # the server has ended, and no longer kills its processes
                self._kill()
                socket.send_fds(self._start(), [b"0"], fds)

    def _start(self) -> socket.socket:
        """Start the server, and return the control socket, over which `fork` sends the server the
        file descriptors of each grading's two connections. The server ends when this socket is
        closed, at the latest when this process ends."""
        self._control, remote = socket.socketpair()
        with remote:
            arguments = [str(remote.fileno()), " ".join(self.modules), *sys.path]
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SERVER_PROGRAM, *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=[remote.fileno()],
                start_new_session=True,  # Ctrl-C interrupts this process only
            )
        atexit.register(self._stop)
        return self._control

    def _kill(self) -> None:
        if self._process:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # none is left
                os.killpg(self._process.pid, signal.SIGKILL)
        self._stop()

    def _stop(self) -> None:
        """Close the control socket, and wait until the server has ended."""
        if self._control and self._process:
            self._control.close()
            self._process.wait()


_server = _Server()


def preload(modules: Iterable[str]) -> None:
    """Import modules once for all gradings, if they are installed. Has an effect only before the
    first grading."""
    _server.modules = tuple(modules)


def run_isolated(
    function: Callable[..., _Result], *arguments: Any, timeout_s: float = TIMEOUT_S
) -> _Result:
    """Call a function in a new process and return its result. The process imports the function's
    module by its name, so the function must not be defined in the main script.

    The function's standard output and its log records are discarded. Raises UngradableError if a
    package is not installed or if the function raises it, and GraderError if there is no result for
    another reason.
    """
    call = pickle.dumps((function, arguments))
    request = GradingRequest(call, os.getcwd(), sys.path, sys.argv)  # noqa: PTH109 - a string
    connection, remote_connection = multiprocessing.Pipe()
    status, remote_status = multiprocessing.Pipe()
    with connection, status:
        with remote_connection, remote_status:
            _server.fork(remote_connection, remote_status)
        kind, result = _outcome(request, connection, status, timeout_s)
    if kind == "ungradable":
        raise UngradableError(result)
    if kind == "failed":
        raise GraderError(result)
    value: _Result = result
    return value


def _outcome(
    request: GradingRequest, connection: Connection, status: Connection, timeout_s: float
) -> tuple[str, Any]:
    try:
        if not status.poll(START_TIMEOUT_S):
            return "failed", f"the process has not started within {START_TIMEOUT_S:g} s"
        status.recv()
        try:
            connection.send(request)
            if connection.poll(timeout_s):
                kind, result = connection.recv()
                return kind, result
        except (EOFError, ConnectionError):
            if status.poll(timeout_s):
                return "failed", f"the process ended with exit code {status.recv()}"
    except (EOFError, ConnectionError):
        return "failed", "the server of the gradings ended"
    return "failed", f"no result within {timeout_s:g} s"
