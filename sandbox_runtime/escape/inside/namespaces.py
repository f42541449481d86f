"""Attempts to make and enter namespaces and to change mounts. In a new user namespace a process has
all capabilities and reaches much kernel code.

A sandbox's own kernel makes these attempts harmless: the system calls never reach the host's
kernel.
"""

from __future__ import annotations

import errno
import os
import signal
import struct
from pathlib import Path

from sandbox_runtime.escape.inside.attempt import call, summarize, survives

_NEW_USER = 0x1000_0000
_NEW = {
    "mount": 0x0002_0000,
    "cgroup": 0x0200_0000,
    "uts": 0x0400_0000,
    "ipc": 0x0800_0000,
    "pid": 0x2000_0000,
    "network": 0x4000_0000,
    "time": 0x80,
}
_HERE = -100
_INITIAL = {
    "ipc": 0xEFFF_FFFF,
    "uts": 0xEFFF_FFFE,
    "pid": 0xEFFF_FFFC,
    "net": 0xEFFF_FFF7,
    "mnt": 0xEFFF_FFF8,
}
"""The inode numbers of a machine's initial namespaces. A sandbox's own namespaces never have these
numbers. On older kernels net and mnt have others, so `host_namespaces` cannot detect these two."""


def user_namespace() -> str | None:
    """Makes a user namespace, in which the process would have every capability."""
    call("unshare", _NEW_USER)
    return "a user namespace was made"


def cloned_user_namespace() -> str | None:
    """Makes a process in a user namespace of its own."""
    child = call("clone", _NEW_USER | signal.SIGCHLD, 0, 0, 0, 0)
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return "a process in a user namespace was made"


def clone3_user_namespace() -> str | None:
    """Makes a process in a user namespace by clone3, whose flags no filter can read."""
    child = call("clone3", struct.pack("=5Q24x", _NEW_USER, 0, 0, 0, signal.SIGCHLD), 64)
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return "a process in a user namespace was made by clone3"


def other_namespaces() -> str | None:
    """Makes a namespace of each kind except user namespaces."""
    made = [name for name, flag in _NEW.items() if survives(lambda: call("unshare", flag))]  # noqa: B023 - called at once
    return summarize("namespaces were made", made)


def setns() -> str | None:
    """Enters the UTS namespace that the process is already in."""
    own = os.open("/proc/self/ns/uts", os.O_RDONLY)
    call("setns", own, 0)
    return "namespaces can be entered"


def host_namespaces() -> str | None:
    """Compares the namespaces of the process with those that the machine booted with."""
    inside = {
        name
        for name, initial in _INITIAL.items()
        if os.readlink(f"/proc/self/ns/{name}") == f"{name}:[{initial}]"  # noqa: PTH115 - no path
    }
    return summarize("shared with the host", sorted(inside))


def mount() -> str | None:
    """Sets the mount propagation of a directory that is no mount point."""
    call("mount", None, b"/usr/bin", None, 1 << 18, None, reached=(errno.EINVAL,))
    return "mounts can be made"


def umount() -> str | None:
    """Unmounts a directory that is no mount point."""
    call("umount2", b"/usr/bin", 0, reached=(errno.EINVAL,))
    return "mounts can be taken away"


def pivot_root() -> str | None:
    """Replaces the root file system by one that does not exist."""
    call("pivot_root", b"/nonexistent", b"/nonexistent", reached=(errno.ENOENT,))
    return "the root file system can be changed"


def chroot() -> str | None:
    """Changes the root directory to the same directory; calling chroot twice escapes from a
    chroot."""
    call("chroot", b"/")
    return "the root directory can be changed"


def fsopen() -> str | None:
    """Opens a file system context of the newer mount API."""
    os.close(call("fsopen", b"tmpfs", 0))
    return "file systems can be opened"


def open_tree() -> str | None:
    """Makes a detached copy of a mount."""
    os.close(call("open_tree", _HERE, b"/", 1))
    return "mounts can be copied"


def move_mount() -> str | None:
    """Moves a mount from a path that does not exist."""
    nowhere = b"/nonexistent"
    call("move_mount", _HERE, nowhere, _HERE, nowhere, 0, reached=(errno.ENOENT,))
    return "mounts can be moved"


def mount_setattr() -> str | None:
    """Sets the attributes of a mount, with an empty list of changes."""
    call("mount_setattr", _HERE, b"/", 0, bytes(32), 32)
    return "mounts can be changed"


def other_roots() -> str | None:
    """Looks in /proc for processes that have another root directory than this one."""
    own = Path("/").stat()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            root = (process / "root").stat()
        except OSError:
            continue
        if (root.st_dev, root.st_ino) != (own.st_dev, own.st_ino):
            found.append(process / "root")
    return summarize("leads out", found)
