"""Containers on gVisor's kernel. The tests need an engine with a runtime `runsc`."""

import os
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from policies.isolation import Isolation
from sandbox_runtime.backends.docker import DockerBackend
from sandbox_runtime.backends.docker_guest import RunscProcesses
from sandbox_runtime.errors import SandboxLostError, SandboxStartError
from sandbox_runtime.guest_sandbox import start_sandbox
from sandbox_runtime.images import image_checks
from tests.fakes.waiting import until
from tests.sandbox_runtime.backends.engine import client, docker_backend, inspect
from tests.sandbox_runtime.transfer import PLENTY_S, output

pytestmark = pytest.mark.docker

SMALL = Isolation(memory_mib=512, pids=32, disk_mib=16)


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[DockerBackend]:
    await docker_backend(tmp_path).aclose()  # skips where there is no engine
    with client() as engine:
        if "runsc" not in engine.info()["Runtimes"]:
            pytest.skip("the engine has no runtime runsc")
    backend = docker_backend(tmp_path, runtime="runsc")
    yield backend
    await backend.aclose()


def used_cpu_s(container_id: str) -> float:
    """Return the processor time of a container in the host's cgroup."""
    with client() as engine:
        used_ns: int = engine.stats(container_id, stream=False)["cpu_stats"]["cpu_usage"][
            "total_usage"
        ]
    return used_ns / 1e9


