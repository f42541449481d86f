"""The machine in memory that the fake shells run on: processes and a time of its own.

Time passes only where a foreground command sleeps or takes a step; nothing waits for it. A command
that waits for another one (at a FIFO) does so in real time, `REAL_SECOND` for each second.
"""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from tests.fakes.memory_files import Files, Pipe, Reader, Writer
from tests.fakes.shell_syntax import Command, UnsupportedShellError

REAL_SECOND = 0.01
STEP_S = 0.005


class ExitShell(Exception):
    def __init__(self, status: int) -> None:
        self.status = status


class ReturnFromFunction(Exception):
    def __init__(self, status: int) -> None:
        self.status = status


class Machine:
    """What the shells of one sandbox share."""

    def __init__(self) -> None:
        self.files = Files()
        self.living: dict[int, Process | None] = {}
        """By pid; a child shell has a pid but no Process of its own."""
        self.fault: BaseException | None = None
        """What a background job could not do, so that it is not lost."""
        self._pids = 1
        self._now = 0.0
        self._alarms: list[tuple[float, asyncio.Event]] = []

    def new_pid(self) -> int:
        self._pids += 1
        return self._pids

    async def pass_time(self, seconds: float) -> None:
        """Let time pass, waking background sleepers on the way."""
        end = self._now + seconds
        while due := [alarm for alarm in self._alarms if alarm[0] <= end]:
            first = min(due, key=lambda alarm: alarm[0])
            self._alarms.remove(first)
            self._now = max(self._now, first[0])
            first[1].set()
            for _ in range(10):  # the sleeper's next sleep must be known before time goes on
                await asyncio.sleep(0)
        self._now = max(self._now, end)

    async def wait_until(self, seconds: float) -> None:
        alarm = asyncio.Event()
        self._alarms.append((self._now + seconds, alarm))
        await alarm.wait()


class Process:
    """A running command or background job, and how it was ended."""

    def __init__(self, machine: Machine, timeout_s: float | None) -> None:
        self.machine = machine
        self.pid = machine.new_pid()
        self.used_s = 0.0
        self.timed_out = False
        self.signal = 0
        self.jobs: list[Process] = []
        self._timeout_s = timeout_s
        self._task: asyncio.Task[int] | None = None

    def start(self, work: Coroutine[Any, Any, int]) -> asyncio.Task[int]:
        self._task = asyncio.create_task(work)
        self.machine.living[self.pid] = self
        self._task.add_done_callback(self._ended)
        return self._task

    def _ended(self, task: asyncio.Task[int]) -> None:
        del self.machine.living[self.pid]
        if self._timeout_s is None and not task.cancelled():
            self.machine.fault = self.machine.fault or task.exception()

    def end(self) -> None:
        """Kill it."""
        assert self._task is not None
        self._task.cancel()

    def end_session(self) -> None:
        """Kill it and the background jobs it has started."""
        for process in (self, *self.jobs):
            process.end()

    async def spend(self, seconds: float) -> None:
        """Take so much time; does not return if that is more than is left."""
        await asyncio.sleep(0)
        if self._timeout_s is None:
            if seconds > STEP_S:
                await self.machine.wait_until(seconds)
            return
        left_s = self._timeout_s - self.used_s
        self.used_s += min(seconds, left_s)
        await self.machine.pass_time(min(seconds, left_s))
        if seconds >= left_s:
            await self._expire()

    async def wait(self, arrival: asyncio.Future[Pipe]) -> Pipe:
        """Wait for another process, at most for the time that is left."""
        left_s = None if self._timeout_s is None else self._timeout_s - self.used_s
        try:
            return await asyncio.wait_for(arrival, left_s and left_s * REAL_SECOND)
        except TimeoutError:
            await self._expire()

    async def die(self, signal: int) -> NoReturn:
        self.signal = signal
        self.end()
        await asyncio.Future()
        raise AssertionError

    async def _expire(self) -> NoReturn:
        self.timed_out = True
        await self.die(9)


@dataclass
class State:
    """What one command leaves to the next."""

    cwd: str
    variables: dict[str, str | list[str]]
    exported: set[str]
    functions: dict[str, Command] = field(default_factory=dict)

    def copy(self) -> "State":
        variables = {k: v if isinstance(v, str) else [*v] for k, v in self.variables.items()}
        return State(self.cwd, variables, set(self.exported), dict(self.functions))


@dataclass(frozen=True)
class Io:
    stdin: Reader
    stdout: Writer
    stderr: Writer

    def with_output(self, fd: int, writer: Writer) -> "Io":
        if fd not in (1, 2):
            raise UnsupportedShellError(f"file descriptor {fd}")
        return replace(self, stdout=writer) if fd == 1 else replace(self, stderr=writer)

    async def say(self, text: str) -> None:
        await self.stdout.write(text.encode(errors="surrogateescape"))

    async def complain(self, text: str) -> None:
        await self.stderr.write(f"{text}\n".encode(errors="surrogateescape"))


class Collected:
    """Output that becomes a word."""

    def __init__(self) -> None:
        self.data = b""

    async def write(self, data: bytes) -> None:
        self.data += data

    def close(self) -> None:
        pass
