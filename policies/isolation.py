"""What a sandbox may use and reach."""

from dataclasses import dataclass
from typing import Literal

from policies.egress import Egress

Level = Literal["standard", "strict"]
LEAST = {
    "memory_mib": 16,
    "cpus": 0.01,
    "pids": 8,
    "disk_mib": 1,
    "disk_mib_per_s": 64,
    "open_files": 16,
}
"""The narrowest walls that anybody may ask for: with much less nothing starts, and a killed sandbox
ends only when the disk has done what it asked."""


@dataclass(frozen=True, slots=True)
class Isolation:
    """The walls around one sandbox. Raises ValueError where there would be none.

    It never has a network interface; what it may reach through the proxy on the host is `egress`.
    """

    level: Level = "standard"
    """standard: root inside, so that packages install; strict: no root inside, nothing writable but
    a workspace in memory."""
    memory_mib: int = 2048
    """Memory of all processes together, swap excluded (there is none)."""
    cpus: float = 2.0
    """Processor share, in cores."""
    pids: int = 512
    """Processes and threads at one time."""
    disk_mib: int = 1536
    """What may be written: a tmpfs on bubblewrap, so at most 3/4 of the memory; on Docker watched,
    and who goes beyond it is stopped."""
    disk_mib_per_s: int | None = 256
    """MiB a second that may be read from the disk, and as many that may be written to it; null: no
    limit. On Docker only, where the engine's disk is one of this host's."""
    open_files: int = 1024
    """Open files per process."""
    egress: Egress = Egress()
    """Bound when a sandbox is lent; the rest but memory, cpus and pids when it is made."""

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is not None and not value > 0:  # which engines take for "no bound"
                raise ValueError(f"{name} is at least {least:g}")
