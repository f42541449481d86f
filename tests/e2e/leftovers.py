"""Find containers, open files and tasks that a test could leave behind."""

import asyncio
import gc
import os
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import anyio
import pytest
from docker.errors import APIError

from sandbox_runtime.backends.cgroups import find_cgroups, process_key
from sandbox_runtime.backends.docker import INSTALL_LABEL
from sandbox_runtime.backends.docker_sdk import connect
from sandbox_runtime.errors import SandboxStartError
from tests.fakes.waiting import until

TIMEOUT_S = 60.0


def cgroups_of(pid: int) -> list[Path]:
    """Return the cgroups of the sandboxes of that owner process."""
    cgroups = find_cgroups()
    hierarchies = cgroups.hierarchies if cgroups else ()
    return [path for each in hierarchies for path in each.folder.glob(f"{process_key(pid)}-*")]


class Engine:
    """The Docker engine, accessed without the proxy."""

    def __init__(self) -> None:
        self.client, _ = connect()

    def clear(self, state_dir: Path) -> None:
        """Remove the containers of this installation."""
        for id in self.containers(state_dir):
            with suppress(APIError):  # already removed, or being removed
                self.client.remove_container(id, force=True)

    def running(self, state_dir: Path) -> list[str]:
        """Return the running containers of this installation."""
        ids = self.containers(state_dir)
        alive = {found["Id"] for found in self.client.containers()}
        return [id for id in ids if id in alive]

    def containers(self, state_dir: Path) -> list[str]:
        """Return the containers of the installation in `state_dir`, running or not."""
        file = state_dir / "install-id"
        if not file.exists():
            return []
        ours = {"label": f"{INSTALL_LABEL}={file.read_text(encoding='ascii')}"}
        return [found["Id"] for found in self.client.containers(all=True, filters=ours)]

    async def kill(self, ids: Iterable[str]) -> None:
        """Kill running containers. Return when they have ended."""
        killed = set(ids)
        for id in killed:
            self.client.kill(id)
        await until(lambda: killed.isdisjoint(each["Id"] for each in self.client.containers()))

    def close(self) -> None:
        self.client.close()


@contextmanager
def open_engine(state_dir: Path) -> Iterator[Engine]:
    """Yield the Docker engine; afterwards remove the containers of the installation in `state_dir`.
    Without an engine, skip the test, or fail if REQUIRE_DOCKER is set."""
    try:
        engine = Engine()
    except SandboxStartError as error:
        if os.environ.get("REQUIRE_DOCKER"):
            raise
        pytest.skip(str(error))
    yield engine
    # A proxy killed between creating and starting a container leaves it for the next sweep.
    engine.clear(state_dir)
    engine.close()


async def gone(leftovers: Callable[[], Counter[str]]) -> None:
    """Wait until nothing is left. Raise AssertionError that lists what is."""
    with anyio.move_on_after(TIMEOUT_S):
        return await until(lambda: not leftovers())
    raise AssertionError(f"still there: {leftovers()}")


def open_files() -> Counter[str]:
    """Count the open file descriptors of this process by kind; regular files by their path."""
    gc.collect()  # the Docker SDK leaves sockets in reference cycles
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
    """Return the socket's peer path, or "socket"."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as same:
            return (same.family == socket.AF_UNIX and same.getpeername()) or "socket"
    except OSError:
        return "socket"


def tasks() -> Counter[str]:
    """Count the tasks of this event loop by coroutine name."""
    return Counter(str(task.get_coro()).split(" at 0x")[0] for task in asyncio.all_tasks())
