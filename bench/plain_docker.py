"""Containers as most runtimes use them: `sleep` as the main process, and `docker exec` for
commands.
"""

import asyncio
import io
import tarfile
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import ParamSpec, TypeVar

import docker
from docker.models.containers import Container

P = ParamSpec("P")
T = TypeVar("T")

CLIENT_TIMEOUT_S = 60


class PlainDocker:
    """The usual operations of a Docker engine, in threads because the SDK is blocking."""

    def __init__(self, image: str) -> None:
        self._image = image
        self._client = docker.from_env(timeout=CLIENT_TIMEOUT_S)
        self._threads = ThreadPoolExecutor()

    async def run(self) -> Container:
        return await self._in_thread(self._run)

    async def _in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, partial(work, *args, **kwargs))

    def _run(self) -> Container:
        return self._client.containers.run(
            self._image,
            ["infinity"],
            entrypoint=["sleep"],
            detach=True,
            init=True,
            network_mode="none",
        )

    async def main_pid(self, container: Container) -> int:
        """Return the process id of the main process."""
        await self._in_thread(container.reload)
        return int(container.attrs["State"]["Pid"])

    async def exec_by_sdk(self, container: Container) -> None:
        done = await self._in_thread(container.exec_run, ["true"])
        assert done.exit_code == 0

    async def exec_by_command_line(self, container: Container) -> None:
        assert container.id
        process = await asyncio.create_subprocess_exec("docker", "exec", container.id, "true")
        assert await process.wait() == 0

    async def put(self, container: Container, source: Path, path: str) -> None:
        """Copy a file into the container as an archive made in memory, as `docker cp` does."""
        await self._in_thread(_put, container, source, path)

    async def get(self, container: Container, path: str, target: Path) -> None:
        """Copy a file from the container to the host."""
        await self._in_thread(_get, container, path, target)

    async def remove(self, container: Container) -> None:
        await self._in_thread(container.remove, force=True)

    def close(self) -> None:
        self._client.close()
        self._threads.shutdown()


@asynccontextmanager
async def plain_container(image: str) -> AsyncIterator[tuple[PlainDocker, Container]]:
    """Run a container during the block."""
    plain = PlainDocker(image)
    container = await plain.run()
    try:
        yield plain, container
    finally:
        await plain.remove(container)
        plain.close()


def _put(container: Container, source: Path, path: str) -> None:
    archive = io.BytesIO()
    target = PurePosixPath(path)
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.add(source, target.name)
    assert container.put_archive(str(target.parent), archive.getvalue())


def _get(container: Container, path: str, target: Path) -> None:
    pieces, _ = container.get_archive(path)
    with tarfile.open(fileobj=io.BytesIO(b"".join(pieces))) as tar:
        file = tar.extractfile(PurePosixPath(path).name)
        assert file
        target.write_bytes(file.read())
