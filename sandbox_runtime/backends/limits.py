"""Limits that every backend gives a sandbox: its users, rlimits, pseudo-terminals and the size of
its disk. Open it to see what bounds a sandbox besides its cgroup."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from policies.isolation import Isolation

NOBODY = 65534
UIDS = range(0x7800_0000, 0x7FFE_0000)
"""The host's users that sandboxes run as where the proxy is root and may choose. The kernel counts
some resources for a user, in all namespaces together: open files on their way through sockets, the
memory of pipes, queued signals. Sandboxes of different users do not share these.

The range is a part of the one that distributions leave unused (systemd's "UIDs and GIDs"): above
the uids that SSSD gives to users of an Active Directory, below systemd's own for foreign images."""
PENDING_SIGNALS = 2048
"""Queued signals and POSIX timers, counted for each user of each user namespace. Where the root of
several sandboxes is the same user, as with Docker's runc, they have this many together; the host's
own processes may have more by their higher limit (a host of 1 GiB of memory has about 4000)."""
MESSAGE_QUEUE_BYTES = 0
"""No POSIX message queues: a host lets a user have about nine of the usual size, in all of its user
namespaces together, so the first sandbox would leave none for the next."""
PSEUDO_TERMINALS = 32
"""Of those that a host has for all sandboxes: 3072, by kernel.pty.max and kernel.pty.reserve."""
TERMINALS = f"newinstance,ptmxmode=0666,mode=0620,max={PSEUDO_TERMINALS},nosuid,noexec"
"""Mount options of a devpts, the file system that gives out pseudo-terminals."""
SHARE_OF_MEMORY = 0.75
"""How much of its memory a sandbox may fill with files where its disk is a tmpfs: a full disk is to
be an error that the model can read, not the end of all its processes."""
FILES_PER_MIB = 128
"""The number of files is limited too: a file of no bytes takes kernel memory."""


@dataclass(frozen=True, slots=True)
class GuestUser:
    """The user that programs inside a sandbox run as; the backend maps it to a user of the host."""

    uid: int
    name: str
    home: str

    @property
    def env(self) -> Mapping[str, str]:
        """What programs look up about themselves, also where /etc/passwd does not know the user."""
        return {"HOME": self.home, "USER": self.name}


ROOT = GuestUser(0, "root", "/root")
SANDBOX = GuestUser(1000, "sandbox", "/home/sandbox")


def guest_user(isolation: Isolation) -> GuestUser:
    """Return root, who may install packages, or at the strict level an ordinary user."""
    return SANDBOX if isolation.level == "strict" else ROOT


def new_uid() -> int:
    """Return a random uid of UIDS: two sandboxes rarely get the same, and nobody can guess it."""
    return secrets.choice(UIDS)


def has_range(proc: Path = Path("/proc")) -> bool:
    """Return whether UIDS exist here: the user namespace of a container may not map them."""
    return all(_is_mapped(proc / "self" / name) for name in ("uid_map", "gid_map"))


def _is_mapped(file: Path) -> bool:
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except FileNotFoundError:  # no Linux
        return False
    parts = [tuple(map(int, line.split())) for line in lines]
    return any(first <= UIDS.start and first + count >= UIDS.stop for first, _, count in parts)


def process_limits(isolation: Isolation) -> Mapping[str, int]:
    """Return the rlimits of a sandbox's processes, hard and soft, by lower-case name (`nofile`)."""
    return {
        "nofile": isolation.open_files,
        # With 0 a crash inside would still start the host's core handler, as root: only 1 byte
        # keeps the kernel from it.
        "core": 1,
        "fsize": isolation.disk_mib << 20,
        "sigpending": PENDING_SIGNALS,
        "msgqueue": MESSAGE_QUEUE_BYTES,
    }


def largest_disk_mib(isolation: Isolation) -> int:
    """Return the size of a tmpfs whose files are charged to the sandbox's memory."""
    return min(isolation.disk_mib, int(isolation.memory_mib * SHARE_OF_MEMORY))


def tmpfs_options(size_mib: int) -> str:
    """Return mount options with hard limits: beyond them a write fails with ENOSPC."""
    size_mib = max(1, size_mib)
    return f"size={size_mib}m,nr_inodes={size_mib * FILES_PER_MIB},nosuid,nodev"
