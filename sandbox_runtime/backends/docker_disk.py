"""The disk that an engine's containers share, and the watch that stops those who take too much.

For storage drivers that set no limit. No sandbox can have written more than the whole disk has been
filled by since the sandbox was last measured; so a sandbox is measured only when that might have
brought it over its limit, and now and then on a disk that changes. While nothing is written, the
watch costs one question to the file system a second.
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
_REST = 4
_LONGEST_REST_S = 3.0
"""The watch rests so much longer than it has measured, but never for longer than this: whoever
makes measuring slow is not to gain time by it."""
_ROUND_S = 0.5
"""How long it measures before it rests, with the others left to the next round."""
_RESERVE_BYTES = 1 << 30
"""What is kept free on the host's disk, if it must be at the expense of sandboxes."""
_FULL_ROUND = 8
"""How many looks apart everybody is measured where anything is written or freed: what one frees
hides what another writes at the same time."""
_LARGE_BYTES = 16 << 20
"""Stopping a sandbox with less would not help the host."""
_BLOCK_BYTES = 512
_FASTEST_BYTES_PER_S = 256 << 20
"""What a disk that we cannot see is taken to be able to write."""


@dataclass(frozen=True, slots=True)
class DiskUsage:
    """What is taken of a disk; directories, links and all else count as files too."""

    bytes: int = 0
    files: int = 0


class Disk(Protocol):
    """A disk that several sandboxes write to. `filled` and `free_bytes` may block."""

    def filled(self) -> DiskUsage:
        """Return by how much anybody has filled it so far, at most. Never becomes less."""

    async def used(self, name: str, limit: DiskUsage) -> DiskUsage | None:
        """Return what one sandbox takes of it, counted until it is beyond `limit`; None if that
        cannot be told now."""

    def free_bytes(self) -> int | None:
        """Return what is left; None if that cannot be told."""


@dataclass(slots=True)
class _Watched:
    limit: DiskUsage
    stop: Callable[[str], None]
    used: DiskUsage
    when_measured: DiskUsage
    """How full the disk was then."""

    def may_exceed(self, filled: DiskUsage) -> bool:
        since = self.when_measured
        return (
            self.used.bytes + filled.bytes - since.bytes > self.limit.bytes
            or self.used.files + filled.files - since.files > self.limit.files
        )

    def excess(self) -> str:
        if self.used.bytes > self.limit.bytes:
            limit_mib = self.limit.bytes >> 20
            return f"its disk use of {_mib(self.used)} MiB exceeded the limit of {limit_mib} MiB"
        if self.used.files > self.limit.files:
            return f"it has more than the {self.limit.files} files that its disk may have"
        return ""


class DiskWatch:
    """Watches sandboxes, from when they are added until they are discarded."""

    def __init__(
        self, disk: Disk, *, period_s: float = _PERIOD_S, reserve_bytes: int = _RESERVE_BYTES
    ) -> None:
        self._disk = disk
        self._period_s = period_s
        self._reserve_bytes = reserve_bytes
        self._watched: dict[str, _Watched] = {}
        self._filled = DiskUsage()
        self._looks = 0
        self._free: int | None = None
        self._has_changed = False
        self._watching: asyncio.Task[None] | None = None

    def add(self, name: str, limit: DiskUsage, stop: Callable[[str], None]) -> None:
        """Watch a sandbox that has just begun; `stop` is told why, once, if it must end."""
        self._watched[name] = _Watched(limit, stop, DiskUsage(), self._filled)
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch(), name="disk watch")

    def discard(self, name: str) -> None:
        """Stop to watch a sandbox. Safe to call twice."""
        self._watched.pop(name, None)

    async def aclose(self) -> None:
        """Stop to watch."""
        self._watched.clear()
        if self._watching:
            self._watching.cancel()
            await asyncio.wait([self._watching])

    async def _watch(self) -> None:
        pause_s = self._period_s
        while self._watched:
            await asyncio.sleep(pause_s)
            started = time.monotonic()
            reasons = await self._look(dict(self._watched))
            rest_s = min(_REST * (time.monotonic() - started), _LONGEST_REST_S)
            pause_s = max(self._period_s, rest_s)
            for name, why in reasons.items():
                if watched := self._watched.pop(name, None):
                    logger.warning("sandbox %s is stopped: %s", name, why)
                    watched.stop(why)

    async def _look(self, watched: dict[str, _Watched]) -> dict[str, str]:
        """Return who must be stopped, and why."""
        filled, free = await asyncio.to_thread(
            lambda: (self._disk.filled(), self._disk.free_bytes())
        )
        self._filled = filled
        everybody = self._is_full_round(free)
        due = {name: each for name, each in watched.items() if everybody or each.may_exceed(filled)}
        await self._measure(due, filled)
        reasons = {name: why for name, each in due.items() if (why := each.excess())}
        if not reasons and free is not None and free < self._reserve_bytes:
            await self._measure(watched, filled)
            return dict(_largest(watched))
        return reasons

    def _is_full_round(self, free: int | None) -> bool:
        """Return whether more may have been written of late than the disk shows."""
        before, self._free = self._free, free
        if before is not None and free != before:
            self._has_changed = True
        self._looks += 1
        if self._looks % _FULL_ROUND or not self._has_changed:
            return False
        self._has_changed = False
        return True

    async def _measure(self, due: dict[str, _Watched], filled: DiskUsage) -> None:
        """Measure sandboxes for a while, those first whose last measurement is oldest."""
        until = time.monotonic() + _ROUND_S
        for name, each in sorted(due.items(), key=lambda item: item[1].when_measured.bytes):
            used = await self._disk.used(name, each.limit)
            if used is not None:
                each.used, each.when_measured = used, filled
            if time.monotonic() > until:
                return


