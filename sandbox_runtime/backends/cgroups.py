"""Limits on all processes of a sandbox together, by a cgroup of version 1 or 2.

The path of a cgroup is `llm-sandbox-proxy/<owner's pid>-<owner's start time>-<pid namespace>-<id>`,
so that a later owner can find the cgroups of dead owners. An owner in another pid namespace, such
as a container's, cannot be seen from here, so a sweep leaves its cgroups alone.
"""

import asyncio
import logging
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Literal

from policies.isolation import Isolation
from sandbox_runtime.backends.base import LimitEvents
from sandbox_runtime.errors import SandboxStartError

logger = logging.getLogger(__name__)

Version = Literal[1, 2]

CGROUP_DIR = "llm-sandbox-proxy"
_REQUIRED_CONTROLLERS = ("memory", "pids")
_CONTROLLERS = (*_REQUIRED_CONTROLLERS, "cpu")
_CPU_PERIOD_US = 100_000
_SWAP_FILES = ("memory.memsw.limit_in_bytes", "memory.swap.max")
"""Files that limit swap. They are missing if the kernel does not account for swap."""
_REMOVAL_PAUSES_S = (*(0.001 * 2**step for step in range(6)), *(0.05 for _ in range(80)))
_READ_BYTES = 64 << 10
_OWNED_NAME = re.compile(r"(\d+)-(\d+)-(\d+)-\w+")


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """A directory of sandboxes' cgroups, and the controllers that are enabled below it."""

    folder: Path
    controllers: frozenset[str]


@dataclass(frozen=True)
class Cgroup:
    """The cgroup of one sandbox. Version 1 has a directory for each controller."""

    version: Version
    name: str
    hierarchies: tuple[Hierarchy, ...]

    @cached_property
    def directories(self) -> tuple[Path, ...]:
        return tuple(each.folder / self.name for each in self.hierarchies)

    @property
    def procs_files(self) -> tuple[str, ...]:
        """The files to which a process writes its pid to enter the cgroup."""
        return tuple(f"{directory}/cgroup.procs" for directory in self.directories)

    def set_limits(self, isolation: Isolation) -> None:
        """Set the limits of the cgroup. Raises SandboxStartError."""
        try:
            for hierarchy, directory in zip(self.hierarchies, self.directories, strict=True):
                for controller in hierarchy.controllers:
                    _write_limits(directory, _limit_files(self.version, controller, isolation))
        except OSError as error:
            raise SandboxStartError(
                f"cannot set the limits of cgroup {self.name!r}: {error}"
            ) from error

    def limit_events(self) -> LimitEvents:
        """Return how often the limits were hit."""
        memory = "memory.oom_control" if self.version == 1 else "memory.events"
        return LimitEvents(
            oom_kills=self._read_counter("memory", memory, "oom_kill"),
            pids_refused=self._read_counter("pids", "pids.events", "max"),
        )

    def _read_counter(self, controller: str, file: str, counter: str) -> int:
        for hierarchy, directory in zip(self.hierarchies, self.directories, strict=True):
            if controller in hierarchy.controllers:
                found = re.search(
                    rf"^{counter} (\d+)", read_text(f"{directory}/{file}"), re.MULTILINE
                )
                return int(found[1]) if found else 0
        return 0

    def remove_empty(self) -> None:
        """Remove the cgroup, which no process has entered yet."""
        for directory in self.directories:
            _remove_directory(directory)

    async def remove(self) -> None:
        """Kill the processes in the cgroup and remove it. Safe to call twice."""
        for pause_s in _REMOVAL_PAUSES_S:
            if self._try_remove():
                return
            await asyncio.sleep(pause_s)
        logger.warning("cgroup %s cannot be removed", self.directories)

    def _try_remove(self) -> bool:
        left = [each for each in self.directories if not _remove_directory(each)]
        for directory in left:
            _kill_members(directory)
        return not left


