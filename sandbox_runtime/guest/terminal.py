"""A terminal as a command's standard input: somebody may type into it, and see that it waits."""

from __future__ import annotations

import os
import platform
import termios

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from sandbox_runtime.guest.agent import Agent

END_OF_INPUT = b"\x04"
READ_CALL = {"x86_64": b"0", "aarch64": b"63"}.get(platform.machine(), b"?")
"""The number of read(2), as /proc/<pid>/syscall shows it."""
_IFLAG, _OFLAG, _CFLAG, _LFLAG = range(4)


class Terminal:
    """A pseudo-terminal that is nobody's controlling one, so no key is a signal.

    Where there is none to be had, a pipe takes its place.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.is_pipe = self._has_ended = False
        try:
            self._fd, self.slave = os.openpty()
        except OSError:
            self.is_pipe = True
            self.slave, self._fd = os.pipe()
            self._name = f"pipe:[{os.fstat(self.slave).st_ino}]"
        else:
            self._name = os.ttyname(self.slave)
            _set_modes(self.slave)
        self._typed: list[tuple[bytes, Callable[[int], None]]] = []
        os.set_blocking(self._fd, False)
        agent.watch(self._fd, read=self._drain)

    def type(self, data: bytes, taken: Callable[[int], None]) -> None:
        """Type `data`; `taken` hears of the bytes that the terminal took."""
        if self._fd < 0:
            taken(len(data))  # nobody reads any more
        elif data:
            self._typed.append((data, taken))
            self._write()

    def type_end(self) -> None:
        """Type the end of input."""
        if self.is_pipe:
            self._has_ended = True
            self._write()
        else:
            self.type(END_OF_INPUT, lambda _: None)

    @property
    def is_idle(self) -> bool:
        """Whether all that was typed has been taken."""
        return not self._typed

    def is_awaited_by(self, pids: list[int]) -> bool:
        """Whether one of these processes stands in a read of this terminal."""
        return any(self._name == _read_by(pid) for pid in pids)

    def close(self) -> None:
        """Hang up."""
        if self._fd >= 0:
            self._agent.unwatch(self._fd)
            os.close(self._fd)
            self._fd = -1
        for data, taken in self._typed:
            taken(len(data))
        self._typed.clear()

    def _write(self) -> None:
        while self._typed:
            data, taken = self._typed.pop(0)
            try:
                written = os.write(self._fd, data)
            except BlockingIOError:
                written = 0
            except OSError:  # every program has closed its end
                written = len(data)
            if written:
                taken(written)
            if written < len(data):
                self._typed.insert(0, (data[written:], taken))
                break
        if self._fd < 0:
            return
        if self._has_ended and not self._typed:
            self.close()
            return
        self._agent.watch(self._fd, read=self._drain, write=self._write if self._typed else None)

    def _drain(self) -> None:
        """Programs may write to their input too; nobody shows that."""
        try:
            os.read(self._fd, 65536)
        except BlockingIOError:
            pass
        except OSError:  # no program has the other end open
            self.close()


def _set_modes(slave: int) -> None:
    modes = termios.tcgetattr(slave)
    modes[_IFLAG] &= ~(termios.IXON | termios.ICRNL)
    modes[_LFLAG] &= ~(termios.ECHO | termios.ISIG)
    termios.tcsetattr(slave, termios.TCSANOW, modes)


def _read_by(pid: int) -> str | None:
    """What the file is called that a process is blocked in reading; None if it is not."""
    try:
        with open(f"/proc/{pid}/syscall", "rb") as file:
            words = file.read().split()
        if len(words) > 1 and words[0] == READ_CALL:
            return os.readlink(f"/proc/{pid}/fd/{int(words[1], 16)}")
    except OSError:
        pass
    return None
