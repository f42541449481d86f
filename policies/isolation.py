"""The isolation of a sandbox and the resources that it may use."""

from dataclasses import dataclass
from typing import Literal

from policies.egress import Egress

Level = Literal["standard", "strict"]
MIN_LIMITS = {
    "memory_mib": 16,
    "cpus": 0.01,
    "pids": 8,
    "disk_mib": 1,
    "disk_mib_per_s": 64,
    "open_files": 16,
}
"""Minimum values of the limits that a request may set. With much smaller limits no sandbox starts,
and with a smaller disk bandwidth a killed sandbox takes long to end."""


@dataclass(frozen=True, slots=True)
class Isolation:
    """The isolation and the resources of one sandbox. Raises ValueError for a limit of 0 or less,
    which container engines treat as no limit.

    A sandbox on this host never has a network interface, and on Kubernetes a network policy denies
    its traffic. Its connections go through an egress proxy on the host.
    """

    level: Level = "standard"
    """standard: root in the sandbox, so that packages can be installed. strict: no root, and only
    the workspace, /tmp and the home directory are writable, in memory."""
    memory_mib: int = 2048
    """Maximum memory of all processes together, in MiB; there is no swap. At the limit the kernel
    kills a process."""
    cpus: float = 2.0
    """Maximum processor use, in cores."""
    pids: int = 512
    """Maximum number of processes and threads; at the limit no further process or thread can be
    started."""
    disk_mib: int = 1536
    """Maximum disk space, in MiB. On bubblewrap it is the size of a tmpfs, at most 3/4 of
    memory_mib. On Docker and Kubernetes it is measured, and a sandbox above the limit is
    stopped."""
    disk_mib_per_s: int | None = 256
    """Maximum disk bandwidth, in MiB a second, separately for reading and writing. null: no limit.
    Only on Docker, and only if the engine's disk is a disk of this host."""
    open_files: int = 1024
    """Maximum number of open files of one process."""
    network: Egress = Egress()
    """Rules for connections out of the sandbox. A pooled sandbox gets `network`, `memory_mib`,
    `cpus` and `pids` when it is leased; all other settings are fixed when it is created."""

    def __post_init__(self) -> None:
        for name, minimum in MIN_LIMITS.items():
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be at least {minimum:g} (got {value:g})")
