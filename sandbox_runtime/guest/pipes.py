"""A program with a stream at either end: how whole directories come in and go out, as tar."""

from __future__ import annotations

import os
import signal

from sandbox_runtime.guest.commands import session
from sandbox_runtime.guest.shell import which
from sandbox_runtime.protocol import DATA, MAX_DATA_BYTES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from sandbox_runtime.guest.agent import Agent

LAST_WORDS_BYTES = 4096


class Pipe:
    """A running program: DATA is its input, its output is DATA, both at the pace of the slower."""

    def __init__(self, agent: Agent, stream: int, request: dict[str, Any]) -> None:
        self._agent = agent
        self._stream = stream
        self._unwritten = bytearray()
        self._input_ends = False
        self._exit_code: int | None = None
        self._words = b""
        program = which(request["argv"][0], agent.env)
        if not program:
            raise FileNotFoundError(f"there is no program {request['argv'][0]!r}")
        pairs = [os.pipe(), os.pipe(), os.pipe()]
        (stdin, self._in), (self._out, stdout), (self._err, stderr) = pairs
        theirs = (stdin, stdout, stderr)
        try:
            self._pid = os.posix_spawn(
                program,
                request["argv"],
                agent.env,
                file_actions=[(os.POSIX_SPAWN_DUP2, fd, n) for n, fd in enumerate(theirs)],
                setsid=True,
                setsigmask=[],
                setsigdef=[signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGCHLD],
            )
        except (OSError, ValueError):
            for fd in (self._in, self._out, self._err):
                os.close(fd)
            raise
        finally:
            for fd in theirs:
                os.close(fd)
        agent.children[self._pid] = self._exited
        for fd in (self._in, self._out, self._err):
            os.set_blocking(fd, False)
        agent.watch(self._err, read=self._listen)
        agent.pump(stream)

    # In

    def feed(self, data: bytes) -> None:
        """More input."""
        self._unwritten += data
        self._write()

    def finish_input(self) -> None:
        """That was all."""
        self._input_ends = True
        self._write()

    def _write(self) -> None:
        if self._in < 0:
            self._take(len(self._unwritten))
            return
        try:
            if self._unwritten:
                self._take(os.write(self._in, self._unwritten))
        except BlockingIOError:
            pass
        except OSError:  # it reads no more
            self._take(len(self._unwritten))
            self._input_ends = True
        if self._unwritten:
            self._agent.watch(self._in, write=self._write)
            return
        self._agent.unwatch(self._in)
        if self._input_ends:
            os.close(self._in)
            self._in = -1

    def _take(self, count: int) -> None:
        del self._unwritten[:count]
        if count:
            self._agent.credit(self._stream, count)

    # Out

    def pump(self, credit: int) -> tuple[int, bytes] | None:
        """The next piece of output; it is asked for again once there is some."""
        if self._out < 0:
            self._finish()
            return None
        try:
            data = os.read(self._out, min(credit, MAX_DATA_BYTES))
        except BlockingIOError:
            self._agent.watch(self._out, read=self._readable)
            return None
        if data:
            return DATA, data
        self._agent.unwatch(self._out)
        os.close(self._out)
        self._out = -1
        self._finish()
        return None

    def _readable(self) -> None:
        self._agent.unwatch(self._out)  # until that much has been sent
        self._agent.pump(self._stream)

    def _listen(self) -> None:
        try:
            data = os.read(self._err, MAX_DATA_BYTES)
        except BlockingIOError:
            return
        self._words = (self._words + data)[-LAST_WORDS_BYTES:]
        if not data:
            self._agent.unwatch(self._err)
            os.close(self._err)
            self._err = -1

    # The end

    def _exited(self, exit_code: int, cpu_s: float, peak_memory_bytes: int) -> None:
        self._exit_code = exit_code
        self._finish()

    def _finish(self) -> None:
        if self._exit_code is None or self._out >= 0:
            return
        if self._err >= 0:
            self._listen()
        self._close()
        words = self._words.decode(errors="replace")
        self._agent.finish(self._stream, {"exit_code": self._exit_code, "stderr": words})

    def _close(self) -> None:
        for fd in (self._in, self._out, self._err):
            if fd >= 0:
                self._agent.unwatch(fd)
                os.close(fd)
        self._in = self._out = self._err = -1

    def reset(self) -> None:
        """Give it up."""
        for pid in session(self._pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self._close()
