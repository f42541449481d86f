"""The disk that an engine's containers share, and a watch that stops sandboxes that exceed their
limit. The watch is used for storage drivers that cannot limit a container's disk.

Since its last measurement, a sandbox cannot have written more than was written to the whole disk.
So a sandbox is measured only if that amount could take it over its limit. Besides, every eighth
check measures all sandboxes if the free space of the disk has changed. While nothing is written,
the watch costs one statvfs call per second.
"""

import asyncio
import contextlib
import errno
import logging
import os
import re
import stat
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sandbox_runtime.backends.docker_engine import DockerEngine, EngineError, EngineJson

logger = logging.getLogger(__name__)

_PERIOD_S = 1.0
_REST_FACTOR = 4
_MAX_REST_S = 3.0
"""Maximum rest after a check. The rest takes _REST_FACTOR times as long as the check took. It has a
maximum because a sandbox that makes its measurement slow must not gain time to write."""
_ROUND_S = 0.5
"""Time after which `_measure` stops. The sandboxes not reached come first the next time."""
_RESERVE_BYTES = 1 << 30
"""Part of the host's disk that is kept free, if necessary by stopping sandboxes."""
_FULL_ROUND_CHECKS = 8
"""Interval, in checks, at which all sandboxes are measured if the free space of the disk has
changed: space that one sandbox frees hides what another writes at the same time."""
_LARGE_BYTES = 16 << 20
"""A sandbox that uses at most this much is not stopped when the host's disk is nearly full, because
that would free too little."""
_BLOCK_BYTES = 512
_FASTEST_BYTES_PER_S = 256 << 20
"""The assumed write speed of a disk that cannot be inspected."""


@dataclass(frozen=True, slots=True)
class DiskUsage:
    """Disk space and files in use; directories, links and all other entries count as files."""

    bytes: int = 0
    files: int = 0


class Disk(Protocol):
    """A disk that several sandboxes write to. `total_written` and `free_bytes` may block."""

    def total_written(self) -> DiskUsage:
        """Return an estimate of all that was written to the disk so far; it never decreases. Space
        that is freed between two calls hides writes."""

    async def usage(self, name: str, limit: DiskUsage) -> DiskUsage | None:
        """Return the disk usage of one sandbox, counted only until it exceeds `limit`; None if it
        cannot be measured now."""

    def free_bytes(self) -> int | None:
        """Return the free space, or None if it is unknown."""


@dataclass(slots=True)
class _WatchedSandbox:
    limit: DiskUsage
    stop: Callable[[str], None]
    used: DiskUsage
    written_when_measured: DiskUsage
    """The value of `Disk.total_written` at the last measurement."""

    def may_exceed(self, total_written: DiskUsage) -> bool:
        since = self.written_when_measured
        return (
            self.used.bytes + total_written.bytes - since.bytes > self.limit.bytes
            or self.used.files + total_written.files - since.files > self.limit.files
        )

    def excess_text(self) -> str:
        if self.used.bytes > self.limit.bytes:
            limit_mib = self.limit.bytes >> 20
            return f"its disk use of {_to_mib(self.used)} MiB exceeded the limit of {limit_mib} MiB"
        if self.used.files > self.limit.files:
            return f"it has more than the {self.limit.files} files that its disk may have"
        return ""