def _largest(watched: dict[str, _Watched]) -> Iterator[tuple[str, str]]:
    """Return the sandbox that has most, with the reason to stop it; nobody if all are small."""
    name, largest = max(watched.items(), key=lambda item: item[1].used.bytes)
    if largest.used.bytes > _LARGE_BYTES:
        had = f"of all sandboxes this one had most of it, {_mib(largest.used)} MiB"
        yield name, f"the host's disk is nearly full, and {had}"


def _mib(used: DiskUsage) -> int:
    return -(-used.bytes // (1 << 20))


class DockerDisk:
    """Where an engine keeps its containers.

    `directory` is the engine's, if it is on this host. Where we may read what a container has
    written, it is measured here, and files that it has deleted and keeps open are found too. Else
    the engine is asked, which knows only the sizes of the files that are there.
    """

    def __init__(self, engine: DockerEngine, directory: Path | None) -> None:
        self._engine = engine
        self._directory = directory
        self._began = time.monotonic()
        self._filled = DiskUsage()
        self._free = self._left() or DiskUsage()

    def filled(self) -> DiskUsage:
        left = self._left()
        if left is None:
            return DiskUsage(int((time.monotonic() - self._began) * _FASTEST_BYTES_PER_S))
        self._filled = DiskUsage(
            self._filled.bytes + max(0, self._free.bytes - left.bytes),
            self._filled.files + max(0, self._free.files - left.files),
        )
        self._free = left
        return self._filled

    async def used(self, name: str, limit: DiskUsage) -> DiskUsage | None:
        try:
            container = await self._engine.container(name)
            if (seen := await asyncio.to_thread(_seen, container, limit)) is not None:
                return seen
            return DiskUsage((await self._engine.container(name, size=True)).get("SizeRw") or 0)
        except (EngineError, OSError) as error:
            logger.debug("the disk of %s cannot be measured: %s", name, error)
            return None

    def free_bytes(self) -> int | None:
        left = self._left()
        return left.bytes if left else None

    def _left(self) -> DiskUsage | None:
        """Return what the file system has left; None if it cannot be seen."""
        if self._directory is None:
            return None
        try:
            system = os.statvfs(self._directory)
        except OSError as error:
            logger.warning("the disk at %s cannot be seen: %s", self._directory, error)
            return None
        return DiskUsage(system.f_bfree * system.f_frsize, system.f_ffree)


def _seen(container: EngineJson, limit: DiskUsage) -> DiskUsage | None:
    """Return what a container takes, from its files; None if they cannot be read from here."""
    directories = (container.get("GraphDriver") or {}).get("Data") or {}
    upper = Path(directories.get("UpperDir") or "/nonexistent")
    if not os.access(upper, os.R_OK | os.X_OK):
        return None
    if _hides_files(container):
        return DiskUsage(limit.bytes + 1)
    written = _written(upper, limit)
    deleted = _deleted(container, Path(directories["MergedDir"]))
    return DiskUsage(written.bytes + deleted.bytes, written.files + deleted.files)


def _written(top: Path, limit: DiskUsage) -> DiskUsage:
    """Return what a directory with all below it takes, counted until it is beyond the limit."""
    size = files = 0
    seen: set[int] = set()
    try:
        for status in _below(top):
            files += 1
            if status.st_ino not in seen:  # else it is another link to the same file
                seen.add(status.st_ino)
                size += status.st_blocks * _BLOCK_BYTES
            if size > limit.bytes or files > limit.files:
                break
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        files = sys.maxsize  # nested deeper than one can look
    return DiskUsage(size, files)


def _below(top: Path) -> Iterator[os.stat_result]:
    to_scan = [str(top)]
    while to_scan:
        for path, status in _entries(to_scan.pop()):
            if stat.S_ISDIR(status.st_mode):
                to_scan.append(path)
            yield status


def _entries(directory: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield what is in a directory, less what goes meanwhile."""
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                yield entry.path, entry.stat(follow_symlinks=False)


def _deleted(container: EngineJson, root: Path) -> DiskUsage:
    """Return what is in no directory any more but still open, in a container's processes."""
    files: dict[int, int] = {}
    try:
        device = root.stat().st_dev
    except OSError:
        return DiskUsage()
    for pid in _processes(container["State"]["Pid"]):
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
    """Return whether descriptors lie in a socket, sent and not received.

    The files that they keep cannot be seen, so the sandbox counts as beyond its limit.
    """
    sockets = (
        link
        for pid in _processes(container["State"]["Pid"])
        for link in _open_files(Path(f"/proc/{pid}"))
        if _target(link).startswith("socket:")
    )
    return any(_in_flight(link.parent.parent / "fdinfo" / link.name) for link in sockets)


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""  # closed in the meantime


def _in_flight(info: Path) -> bool:
    try:
        found = re.search(r"^scm_fds:\s*(\d+)", info.read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        return False
    return found is not None and int(found[1]) > 0


def _processes(first: int) -> Iterator[int]:
    """Yield a process and its descendants; all of a container descend from its first."""
    to_visit = [first] if first else []
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
