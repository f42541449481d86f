"""The machine of the fake shells: processes and a simulated clock.

Simulated time passes only while a command that a caller waits for sleeps, takes a step or is
blocked: a sleep ends at once, and a blocked command takes `REAL_SECOND` for each second. A command
without a caller takes its steps at once and sleeps until others have let time pass.
"""

import asyncio
import math
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from tests.fakes.memory_files import ByteWriter, Files, Reader
from tests.fakes.shell_syntax import Command, UnsupportedShellError

REAL_SECOND = 0.01
STEP_S = 0.005
INTERRUPTED, KILLED = 2, 9


class ExitShell(Exception):
    def __init__(self, status: int) -> None:
        self.status = status


class ReturnFromFunction(Exception):
    def __init__(self, status: int) -> None:
        self.status = status


async def settle() -> None:
    """Let every runnable task take some steps."""
    for _ in range(10):
        await asyncio.sleep(0)


@dataclass(eq=False)
class Alarm:
    """A callback at a simulated time."""

    at_s: float
    ring: Callable[[], None]


class Machine:
    """The state that all shells of one sandbox share."""

    def __init__(self) -> None:
        self.files = Files()
        self.living: dict[int, FakeProcess | None] = {}
        """The processes by pid; None for a child shell, which has no process of its own."""
        self.fault: BaseException | None = None
        """An error of a background command, raised for the next caller."""
        self.now_s = 0.0
        self._pids = 1
        self._alarms: list[Alarm] = []

    def new_pid(self) -> int:
        self._pids += 1
        return self._pids

    def set_alarm(self, seconds: float, ring: Callable[[], None]) -> Alarm:
        alarm = Alarm(self.now_s + seconds, ring)
        self._alarms.append(alarm)
        return alarm

    def cancel(self, alarm: Alarm) -> None:
        """Cancel the alarm. Safe to call after it has run."""
        if alarm in self._alarms:
            self._alarms.remove(alarm)

    async def pass_time(self, seconds: float, stir: Callable[[], None]) -> None:
        """Let time pass and wake the sleepers that are due; call `stir` for each."""
        end_s = self.now_s + seconds
        while due := [alarm for alarm in self._alarms if alarm.at_s <= end_s]:
            first = min(due, key=lambda alarm: alarm.at_s)
            self._alarms.remove(first)
            self.now_s = max(self.now_s, first.at_s)
            first.ring()
            stir()
            await settle()  # the sleeper's next sleep must be known before time goes on
        self.now_s = max(self.now_s, end_s)


class FakeProcess:
    """A running command or background job."""

    def __init__(self, machine: Machine, timeout_s: float = math.inf) -> None:
        self.machine = machine
        self.pid = machine.new_pid()
        self.used_s = 0.0
        self.timed_out = False
        self.signal = 0
        self.jobs: list[FakeProcess] = []
        self.stirred = asyncio.Event()
        """Set by each action of the process."""
        self.stir = self.stirred.set
        self._timeout_s = timeout_s
        self._has_caller = False
        self._unattended_since_s = machine.now_s
        self._dozing: set[asyncio.Event] = set()
        self._deadline: Alarm | None = None

    # Start and end

    def start(self, work: Coroutine[Any, Any, int]) -> None:
        self._task = asyncio.create_task(work)
        self.machine.living[self.pid] = self
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[int]) -> None:
        del self.machine.living[self.pid]
        if not self._has_caller:
            self._add_unattended_time()
            if not task.cancelled():
                self.machine.fault = self.machine.fault or task.exception()
        self.stir()

    @property
    def has_ended(self) -> bool:
        return self.pid not in self.machine.living

    @property
    def exit_code(self) -> int:
        """Return the exit code after the end. Raises UnsupportedShellError."""
        return 128 + self.signal if self.signal else self._task.result()

    def end(self, signal: int) -> None:
        """Kill the process."""
        if not self._task.done():
            self.signal = signal
            self._task.cancel()

    def end_session(self, signal: int) -> None:
        """Kill the process and its background jobs, unless they have outlived it."""
        if not self._task.done():
            for process in (self, *self.jobs):
                process.end(signal)

    async def die(self, signal: int) -> NoReturn:
        self.end(signal)
        await asyncio.Future()
        raise AssertionError

    # Time

    @property
    def left_s(self) -> float:
        return self._timeout_s - self.used_s

    def attend(self) -> None:
        """Note that a caller waits: simulated time now passes as the process needs it."""
        self._has_caller = True
        if not self.has_ended:
            self._add_unattended_time()
        for sleeper in self._dozing:
            sleeper.set()

    def leave(self) -> None:
        """Note that no caller waits any more. The deadline still applies."""
        self._has_caller = False
        self._unattended_since_s = self.machine.now_s
        if not self.has_ended and self.left_s < math.inf:
            self._deadline = self.machine.set_alarm(self.left_s, self._expire)

    def _add_unattended_time(self) -> None:
        self.used_s += self.machine.now_s - self._unattended_since_s
        if self._deadline:
            self.machine.cancel(self._deadline)

    async def spend(self, seconds: float) -> None:
        """Use up time. Does not return if the deadline comes first."""
        self.stir()
        await asyncio.sleep(0)
        while not self._has_caller:
            if seconds <= STEP_S:
                return
            seconds -= await self._doze(seconds)
        await self.pass_time(seconds)
        if self.timed_out:
            await asyncio.Future()

    async def pass_time(self, seconds: float) -> None:
        """Let time pass for all processes; end this one if its deadline comes first."""
        left_s = self.left_s
        self.used_s += min(seconds, left_s)
        await self.machine.pass_time(min(seconds, left_s), self.stir)
        if seconds >= left_s:
            self._expire()

    async def _doze(self, seconds: float) -> float:
        """Sleep until a caller waits or the time is over. Return the duration in seconds."""
        began_s = self.machine.now_s
        awake = asyncio.Event()
        self._dozing.add(awake)
        alarm = self.machine.set_alarm(seconds, awake.set)
        try:
            await awake.wait()
        finally:
            self.machine.cancel(alarm)
            self._dozing.discard(awake)
        return self.machine.now_s - began_s

    def _expire(self) -> None:
        if not self._task.done():
            self.timed_out = True
            self.end_session(KILLED)


@dataclass
class FakeShellState:
    """The shell state that one command passes to the next."""

    cwd: str
    variables: dict[str, str | list[str]]
    exported: set[str]
    functions: dict[str, Command] = field(default_factory=dict)

    def copy(self) -> "FakeShellState":
        variables = {k: v if isinstance(v, str) else [*v] for k, v in self.variables.items()}
        return FakeShellState(self.cwd, variables, set(self.exported), dict(self.functions))


@dataclass(frozen=True)
class Io:
    stdin: Reader
    stdout: ByteWriter
    stderr: ByteWriter

    def with_output(self, fd: int, writer: ByteWriter) -> "Io":
        if fd not in (1, 2):
            raise UnsupportedShellError(f"file descriptor {fd}")
        return replace(self, stdout=writer) if fd == 1 else replace(self, stderr=writer)

    async def say(self, text: str) -> None:
        await self.stdout.write(text.encode(errors="surrogateescape"))

    async def complain(self, text: str) -> None:
        await self.stderr.write(f"{text}\n".encode(errors="surrogateescape"))


class Collected:
    """Collects output that becomes a word."""

    def __init__(self) -> None:
        self.data = b""

    async def write(self, data: bytes) -> None:
        self.data += data

    def close(self) -> None:
        pass