class DiskWatch:
    """Watches the disk usage of sandboxes and stops those that exceed their limit. If the host's
    disk is nearly full, it stops the sandbox that uses most of the disk."""

    def __init__(
        self, disk: Disk, *, period_s: float = _PERIOD_S, reserve_bytes: int = _RESERVE_BYTES
    ) -> None:
        self._disk = disk
        self._period_s = period_s
        self._reserve_bytes = reserve_bytes
        self._watched: dict[str, _WatchedSandbox] = {}
        self._total_written = DiskUsage()
        self._checks = 0
        self._free: int | None = None
        self._has_changed = False
        self._watch_task: asyncio.Task[None] | None = None

    def add(self, name: str, limit: DiskUsage, stop: Callable[[str], None]) -> None:
        """Watch a new sandbox. If the sandbox must end, `stop` is called once with the reason."""
        self._watched[name] = _WatchedSandbox(limit, stop, DiskUsage(), self._total_written)
        if self._watch_task is None or self._watch_task.done():
            self._watch_task = asyncio.create_task(self._watch(), name="disk watch")

    def discard(self, name: str) -> None:
        """Stop watching a sandbox. Safe to call twice."""
        self._watched.pop(name, None)

    async def aclose(self) -> None:
        """Stop watching all sandboxes."""
        self._watched.clear()
        if self._watch_task:
            self._watch_task.cancel()
            await asyncio.wait([self._watch_task])

    async def _watch(self) -> None:
        pause_s = self._period_s
        while self._watched:
            await asyncio.sleep(pause_s)
            started = time.monotonic()
            reasons = await self._check(dict(self._watched))
            rest_s = min(_REST_FACTOR * (time.monotonic() - started), _MAX_REST_S)
            pause_s = max(self._period_s, rest_s)
            for name, why in reasons.items():
                if watched := self._watched.pop(name, None):
                    logger.warning("stopping sandbox %s: %s", name, why)
                    watched.stop(why)

    async def _check(self, watched: dict[str, _WatchedSandbox]) -> dict[str, str]:
        """Return the sandboxes that must be stopped, with the reasons."""
        total_written, free = await asyncio.to_thread(
            lambda: (self._disk.total_written(), self._disk.free_bytes())
        )
        self._total_written = total_written
        is_full = self._must_measure_all(free)
        due = {
            name: sandbox
            for name, sandbox in watched.items()
            if is_full or sandbox.may_exceed(total_written)
        }
        await self._measure(due, total_written)
        reasons = {name: why for name, sandbox in due.items() if (why := sandbox.excess_text())}
        if not reasons and free is not None and free < self._reserve_bytes:
            await self._measure(watched, total_written)
            return dict(_largest_sandbox_and_reason(watched))
        return reasons

    def _must_measure_all(self, free: int | None) -> bool:
        """Count a check; return True if all sandboxes must be measured, because freed space may
        hide recent writes."""
        before, self._free = self._free, free
        if before is not None and free != before:
            self._has_changed = True
        self._checks += 1
        if self._checks % _FULL_ROUND_CHECKS or not self._has_changed:
            return False
        self._has_changed = False
        return True

    async def _measure(
        self, sandboxes: dict[str, _WatchedSandbox], total_written: DiskUsage
    ) -> None:
        """Measure sandboxes for up to _ROUND_S, those with the oldest measurement first."""
        until = time.monotonic() + _ROUND_S
        for name, sandbox in sorted(
            sandboxes.items(), key=lambda item: item[1].written_when_measured.bytes
        ):
            used = await self._disk.usage(name, sandbox.limit)
            if used is not None:
                sandbox.used, sandbox.written_when_measured = used, total_written
            if time.monotonic() > until:
                return


def _largest_sandbox_and_reason(watched: dict[str, _WatchedSandbox]) -> Iterator[tuple[str, str]]:
    """Yield the sandbox that uses most disk space, with the reason to stop it; nothing if it uses
    at most _LARGE_BYTES."""
    name, largest = max(watched.items(), key=lambda item: item[1].used.bytes)
    if largest.used.bytes > _LARGE_BYTES:
        usage = f"this sandbox used more of it than any other, {_to_mib(largest.used)} MiB"
        yield name, f"the host's disk is nearly full, and {usage}"


