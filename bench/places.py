"""The isolated places of this machine: ours, and containers as anybody starts them."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import docker
from docker.models.containers import Container

from bench.table import Row
from sandbox_runtime.backends.base import Backend
from sandbox_runtime.backends.bubblewrap import BubblewrapBackend
from sandbox_runtime.backends.docker import DockerBackend
from sandbox_runtime.errors import SandboxStartError

CLIENT_TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class Places:
    """Our backends that work here, and why the others do not."""

    backends: dict[str, Backend]
    missing: list[Row]


@asynccontextmanager
async def places(image: str) -> AsyncIterator[Places]:
    """Every backend, with a state directory of its own."""
    found = Places({}, [])
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        state_dir = Path(directory)
        try:
            found.backends["docker"] = DockerBackend(image, state_dir=state_dir)
        except SandboxStartError as error:
            found.missing.append(Row("docker", note=str(error)))
        found.backends["bubblewrap"] = BubblewrapBackend(state_dir=state_dir)
        for backend in list(found.backends.values()):
            broken = [check.detail for check in await backend.check() if not check.ok]
            if broken:
                found.missing.append(Row(backend.name, note="; ".join(broken)))
                await found.backends.pop(backend.name).aclose()
        try:
            yield found
        finally:
            for backend in found.backends.values():
                await backend.aclose()


class PlainDocker:
    """A container as most runtimes have it: `sleep` as its program, `docker exec` for the rest."""

    def __init__(self, image: str) -> None:
        self._image = image
        self._client = docker.from_env(timeout=CLIENT_TIMEOUT_S)

    async def run(self) -> Container:
        return await asyncio.to_thread(self._run)

    def _run(self) -> Container:
        return self._client.containers.run(
            self._image,
            ["infinity"],
            entrypoint=["sleep"],
            detach=True,
            init=True,
            network_mode="none",
        )

    async def exec_by_sdk(self, container: Container) -> None:
        done = await asyncio.to_thread(container.exec_run, ["true"])
        assert done.exit_code == 0

    async def exec_by_command_line(self, container: Container) -> None:
        assert container.id
        process = await asyncio.create_subprocess_exec("docker", "exec", container.id, "true")
        assert await process.wait() == 0

    async def remove(self, container: Container) -> None:
        await asyncio.to_thread(container.remove, force=True)

    def close(self) -> None:
        self._client.close()
