"""A private Docker engine that a test may stop and start without affecting other tests."""

import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from anyio.abc import Process

from sandbox_runtime.backends.docker_sdk import connect
from sandbox_runtime.errors import SandboxStartError
from tests.fakes.waiting import until
from tests.sandbox_runtime.conformance.backends import DOCKER_IMAGE


class OwnEngine:
    """`dockerd` with all of its files in one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._process: Process | None = None
        self.url = f"unix://{directory}/docker.sock"

    async def start(self) -> None:
        options = {
            "data-root": self._directory / "data",
            "exec-root": self._directory / "exec",
            "pidfile": self._directory / "pid",
            "host": self.url,
            "iptables": "false",
        }
        arguments = [f"--{name}={value}" for name, value in options.items()]
        self._process = await anyio.open_process(
            ["dockerd", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        with anyio.fail_after(60):
            await until(self._answers)

    async def stop(self) -> None:
        if self._process:
            self._process.terminate()
            await self._process.wait()
            self._process = None

    async def kill(self) -> None:
        """End the engine as a crash would."""
        assert self._process
        self._process.kill()
        await self._process.wait()
        self._process = None
        # In a container without an init process the engine's containerd stays as a zombie, and the
        # next engine would wait for it.
        (self._directory / "exec" / "containerd" / "containerd.pid").unlink()

    def containers(self) -> list[str]:
        client, _ = connect(self.url)
        try:
            return [found["Id"] for found in client.containers(all=True)]
        finally:
            client.close()

    def _answers(self) -> bool:
        try:
            client, _ = connect(self.url)
        except SandboxStartError:
            return False
        client.close()
        return True

    async def unmount_all(self) -> None:
        """Unmount what a killed engine has left mounted."""
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        below = [path for path in mounts if path.startswith(f"{self._directory}/")]
        for path in reversed(below):
            await anyio.run_process(["umount", path])

    async def take_image(self) -> None:
        """Copy the test image from the shared engine."""
        copy = f"docker save {DOCKER_IMAGE} | docker --host {self.url} load"
        await anyio.run_process(["sh", "-c", copy])


@asynccontextmanager
async def own_engine() -> AsyncIterator[OwnEngine]:
    """Yield a running engine that has the test image, and remove it afterwards."""
    if shutil.which("dockerd") is None:
        pytest.skip("dockerd is not installed here")
    # A short path: the length of socket paths is limited.
    directory = Path(tempfile.mkdtemp(prefix="engine-"))
    engine = OwnEngine(directory)
    try:
        await engine.start()
        await engine.take_image()
        yield engine
    finally:
        with anyio.CancelScope(shield=True):
            await engine.stop()
            await engine.unmount_all()
            await anyio.to_thread.run_sync(shutil.rmtree, directory)
