"""Measures the memory that is available to this process, and refuses work when little is left."""

import gc
import logging
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from proxy.errors import BusyError
from sandbox_runtime.backends.cgroups import read_text

log = logging.getLogger(__name__)

READ_EVERY_S = 0.2
"""Seconds for which a reading is used. A reading takes about 0.1 ms."""
LOG_EVERY_S = 60.0
COLLECT_EVERY_S = 5.0
"""Minimum interval of the collections of garbage before a refusal, in seconds."""
MAX_RESERVE_BYTES = 512 << 20
RESERVE_DIVISOR = 20
"""The reserve within a memory limit is by default the limit divided by this number."""
_FILE_NAMES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    2: ("memory.max", "memory.current"),
}
"""The files with the limit and the usage of a cgroup, by the version of cgroups."""
_UNLIMITED_BYTES = 1 << 60
"""Version 1 of cgroups reports about 2**63 bytes for a cgroup without a limit."""


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A limit on this process's memory, which other processes may share."""

    total_bytes: int
    available_bytes: int


class AvailableMemory:
    """Refuses work when little memory is available.

    The limits are the machine's memory, and the limits of this process's cgroup and of the cgroups
    above it. File caches count as available. Within each limit, `reserve_bytes` must stay
    available. None stands for a twentieth of the limit, at most MAX_RESERVE_BYTES. With 0, nothing
    is refused.
    """

    def __init__(self, reserve_bytes: int | None = None) -> None:
        self._reserve_bytes = reserve_bytes
        mounts, paths = (read_text(f"/proc/self/{name}") for name in ("mountinfo", "cgroup"))
        self._cgroups = list(memory_cgroups(mounts, paths))
        self._expires_at = 0.0
        self._limits: list[MemoryLimit] = []
        self._logged_at = -LOG_EVERY_S
        self._collected_at = -COLLECT_EVERY_S
        self.refused_count = 0
        """Requests that were refused."""

    def require(self, byte_count: int = 0) -> None:
        """Raise BusyError unless the reserve stays available after `byte_count` bytes are used."""
        if self._reserve_bytes == 0 or self._has(byte_count):
            return
        if self._collect_garbage() and self._has(byte_count):
            return
        self.refused_count += 1
        now_s = time.monotonic()
        if now_s - self._logged_at >= LOG_EVERY_S:
            self._logged_at = now_s
            log.warning(
                "requests are refused, because only %d MiB of memory are available",
                self.available_bytes >> 20,
            )
        raise BusyError("The server has too little memory for this request. Send it again later.")

    def _has(self, byte_count: int) -> bool:
        return all(
            limit.available_bytes - byte_count >= self._required_reserve(limit)
            for limit in self._read()
        )

    def _collect_garbage(self) -> bool:
        """Collect the objects of ended runs, which refer to each other. Return False if this was
        done less than COLLECT_EVERY_S ago."""
        now_s = time.monotonic()
        if now_s < self._collected_at + COLLECT_EVERY_S:
            return False
        gc.collect()
        self._collected_at = now_s
        self._expires_at = 0.0
        return True

    @property
    def available_bytes(self) -> int:
        """The memory that is available within the narrowest limit."""
        return min((limit.available_bytes for limit in self._read()), default=0)

    def _required_reserve(self, limit: MemoryLimit) -> int:
        if self._reserve_bytes is not None:
            return self._reserve_bytes
        return min(limit.total_bytes // RESERVE_DIVISOR, MAX_RESERVE_BYTES)

    def _read(self) -> list[MemoryLimit]:
        now_s = time.monotonic()
        if now_s >= self._expires_at:
            self._expires_at = now_s + READ_EVERY_S
            found = (_machine_limit(), *(cgroup.limit() for cgroup in self._cgroups))
            self._limits = [limit for limit in found if limit]
        return self._limits


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return (_number("VmRSS:", read_text("/proc/self/status")) or 0) << 10


@dataclass(frozen=True, slots=True)
class Cgroup:
    """A cgroup of the memory controller."""

    directory: Path
    version: int

    def limit(self) -> MemoryLimit | None:
        """Return the cgroup's limit, or None if it has none or cannot be read."""
        limit_name, usage_name = _FILE_NAMES[self.version]
        total = read_text(f"{self.directory}/{limit_name}").strip()
        if not total.isdecimal() or int(total) >= _UNLIMITED_BYTES:
            return None
        used = read_text(f"{self.directory}/{usage_name}").strip()
        if not used.isdecimal():
            return None
        counts = read_text(f"{self.directory}/memory.stat")
        prefix = "" if self.version == 2 else "total_"
        names = (f"{prefix}{kind}_file" for kind in ("active", "inactive"))
        caches = sum(_number(name, counts) or 0 for name in names)
        return MemoryLimit(int(total), int(total) - int(used) + caches)


def _machine_limit() -> MemoryLimit | None:
    text = read_text("/proc/meminfo")
    total_kib, available_kib = _number("MemTotal:", text), _number("MemAvailable:", text)
    if total_kib is None or available_kib is None:
        return None
    return MemoryLimit(total_kib << 10, available_kib << 10)


def memory_cgroups(mounts: str, paths: str) -> Iterator[Cgroup]:
    """Yield a process's cgroup of the memory controller, and the cgroups above it that the process
    can see. `mounts` and `paths` are the texts of `mountinfo` and `cgroup` in the process's
    directory in `/proc`."""
    for line in mounts.splitlines():
        front, _, back = line.partition(" - ")
        root, mount_point = front.split(" ")[3:5]
        kind, *_, options = back.split(" ")  # the source between them may be empty
        if kind == "cgroup2":
            pattern, version = r"^0::(/.*)$", 2
        elif kind == "cgroup" and "memory" in options.split(","):
            pattern, version = r"^\d+:(?:[^:]*,)?memory(?:,[^:]*)?:(/.*)$", 1
        else:
            continue
        if found := re.search(pattern, paths, re.MULTILINE):
            below = Path(found[1].removeprefix(root).strip("/"))
            parts = () if ".." in below.parts else below.parts
            for depth in range(len(parts), -1, -1):
                yield Cgroup(Path(mount_point).joinpath(*parts[:depth]), version)


def _number(name: str, text: str) -> int | None:
    """Return the number in the line that begins with `name`, in the text of a file in `/proc` or of
    a cgroup. Return None if there is no such line."""
    found = re.search(rf"^{name}[ \t]+(\d+)", text, re.MULTILINE)
    return int(found[1]) if found else None
