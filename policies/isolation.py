"""What a sandbox may use and reach."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Isolation:
    """The walls around one sandbox. The network is always absent: there is no key to open it."""

    memory_mib: int = 2048
    """Memory of all processes together, swap excluded (there is none)."""
    cpus: float = 2.0
    """Processor share, in cores."""
    pids: int = 512
    """Processes and threads at one time."""
    disk_mib: int = 1536
    """Size of the writable disk: bubblewrap's is a tmpfs, so at most 3/4 of the memory; Docker's is
    its storage driver's and not limited here."""
    open_files: int = 4096
    """Open files per process."""
