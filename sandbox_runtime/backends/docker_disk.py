"""The disk of a Docker engine, as its containers fill it."""

import contextlib
import errno
import logging
import os
import re
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from sandbox_runtime.backends.disk_watch import Usage
from sandbox_runtime.backends.docker_api import Facts
from sandbox_runtime.backends.docker_engine import ENGINE_ERRORS, Engine

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 512
_FASTEST_BYTES_PER_S = 256 << 20
"""What a disk that we cannot see is taken to be able to write."""


class DockerDisk:
    """Where the engine keeps containers: seen with our own eyes, or else asked for.

    `directory` is the engine's, if it is on this host. Where we may read what a container has
    written, files that it has deleted and keeps open are found too; the engine knows only the sizes
    of the files that are there.
    """

    def __init__(self, engine: Engine, directory: Path | None) -> None:
        self._engine = engine
        self._directory = directory
        self._began = time.monotonic()
        self._filled = Usage()
        self._free = self._left() or Usage()

    def filled(self) -> Usage:
        left = self._left()
        if left is None:
            return Usage(int((time.monotonic() - self._began) * _FASTEST_BYTES_PER_S))
        self._filled = Usage(
            self._filled.bytes + max(0, self._free.bytes - left.bytes),
            self._filled.files + max(0, self._free.files - left.files),
        )
        self._free = left
        return self._filled

    def used(self, name: str, limit: Usage) -> Usage | None:
        try:
            facts = self._engine.container(name)
            directories = (facts.get("GraphDriver") or {}).get("Data") or {}
            upper = Path(directories.get("UpperDir") or "/nonexistent")
            if os.access(upper, os.R_OK | os.X_OK):
                if _hides_files(facts):
                    return Usage(limit.bytes + 1)
                return _sum(_written(upper, limit), _deleted(facts, Path(directories["MergedDir"])))
            return Usage(self._engine.container(name, size=True).get("SizeRw") or 0)
        except (*ENGINE_ERRORS, OSError) as error:
            logger.debug("the disk of %s cannot be measured: %s", name, error)
            return None

    def free_bytes(self) -> int | None:
        left = self._left()
        return left.bytes if left else None

    def _left(self) -> Usage | None:
        """What the file system has left; None if it cannot be seen."""
        if self._directory is None:
            return None
        try:
            system = os.statvfs(self._directory)
        except OSError as error:
            logger.warning("the disk at %s cannot be seen: %s", self._directory, error)
            return None
        return Usage(system.f_bfree * system.f_frsize, system.f_ffree)


def _sum(*usages: Usage) -> Usage:
    return Usage(sum(each.bytes for each in usages), sum(each.files for each in usages))


def _written(top: Path, limit: Usage) -> Usage:
    """A directory with all that is below it, counted until it is beyond the limit."""
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
    return Usage(size, files)


def _below(top: Path) -> Iterator[os.stat_result]:
    to_scan = [str(top)]
    while to_scan:
        for path, status in _entries(to_scan.pop()):
            if stat.S_ISDIR(status.st_mode):
                to_scan.append(path)
            yield status


def _entries(directory: str) -> Iterator[tuple[str, os.stat_result]]:
    """What is in it, less what goes while one looks."""
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                yield entry.path, entry.stat(follow_symlinks=False)


def _deleted(facts: Facts, root: Path) -> Usage:
    """What is in no directory any more but still open, in a container's processes."""
    files: dict[int, int] = {}
    try:
        device = root.stat().st_dev
    except OSError:
        return Usage()
    for pid in _processes(facts["State"]["Pid"]):
        for path in _open_files(Path(f"/proc/{pid}")):
            try:
                status = path.stat()
            except OSError:
                continue  # closed in the meantime
            on_disk = stat.S_ISREG(status.st_mode) and status.st_dev == device
            if on_disk and status.st_nlink == 0:
                files[status.st_ino] = status.st_blocks * _BLOCK_BYTES
    return Usage(sum(files.values()), len(files))


def _hides_files(facts: Facts) -> bool:
    """Whether descriptors lie in a socket, sent and not received: what they keep is out of sight.

    Whoever is measured may have filled the disk beyond its limit, so it is taken to have done so.
    """
    sockets = (
        link
        for pid in _processes(facts["State"]["Pid"])
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
    """A process and its descendants; all of a container descend from its first."""
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
