"""Find the processes that another one started, and wait for their end."""

import os
import select
import signal
from collections.abc import Iterable
from pathlib import Path


def descendants(pid: int) -> list[int]:
    """Return the processes that `pid` started, recursively. The server of gradings, which
    other tests start and which stays until the end, is left out.

    The parents are read from /proc/PID/stat: /proc/PID/task/TID/children may leave out a process
    while another one ends, see proc_pid_children(5)."""
    started: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        if text := read(stat):
            parent = int(text.rpartition(")")[2].split()[1])
            started.setdefault(parent, []).append(int(stat.parent.name))
    found: list[int] = []
    unread = [pid]
    while unread:
        for child in started.get(unread.pop(), ()):
            if "evaluation.isolation_server" not in command_line(child):
                found.append(child)
                unread.append(child)
    return found


def command_line(pid: int) -> str:
    """Return the command line of a living process, or "" if it has ended."""
    return read(Path(f"/proc/{pid}/cmdline"))


def running(marker: str) -> bool:
    """Return True if a process on this host, sandboxed or not, has `marker` in its command line."""
    return any(marker in read(path) for path in Path("/proc").glob("[0-9]*/cmdline"))


def bubblewrap_sandboxes(pid: int) -> list[int]:
    """Return the bubblewrap sandboxes of the process `pid`, also the idle ones."""
    return [each for each in descendants(pid) if read(Path(f"/proc/{each}/comm")) == "bwrap\n"]


def kill_sandboxes(pid: int, count: int | None = None) -> None:
    """Kill all bubblewrap sandboxes of the process `pid`, also the idle ones, or only `count` of
    them. Return when they and all processes inside have ended: until then one inside can answer the
    next request."""
    killed = bubblewrap_sandboxes(pid)[:count]
    assert killed
    pidfds = [os.pidfd_open(inside) for each in killed for inside in (each, *descendants(each))]
    for each in killed:
        os.kill(each, signal.SIGKILL)
    assert all_end(pidfds)


def all_end(pidfds: Iterable[int]) -> bool:
    """Close the descriptors of processes after these have ended. Return False if one has not
    ended after 5 s."""
    for pidfd in pidfds:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        if not poll.poll(5000):
            return False
        os.close(pidfd)
    return True


def read(path: Path) -> str:
    """Return the text of a file in /proc, or "" if its process has just ended."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
