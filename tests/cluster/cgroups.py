"""The cgroups of nodes, in every hierarchy."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

from tests.cluster.processes import POLL_INTERVAL_S, ClusterError

DELETE_TIMEOUT_S = 10
"""The kernel keeps a cgroup busy for a moment after its last process has ended."""


def create_cgroup(name: str) -> None:
    """Create a cgroup, where it is missing, with its parents. Raise ClusterError."""
    if not any((hierarchy / "cpuset.cpus").exists() for hierarchy in _hierarchies()):
        raise ClusterError("no cgroup v1 hierarchy of cpusets: the kubelet 1.20 needs cgroup v1")
    for hierarchy in _hierarchies():
        folder = hierarchy
        for part in name.split("/"):
            folder /= part
            if not folder.exists():
                folder.mkdir()
                # A new cpuset has no processor and no memory, and takes no process.
                for setting in ("cpuset.cpus", "cpuset.mems"):
                    if (folder / setting).exists():
                        inherited = (folder.parent / setting).read_text(encoding="ascii")
                        (folder / setting).write_text(inherited, encoding="ascii")


def delete_cgroup(name: str) -> None:
    """Delete a cgroup without processes and all below it. Raise ClusterError."""
    for hierarchy in _hierarchies():
        for folder, _, _ in os.walk(hierarchy / name, topdown=False):
            _delete(Path(folder))


def _delete(folder: Path) -> None:
    deadline = time.monotonic() + DELETE_TIMEOUT_S
    while True:
        try:
            folder.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise ClusterError(f"cgroup {folder} cannot be deleted: {error}") from error
            time.sleep(POLL_INTERVAL_S)


def existing_cgroups(name: str) -> list[Path]:
    """Return the folders of a cgroup, one for each hierarchy that has it."""
    return [hierarchy / name for hierarchy in _hierarchies() if (hierarchy / name).exists()]


def _hierarchies() -> Iterator[Path]:
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        _, where, kind, *_ = line.split()
        if kind in ("cgroup", "cgroup2"):
            yield Path(where)
