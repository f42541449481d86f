"""Processes of this host, read from /proc."""

import os
import re
import resource
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
PARENT_FIELD, START_FIELD = 1, 19
"""Indices into the fields of /proc/PID/stat after the command's name."""


@dataclass(frozen=True, slots=True)
class HostProcess:
    """A process, identified also by its start time, because pids are reused."""

    pid: int
    start_ticks: int
    """Start time, in ticks since boot."""

    @property
    def name(self) -> str:
        """The name of the program, or "" if the process has ended."""
        try:
            return (PROC / str(self.pid) / "comm").read_text().strip()
        except (FileNotFoundError, ProcessLookupError):
            return ""


def raise_open_file_limit() -> None:
    """Raise this process's soft limit of open files to its hard limit."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def alive_processes(processes: Iterable[HostProcess]) -> set[HostProcess]:
    """Return those of the processes that have not ended."""
    return {each for each in processes if _is_alive(each)}


class ProcessTree:
    """A snapshot of all processes of this host and their parents."""

    def __init__(self) -> None:
        self._parents: dict[int, int] = {}
        self._children: dict[int, list[HostProcess]] = {}
        self._by_pid: dict[int, HostProcess] = {}
        for entry in PROC.iterdir():
            if entry.name.isdigit() and (fields := _stat_fields(int(entry.name))):
                process = HostProcess(int(entry.name), int(fields[START_FIELD]))
                self._by_pid[process.pid] = process
                self._parents[process.pid] = int(fields[PARENT_FIELD])
                self._children.setdefault(int(fields[PARENT_FIELD]), []).append(process)

    def parent(self, pid: int) -> HostProcess:
        """Return the parent of a process. Raises KeyError if the process had ended before the
        snapshot."""
        return self._by_pid[self._parents[pid]]

    def children(self, pid: int) -> list[HostProcess]:
        """Return the children of a process."""
        return self._children.get(pid, [])

    def with_descendants(self, process: HostProcess) -> set[HostProcess]:
        """Return a process and all its descendants."""
        found, left = set[HostProcess](), [process]
        while left:
            found.add(each := left.pop())
            left += self.children(each.pid)
        return found

    def __getitem__(self, pid: int) -> HostProcess:
        return self._by_pid[pid]


def rss_mib(pid: int) -> float:
    """Return the resident memory of a process in MiB."""
    return _status_kib(pid, "VmRSS") / 1024


def peak_rss_mib(pid: int) -> float:
    """Return the peak of the resident memory of a process in MiB."""
    return _status_kib(pid, "VmHWM") / 1024


def pss_mib(processes: Iterable[HostProcess]) -> float:
    """Return the proportional memory (PSS) of the processes in MiB. Raises PermissionError."""
    return sum(_pss_kib(each.pid) for each in processes) / 1024


def cgroup_mib(pid: int) -> float:
    """Return the MiB charged to the cgroup of a process, including page cache and kernel memory.

    Raises LookupError if the process is in no cgroup for memory.
    """
    for line in (PROC / str(pid) / "cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if controllers == "memory":
            return _read_int(CGROUPS / "memory" / path[1:] / "memory.usage_in_bytes") / (1 << 20)
        if number == "0" and (CGROUPS / path[1:] / "memory.current").exists():
            return _read_int(CGROUPS / path[1:] / "memory.current") / (1 << 20)
    raise LookupError(f"process {pid} is in no cgroup for memory")


def available_mib() -> float:
    """Return the available memory of the host in MiB."""
    text = (PROC / "meminfo").read_text()
    return int(text.partition("MemAvailable:")[2].split()[0]) / 1024


def busy_s() -> float:
    """Return the busy time of all processors since boot, added up, in seconds."""
    user, nice, system, _, _, *interrupts = map(int, (PROC / "stat").read_text().split()[1:9])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def open_file_count(pid: int) -> int:
    """Return the number of open descriptors of a process."""
    return len(list((PROC / str(pid) / "fd").iterdir()))


def _is_alive(process: HostProcess) -> bool:
    fields = _stat_fields(process.pid)
    return bool(fields) and int(fields[START_FIELD]) == process.start_ticks


def _stat_fields(pid: int) -> list[str]:
    """Return the fields after the command's name; [] if the process has ended or is a zombie."""
    try:
        fields = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [] if fields[0] in "ZX" else fields


def _status_kib(pid: int, name: str) -> int:
    status = (PROC / str(pid) / "status").read_text()
    return int(status.partition(f"{name}:")[2].split()[0])


def _read_int(file: Path) -> int:
    return int(file.read_text())


def _pss_kib(pid: int) -> int:
    try:
        rollup = (PROC / str(pid) / "smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    found = re.search(r"^Pss:\s+(\d+)", rollup, re.MULTILINE)
    return int(found[1]) if found else 0
