"""The isolation of a sandbox: the resources that it may use."""

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
"""The lowest limits that a request may ask for: with much less nothing starts, and a killed sandbox
ends only when the disk has finished its requests."""


@dataclass(frozen=True, slots=True)
class Isolation:
    """The isolation of one sandbox. Raises ValueError for a limit that engines take for none.

    A sandbox never has a network interface. `egress` are the rules for connections through the
    proxy on the host.
    """

    level: Level = "standard"
    """standard: root inside, so that packages can be installed; strict: no root inside, and only a
    workspace in memory is writable."""
    memory_mib: int = 2048
    """Memory of all processes together, swap excluded (there is none)."""
    cpus: float = 2.0
    """Processor share, in cores."""
    pids: int = 512
    """Processes and threads at one time."""
    disk_mib: int = 1536
    """Disk space: on bubblewrap the size of a tmpfs, so at most 3/4 of the memory; on Docker it is
    measured, and a sandbox that exceeds it is stopped."""
    disk_mib_per_s: int | None = 256
    """MiB a second that may be read from the disk, and as many that may be written; null: no limit.
    On Docker only, if the engine's disk is one of this host's."""
    open_files: int = 1024
    """Open files per process."""
    egress: Egress = Egress()
    """Applied when a sandbox is leased, as can be memory, cpus and pids; the rest is fixed when it
    is created."""

    def __post_init__(self) -> None:
        for name, least in MIN_LIMITS.items():
            value = getattr(self, name)
            if value is not None and not value > 0:  # which engines take for "no limit"
                raise ValueError(f"{name} is at least {least:g}")
