"""A command of the fake sandbox, from its start until its result was returned."""

import asyncio
from collections.abc import Callable
from functools import partial

from sandbox_runtime.sandbox import ExecResult, OnOutput, OutputCap, StreamName
from tests.fakes.memory_files import FakeFile, Files, Reader
from tests.fakes.memory_machine import REAL_SECOND, FakeProcess, Io, settle
from tests.fakes.memory_output import Captured, FakeReading
from tests.fakes.memory_terminal import Terminal


class FakeOutput:
    """An output stream of a command."""

    def __init__(self, take: Callable[[bytes], None]) -> None:
        self._take = take

    async def write(self, data: bytes) -> None:
        self._take(data)

    def close(self) -> None:
        pass


class RunningCommand:
    """A process and its output, as consecutive readings."""

    def __init__(
        self, id: str, process: FakeProcess, stdin: Reader, cap: OutputCap, files: Files
    ) -> None:
        self.process = process
        self.is_job = False
        """True if a result has reported the command as a running job."""
        self._id = id
        self._cap = cap
        self._keep_room = cap.max_kept_bytes
        self._files = files
        self._count = 0
        """Number of readings that have ended."""
        self._reading = FakeReading(cap)
        self._last_reading: FakeReading | None = None
        """The previous reading, until the next one is requested."""
        self._terminal = stdin if isinstance(stdin, Terminal) else None
        stdout, stderr = (
            FakeOutput(partial(self._take, "stdout")),
            FakeOutput(partial(self._take, "stderr")),
        )
        self.io = Io(stdin, stdout, stderr)

    def _take(self, name: StreamName, data: bytes) -> None:
        if not self.process.has_ended:  # drop the output of its background processes
            self._reading.take(name, data)
            self.process.stir()

    def begin_reading(self, typed_bytes: bytes, *, end_of_input: bool) -> None:
        """Start the next reading, because the previous one was received. Write input if there is a
        terminal.
        """
        self._last_reading = None
        if self._terminal and typed_bytes:
            self._terminal.type(typed_bytes)
        if self._terminal and end_of_input:
            self._terminal.type_end()

    async def deliver_reading(self, wait_s: float, on_output: OnOutput | None) -> ExecResult:
        """Deliver a reading from its start and return its result. Raise UnsupportedShellError."""
        reading = self._last_reading or self._reading
        delivered = 0
        self.process.attend()
        try:
            while delivered < len(reading.pieces) or not reading.result:
                if delivered < len(reading.pieces):
                    if on_output:
                        await on_output(*reading.pieces[delivered])
                    delivered += 1
                elif self.process.has_ended:
                    self._end_reading(exit_code=self.process.exit_code)
                else:
                    await self._run(wait_s)
        finally:
            self.process.leave()
        return reading.result

    async def _run(self, wait_s: float) -> None:
        """Let the command run. End the reading when it waits for input, or after `wait_s`."""
        self.process.stirred.clear()
        await settle()
        if self.process.stirred.is_set():
            return
        if self._terminal and self._terminal.is_awaited:
            self._pause(waiting=True)
            return
        patience_s = min(wait_s, self.process.left_s)
        try:
            async with asyncio.timeout(patience_s * REAL_SECOND):
                await self.process.stirred.wait()
        except TimeoutError:
            await self.process.pass_time(patience_s)
            if not (self.process.timed_out or self.process.has_ended):
                self._pause(waiting=False)

    def _pause(self, *, waiting: bool) -> None:
        """End the reading of a running command. Later output belongs to the next reading."""
        self._end_reading(exit_code=0, running=True, waiting=waiting)
        self.is_job = True
        self._last_reading, self._reading = self._reading, FakeReading(self._cap)

    def _end_reading(self, *, exit_code: int, running: bool = False, waiting: bool = False) -> None:
        stdout, stderr = self._reading.stdout, self._reading.stderr
        stdout_file, stderr_file = self._keep("stdout", stdout), self._keep("stderr", stderr)
        self._count += 1
        self._reading.result = ExecResult(
            exit_code=exit_code,
            stdout=stdout.text(stdout_file),
            stderr=stderr.text(stderr_file),
            timed_out=self.process.timed_out,
            truncated=stdout.truncated or stderr.truncated,
            duration_s=self.process.used_s,
            stdout_bytes=stdout.bytes,
            stderr_bytes=stderr.bytes,
            output_lines=stdout.lines + stderr.lines,
            running=running,
            waiting=waiting,
            job_id=self._id if running else "",
            stdout_file=stdout_file,
            stderr_file=stderr_file,
        )

    def _keep(self, name: StreamName, captured: Captured) -> str:
        """Store the full output of a truncated stream. Return its path, or "" if not stored."""
        if not (captured.truncated and captured.kept and self._keep_room):
            return ""
        del captured.kept[self._keep_room :]
        self._keep_room -= len(captured.kept)
        path = f"{self._cap.retention_directory}/{self._id}-{self._count}.{name}"
        try:
            self._files.make_directories(path.rpartition("/")[0])
        except OSError:
            return ""
        self._files.add(path, FakeFile(captured.kept))
        return path
