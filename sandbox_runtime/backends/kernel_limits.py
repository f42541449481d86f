"""Bounds on what the kernel counts for a process or a user, or once for all sandboxes on it."""

from collections.abc import Mapping

from policies.isolation import Isolation

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


def process_limits(isolation: Isolation) -> Mapping[str, int]:
    """The rlimits of a sandbox's processes, hard and soft, by name in small letters (`nofile`)."""
    return {
        "nofile": isolation.open_files,
        # With 0 the host's core handler would still be started, as root, by a crash in here: only 1
        # byte keeps the kernel from it.
        "core": 1,
        "fsize": isolation.disk_mib << 20,
        "sigpending": PENDING_SIGNALS,
        "msgqueue": MESSAGE_QUEUE_BYTES,
    }
