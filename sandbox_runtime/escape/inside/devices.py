"""Attempts on devices of the host and on terminals.

A sandbox's own kernel makes these attempts harmless: its devices are not the host's.
"""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
import termios
from pathlib import Path

from sandbox_runtime.escape.inside.attempt import summarize, survives

_HARMLESS = frozenset({"null", "zero", "full", "random", "urandom", "tty", "ptmx"})
_TYPE_A_CHARACTER = 0x5412
_MEMORY = os.makedev(1, 1)
_FIRST_DISK = os.makedev(8, 0)


def memory_device() -> str | None:
    """Makes a device node for the machine's memory."""
    return _make_device(stat.S_IFCHR, _MEMORY, "the machine's memory")


def disk_device() -> str | None:
    """Makes a device node for the first disk."""
    return _make_device(stat.S_IFBLK, _FIRST_DISK, "a disk")


def root_disk() -> str | None:
    """Makes a device node for the disk that holds the sandbox's own files, and opens it."""
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        major, _, minor = line.split()[2].partition(":")
        if major != "0":  # a number of the kernel's own, without a device
            break
    else:
        return None
    with tempfile.TemporaryDirectory() as folder:
        node = Path(folder, "disk")
        os.mknod(node, 0o600 | stat.S_IFBLK, os.makedev(int(major), int(minor)))
        os.close(os.open(node, os.O_RDONLY))
    return f"the disk {major}:{minor} can be read"


def device_nodes() -> str | None:
    """Looks for devices other than harmless ones such as /dev/null and terminals."""
    nodes = (path for path in Path("/dev").rglob("*") if _is_device(path.lstat().st_mode))
    unusual = (
        node for node in nodes if node.name not in _HARMLESS and node.parent != Path("/dev/pts")
    )
    return summarize("there are", unusual)


def typing_into_a_terminal() -> str | None:
    """Writes a character to the input of the process's own terminal, as a user's keyboard does."""
    return "input can be written to terminals" if survives(_type_character) else None


def foreign_terminal() -> str | None:
    """Looks for a controlling terminal, which would belong to a user of the host."""
    os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    return "there is a controlling terminal"


def _type_character() -> None:
    _, slave = os.openpty()
    os.setsid()
    fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
    fcntl.ioctl(slave, _TYPE_A_CHARACTER, b"x")


def _make_device(kind: int, device: int, what: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        os.mknod(Path(folder, "device"), 0o600 | kind, device)
    return f"the device of {what} can be made"


def _is_device(mode: int) -> bool:
    return stat.S_ISCHR(mode) or stat.S_ISBLK(mode)
