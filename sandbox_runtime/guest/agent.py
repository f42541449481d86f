"""The agent: one loop that serves the host over standard input and output.

It ends, and with it everything in the sandbox, when its input does: a dead host leaves nothing
running.
"""

from __future__ import annotations

import errno
import heapq
import os
import selectors
import signal
import sys
import time
from collections import deque

from sandbox_runtime.guest.commands import Command, Shell
from sandbox_runtime.guest.files import Get, Put, Walk
from sandbox_runtime.protocol import (
    CREDIT,
    DATA,
    END,
    EOF,
    HELLO,
    MAX_DATA_BYTES,
    MAX_OPEN_BYTES,
    OPEN,
    PING,
    PONG,
    RESET,
    VERSION,
    WINDOW,
    WINDOW_BYTES,
    Decoder,
    frame,
    json_frame,
    parse_object,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

OPERATIONS = {"exec": Command, "put": Put, "get": Get, "list": Walk}
MAX_UNSENT_BYTES = 1 << 20
"""What may wait for the host to read before operations are asked for more."""


class Agent:
    """Frames in, operations run side by side, frames out."""

    def __init__(self, env: dict[str, str]) -> None:
        self.shell = Shell(env)
        self.children: dict[int, Callable[[int, float, int], None]] = {}
        """By pid: who is told exit code, processor seconds and peak memory in bytes."""
        self._selector = selectors.DefaultSelector()
        self._decoder = Decoder(MAX_OPEN_BYTES)
        self._operations: dict[int, Any] = {}
        self._credit: dict[int, int] = {}
        self._ready: deque[int] = deque()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._timer_count = 0
        self._unsent = bytearray()
        self._writing = False

    # What operations ask of the agent

    def watch(self, fd: int, callback: Callable[[], object]) -> None:
        """Call back whenever `fd` can be read."""
        self._selector.register(fd, selectors.EVENT_READ, callback)

    def unwatch(self, fd: int) -> None:
        """Stop watching `fd`."""
        self._selector.unregister(fd)

    def after(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Call back once, later."""
        self._timer_count += 1
        heapq.heappush(self._timers, (time.monotonic() + delay_s, self._timer_count, callback))

    def pump(self, stream: int) -> None:
        """The operation has something to send."""
        if stream not in self._ready:
            self._ready.append(stream)

    def finish(self, stream: int, report: dict[str, object]) -> None:
        """The operation is over."""
        if stream in self._operations:
            del self._operations[stream], self._credit[stream]
            self._send(json_frame(stream, END, report))

    def fail(self, stream: int, code: str, message: str) -> None:
        """The operation cannot be done."""
        self.finish(stream, {"error": code, "message": message[:1000]})

    # The loop

    def serve(self) -> None:
        """Serve until the host closes our input."""
        read, write = os.pipe()
        for fd in (0, 1, read, write):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.watch(read, lambda: self._reap(read))
        self.watch(0, self._receive)
        self._send(json_frame(0, HELLO, {"version": VERSION, "python": sys.version.split()[0]}))
        while True:
            self._pump_all()
            self._flush()
            timeout = None
            if self._timers:
                timeout = max(0.0, self._timers[0][0] - time.monotonic())
            for key, _ in self._selector.select(timeout):
                key.data()
            while self._timers and self._timers[0][0] <= time.monotonic():
                heapq.heappop(self._timers)[2]()

    def _receive(self) -> None:
        data = os.read(0, 1 << 20)
        if not data:
            os._exit(0)
        for stream, kind, payload in self._decoder.feed(data):
            self._handle(stream, kind, payload)

    def _handle(self, stream: int, kind: int, payload: bytes) -> None:
        operation = self._operations.get(stream)
        if kind == OPEN:
            self._open(stream, parse_object(payload))
        elif kind == PING:
            self._send(frame(0, PONG))
        elif operation is None:
            pass  # it ended while the host was still writing
        elif kind in (DATA, EOF):
            self._feed(stream, operation, kind, payload)
        elif kind == WINDOW:
            self._credit[stream] += CREDIT.unpack(payload)[0]
            self.pump(stream)
        elif kind == RESET:
            del self._operations[stream], self._credit[stream]
            operation.reset()

    def _feed(self, stream: int, operation: Any, kind: int, payload: bytes) -> None:
        try:
            if kind == EOF:
                operation.finish_input()
            else:
                operation.feed(payload)
                self._send(frame(stream, WINDOW, CREDIT.pack(len(payload))))
        except (OSError, ValueError) as error:
            operation.reset()
            self.fail(stream, "io", str(error))

    def _open(self, stream: int, request: dict[str, Any]) -> None:
        self._operations[stream] = None
        self._credit[stream] = WINDOW_BYTES
        try:
            operation = OPERATIONS[request["op"]](self, stream, request)
        except (OSError, OverflowError, ValueError) as error:
            self.fail(stream, _code(error), str(error))
            return
        if stream in self._operations:
            self._operations[stream] = operation

    def _pump_all(self) -> None:
        while self._ready and len(self._unsent) < MAX_UNSENT_BYTES:
            stream = self._ready.popleft()
            if piece := self._next_piece(stream):
                self._credit[stream] -= len(piece[1])
                self._send(frame(stream, *piece))
                self._ready.append(stream)

    def _next_piece(self, stream: int) -> tuple[int, bytes] | None:
        operation, credit = self._operations.get(stream), self._credit.get(stream, 0)
        if not operation or not credit:
            return None
        try:
            piece: tuple[int, bytes] | None = operation.pump(min(credit, MAX_DATA_BYTES))
        except OSError as error:  # the disk itself fails
            operation.reset()
            self.fail(stream, "io", str(error))
            return None
        return piece

    def _send(self, data: bytes) -> None:
        self._unsent += data

    def _flush(self) -> None:
        """Write what the host takes, and ask to be told when it takes more."""
        try:
            while self._unsent:
                del self._unsent[: os.write(1, self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            os._exit(0)
        if bool(self._unsent) != self._writing:
            self._writing = bool(self._unsent)
            self._watch_output()

    def _watch_output(self) -> None:
        # Input and output are one socket or two pipes; a second number makes both cases one.
        if self._writing:
            self._output = os.dup(1)
            self._selector.register(self._output, selectors.EVENT_WRITE, lambda: None)
        else:
            self._selector.unregister(self._output)
            os.close(self._output)

    def _reap(self, wakeup: int) -> None:
        """Collect the dead: ours, and as process 1 everyone's."""
        os.read(wakeup, 4096)
        while True:
            try:
                pid, status, used = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            ended = self.children.pop(pid, None)
            if ended:
                signalled = os.WIFSIGNALED(status)
                code = 128 + os.WTERMSIG(status) if signalled else os.WEXITSTATUS(status)
                ended(code, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024)


def _code(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "missing"
    if isinstance(error, OverflowError):
        return "too_large"
    if isinstance(error, (IsADirectoryError, NotADirectoryError)):
        return "not_regular"
    if isinstance(error, OSError) and error.errno in (errno.ELOOP, errno.ENXIO):
        return "not_regular"  # a link, or a FIFO or socket without a peer
    return "io"


def main(config: dict[str, Any]) -> None:
    """Prepare the sandbox as told and serve."""
    env = {**os.environ, **config["env"]}
    if config["rlimits"]:
        import resource  # noqa: PLC0415 - not needed where the backend limits by cgroup

        for name, value in config["rlimits"].items():
            resource.setrlimit(getattr(resource, name), (value, value))
    for directory in config["directories"]:
        os.makedirs(directory, exist_ok=True)
    os.chdir(config["working_dir"])
    Agent(env).serve()
