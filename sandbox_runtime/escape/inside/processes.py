"""Attempts on the guest agent and other processes outside this command's session. A program that
controls the agent's descriptors or memory can send frames to the host in the agent's name."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import subprocess
from pathlib import Path

from sandbox_runtime.escape.inside.attempt import call, summarize

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_SEIZE = 0x4206
_STANDARD = frozenset({0, 1, 2})


def agent_descriptors() -> str | None:
    """Opens the descriptors of other processes, where a write would forge frames of the
    protocol."""
    found = []
    for process in _foreign_processes():
        for link in _list_folder(process / "fd"):
            if _opens(link):
                found.append(link)
    return summarize("open", found)


def agent_memory() -> str | None:
    """Opens the memory of other processes."""
    return summarize(
        "open", (process / "mem" for process in _foreign_processes() if _opens(process / "mem"))
    )


def agent_environment() -> str | None:
    """Reads the environment of other processes, which may contain an engine's secrets."""
    found = []
    for process in _foreign_processes():
        try:
            content = (process / "environ").read_bytes()
        except OSError:
            continue
        if content:
            found.append(process / "environ")
    return summarize("readable", found)


def agent_traced() -> str | None:
    """Attaches to other processes as a debugger does, without stopping them."""
    found = []
    for process in _foreign_processes():
        try:
            call("ptrace", _SEIZE, int(process.name), 0, 0)
        except OSError:
            continue
        found.append(process.name)
    return summarize("traced", found)


def agent_memory_read() -> str | None:
    """Reads a byte at address 0 in the memory of other processes."""
    byte = ctypes.create_string_buffer(1)
    local, remote = struct.pack("=2Q", ctypes.addressof(byte), 1), struct.pack("=2Q", 0, 1)
    found = []
    for process in _foreign_processes():
        try:
            call(
                "process_vm_readv",
                int(process.name),
                local,
                1,
                remote,
                1,
                0,
                reached=(errno.EFAULT,),
            )
        except OSError:
            continue
        found.append(process.name)
    return summarize("readable", found)


def agent_descriptor_stolen() -> str | None:
    """Duplicates the standard output of other processes."""
    found = []
    for process in _foreign_processes():
        try:
            descriptor = call("pidfd_open", int(process.name), 0)
            os.close(call("pidfd_getfd", descriptor, 1, 0))
        except OSError:
            continue
        found.append(process.name)
    return summarize("taken from", found)


def inherited_descriptors() -> str | None:
    """Looks for open files other than standard input, standard output and standard error."""
    # A new program has only inherited descriptors, and one more for the directory being listed.
    shell = ("bash", "-c", "cd /proc/self/fd; echo *")
    shown = subprocess.run(shell, close_fds=False, capture_output=True, check=True)
    extra = set(map(int, shown.stdout.split())) - _STANDARD
    return summarize("descriptors", sorted(extra)) if len(extra) > 1 else None


def _foreign_processes() -> Iterator[Path]:
    """Yield the /proc directories of the processes outside this command's session."""
    own = os.getsid(0)
    return (process for process in _processes() if _session(process) != own)


def _processes() -> Iterator[Path]:
    return Path("/proc").glob("[0-9]*")


def _session(process: Path) -> int:
    try:
        # The command's name, in parentheses, may hold any character.
        return int((process / "stat").read_text(errors="replace").rpartition(")")[2].split()[3])
    except OSError:
        return os.getsid(0)  # it has ended, or nothing of it may be read


def _list_folder(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _opens(path: Path) -> bool:
    for mode in (os.O_RDONLY, os.O_WRONLY):
        try:
            os.close(os.open(path, mode | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC))
        except OSError:
            continue
        return True
    return False
