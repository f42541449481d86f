"""Commands inside the sandbox: a fresh bash each, the shell's state carried over by a snapshot.

A fresh shell survives `exit`, syntax errors, `set -e` and timeouts of the command before it. The
snapshot is taken as the shell ends, and replaces the last one only if the shell ended by itself.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from functools import partial

from sandbox_runtime.protocol import DATA, MAX_DATA_BYTES, STDERR, STDERR_TAIL, TAIL

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing is slow to import and not needed at run time
    from typing import Any

    from sandbox_runtime.guest.agent import Agent

GRACE_S = 0.3
"""Between SIGINT, SIGTERM and SIGKILL of a command whose time is up."""
DRAIN_S = 0.05
"""How long output is awaited when the shell has ended but its children still hold the pipes."""
MAX_PIPE_READS = 32
"""More than a pipe holds: all that the shell wrote is read, whoever goes on writing."""
MAX_ARGUMENT_BYTES = 100_000
"""Linux allows 128 KiB in one argument; a longer command is read from a file."""

# `set --` hides our argument from the command. All is one line, so bash counts the command's
# lines from 1. The save runs twice at most: as EXIT trap, and for commands that replace that trap.
_RESTORE = (
    "builtin source {state} >/dev/null 2>&1; builtin hash -r; [[ $PWD -ef . ]] || "
    '{{ builtin cd -P .; builtin echo "bash: the directory was removed, this is $PWD" >&2; }}'
)
_SAVE = (
    '{{ builtin set -- "$?"; builtin set +eux; builtin trap - DEBUG ERR RETURN; [[ -e {new} ]] || '
    "{{ builtin printf 'builtin cd -- %q\\n' \"$PWD\"; builtin umask -p; builtin shopt -p; "
    "builtin declare -p; builtin echo 'builtin set +o posix'; builtin declare -f; "
    "builtin echo ': whole'; }} >{new}; }} 2>/dev/null"
)


WHOLE = b": whole\n"
"""The last line of every snapshot."""


class Shell:
    """One computer's shell: starts commands and keeps the state they leave."""

    def __init__(self, env: dict[str, str]) -> None:
        self._env = env
        self._bash = _which("bash", env)
        self._directory = _private_directory()
        self._state = self._directory + "/state"
        self._count = 0

    def spawn(self, request: dict[str, Any], fds: list[int]) -> tuple[int, str | None]:
        """Start a command as leader of its own session; returns its pid and its snapshot's path."""
        self._count += 1
        if not os.path.isdir(self._directory):  # a command has removed it
            self._directory = _private_directory()
            self._state = self._directory + "/state"
        restore = save = False
        if self._bash and request["shell_state"] == "snapshot":
            restore = os.path.exists(self._state)
            save = not request["cwd"] and not request["env"]
        new = f"{self._directory}/{self._count}" if save else None
        shell = self._bash or "/bin/sh"
        pid = os.posix_spawn(
            shell,
            self._argv(shell, request, restore, new),
            # A snapshot holds the whole environment, and what was unset must stay so.
            {} if restore else self._env,
            file_actions=[(os.POSIX_SPAWN_DUP2, fd, n) for n, fd in enumerate(fds)],
            setsid=True,
            setsigmask=[],
            setsigdef=[signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGCHLD],
        )
        return pid, new

    def _argv(
        self, shell: str, request: dict[str, Any], restore: bool, new: str | None
    ) -> list[str | bytes]:
        steps = ["unset BASH_EXECUTION_STRING; shopt -s expand_aliases"] if self._bash else []
        if restore:
            steps.append(_RESTORE.format(state=self._state))
        if request["cwd"]:
            steps.append(f"cd -- {_quote(request['cwd'])} || exit")
        steps += [f"export {name}={_quote(value)}" for name, value in request["env"].items()]
        if new:
            steps.append(f"trap {_quote(_SAVE.format(new=new))} EXIT")
        command = request["command"].replace("\0", "").encode(errors="replace")
        if len(command) > MAX_ARGUMENT_BYTES:
            path = f"{self._directory}/{self._count}.command"
            with open(path, "wb") as file:
                file.write(command)
            command = b'builtin eval "$(<' + path.encode() + b')"'
        builtin = "builtin " if self._bash else ""
        steps.append(f'{builtin}eval "set -- ; $1"')
        if new:
            steps.append(_SAVE.format(new=new) + '; builtin exit "$1"')
        return [shell, *self._options(), "-c", "; ".join(steps), "bash", command]

    def _options(self) -> list[str]:
        return ["--noprofile", "--norc"] if self._bash else []

    def commit(self, new: str | None, keep: bool) -> None:
        """Make a command's snapshot the state of the next, or drop it."""
        try:
            if new and keep and _is_whole(new):
                os.rename(new, self._state)
            elif new:
                os.unlink(new)
        except OSError:
            pass  # no snapshot was written (`exec`, a full disk): the state stays as it was


