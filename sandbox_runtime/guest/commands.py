"""Commands inside the sandbox, each known by its id, run once, and heard in readings."""

from __future__ import annotations

import os
import signal
import time
from functools import partial

from sandbox_runtime.guest.capture import Capture
from sandbox_runtime.guest.spool import Room, Spool
from sandbox_runtime.guest.terminal import Terminal
from sandbox_runtime.protocol import DATA, MAX_DATA_BYTES, STDERR, STDERR_TAIL, TAIL

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing is slow to import and not needed at run time
    from collections.abc import Callable
    from typing import Any

    from sandbox_runtime.guest.agent import Agent
    from sandbox_runtime.guest.attachments import Attachment

GRACE_S = 0.3
"""Between SIGINT, SIGTERM and SIGKILL of a command whose time is up."""
DRAIN_S = 0.05
"""How long output is awaited when the shell has ended but its children still hold the pipes."""
MAX_PIPE_READS = 32
"""More than a pipe holds: all that the shell wrote is read, whoever goes on writing."""
FIRST_LOOK_S, NEXT_LOOK_S = 1.0, 0.5
"""When it is looked whether a command waits for somebody to type."""
NO_TERMINAL = b"sandbox: no pseudo-terminal is free: the input of this command is a pipe\n"
STREAMS = ((DATA, TAIL, "stdout"), (STDERR, STDERR_TAIL, "stderr"))
NAMES = {kind: name for kind, _, name in STREAMS}


class Reading:
    """A part of a command's output, kept for as long as it may be asked for again."""

    def __init__(self, number: int, request: dict[str, Any], room: Room) -> None:
        self.number = number
        self.pieces: list[tuple[int, bytes]] = []
        """What is delivered: (frame type, bytes)."""
        self.report: dict[str, object] | None = None
        """How it ended."""
        cap = request["max_bytes"], request["max_lines"]
        self._captures = {kind: Capture(*cap) for kind in (DATA, STDERR)}
        self._keep = request.get("keep")
        self._room = room
        self._spools: dict[int, Spool] = {}

    def feed(self, kind: int, data: bytes) -> bool:
        """Take output in; returns whether there is something new to deliver."""
        head = self._captures[kind].feed(data)
        if head:
            self.pieces.append((kind, head))
        if self._keep and len(head) < len(data):
            self._keep_whole(kind, data[len(head) :])
        return bool(head)

    def _keep_whole(self, kind: int, data: bytes) -> None:
        """What is past the head goes into a file too, which the head begins."""
        spool = self._spools.get(kind)
        if spool is None:
            path = f"{self._keep}-{self.number}.{NAMES[kind]}"
            spool = self._spools[kind] = Spool(path, self._room)
            spool.begin(b"".join(piece for sort, piece in self.pieces if sort == kind))
        spool.add(data)

    @property
    def total_bytes(self) -> int:
        """How much was written since it began."""
        return sum(capture.total_bytes for capture in self._captures.values())

    def end(self, report: dict[str, object]) -> None:
        """Complete it: the tails and the counts."""
        for kind, tail_kind, name in STREAMS:
            capture = self._captures[kind]
            tail = capture.tail()
            if tail:
                self.pieces.append((tail_kind, tail))
            report[name + "_bytes"] = capture.total_bytes
            report[name + "_omitted_lines"] = capture.total_lines - capture.shown_lines
            spool = self._spools.get(kind)
            is_cut = capture.shown_bytes < capture.total_bytes
            report[name + "_kept_bytes"] = spool.end(is_cut) if spool else 0
        self._captures = {}
        report["reading"] = self.number
        self.report = report


