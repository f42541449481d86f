"""The agent: one loop that serves the host over standard input and output.

It ends, and with it everything in the sandbox, when its input does, or when the host has been
silent for too long: a dead host leaves nothing running.
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

from sandbox_runtime.guest.attachments import Attach, Exec, Stop, UnknownCommand
from sandbox_runtime.guest.commands import Outcomes
from sandbox_runtime.guest.files import Get, Put, Walk
from sandbox_runtime.guest.forwarding import Forwarding
from sandbox_runtime.guest.pipes import Pipe
from sandbox_runtime.guest.pressure import Pressure
from sandbox_runtime.guest.shell import Shell
from sandbox_runtime.protocol import (
    ACK,
    CREDIT,
    DATA,
    END,
    EOF,
    FIRST_WINDOW_BYTES,
    HELLO,
    MAX_DATA_BYTES,
    MAX_OPEN_BYTES,
    OPEN,
    PING,
    PONG,
    RESET,
    VERSION,
    WINDOW,
    Decoder,
    frame,
    json_frame,
    parse_object,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

OPERATIONS = {
    "exec": Exec,
    "attach": Attach,
    "stop": Stop,
    "pipe": Pipe,
    "put": Put,
    "get": Get,
    "list": Walk,
}
PR_SET_DUMPABLE = 4
MAX_UNSENT_BYTES = 1 << 20
"""What may wait for the host to read before operations are asked for more."""


class Agent:
    """Frames in, operations run side by side, frames out."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.env: dict[str, str] = {**os.environ, **config["env"]}
        self.shell = Shell(self.env)
        self.outcomes = Outcomes()
        self.pressure = Pressure(config["pressure"])
        self.children: dict[int, Callable[[int, float, int], None]] = {}
        """By pid: who is told exit code, processor seconds and peak memory in bytes."""
        self._config = config
        self._selector = selectors.DefaultSelector()
        self._decoder = Decoder(MAX_OPEN_BYTES)
        self._operations: dict[int, Any] = {}
        self._credit: dict[int, int] = {}
        self._ready: deque[int] = deque()
        self._timers: list[tuple[float, int]] = []
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._timer_count = 0
        self._last_opened = 0
        self._heard = time.monotonic()
        self._unsent = bytearray()
        self._output = -1

    # What operations ask of the agent

    def watch(
        self,
        fd: int,
        read: Callable[[], object] | None = None,
        write: Callable[[], object] | None = None,
    ) -> None:
        """From now on call back when `fd` can be read, when it can be written."""
        events = (selectors.EVENT_READ if read else 0) | (selectors.EVENT_WRITE if write else 0)
        if not events:
            self.unwatch(fd)
        elif fd in self._selector.get_map():
            self._selector.modify(fd, events, (read, write))
        else:
            self._selector.register(fd, events, (read, write))

    def unwatch(self, fd: int) -> None:
        """Stop watching `fd`, if it was watched."""
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

    def after(self, delay_s: float, callback: Callable[[], None]) -> int:
        """Call back once, later; returns what `cancel` takes."""
        self._timer_count += 1
        self._callbacks[self._timer_count] = callback
        heapq.heappush(self._timers, (time.monotonic() + delay_s, self._timer_count))
        return self._timer_count

    def cancel(self, timer: int) -> None:
        """Do not call back."""
        self._callbacks.pop(timer, None)

    def pump(self, stream: int) -> None:
        """The operation has something to send."""
        if stream not in self._ready:
            self._ready.append(stream)

    def credit(self, stream: int, count: int) -> None:
        """That much of the stream's input has been dealt with."""
        if stream in self._operations:
            self._send(frame(stream, WINDOW, CREDIT.pack(count)))

    def finish(self, stream: int, report: dict[str, object]) -> None:
        """The operation is over."""
        if stream in self._operations:
            self.leave(stream)
            self._send(json_frame(stream, END, report))

    def fail(self, stream: int, code: str, message: str) -> None:
        """The operation cannot be done."""
        self.finish(stream, {"error": code, "message": message[:1000]})

    # What connections of programs ask of it

    def open(self, make: Callable[[int], Any]) -> None:
        """A stream of ours, for what `make` makes of its number."""
        self._last_opened += 2
        stream = self._last_opened
        self._credit[stream] = FIRST_WINDOW_BYTES
        self._send(frame(stream, OPEN, b"{}"))
        self._operations[stream] = make(stream)

    def send_end(self, stream: int) -> None:
        """Nothing more comes from inside."""
        self._send(frame(stream, EOF))

    def send_reset(self, stream: int) -> None:
        """It has failed."""
        self.leave(stream)
        self._send(frame(stream, RESET))

    def leave(self, stream: int) -> None:
        """It is over for both sides."""
        self._operations.pop(stream, None)
        self._credit.pop(stream, None)

    # The loop

    def serve(self) -> None:
        """Serve until the host closes our input."""
        read, write = os.pipe()
        for fd in (0, 1, read, write):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # Process 1 gets the signals it has a handler for, and Python has one for this.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.watch(read, read=lambda: self._reap(read))
        self.watch(0, read=self._receive)
        hello = {"version": VERSION, "agent": "python " + sys.version.split()[0]}
        self._send(json_frame(0, HELLO, hello))
        self._flush()
        self._prepare()
        while True:
            self._pump_all()
            self._flush()
            self._run_due(self._selector.select(self._patience()))

    def _prepare(self) -> None:
        """What the first command need not wait for."""
        _hide()
        if self._config["egress_port"]:
            Forwarding(self, self._config["egress_port"])
        if self._config["watchdog_s"]:
            self._watch_host()
        if self._config["lifetime_s"]:
            self.after(self._config["lifetime_s"], lambda: os._exit(0))

    def _watch_host(self) -> None:
        patience = self._config["watchdog_s"]
        if time.monotonic() - self._heard > patience:
            os._exit(0)
        self.after(patience / 4, self._watch_host)

    def _patience(self) -> float | None:
        while self._timers and self._timers[0][1] not in self._callbacks:
            heapq.heappop(self._timers)  # cancelled
        return max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None

    def _run_due(self, events: list[Any]) -> None:
        for key, happened in events:
            read, write = key.data
            for event, callback in ((selectors.EVENT_READ, read), (selectors.EVENT_WRITE, write)):
                # What was called before may have closed it, or want it no more.
                is_current = self._selector.get_map().get(key.fd) is key
                if happened & event and callback and is_current:
                    callback()
        while self._timers and self._timers[0][0] <= time.monotonic():
            callback = self._callbacks.pop(heapq.heappop(self._timers)[1], None)
            if callback:
                callback()

    def _receive(self) -> None:
        data = os.read(0, 1 << 20)
        if not data:
            os._exit(0)
        self._heard = time.monotonic()
        for stream, kind, payload in self._decoder.feed(data):
            self._handle(stream, kind, payload)

    def _handle(self, stream: int, kind: int, payload: bytes) -> None:
        operation = self._operations.get(stream)
        if kind == OPEN:
            self._open(stream, parse_object(payload))
        elif kind == PING:
            self._send(frame(0, PONG))
        elif kind == ACK:
            self.outcomes.acknowledge(payload.decode())
        elif operation is None:
            pass  # it ended while the host was still writing
        elif kind in (DATA, EOF):
            self._feed(stream, operation, kind, payload)
        elif kind == WINDOW:
            self._credit[stream] += CREDIT.unpack(payload)[0]
            self.pump(stream)
        elif kind == RESET:
            self.leave(stream)
            operation.reset()

    def _feed(self, stream: int, operation: Any, kind: int, payload: bytes) -> None:
        try:
            if kind == EOF:
                operation.finish_input()
            else:
                operation.feed(payload)
        except (OSError, ValueError) as error:
            operation.reset()
            self.fail(stream, "io", str(error))

    def _open(self, stream: int, request: dict[str, Any]) -> None:
        self._operations[stream] = None
        self._credit[stream] = FIRST_WINDOW_BYTES
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
        # Input and output are one socket or two pipes; a second number makes both cases one.
        if self._unsent and self._output < 0:
            self._output = os.dup(1)
            self.watch(self._output, write=_again)
        elif not self._unsent and self._output >= 0:
            self.unwatch(self._output)
            os.close(self._output)
            self._output = -1

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


