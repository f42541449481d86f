"""Bounds on all processes of one sandbox together: its cgroup, of version 1 or 2.

Each lies at `llm-sandbox-proxy/<owner's pid>-<owner's start time>-<pid namespace>-<id>`, so that a
later owner can tell what a dead one left behind from what is in use. Whether an owner in another
namespace lives, a container's for one, cannot be told from here: what is theirs is left alone.
"""

import asyncio
import logging
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from policies.isolation import Isolation
from sandbox_runtime.backends.base import Pressure
from sandbox_runtime.errors import SandboxStartError

logger = logging.getLogger(__name__)

Version = Literal[1, 2]

FOLDER = "llm-sandbox-proxy"
_REQUIRED = ("memory", "pids")
_CONTROLLERS = (*_REQUIRED, "cpu")
_CPU_PERIOD_US = 100_000
_SWAP_FILES = ("memory.memsw.limit_in_bytes", "memory.swap.max")
"""Missing where the kernel does not account swap."""
_REMOVAL_PAUSES_S = (*(0.001 * 2**step for step in range(6)), *(0.05 for _ in range(80)))
_OWNED = re.compile(r"(\d+)-(\d+)-(\d+)-\w+")


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """A directory for sandboxes' cgroups and the controllers that work below it."""

    folder: Path
    controllers: frozenset[str]


@dataclass(frozen=True)
class Cgroup:
    """One sandbox's cgroup: version 1 has a directory per controller."""

    version: Version
    name: str
    hierarchies: tuple[Hierarchy, ...]

    @cached_property
    def directories(self) -> tuple[Path, ...]:
        return tuple(each.folder / self.name for each in self.hierarchies)

    @property
    def entrances(self) -> tuple[str, ...]:
        """Where a process writes its pid to enter."""
        return tuple(f"{directory}/cgroup.procs" for directory in self.directories)

    def limit(self, isolation: Isolation) -> None:
        """Set its bounds, whatever they were. Raises SandboxStartError."""
        try:
            for hierarchy, directory in zip(self.hierarchies, self.directories, strict=True):
                for controller in hierarchy.controllers:
                    _bound(directory, _limits(self.version, controller, isolation))
        except OSError as error:
            raise SandboxStartError(f"cannot bound cgroup {self.name!r}: {error}") from error

    def pressure(self) -> Pressure:
        """How often its bounds were hit."""
        memory = "memory.oom_control" if self.version == 1 else "memory.events"
        return Pressure(
            oom_kills=self._count("memory", memory, "oom_kill"),
            pids_refused=self._count("pids", "pids.events", "max"),
        )

    def _count(self, controller: str, file: str, word: str) -> int:
        for hierarchy, directory in zip(self.hierarchies, self.directories, strict=True):
            if controller in hierarchy.controllers:
                counts = dict(line.split() for line in _read(f"{directory}/{file}").splitlines())
                return int(counts.get(word, 0))
        return 0

    def discard(self) -> None:
        """Remove it before anything has entered."""
        for directory in self.directories:
            _remove_directory(directory)

    async def remove(self) -> None:
        """End what still runs in it, and remove it. Safe to call twice."""
        for pause_s in _REMOVAL_PAUSES_S:
            if self._try_remove():
                return
            await asyncio.sleep(pause_s)
        logger.warning("cgroup %s cannot be removed", self.directories)

    def _try_remove(self) -> bool:
        for directory in self.directories:
            _kill_members(directory)
        left = [each for each in self.directories if not _remove_directory(each)]
        return not left


@dataclass(frozen=True, slots=True)
class Cgroups:
    """Where cgroups can be made on this host."""

    version: Version
    hierarchies: tuple[Hierarchy, ...]

    @property
    def controllers(self) -> tuple[str, ...]:
        """What they can bound, of memory, pids and cpu."""
        present = frozenset[str]().union(*(each.controllers for each in self.hierarchies))
        return tuple(name for name in _CONTROLLERS if name in present)

    def create(self, id: str, isolation: Isolation) -> Cgroup:
        """Make a cgroup with the isolation's bounds. Raises SandboxStartError."""
        cgroup = Cgroup(self.version, f"{owner()}-{_pid_namespace()}-{id}", self.hierarchies)
        try:
            for directory in cgroup.directories:
                directory.mkdir()
            cgroup.limit(isolation)
        except (OSError, SandboxStartError) as error:
            cgroup.discard()
            raise SandboxStartError(f"cannot make cgroup {cgroup.name!r}: {error}") from error
        return cgroup

    async def sweep(self) -> int:
        """Remove the cgroups of dead owners and what runs in them; returns how many sandboxes."""
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
    """Where this process may bound memory and process numbers; None if nowhere."""
    mounts = list(_mounts(proc))
    return _find_version_1(mounts) or _find_version_2(mounts, proc)


def owner(pid: int | None = None) -> str:
    """A process as no later one is called: its pid and when it started. "" when it is gone."""
    pid = pid or os.getpid()
    # The command's name, in brackets, may hold spaces and brackets; field 22 is the start time.
    fields = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return f"{pid}-{fields[19]}" if fields else ""


@dataclass(frozen=True, slots=True)
class _Mount:
    root: str
    point: Path
    type: str
    options: frozenset[str]


