"""Start processes in the cluster's network namespaces, find them there, and end them.

A network namespace is the register of its processes: no file can name a process that has ended, or
one that has got its number since.
"""

import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

POLL_INTERVAL_S = 0.1
END_TIMEOUT_S = 20
"""Time limit for the end of killed processes: a node ends when all its containers have."""
LOG_TAIL_CHARS = 2000


class ClusterError(Exception):
    """The cluster cannot do what was asked; the message says why."""


def run(*command: str) -> str:
    """Run a command and return its standard output. Raise ClusterError."""
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except OSError as error:
        raise ClusterError(f"{command[0]} cannot be started: {error}") from error
    if done.returncode:
        message = done.stderr.decode(errors="replace").strip()
        raise ClusterError(f"{' '.join(command)} failed ({done.returncode}): {message}")
    return done.stdout.decode(errors="replace")


def start(namespace: str, command: Sequence[str], log: Path) -> None:
    """Start a process in a network namespace, in a session of its own, and append to its log. It
    outlives this process.
    """
    # A forked setsid leaves the process to init: it becomes no zombie of this process.
    run(
        *("setsid", "--fork", "nsenter", f"--net={namespace_file(namespace)}", "--"),
        *("sh", "-c", 'log=$1; shift; exec "$@" </dev/null >>"$log" 2>&1', "sh", str(log)),
        *command,
    )


def namespace_file(namespace: str) -> Path:
    """Return the path at which iproute2 keeps a network namespace."""
    return Path("/run/netns", namespace)


def pids_in(namespace: str, program: str | None = None) -> list[int]:
    """Return the processes in a network namespace, or those of them that run a program."""
    try:
        inode = namespace_file(namespace).stat().st_ino
    except FileNotFoundError:
        return []
    return [
        int(process.name)
        for process in Path("/proc").glob("[0-9]*")
        if _inode(process / "ns/net") == inode and (program is None or _program(process) == program)
    ]


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:  # the process has ended
        return None


def _program(process: Path) -> str | None:
    """Return the name of a process's program, also if its file was deleted."""
    try:
        return (process / "exe").readlink().name.removesuffix(" (deleted)")
    except OSError:  # the process has ended
        return None


def kill(pids: Sequence[int]) -> None:
    """Kill processes, and return when they have ended. Raise ClusterError."""
    pidfds = []
    for pid in pids:
        try:
            pidfds.append(os.pidfd_open(pid))
        except ProcessLookupError:
            continue
    try:
        for pidfd in pidfds:
            try:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for pidfd in pidfds:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            if not poll.poll(1000 * END_TIMEOUT_S):
                raise ClusterError(f"a process has not ended {END_TIMEOUT_S} s after SIGKILL")
    finally:
        for pidfd in pidfds:
            os.close(pidfd)


def kill_all(namespace: str) -> None:
    """Kill the processes in a network namespace, also those that they start meanwhile."""
    while pids := pids_in(namespace):
        kill(pids)


def wait_until(condition: Callable[[], bool], timeout_s: float, expected: str, log: Path) -> None:
    """Return when the condition is true. Raise ClusterError with the end of the log."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
            raise ClusterError(
                f"{expected} not after {timeout_s:g} s; the end of {log}:\n{text[-LOG_TAIL_CHARS:]}"
            )
        time.sleep(POLL_INTERVAL_S)
