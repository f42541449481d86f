"""Bounds of a sandbox in addition to its cgroup: users, rlimits, pseudo-terminals and the size of
its disk. The backends share them; not every backend needs each of them."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from policies.isolation import Isolation

NOBODY = 65534
HOST_UIDS = range(0x7800_0000, 0x7FFE_0000)
"""The host uids of sandboxes if the proxy runs as root. The kernel counts some resources per user
across all namespaces: open files in flight through sockets, pipe memory, queued signals. Sandboxes
with different uids do not share these counters.

Distributions leave this range unused (systemd's "UIDs and GIDs"): it lies above the uids that SSSD
gives to Active Directory users and below systemd's uids for foreign images.
"""
PENDING_SIGNALS = 2048
"""Maximum number of queued signals and POSIX timers, counted per user and user namespace. Sandboxes
whose root is the same user, as with Docker's runc, share this number; the host's own processes have
a higher limit (about 4000 on a host with 1 GiB of memory)."""
PENDING_SIGNAL_ATTEMPTS = ("timer_bomb", "signal_bomb")
"""The escape attempts that use up the signals and timers of another sandbox with the same user."""
MESSAGE_QUEUE_BYTES = 0
"""No POSIX message queues: a host allows each user about nine of the default size, in all its user
namespaces together, so one sandbox could use up those of all others."""
PSEUDO_TERMINALS = 32
"""Maximum number of pseudo-terminals of one sandbox. A host has 3072 for all sandboxes
(kernel.pty.max less kernel.pty.reserve)."""
DEVPTS_OPTIONS = f"newinstance,ptmxmode=0666,mode=0620,max={PSEUDO_TERMINALS},nosuid,noexec"
"""Mount options of devpts, the file system of pseudo-terminals."""
TMPFS_MEMORY_SHARE = 0.75
"""The share of a sandbox's memory that files may take if its disk is a tmpfs. A full disk must give
an error that the model can read, before memory runs out and processes are killed."""
FILES_PER_MIB = 128
"""Maximum number of files per MiB of disk. Even an empty file takes kernel memory."""


@dataclass(frozen=True, slots=True)
class GuestUser:
    """The user of programs inside a sandbox; the backend maps it to a user of the host."""

    uid: int
    name: str
    home: str

    @property
    def env(self) -> Mapping[str, str]:
        """The variables HOME and USER, from which programs know the user even without
        /etc/passwd."""
        return {"HOME": self.home, "USER": self.name}

    def search_path(self, directories: str) -> str:
        """Return the PATH of the user's programs: the directory of the scripts that `pip install
        --user` installs, then `directories`."""
        return f"{self.home}/.local/bin:{directories}"


ROOT_USER = GuestUser(0, "root", "/root")
SANDBOX_USER = GuestUser(1000, "sandbox", "/home/sandbox")


def guest_user(isolation: Isolation) -> GuestUser:
    """Return the user of the sandbox's programs: root, which may install packages, or an ordinary
    user at the strict level."""
    return SANDBOX_USER if isolation.level == "strict" else ROOT_USER


def new_host_uid() -> int:
    """Return a random uid of HOST_UIDS; it is unguessable and rarely given to two sandboxes."""
    return secrets.choice(HOST_UIDS)


def maps_host_uids(proc: Path = Path("/proc")) -> bool:
    """Return True if this process's user namespace maps HOST_UIDS; a container's may not."""
    return all(_map_contains_host_uids(proc / "self" / name) for name in ("uid_map", "gid_map"))


def _map_contains_host_uids(file: Path) -> bool:
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except FileNotFoundError:  # not Linux
        return False
    parts = [tuple(map(int, line.split())) for line in lines]
    return any(
        first <= HOST_UIDS.start and first + count >= HOST_UIDS.stop for first, _, count in parts
    )


def rlimits(isolation: Isolation) -> Mapping[str, int]:
    """Return the hard and soft rlimits of a sandbox's processes, by lower-case name (`nofile`)."""
    return {
        "nofile": isolation.open_files,
        # Not 0, with which a crash inside would still start the host's core handler as root.
        "core": 1,
        "fsize": isolation.disk_mib << 20,
        "sigpending": PENDING_SIGNALS,
        "msgqueue": MESSAGE_QUEUE_BYTES,
    }


def tmpfs_size_mib(isolation: Isolation) -> int:
    """Return the size of a tmpfs whose files are charged to the sandbox's memory."""
    return min(isolation.disk_mib, int(isolation.memory_mib * TMPFS_MEMORY_SHARE))


def tmpfs_options(size_mib: int) -> str:
    """Return tmpfs mount options with hard limits; a write beyond them fails with ENOSPC."""
    size_mib = max(1, size_mib)
    return f"size={size_mib}m,nr_inodes={size_mib * FILES_PER_MIB},nosuid,nodev"
