"""What is there that could be left behind: processes, containers, open files, tasks."""

import asyncio
import gc
import os
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import anyio
from docker.errors import APIError

from sandbox_runtime.backends.cgroups import find_cgroups, process_key
from sandbox_runtime.backends.docker import INSTALL_LABEL
from sandbox_runtime.backends.docker_engine import connect
from tests.fakes.waiting import until

PATIENCE_S = 60.0


def descendants(pid: int) -> Iterator[int]:
    """The processes that `pid` started, and those that they started."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, _read(children).split()):
            yield child
            yield from descendants(child)


def command_line(pid: int) -> str:
    """A living process's command line; "" when it is gone or a mere zombie."""
    return _read(Path(f"/proc/{pid}/cmdline"))


def running(marker: str) -> bool:
    """Whether a process on this host, in a sandbox or not, has that word on its command line."""
    return any(marker in _read(path) for path in Path("/proc").glob("[0-9]*/cmdline"))


def cgroups_of(pid: int) -> list[Path]:
    """The cgroups of that owner's sandboxes."""
    cgroups = find_cgroups()
    hierarchies = cgroups.hierarchies if cgroups else ()
    return [path for each in hierarchies for path in each.folder.glob(f"{process_key(pid)}-*")]


class Engine:
    """The Docker engine, seen past the proxy."""

    def __init__(self) -> None:
        self.client, _ = connect()

    def clear(self, state_dir: Path) -> None:
        """Remove these containers, as a sweep would while the state is there."""
        for id in self.containers(state_dir):
            with suppress(APIError):  # gone, or about to be
                self.client.remove_container(id, force=True)

    def running(self, state_dir: Path) -> list[str]:
        """Of these containers those that run."""
        ids = self.containers(state_dir)
        alive = {found["Id"] for found in self.client.containers()}
        return [id for id in ids if id in alive]

    def containers(self, state_dir: Path) -> list[str]:
        """The containers of the installation whose state is there, running or not."""
        file = state_dir / "install-id"
        if not file.exists():
            return []
        ours = {"label": f"{INSTALL_LABEL}={file.read_text(encoding='ascii')}"}
        return [found["Id"] for found in self.client.containers(all=True, filters=ours)]

    def close(self) -> None:
        self.client.close()


async def gone(left: Callable[[], Counter[str]]) -> None:
    """Return once nothing is left. Raises AssertionError that says what is."""
    with anyio.move_on_after(PATIENCE_S):
        return await until(lambda: not left())
    raise AssertionError(f"still there: {left()}")


def open_files() -> Counter[str]:
    """What this process holds open, by kind; each file that is a file by its path."""
    gc.collect()  # docker's SDK leaves some sockets in cycles
    found: Counter[str] = Counter()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except FileNotFoundError:
            continue  # the directory itself, while it was listed
        kind = re.sub(r":\[\d+\]$", "", target)
        found[_peer(int(descriptor.name)) if kind == "socket" else kind] += 1
    return found


def _peer(descriptor: int) -> str:
    """A socket, by what it leads to where that has a path."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as same:
            return (same.family == socket.AF_UNIX and same.getpeername()) or "socket"
    except OSError:
        return "socket"


def tasks() -> Counter[str]:
    """What runs in this loop, by the name of its coroutine."""
    return Counter(str(task.get_coro()).split(" at 0x")[0] for task in asyncio.all_tasks())


def _read(path: Path) -> str:
    """Its text, or nothing when the process has just gone."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