@dataclass(frozen=True, slots=True)
class Cgroups:
    """The hierarchies in which this process can create cgroups for sandboxes."""

    version: Version
    hierarchies: tuple[Hierarchy, ...]

    @property
    def controllers(self) -> tuple[str, ...]:
        """The enabled controllers among memory, pids and cpu."""
        present = frozenset[str]().union(*(each.controllers for each in self.hierarchies))
        return tuple(name for name in _CONTROLLERS if name in present)

    def create(self, id: str, isolation: Isolation) -> Cgroup:
        """Create a cgroup with the isolation's limits. Raises SandboxStartError."""
        cgroup = Cgroup(self.version, f"{_owner_key(os.getpid())}-{id}", self.hierarchies)
        try:
            for directory in cgroup.directories:
                directory.mkdir()
            cgroup.set_limits(isolation)
        except (OSError, SandboxStartError) as error:
            cgroup.remove_empty()
            raise SandboxStartError(f"cannot create cgroup {cgroup.name!r}: {error}") from error
        return cgroup

    async def sweep(self) -> int:
        """Remove the cgroups of dead owners with their processes; return how many there were."""
        names = {
            entry.name
            for hierarchy in self.hierarchies
            for entry in hierarchy.folder.iterdir()
            if _is_abandoned(entry.name)
        }
        for name in names:
            await Cgroup(self.version, name, self.hierarchies).remove()
        return len(names)


def find_cgroups(proc: Path = Path("/proc")) -> Cgroups | None:
    """Return the hierarchies in which this process can create cgroups that limit memory and pids,
    or None if there are none."""
    mounts = list(_mounts(proc))
    return _find_version_1(mounts) or _find_version_2(mounts, proc)


def process_key(pid: int | None = None) -> str:
    """Return a process's pid and start time, a key that is never reused; "" if it has ended."""
    pid = pid or os.getpid()
    # The command's name, in parentheses, may hold any character; field 22 is the start time.
    fields = read_text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return f"{pid}-{fields[19]}" if fields else ""


@cache
def _owner_key(pid: int) -> str:
    """Return the prefix of the names of all cgroups that the process `pid` owns."""
    return f"{process_key(pid)}-{_pid_namespace()}"


@dataclass(frozen=True, slots=True)
class _Mount:
    root: str
    mount_point: Path
    type: str
    options: frozenset[str]


def _mounts(proc: Path) -> Iterator[_Mount]:
    for line in read_text(proc / "self/mountinfo").splitlines():
        front, _, back = line.partition(" - ")
        fields, (type, _, options) = front.split(), back.split(maxsplit=2)
        if type in ("cgroup", "cgroup2"):
            yield _Mount(fields[3], Path(fields[4]), type, frozenset(options.split(",")))


def _find_version_1(mounts: list[_Mount]) -> Cgroups | None:
    """Return the hierarchies at the top of the controllers' mounts, or None if they lack memory or
    pids. If cgroups were created below this process's own cgroup, the sweep of a later owner would
    not find them."""
    found: list[Hierarchy] = []
    for controller in _CONTROLLERS:
        for mount in mounts:
            if mount.type == "cgroup" and controller in mount.options:
                folder = _create_folder_in(mount.mount_point)
                found += [Hierarchy(folder, frozenset({controller}))] if folder else []
    return _cgroups_if_sufficient(Cgroups(1, _merge_by_folder(found)))


def _merge_by_folder(hierarchies: list[Hierarchy]) -> tuple[Hierarchy, ...]:
    """Merge the hierarchies of one directory, because several controllers may be mounted
    together."""
    folders: dict[Path, frozenset[str]] = {}
    for each in hierarchies:
        folders[each.folder] = folders.get(each.folder, frozenset()) | each.controllers
    return tuple(Hierarchy(folder, controllers) for folder, controllers in folders.items())


def _find_version_2(mounts: list[_Mount], proc: Path) -> Cgroups | None:
    """Return the hierarchy nearest to the top in which this process may create cgroups. Root may
    write at the top, a user in the part that systemd has delegated."""
    found = re.search(r"^0::(/.*)$", read_text(proc / "self/cgroup"), re.MULTILINE)
    mount = next((each for each in mounts if each.type == "cgroup2"), None)
    if mount is None or found is None:
        return None
    below = Path(found[1].removeprefix(mount.root).strip("/"))
    # In a container our own path may lie outside the mount, and then begins with "..".
    parts = () if ".." in below.parts else below.parts
    for depth in range(len(parts) + 1):
        cgroups = _create_version_2_cgroups(mount.mount_point.joinpath(*parts[:depth]))
        if cgroups:
            return cgroups
    return None