def _again() -> None:
    """Whatever woke us, the loop flushes."""


def _hide() -> None:
    """Keep commands, which may be of our user, from our memory and our descriptors."""
    try:
        import ctypes  # noqa: PLC0415 - takes a while, and some builds of Python have none

        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    except (ImportError, OSError, AttributeError):
        pass  # they can then break their own sandbox, which the host takes for what it is


def _code(error: Exception) -> str:
    if isinstance(error, UnknownCommand):
        return "unknown"
    if isinstance(error, FileNotFoundError):
        return "missing"
    if isinstance(error, FileExistsError):
        return "exists"
    if isinstance(error, OverflowError):
        return "too_large"
    if isinstance(error, (IsADirectoryError, NotADirectoryError)):
        return "not_regular"
    if isinstance(error, OSError) and error.errno in (errno.ELOOP, errno.ENXIO):
        return "not_regular"  # a link, or a FIFO or socket without a peer
    return "io"


def main(config: dict[str, Any]) -> None:
    """Prepare the sandbox as told and serve."""
    os.closerange(3, 256)  # what was open for those who put the sandbox together
    if config["rlimits"]:
        import resource  # noqa: PLC0415 - not needed where the backend limits by cgroup

        for name, value in config["rlimits"].items():
            resource.setrlimit(getattr(resource, name), (value, value))
    for directory in config["directories"]:
        os.makedirs(directory, exist_ok=True)
    os.chdir(config["working_dir"])
    Agent(config).serve()
