"""Disk usage of containers is measured, and containers beyond their limit are stopped."""

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from policies.isolation import Isolation
from sandbox_runtime.backends.docker import DockerBackend
from sandbox_runtime.backends.docker_disk import DiskUsage, DockerDisk
from sandbox_runtime.backends.docker_engine import DockerEngine, EngineJson
from sandbox_runtime.errors import SandboxLostError
from sandbox_runtime.guest_sandbox import start_sandbox
from sandbox_runtime.sandbox import Sandbox
from tests.sandbox_runtime.backends.engine import docker_backend, names
from tests.sandbox_runtime.transfer import PLENTY_S, output

pytestmark = pytest.mark.docker

SMALL = Isolation(disk_mib=16)
NEVER = "mkfifo never; cat never"


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[DockerBackend]:
    backend = docker_backend(tmp_path)
    yield backend
    await backend.aclose()


async def failure_of(sandbox: Sandbox, command: str) -> str:
    """Return the error of a sandbox that is lost during a command."""
    with anyio.fail_after(40), pytest.raises(SandboxLostError) as lost:
        await sandbox.exec(command, timeout_s=PLENTY_S)
    return str(lost.value)


async def test_only_the_sandbox_that_exceeds_its_disk_limit_is_stopped(
    backend: DockerBackend, tmp_path: Path
) -> None:
    greedy, modest = [await start_sandbox(backend, SMALL) for _ in range(2)]
    await output(modest, "head -c 12M /dev/zero > file")
    said = await failure_of(greedy, f"for n in 1 2 3; do head -c 12M /dev/zero > $n; done; {NEVER}")
    assert re.search(r"its disk use of \d+ MiB exceeded the limit of 16 MiB", said)
    assert await output(modest, "wc -c < file") == f"{12 << 20}\n"
    await greedy.close()
    assert await asyncio.to_thread(names, tmp_path) == [modest.id]
    await modest.close()


KEEP_WHAT_IS_DELETED = """
import os, signal
for n in range(3):
    descriptor = os.open("file", os.O_RDWR | os.O_CREAT)
    os.unlink("file")
    for _ in range(12):
        os.write(descriptor, bytes(1 << 20))
signal.pause()
"""


async def test_deleted_files_that_are_still_open_count_as_disk_usage(
    backend: DockerBackend,
) -> None:
    sandbox = await start_sandbox(backend, SMALL)
    await output(sandbox, f"cat > keep.py <<'end'{KEEP_WHAT_IS_DELETED}end")
    assert "exceeded the limit of 16 MiB" in await failure_of(sandbox, "python3 keep.py")
    await sandbox.close()


async def test_sandbox_with_too_many_files_is_stopped(backend: DockerBackend) -> None:
    sandbox = await start_sandbox(backend, Isolation(disk_mib=2))
    said = await failure_of(sandbox, f"for n in {{1..400}}; do : > $n; done; {NEVER}")
    assert "more than the 256 files" in said
    await sandbox.close()


async def test_sandbox_with_files_nested_too_deeply_to_measure_is_stopped(
    backend: DockerBackend,
) -> None:
    sandbox = await start_sandbox(backend, SMALL)
    name = "d" * 250
    dig = f"for n in {{1..20}}; do mkdir {name}; cd -P {name}; done"
    fill = "for n in 1 2 3; do head -c 12M /dev/zero > $n; done"
    said = await failure_of(sandbox, f"{dig} 2> /dev/null; {fill}; {NEVER}")
    assert "more than the 2048 files" in said
    await sandbox.close()


async def test_disk_usage_of_a_background_process_stops_the_sandbox(backend: DockerBackend) -> None:
    sandbox = await start_sandbox(backend, SMALL)
    writing = "for n in 1 2 3; do head -c 12M /dev/zero > $n; done"
    await output(sandbox, f"({writing}) > /dev/null 2>&1 &")
    assert "exceeded the limit" in await failure_of(sandbox, NEVER)
    await sandbox.close()


class RemoteEngine(DockerEngine):
    """An engine whose data directories are not on this host."""

    async def container(self, name: str, *, size: bool = False) -> EngineJson:
        return {**await super().container(name, size=size), "GraphDriver": {"Data": None}}


async def test_disk_usage_on_a_remote_engine_is_read_from_its_api(
    backend: DockerBackend,
) -> None:
    sandbox = await start_sandbox(backend, SMALL)
    await output(sandbox, "head -c 5M /dev/zero > file")
    engine = RemoteEngine()
    disk = DockerDisk(engine, None)
    used = await disk.usage(sandbox.id, DiskUsage())
    assert used is not None
    assert 5 << 20 <= used.bytes < 6 << 20
    assert disk.free_bytes() is None
    assert disk.total_written() != DiskUsage()  # for all that one can know
    await sandbox.close()
    assert await disk.usage(sandbox.id, DiskUsage()) is None
    await engine.aclose()