def _mounts(proc: Path) -> Iterator[_Mount]:
    for line in _read(proc / "self/mountinfo").splitlines():
        front, _, back = line.partition(" - ")
        fields, (type, _, options) = front.split(), back.split(maxsplit=2)
        if type in ("cgroup", "cgroup2"):
            yield _Mount(fields[3], Path(fields[4]), type, frozenset(options.split(",")))


def _find_version_1(mounts: list[_Mount]) -> Cgroups | None:
    """At the top: a cgroup below our own would be out of sight for the sweep of a later owner."""
    found: list[Hierarchy] = []
    for controller in _CONTROLLERS:
        for mount in mounts:
            if mount.type == "cgroup" and controller in mount.options:
                folder = _folder_in(mount.point)
                found += [Hierarchy(folder, frozenset({controller}))] if folder else []
    return _enough(Cgroups(1, _merged(found)))


def _merged(hierarchies: list[Hierarchy]) -> tuple[Hierarchy, ...]:
    """One per folder: controllers may be mounted together."""
    folders: dict[Path, frozenset[str]] = {}
    for each in hierarchies:
        folders[each.folder] = folders.get(each.folder, frozenset()) | each.controllers
    return tuple(Hierarchy(folder, controllers) for folder, controllers in folders.items())


def _find_version_2(mounts: list[_Mount], proc: Path) -> Cgroups | None:
    """As near to the top as we may write: all of it for root, a user's part under systemd."""
    found = re.search(r"^0::(/.*)$", _read(proc / "self/cgroup"), re.MULTILINE)
    mount = next((each for each in mounts if each.type == "cgroup2"), None)
    if mount is None or found is None:
        return None
    below = Path(found[1].removeprefix(mount.root).strip("/"))
    # In a container our own path may lie outside of what is mounted, and begin with "..".
    parts = () if ".." in below.parts else below.parts
    for depth in range(len(parts) + 1):
        cgroups = _version_2_at(mount.point.joinpath(*parts[:depth]))
        if cgroups:
            return cgroups
    return None


def _version_2_at(directory: Path) -> Cgroups | None:
    folder = _folder_in(directory)
    if folder is None:
        return None
    for level in (directory, folder):
        missing = _words(level / "cgroup.controllers") - _words(level / "cgroup.subtree_control")
        for controller in missing & frozenset(_CONTROLLERS):
            _try_write(level / "cgroup.subtree_control", f"+{controller}")
    enabled = _words(folder / "cgroup.subtree_control") & frozenset(_CONTROLLERS)
    cgroups = _enough(Cgroups(2, (Hierarchy(folder, enabled),)))
    if cgroups is None:
        _remove_directory(folder)
    return cgroups


def _enough(cgroups: Cgroups) -> Cgroups | None:
    return cgroups if set(_REQUIRED) <= set(cgroups.controllers) else None


def _folder_in(directory: Path) -> Path | None:
    # Moving a process needs a say over where it comes from.
    if not os.access(directory / "cgroup.procs", os.W_OK):
        return None
    folder = directory / FOLDER
    try:
        folder.mkdir(exist_ok=True)
    except OSError:
        return None
    # Somebody else may have made it.
    return folder if os.access(folder, os.W_OK) else None


def _limits(version: Version, controller: str, isolation: Isolation) -> tuple[tuple[str, str], ...]:
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


def _bound(directory: Path, limits: tuple[tuple[str, str], ...]) -> None:
    # In version 1 memory with swap may at no time be below memory alone.
    first, value = limits[0]
    present = _read(f"{directory}/{first}").strip()
    is_raised = present.isdigit() and int(value) > int(present)
    for name, value in reversed(limits) if is_raised else limits:
        file = f"{directory}/{name}"
        if name not in _SWAP_FILES or os.access(file, os.F_OK):
            _write(file, value)


def _is_abandoned(name: str) -> bool:
    owned = _OWNED.fullmatch(name)
    if owned is None or owned[3] != _pid_namespace():
        return False
    return owner(int(owned[1])) != f"{owned[1]}-{owned[2]}"


def _pid_namespace() -> str:
    return str(Path("/proc/self/ns/pid").stat().st_ino)


def _kill_members(directory: Path) -> None:
    for pid in _members(directory):
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            continue  # gone, or in a process namespace that we do not see
        try:
            # Asked again, now that the number cannot pass on to another process.
            if pid in _members(directory):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        except ProcessLookupError:
            continue
        finally:
            os.close(descriptor)


def _members(directory: Path) -> list[int]:
    return [int(pid) for pid in _read(f"{directory}/cgroup.procs").split()]


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
        logger.debug("%s refuses %r: %s", file, text, error)


def _write(file: str | Path, text: str) -> None:
    with open(file, "wb", buffering=0) as opened:  # noqa: PTH123 - written for each sandbox
        opened.write(text.encode("ascii"))


def _words(file: Path) -> frozenset[str]:
    return frozenset(_read(file).split())


def _read(file: str | Path) -> str:
    """Return the file's text, or nothing if it cannot be read."""
    try:
        with open(file, "rb", buffering=0) as opened:  # noqa: PTH123 - read for each command; unbuffered is twice as fast
            return opened.read().decode(errors="replace")
    except OSError:
        return ""