def processes_of(container_id: str) -> list[str]:
    """Return the command lines of this host's processes that belong to a container."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_text(errors="replace"))
        except OSError:
            continue
    return [line for line in lines if container_id in line]


async def test_gvisor_sandbox_does_not_run_on_the_host_kernel(backend: DockerBackend) -> None:
    sandbox = await start_sandbox(backend, SMALL)
    assert await output(sandbox, "uname -r") != f"{os.uname().release}\n"
    checks = {check.name: check.detail for check in await backend.check()}
    assert checks["docker runtime"].startswith("runsc: each sandbox has a kernel of its own")
    await sandbox.close()


async def test_ls_and_stat_work_on_gvisor(backend: DockerBackend) -> None:
    sandbox = await start_sandbox(backend, SMALL)
    await output(sandbox, "echo text > a && ln -s a link && touch -d 2020-01-02 old")
    listed = (await output(sandbox, "ls -l --time-style=long-iso a old link")).splitlines()
    assert [line.split()[4:] for line in listed] == [
        ["5", *listed[0].split()[5:7], "a"],
        ["1", *listed[1].split()[5:7], "link", "->", "a"],
        ["0", "2020-01-02", "00:00", "old"],
    ]
    assert await output(sandbox, "stat --format='%A %s %n' a") == "-rw-r--r-- 5 a\n"
    failed = [
        check for check in await image_checks(sandbox) if check.name in ("image ls", "image stat")
    ]
    assert failed == []
    await sandbox.close()


async def test_processor_time_of_a_gvisor_sandbox_is_limited(backend: DockerBackend) -> None:
    busy = "for i in 1 2 3; do timeout 2 sh -c 'while :; do :; done' & done; wait"
    sandbox = await start_sandbox(backend, replace(SMALL, cpus=0.5))
    before_s = used_cpu_s(sandbox.id)
    result = await sandbox.exec(busy, timeout_s=PLENTY_S)
    # Three busy loops; a margin of half for accounting by period.
    assert 0.1 < used_cpu_s(sandbox.id) - before_s <= 0.5 * result.duration_s * 1.5
    await sandbox.close()


async def test_process_limit_on_gvisor_leaves_the_sandbox_usable(backend: DockerBackend) -> None:
    sandbox = await start_sandbox(backend, SMALL)
    many = await sandbox.exec("for i in $(seq 60); do sleep 60 & done; wait", timeout_s=2)
    assert "Resource temporarily unavailable" in many.stderr
    assert await output(sandbox, "echo still usable") == "still usable\n"
    await sandbox.close()


async def test_gvisor_sandbox_that_exhausts_its_memory_is_lost_with_the_reason(
    backend: DockerBackend,
) -> None:
    sandbox = await start_sandbox(backend, SMALL)
    with pytest.raises(SandboxLostError, match="memory ran out"):
        await sandbox.exec("python3 -c 'x = bytearray(2 << 30)'", timeout_s=PLENTY_S)
    await sandbox.close()


async def test_gvisor_sandbox_that_fills_its_disk_is_stopped(backend: DockerBackend) -> None:
    sandbox = await start_sandbox(backend, SMALL)
    fill = "for n in 1 2 3; do head -c 12M /dev/zero > $n; done; mkfifo never; cat never"
    with anyio.fail_after(60), pytest.raises(SandboxLostError, match="exceeded the limit"):
        await sandbox.exec(fill, timeout_s=PLENTY_S)
    await sandbox.close()


async def test_limits_of_a_running_gvisor_sandbox_cannot_be_changed(backend: DockerBackend) -> None:
    sandbox = await start_sandbox(backend, SMALL)
    with pytest.raises(SandboxStartError, match="cannot be changed"):
        await sandbox.resize(Isolation(memory_mib=1024))
    assert await output(sandbox, "echo unharmed") == "unharmed\n"
    await sandbox.close()


async def test_closing_a_gvisor_sandbox_leaves_no_process(
    backend: DockerBackend, tmp_path: Path
) -> None:
    sandbox = await start_sandbox(backend, SMALL)
    container_id = inspect(sandbox.id)["Id"]
    assert processes_of(container_id)
    await sandbox.exec("for i in $(seq 60); do sleep 60 & done; wait", timeout_s=1)
    await sandbox.close()
    with anyio.fail_after(10):
        await until(lambda: not processes_of(container_id))
    assert not list((tmp_path / "runsc").iterdir())


def orphans() -> set[str]:
    """Return the ids of containers whose gVisor kernel runs but which the engine does not know."""
    kernels = {line.rstrip("\0").split("\0")[-1] for line in processes_of("runsc-sandbox")}
    with client() as engine:
        return kernels - {container["Id"] for container in engine.containers(all=True)}


async def test_failed_gvisor_start_leaves_no_process(backend: DockerBackend) -> None:
    before = orphans()
    for _ in range(3):
        with pytest.raises(SandboxStartError):
            await start_sandbox(backend, Isolation(memory_mib=8))
    with anyio.fail_after(10):
        await until(lambda: orphans() <= before)


async def test_sweep_ends_only_runsc_processes_of_dead_owners(
    backend: DockerBackend, tmp_path: Path
) -> None:
    """The test starts a process that is named like one that a failed start leaves behind."""
    container_id = "ab" * 32
    RunscProcesses(tmp_path).record("sandbox-0123456789abcdef-0", container_id)
    sleep = f"{sys.executable} -c 'import time; time.sleep(1000)' {container_id}"
    command = ["bash", "-c", f"exec -a runsc-sandbox {sleep}"]
    living = await start_sandbox(backend, SMALL)
    async with await anyio.open_process(command) as process:
        with anyio.fail_after(10):
            await until(lambda: bool(processes_of(container_id)))
            await backend.sweep()
            await process.wait()
    assert [note.name for note in (tmp_path / "runsc").iterdir()] == [living.id]
    assert await output(living, "echo alive") == "alive\n"
    await living.close()


FLOODS = {
    # Frames that no agent sends: connections that never end.
    "frames": r"""
import itertools
frames = (number.to_bytes(4, "big") + b"\2\0\0\0\0" for number in itertools.count(2, 2))
with open("/proc/1/fd/1", "wb", buffering=0) as output:
    while True:
        output.write(b"".join(itertools.islice(frames, 1000)))
""",
    "diagnostics": """
with open("/proc/1/fd/2", "wb", buffering=0) as output:
    while True:
        output.write(bytes(1 << 16))
""",
}


@pytest.mark.parametrize("program", FLOODS.values(), ids=FLOODS.keys())
async def test_flood_through_the_agents_file_descriptors_loses_only_the_flooding_sandbox(
    backend: DockerBackend, program: str
) -> None:
    """gVisor lets every program in the sandbox open the agent's descriptors."""
    hostile, sound = await start_sandbox(backend, SMALL), await start_sandbox(backend, SMALL)
    with anyio.fail_after(60), pytest.raises(SandboxLostError, match="broke the protocol"):
        await hostile.exec(
            "exec python3 -I -S -", timeout_s=PLENTY_S, stdin=program.encode(), shell_state="none"
        )
    assert await output(sound, "echo unharmed") == "unharmed\n"
    await hostile.close()
    await sound.close()
