"""A disk in memory: how large it may be, and how it is mounted."""

from policies.isolation import Isolation

SHARE_OF_MEMORY = 0.75
"""How much of its memory a sandbox may fill with files: a full disk is to be an error that the
model can read, not the end of all its processes."""
FILES_PER_MIB = 128
"""A file of no bytes takes kernel memory too."""


def largest_disk_mib(isolation: Isolation) -> int:
    """How large the disk is where what files take is taken from the sandbox's memory."""
    return min(isolation.disk_mib, int(isolation.memory_mib * SHARE_OF_MEMORY))


def tmpfs_options(size_mib: int) -> str:
    """Mount options with hard bounds: beyond them a write fails with "No space left on device"."""
    size_mib = max(1, size_mib)
    return f"size={size_mib}m,nr_inodes={size_mib * FILES_PER_MIB},nosuid,nodev"