class Capture:
    """One output stream: its first bytes sent on as they come, its last bytes kept, all counted."""

    def __init__(self, max_bytes: int, max_lines: int) -> None:
        self._head_bytes = max_bytes - max_bytes // 2
        self._head_lines = max_lines - max_lines // 2
        self._tail_bytes = max_bytes // 2
        self._tail_lines = max_lines // 2
        self._ring: deque[bytes] = deque()
        self._ring_bytes = 0
        self._head_open = True
        self.total_bytes = 0
        self.total_lines = 0
        self.shown_lines = 0

    def feed(self, data: bytes) -> bytes:
        """Take output in; returns the part of it that still belongs to the head."""
        self.total_bytes += len(data)
        self.total_lines += data.count(b"\n")
        head = self._take_head(data) if self._head_open else b""
        rest = data[len(head) :]
        if rest:
            self._head_open = False
            self._ring.append(rest)
            self._ring_bytes += len(rest)
            while self._ring_bytes - len(self._ring[0]) >= self._tail_bytes:
                self._ring_bytes -= len(self._ring.popleft())
        return head

    def _take_head(self, data: bytes) -> bytes:
        head = data[: self._head_bytes]
        if len(head) < len(data):
            head = _without_cut_character(head)
        lines = head.count(b"\n")
        if lines > self._head_lines:
            head = b"".join(line + b"\n" for line in head.split(b"\n")[: self._head_lines])
            lines = self._head_lines
        self._head_bytes -= len(head)
        self._head_lines -= lines
        self.shown_lines += lines
        return head

    def tail(self) -> bytes:
        """The end of the stream, as much as the cap allows."""
        kept = b"".join(self._ring)
        tail = kept[max(0, len(kept) - self._tail_bytes) :]
        if len(tail) < self._ring_bytes:
            tail = _from_whole_character(tail)
        lines = tail.split(b"\n")  # a last line without a newline counts as one
        excess = len(lines) - (1 if lines[-1] == b"" else 0) - self._tail_lines
        if excess > 0:
            tail = b"\n".join(lines[excess:])
        self.shown_lines += tail.count(b"\n")
        return tail