def _to_mib(used: DiskUsage) -> int:
    return -(-used.bytes // (1 << 20))


class DockerDisk:
    """The disk of an engine's containers.

    `directory` is the engine's data directory, if it is on this host. If the files of a container
    can be read, they are measured here, including deleted files that are still open. Otherwise the
    engine reports the size of the existing files only.
    """

    def __init__(self, engine: DockerEngine, directory: Path | None) -> None:
        self._engine = engine
        self._directory = directory
        self._began_at = time.monotonic()
        self._total_written = DiskUsage()
        self._free = self._free_space() or DiskUsage()

    def total_written(self) -> DiskUsage:
        left = self._free_space()
        if left is None:
            return DiskUsage(int((time.monotonic() - self._began_at) * _FASTEST_BYTES_PER_S))
        self._total_written = DiskUsage(
            self._total_written.bytes + max(0, self._free.bytes - left.bytes),
            self._total_written.files + max(0, self._free.files - left.files),
        )
        self._free = left
        return self._total_written

    async def usage(self, name: str, limit: DiskUsage) -> DiskUsage | None:
        try:
            container = await self._engine.container(name)
            if (seen := await asyncio.to_thread(_measure_files, container, limit)) is not None:
                return seen
            return DiskUsage((await self._engine.container(name, size=True)).get("SizeRw") or 0)
        except (EngineError, OSError) as error:
            logger.debug("the disk usage of %s cannot be measured: %s", name, error)
            return None

    def free_bytes(self) -> int | None:
        left = self._free_space()
        return left.bytes if left else None

    def _free_space(self) -> DiskUsage | None:
        """Return the number of free bytes and of free inodes of the file system, or None if they
        are unknown."""
        if self._directory is None:
            return None
        try:
            system = os.statvfs(self._directory)
        except OSError as error:
            logger.warning("the disk at %s cannot be inspected: %s", self._directory, error)
            return None
        return DiskUsage(system.f_bfree * system.f_frsize, system.f_ffree)


def _measure_files(container: EngineJson, limit: DiskUsage) -> DiskUsage | None:
    """Return the disk usage of a container's files, or None if they cannot be read."""
    directories = (container.get("GraphDriver") or {}).get("Data") or {}
    upper = Path(directories.get("UpperDir") or "/nonexistent")
    if not os.access(upper, os.R_OK | os.X_OK):
        return None
    if _hides_files(container):
        return DiskUsage(limit.bytes + 1)
    written = _disk_usage(upper, limit)
    deleted = _deleted_usage(container, Path(directories["MergedDir"]))
    return DiskUsage(written.bytes + deleted.bytes, written.files + deleted.files)


def _disk_usage(top: Path, limit: DiskUsage) -> DiskUsage:
    """Return the disk usage of a directory tree, counted only until it exceeds the limit."""
    size = files = 0
    seen: set[int] = set()
    try:
        for status in _walk_stats(top):
            files += 1
            if status.st_ino not in seen:  # else it is another hard link to the same file
                seen.add(status.st_ino)
                size += status.st_blocks * _BLOCK_BYTES
            if size > limit.bytes or files > limit.files:
                break
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        files = sys.maxsize  # nested deeper than a path can name
    return DiskUsage(size, files)


def _walk_stats(top: Path) -> Iterator[os.stat_result]:
    to_scan = [str(top)]
    while to_scan:
        for path, status in _entries(to_scan.pop()):
            if stat.S_ISDIR(status.st_mode):
                to_scan.append(path)
            yield status


def _entries(directory: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the entries of a directory, without those that disappear meanwhile."""
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                yield entry.path, entry.stat(follow_symlinks=False)


def _deleted_usage(container: EngineJson, root: Path) -> DiskUsage:
    """Return the disk usage of deleted files that a container's processes still have open."""
    files: dict[int, int] = {}
    try:
        device = root.stat().st_dev
    except OSError:
        return DiskUsage()
    for pid in _process_tree(container["State"]["Pid"]):
        for path in _open_files(Path(f"/proc/{pid}")):
            try:
                status = path.stat()
            except OSError:
                continue  # closed in the meantime
            on_disk = stat.S_ISREG(status.st_mode) and status.st_dev == device
            if on_disk and status.st_nlink == 0:
                files[status.st_ino] = status.st_blocks * _BLOCK_BYTES
    return DiskUsage(sum(files.values()), len(files))


def _hides_files(container: EngineJson) -> bool:
    """Return True if a socket of a container's processes holds descriptors that were sent and not
    received.

    The files of these descriptors cannot be measured, so the sandbox counts as exceeding its limit.
    """
    sockets = (
        link
        for pid in _process_tree(container["State"]["Pid"])
        for link in _open_files(Path(f"/proc/{pid}"))
        if _link_target(link).startswith("socket:")
    )
    return any(
        _has_in_flight_descriptors(link.parent.parent / "fdinfo" / link.name) for link in sockets
    )


def _link_target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""  # closed in the meantime


def _has_in_flight_descriptors(info: Path) -> bool:
    try:
        found = re.search(r"^scm_fds:\s*(\d+)", info.read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        return False
    return found is not None and int(found[1]) > 0


def _process_tree(main_pid: int) -> Iterator[int]:
    """Yield the pids of a process and its descendants. All processes of a container descend from
    its main process."""
    to_visit = [main_pid] if main_pid else []
    while to_visit:
        pid = to_visit.pop()
        yield pid
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # it has ended
                to_visit += map(int, children.read_text(encoding="ascii").split())


def _open_files(process: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):  # it has ended
        yield from (process / "fd").iterdir()
        for line in (process / "maps").read_text(errors="replace").splitlines():
            if line.endswith(" (deleted)"):
                yield process / "map_files" / line.split()[0]