def _create_version_2_cgroups(directory: Path) -> Cgroups | None:
    folder = _create_folder_in(directory)
    if folder is None:
        return None
    for level in (directory, folder):
        missing = _read_words(level / "cgroup.controllers") - _read_words(
            level / "cgroup.subtree_control"
        )
        for controller in missing & frozenset(_CONTROLLERS):
            _try_write(level / "cgroup.subtree_control", f"+{controller}")
    enabled = _read_words(folder / "cgroup.subtree_control") & frozenset(_CONTROLLERS)
    cgroups = _cgroups_if_sufficient(Cgroups(2, (Hierarchy(folder, enabled),)))
    if cgroups is None:
        _remove_directory(folder)
    return cgroups


def _cgroups_if_sufficient(cgroups: Cgroups) -> Cgroups | None:
    return cgroups if set(_REQUIRED_CONTROLLERS) <= set(cgroups.controllers) else None


def _create_folder_in(directory: Path) -> Path | None:
    # Moving a process also needs write access to the cgroup that it comes from.
    if not os.access(directory / "cgroup.procs", os.W_OK):
        return None
    folder = directory / CGROUP_DIR
    try:
        folder.mkdir(exist_ok=True)
    except OSError:
        return None
    # Another user may have created it.
    return folder if os.access(folder, os.W_OK) else None


def _limit_files(
    version: Version, controller: str, isolation: Isolation
) -> tuple[tuple[str, str], ...]:
    memory, quota = str(isolation.memory_mib << 20), str(int(isolation.cpus * _CPU_PERIOD_US))
    match version, controller:
        case 1, "memory":
            return ("memory.limit_in_bytes", memory), ("memory.memsw.limit_in_bytes", memory)
        case 2, "memory":
            return ("memory.max", memory), ("memory.swap.max", "0")
        case _, "pids":
            return (("pids.max", str(isolation.pids)),)
        case 1, _:
            return ("cpu.cfs_period_us", str(_CPU_PERIOD_US)), ("cpu.cfs_quota_us", quota)
        case _:
            return (("cpu.max", f"{quota} {_CPU_PERIOD_US}"),)


def _write_limits(directory: Path, limits: tuple[tuple[str, str], ...]) -> None:
    first, memory = limits[0]
    # In version 1 the limit of memory with swap must never be below that of memory alone.
    if first == "memory.limit_in_bytes":
        present = read_text(f"{directory}/{first}") or memory
        limits = limits[::-1] if int(memory) > int(present) else limits
    for name, value in limits:
        file = f"{directory}/{name}"
        if name not in _SWAP_FILES or os.access(file, os.F_OK):
            _write(file, value)


def _is_abandoned(name: str) -> bool:
    owned = _OWNED_NAME.fullmatch(name)
    if owned is None or owned[3] != _pid_namespace():
        return False
    return process_key(int(owned[1])) != f"{owned[1]}-{owned[2]}"


def _pid_namespace() -> str:
    return str(Path("/proc/self/ns/pid").stat().st_ino)


def _kill_members(directory: Path) -> None:
    for pid in _member_pids(directory):
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            continue  # it has ended, or is in a pid namespace that we cannot see
        try:
            # Checked again: another process may have got the pid before the pidfd was opened.
            if pid in _member_pids(directory):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        except ProcessLookupError:
            continue
        finally:
            os.close(descriptor)


def _member_pids(directory: Path) -> list[int]:
    return [int(pid) for pid in read_text(f"{directory}/cgroup.procs").split()]


def _remove_directory(directory: Path) -> bool:
    try:
        directory.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _try_write(file: Path, text: str) -> None:
    try:
        _write(file, text)
    except OSError as error:
        logger.debug("%s does not accept %r: %s", file, text, error)


def _write(file: str | Path, text: str) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        os.write(descriptor, text.encode("ascii"))
    finally:
        os.close(descriptor)


def _read_words(file: Path) -> frozenset[str]:
    return frozenset(read_text(file).split())


def read_text(file: str | Path) -> str:
    """Return the text of a file of the kernel, or "" if it cannot be read. `Path.read_text` takes
    four times as long."""
    pieces: list[bytes] = []
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while piece := os.read(descriptor, _READ_BYTES):
                pieces.append(piece)
        finally:
            os.close(descriptor)
    except OSError:
        return ""
    return b"".join(pieces).decode(errors="replace")