class Command:
    """A running command and what it has printed; an operation of the agent."""

    def __init__(self, agent: Agent, stream: int, request: dict[str, Any]) -> None:
        self._agent = agent
        self._stream = stream
        self._request = request
        self._stdin = os.memfd_create("stdin") if request["has_stdin"] else -1
        self._captures: dict[int, Capture] = {}
        self._pipes: dict[int, int] = {}
        self._outbox: deque[tuple[int, bytes]] = deque()
        self._pid = 0
        self._exit_code: int | None = None
        self._timed_out = False
        self._ended = False
        self._started = 0.0
        self._duration = 0.0
        if not request["has_stdin"]:
            self.finish_input()

    def feed(self, data: bytes) -> None:
        """More of the command's standard input; it starts once all is here."""
        while data:
            data = data[os.write(self._stdin, data) :]

    def finish_input(self) -> None:
        """Start the command."""
        if self._stdin < 0:
            self._stdin = os.open(os.devnull, os.O_RDONLY)
        else:
            os.lseek(self._stdin, 0, os.SEEK_SET)
        theirs = [self._stdin]
        try:
            for kind in (DATA, STDERR):
                self._pipes[kind], write = os.pipe()
                theirs.append(write)
                os.set_blocking(self._pipes[kind], False)
            self._started = time.monotonic()
            self._pid, self._snapshot = self._agent.shell.spawn(self._request, theirs)
        except (OSError, ValueError):
            for fd in self._pipes.values():
                os.close(fd)
            raise
        finally:
            self._stdin = -1
            for fd in theirs:
                os.close(fd)
        self._agent.children[self._pid] = self._exited
        for kind, fd in self._pipes.items():
            self._captures[kind] = Capture(self._request["max_bytes"], self._request["max_lines"])
            self._agent.watch(fd, partial(self._read, kind))
        self._agent.after(self._request["timeout_s"], self._expire)

    def _read(self, kind: int) -> bool:
        """Take what one pipe holds; returns whether there may be more."""
        if kind not in self._pipes:
            return False  # closed by what happened earlier in the same round of the loop
        fd = self._pipes[kind]
        try:
            data = os.read(fd, MAX_DATA_BYTES)
        except BlockingIOError:
            return False
        if self._ended:
            # A background process still writes: drop it, so that it lives and never blocks.
            if not data:
                self._close_pipe(kind)
            return False
        if not data:
            self._close_pipe(kind)
            if not self._pipes and self._exit_code is not None:
                self._end()
            return False
        head = self._captures[kind].feed(data)
        if head:
            self._outbox.append((kind, head))
            self._agent.pump(self._stream)
        return True

    def _close_pipe(self, kind: int) -> None:
        fd = self._pipes.pop(kind)
        self._agent.unwatch(fd)
        os.close(fd)

    def _expire(self) -> None:
        """Time is up: interrupt, then terminate, then kill."""
        if self._exit_code is not None:
            return
        self._timed_out = True
        for n, number in enumerate((signal.SIGINT, signal.SIGTERM)):
            self._agent.after(n * GRACE_S, partial(self._signal, number))
        self._agent.after(2 * GRACE_S, self.kill)

    def _signal(self, number: int) -> None:
        if self._exit_code is None:
            os.killpg(self._pid, number)

    def kill(self) -> None:
        """Kill every process of the command's session."""
        if self._pid:
            for pid in _session(self._pid):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass

    def _exited(self, exit_code: int, cpu_s: float, peak_memory_bytes: int) -> None:
        self._exit_code = exit_code
        self._used = {"cpu_s": cpu_s, "peak_memory_bytes": peak_memory_bytes}
        self._duration = time.monotonic() - self._started
        if self._timed_out:
            self.kill()
        self._agent.shell.commit(self._snapshot, keep=not self._timed_out)
        for kind in (DATA, STDERR):
            for _ in range(MAX_PIPE_READS):
                if not self._read(kind):
                    break
        if self._pipes:
            self._agent.after(DRAIN_S, self._end)
        elif not self._ended:
            self._end()

    def _end(self) -> None:
        if self._ended:
            return
        self._ended = True
        report: dict[str, object] = {
            "exit_code": self._exit_code,
            "timed_out": self._timed_out,
            "duration_s": self._duration,
            **self._used,
        }
        for kind, tail_kind, name in ((DATA, TAIL, "stdout"), (STDERR, STDERR_TAIL, "stderr")):
            capture = self._captures[kind]
            tail = capture.tail()
            if tail:
                self._outbox.append((tail_kind, tail))
            report[name + "_bytes"] = capture.total_bytes
            report[name + "_omitted_lines"] = capture.total_lines - capture.shown_lines
        self._report = report
        self._agent.pump(self._stream)

    def pump(self, credit: int) -> tuple[int, bytes] | None:
        """The next piece of output to send, no longer than `credit`."""
        if not self._outbox:
            if self._ended:
                self._captures.clear()  # our timer may keep us for long
                self._agent.finish(self._stream, self._report)
            return None
        kind, data = self._outbox.popleft()
        if len(data) > credit:
            self._outbox.appendleft((kind, data[credit:]))
        return kind, data[:credit]

    def reset(self) -> None:
        """The host has lost interest."""
        self._timed_out = True
        if self._stdin >= 0:
            os.close(self._stdin)
        self.kill()


def _which(program: str, env: dict[str, str]) -> str | None:
    for directory in env.get("PATH", os.defpath).split(":"):
        path = os.path.join(directory, program)
        if os.access(path, os.X_OK) and os.path.isfile(path):
            return path
    return None


def _is_whole(snapshot: str) -> bool:
    """Whether a snapshot was written to its end, which a full disk prevents."""
    with open(snapshot, "rb") as file:
        file.seek(-min(len(WHOLE), os.fstat(file.fileno()).st_size), os.SEEK_END)
        return file.read() == WHOLE


def _private_directory() -> str:
    name = "/.shell-" + os.urandom(8).hex()
    for place in ("/run", "/var/tmp", "/tmp"):
        try:
            os.mkdir(place + name, 0o700)
        except OSError:
            continue
        return place + name
    raise OSError("no writable directory in /run, /var/tmp or /tmp")


def _quote(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _without_cut_character(data: bytes) -> bytes:
    """`data` less a UTF-8 character at its end that is not whole."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte >= 0xC0:
            whole = back >= (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
            return data if whole else data[:-back]
        if byte < 0x80:
            break
    return data


def _from_whole_character(data: bytes) -> bytes:
    """`data` from the first byte on that begins a UTF-8 character."""
    for start in range(min(4, len(data))):
        if data[start] & 0xC0 != 0x80:
            return data[start:]
    return data


def _session(leader: int) -> list[int]:
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
