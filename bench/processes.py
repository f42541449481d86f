"""Processes of this host, as /proc tells of them."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
PARENT, STARTED = 1, 19
"""Places in /proc/PID/stat after the command's name."""


@dataclass(frozen=True, slots=True)
class HostProcess:
    """One that no later process is mistaken for."""

    pid: int
    started: int
    """In ticks since boot."""

    @property
    def name(self) -> str:
        """Its program's, or "" when it has ended."""
        try:
            return (PROC / str(self.pid) / "comm").read_text().strip()
        except (FileNotFoundError, ProcessLookupError):
            return ""


def alive(processes: Iterable[HostProcess]) -> set[HostProcess]:
    """Those that have not ended."""
    return {each for each in processes if _is_alive(each)}


class Family:
    """All processes of one moment, by who started whom."""

    def __init__(self) -> None:
        self._parents: dict[int, int] = {}
        self._children: dict[int, list[HostProcess]] = {}
        self._all: dict[int, HostProcess] = {}
        for entry in PROC.iterdir():
            if entry.name.isdigit() and (fields := _stat(int(entry.name))):
                process = HostProcess(int(entry.name), int(fields[STARTED]))
                self._all[process.pid] = process
                self._parents[process.pid] = int(fields[PARENT])
                self._children.setdefault(int(fields[PARENT]), []).append(process)

    def parent(self, pid: int) -> HostProcess:
        """Raises KeyError for a process that had ended."""
        return self._all[self._parents[pid]]

    def children(self, pid: int) -> list[HostProcess]:
        """Those that it is the parent of."""
        return self._children.get(pid, [])

    def descent(self, process: HostProcess) -> set[HostProcess]:
        """It, its children, and so on."""
        found, left = set[HostProcess](), [process]
        while left:
            found.add(each := left.pop())
            left += self.children(each.pid)
        return found

    def __getitem__(self, pid: int) -> HostProcess:
        return self._all[pid]


def rss_mib(pid: int) -> float:
    """Memory it holds."""
    return _status_kib(pid, "VmRSS") / 1024


def peak_rss_mib(pid: int) -> float:
    """The most it has held so far."""
    return _status_kib(pid, "VmHWM") / 1024


def pss_mib(processes: Iterable[HostProcess]) -> float:
    """Memory they hold, what they share with others divided among all. Raises PermissionError."""
    return sum(_pss_kib(each.pid) for each in processes) / 1024


def cgroup_mib(pid: int) -> float:
    """Memory that its cgroup is charged with, files and the kernel's included.

    Raises LookupError.
    """
    for line in (PROC / str(pid) / "cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if controllers == "memory":
            return _number(CGROUPS / "memory" / path[1:] / "memory.usage_in_bytes") / (1 << 20)
        if number == "0" and (CGROUPS / path[1:] / "memory.current").exists():
            return _number(CGROUPS / path[1:] / "memory.current") / (1 << 20)
    raise LookupError(f"process {pid} is in no cgroup for memory")


def available_mib() -> float:
    """What the host could still give."""
    text = (PROC / "meminfo").read_text()
    return int(text.partition("MemAvailable:")[2].split()[0]) / 1024


def open_files(pid: int) -> int:
    """How many descriptors it has."""
    return len(list((PROC / str(pid) / "fd").iterdir()))


def _is_alive(process: HostProcess) -> bool:
    fields = _stat(process.pid)
    return bool(fields) and int(fields[STARTED]) == process.started


def _stat(pid: int) -> list[str]:
    """What follows the command's name; nothing where it has ended, even if nobody has noticed."""
    try:
        fields = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [] if fields[0] in "ZX" else fields


def _status_kib(pid: int, name: str) -> int:
    status = (PROC / str(pid) / "status").read_text()
    return int(status.partition(f"{name}:")[2].split()[0])


def _number(file: Path) -> int:
    return int(file.read_text())


def _pss_kib(pid: int) -> int:
    try:
        rollup = (PROC / str(pid) / "smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    found = re.search(r"^Pss:\s+(\d+)", rollup, re.MULTILINE)
    return int(found[1]) if found else 0