class Command:
    """A process and what it prints, from its start until its outcome is acknowledged."""

    def __init__(self, agent: Agent, request: dict[str, Any], stdin: int) -> None:
        """Start it; `stdin` is taken over, -1 asks for a terminal."""
        self.id: str = request["id"]
        self._room = Room(request.get("max_kept_bytes", 0))
        self.reading = Reading(0, request, self._room)
        """The one that output goes to."""
        self.finished: Reading | None = None
        """The one before, until the next is asked for."""
        self.listener: Attachment | None = None
        """Told when a reading has something new to deliver."""
        self.acknowledged = False
        self.ended = False
        self._agent = agent
        self._request = request
        self._pipes: dict[int, int] = {}
        self._exit_code: int | None = None
        self._timed_out = self._stopping = False
        self._terminal: Terminal | None = None
        self._start(stdin)
        if self._terminal and self._terminal.is_pipe:
            self.reading.feed(STDERR, NO_TERMINAL)

    # Its life

    def _start(self, stdin: int) -> None:
        theirs = [stdin] if stdin >= 0 else []
        try:
            self._open(theirs)
            self._pressure = self._agent.pressure.read()
            self._commits = self._agent.shell.commits
            self._started = time.monotonic()
            self._pid, self._snapshot = self._agent.shell.spawn(self._request, theirs)
        except (OSError, ValueError):
            for fd in self._pipes.values():
                os.close(fd)
            if self._terminal:
                self._terminal.close()
            raise
        finally:
            for fd in theirs:
                os.close(fd)
        self._agent.children[self._pid] = self._exited
        for kind, fd in self._pipes.items():
            self._agent.watch(fd, read=partial(self._read, kind))
        self._deadline = self._agent.after(self._request["timeout_s"], self._expire)

    def _open(self, theirs: list[int]) -> None:
        """Make the pipes, and a terminal where there is no other input; the command's ends go to
        `theirs`."""
        if not theirs:
            theirs.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            self._terminal = Terminal(self._agent)
        for kind in (DATA, STDERR):
            self._pipes[kind], write = os.pipe()
            theirs.append(write)
            os.set_blocking(self._pipes[kind], False)
        if self._terminal:
            theirs.append(self._terminal.slave)

    def _read(self, kind: int) -> bool:
        """Take what one pipe holds; returns whether there may be more."""
        if kind not in self._pipes:
            return False
        try:
            data = os.read(self._pipes[kind], MAX_DATA_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._close_pipe(kind)
            if not self._pipes and self._exit_code is not None:
                self._end()
            return False
        if self.ended:
            return False  # a background process still writes: dropped, so that it never blocks
        if self.reading.feed(kind, data):
            self._tell()
        return True

    def _close_pipe(self, kind: int) -> None:
        fd = self._pipes.pop(kind)
        self._agent.unwatch(fd)
        os.close(fd)

    def _expire(self) -> None:
        """Time is up."""
        if self._exit_code is None:
            self._timed_out = True
            self.stop()

    def stop(self) -> None:
        """Interrupt, then terminate, then kill."""
        if self._exit_code is None and not self._stopping:
            self._stopping = True
            for n, number in enumerate((signal.SIGINT, signal.SIGTERM)):
                self._agent.after(n * GRACE_S, partial(self._signal, number))
            self._agent.after(2 * GRACE_S, self.kill)

    def _signal(self, number: int) -> None:
        if self._exit_code is None:
            os.killpg(self._pid, number)

    def kill(self) -> None:
        """Kill every process of the command's session."""
        if self.ended:
            return  # what it left in the background was meant to stay
        self._stopping = True
        for pid in session(self._pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def _exited(self, exit_code: int, cpu_s: float, peak_memory_bytes: int) -> None:
        self._agent.cancel(self._deadline)
        self._exit_code = exit_code
        self._used = {"cpu_s": cpu_s, "peak_memory_bytes": peak_memory_bytes}
        self._duration = time.monotonic() - self._started
        if self._stopping:
            self.kill()
        # What ran beside later commands is not to take their state back.
        is_late = self.reading.number > 0 and self._agent.shell.commits > self._commits
        self._agent.shell.commit(self._snapshot, keep=not (self._stopping or is_late))
        for kind in (DATA, STDERR):
            for _ in range(MAX_PIPE_READS):
                if not self._read(kind):
                    break
        if self._pipes:
            self._agent.after(DRAIN_S, self._end)
        elif not self.ended:
            self._end()

    def _end(self) -> None:
        if self.ended:
            return
        self.ended = True
        if self._terminal:
            self._terminal.close()
        now = self._agent.pressure.read()
        self.reading.end(
            {
                "exit_code": self._exit_code,
                "timed_out": self._timed_out,
                "duration_s": self._duration,
                **self._used,
                "running": False,
                "waiting": False,
                "oom_kills": now["oom"] - self._pressure["oom"],
                "pids_refused": now["pids"] - self._pressure["pids"],
            }
        )
        self._tell()
        self._agent.outcomes.ended(self)

    # Its readings

    def pause(self, reading: Reading, waiting: bool = False) -> None:
        """End a reading while the command goes on."""
        if self.reading is not reading or reading.report is not None:
            return
        reading.end(
            {
                "exit_code": 0,
                "timed_out": False,
                "duration_s": time.monotonic() - self._started,
                "cpu_s": 0,
                "peak_memory_bytes": 0,
                "running": True,
                "waiting": waiting,
                "oom_kills": 0,
                "pids_refused": 0,
            }
        )
        self.finished = reading
        self.reading = Reading(reading.number + 1, self._request, self._room)
        self._tell()

    def look_after(self, reading: Reading) -> None:
        """Notice when it waits for somebody to type."""
        if self._terminal:
            self._agent.after(FIRST_LOOK_S, partial(self.look, reading))

    def look(self, reading: Reading, seen: int | None = None) -> None:
        """End the reading once the command waits for somebody to type: seen so twice in a row."""
        if self.reading is not reading or self.ended or not self._terminal:
            return
        waits = self._terminal.is_idle and self._terminal.is_awaited_by(session(self._pid))
        if waits and seen == reading.total_bytes:
            self.pause(reading, waiting=True)
        else:
            now = reading.total_bytes if waits else None
            self._agent.after(NEXT_LOOK_S, partial(self.look, reading, now))

    def type(self, data: bytes, taken: Callable[[int], None]) -> None:
        """Type into its terminal, if it has one."""
        if self._terminal:
            self._terminal.type(data, taken)
        else:
            taken(len(data))

    def type_end(self) -> None:
        """Type the end of input."""
        if self._terminal:
            self._terminal.type_end()

    def _tell(self) -> None:
        if self.listener:
            self.listener.tell()


class Outcomes:
    """The commands that somebody may still ask for."""

    MAX_ENDED = 64

    def __init__(self) -> None:
        self._commands: dict[str, Command] = {}

    def find(self, id: str) -> Command | None:
        return self._commands.get(id)

    def add(self, command: Command) -> None:
        self._commands[command.id] = command

    def ended(self, command: Command) -> None:
        """Keep no more of them than somebody can have overlooked."""
        if command.acknowledged:
            self.forget(command)
        over = [each for each in self._commands.values() if each.ended][: -self.MAX_ENDED]
        for each in over:
            self.forget(each)

    def acknowledge(self, id: str) -> None:
        """Its outcome has arrived, or will not be asked for."""
        command = self._commands.get(id)
        if command:
            command.acknowledged = True
            if command.ended:
                self.forget(command)

    def forget(self, command: Command) -> None:
        self._commands.pop(command.id, None)


def session(leader: int) -> list[int]:
    """The processes of a session."""
    members = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == leader:
                members.append(int(name))
    return members
