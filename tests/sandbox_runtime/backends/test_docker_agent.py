"""The volume with the agent: sandboxes run this program even if the volume was changed."""

import asyncio
import io
import tarfile
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from policies.isolation import Isolation
from sandbox_runtime.backends.docker import DockerBackend
from sandbox_runtime.backends.docker_agent import AgentVolumes, _root_uid, _tar_archive
from sandbox_runtime.backends.docker_container import ContainerSpec, ImageMetadata
from sandbox_runtime.backends.docker_engine import DockerEngine
from tests.sandbox_runtime.backends.engine import docker_backend, imported

pytestmark = pytest.mark.docker

USERNS = ["name=seccomp,profile=default", "name=userns"]
"""Security options of an engine with userns-remap."""


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[DockerBackend]:
    backend = docker_backend(tmp_path)
    yield backend
    await backend.aclose()


async def test_agent_volume_is_filled_again_after_its_removal(
    backend: DockerBackend, tmp_path: Path
) -> None:
    program = tmp_path / "agent"
    program.write_text(f"#!/bin/sh\necho {uuid.uuid4()}\n")
    image = ImageMetadata(await backend.fingerprint(), "x86_64", ())
    engine = DockerEngine()
    volumes = AgentVolumes(engine, {})
    for _ in range(2):
        name = await volumes.volume_for(program, image)
        assert await volumes.volume_for(program, image) == name
        run = ["docker", "run", "--rm", "-v", f"{name}:/.agent", image.id, "/.agent/agent"]
        printed = await anyio.run_process(run)
        assert printed.stdout.decode() in program.read_text()
        await anyio.run_process(["docker", "volume", "rm", name])
        volumes.invalidate()
    await engine.aclose()


@pytest.mark.parametrize(
    ("info", "uid"),
    [
        ({"DockerRootDir": "/var/lib/docker"}, 0),
        ({"DockerRootDir": "/var/lib/docker/1000.1000", "SecurityOptions": ["name=seccomp"]}, 0),
        ({"DockerRootDir": "/var/lib/docker/165536.165536", "SecurityOptions": USERNS}, 165536),
        ({"DockerRootDir": "/elsewhere", "SecurityOptions": USERNS}, 0),
        ({}, 0),
    ],
)
def test_host_uid_of_container_root_is_read_from_the_name_of_the_docker_root_directory(
    info: dict[str, object], uid: int
) -> None:
    assert _root_uid(info) == uid


POISONS = {
    "another program": "echo '#!/bin/sh' > agent; echo 'echo poison' >> agent",
    "half of it": "cp agent half; head -c 20 half > agent",
    "one byte more": "echo >> agent",
    "not executable": "chmod 644 agent",
    "anybody's": "chown 1000 agent",
    "a link": "cp agent other; ln -sf other agent",
    "a directory": "rm agent; mkdir agent; touch agent/file",
    "much": "truncate -s 20G agent",
    "nothing": "rm agent",
}


@pytest.mark.parametrize("poison", POISONS.values(), ids=POISONS.keys())
async def test_agent_volume_with_wrong_content_is_corrected_before_use(
    backend: DockerBackend, tmp_path: Path, poison: str
) -> None:
    program = tmp_path / "agent"
    program.write_text(f"#!/bin/sh\necho {uuid.uuid4()}\n")
    image = ImageMetadata(await backend.fingerprint(), "x86_64", ())
    engine = DockerEngine()
    name = await AgentVolumes(engine, {}).volume_for(program, image)
    try:
        run = ["docker", "run", "--rm", "-v", f"{name}:/.agent", "-w", "/.agent", image.id]
        await anyio.run_process([*run, "sh", "-c", poison])
        with anyio.fail_after(30):
            assert (
                await AgentVolumes(engine, {}).volume_for(program, image) == name
            )  # another process
        printed = await anyio.run_process([*run, "/.agent/agent"])
        assert printed.stdout.decode() in program.read_text()
        listed = await anyio.run_process([*run, "stat", "-c", "%F %a %u", "/.agent/agent"])
        assert listed.stdout == b"regular file 755 0\n"
    finally:
        await anyio.run_process(["docker", "volume", "rm", name])
        await engine.aclose()


class SlowEngine(DockerEngine):
    """An engine that writes the first byte of a file, and then the file."""

    writers = most_writers = 0

    async def put_archive(self, container: str, directory: str, tar: bytes) -> None:
        SlowEngine.writers += 1
        SlowEngine.most_writers = max(SlowEngine.writers, SlowEngine.most_writers)
        await super().put_archive(container, directory, _tar_archive(b"#"))
        await super().put_archive(container, directory, tar)
        SlowEngine.writers -= 1


async def test_agent_volume_is_written_by_one_proxy_at_a_time(
    backend: DockerBackend, tmp_path: Path
) -> None:
    program = tmp_path / "agent"
    program.write_text(f"#!/bin/sh\necho {uuid.uuid4()}\n")
    image = ImageMetadata(await backend.fingerprint(), "x86_64", ())
    engines = [SlowEngine() for _ in range(4)]
    with anyio.fail_after(60):
        names = await asyncio.gather(
            *(AgentVolumes(engine, {}).volume_for(program, image) for engine in engines)
        )
    assert len(set(names)) == 1
    assert SlowEngine.most_writers == 1
    await anyio.run_process(["docker", "volume", "rm", names[0]])
    for engine in engines:
        await engine.aclose()


async def test_helper_container_of_a_proxy_that_died_while_writing_the_agent_is_removed(
    backend: DockerBackend, tmp_path: Path
) -> None:
    program = tmp_path / "agent"
    program.write_text(f"#!/bin/sh\necho {uuid.uuid4()}\n")
    image = ImageMetadata(await backend.fingerprint(), "x86_64", ())
    engine = DockerEngine()
    name = await AgentVolumes(engine, {}).volume_for(program, image)
    await engine.create(f"{name}-filling", {"Image": image.id, "Cmd": ["x"]})
    with anyio.fail_after(60):
        assert await AgentVolumes(engine, {}, lock_timeout_s=0.1).volume_for(program, image) == name
    await anyio.run_process(["docker", "volume", "rm", name])
    await engine.aclose()


async def test_image_cannot_replace_the_guest_agent_executable(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    tar = tmp_path / "root.tar"
    with tarfile.open(tar, "w") as archive:
        poison = tarfile.TarInfo(".agent/agent")
        poison.mode, data = 0o755, b"poison"
        poison.size = len(data)
        archive.addfile(poison, io.BytesIO(data))
    program = tmp_path / "agent"
    program.write_text(f"{uuid.uuid4()}\n")
    async with imported(tar) as tag:
        backend = docker_backend(tmp_path, tag)
        image = ImageMetadata(await backend.fingerprint(), "x86_64", ())
        engine = DockerEngine()
        name = await AgentVolumes(engine, {}).volume_for(program, image)
        spec = ContainerSpec(image, Isolation(), labels={}, agent_volume=name)
        empty = f"llm-sandbox-proxy-test-{uuid.uuid4().hex[:8]}"
        try:
            made = await engine.create(empty, replace(spec, agent_volume=empty).to_request())
            assert await engine.get_archive(made, "/.agent/agent", 1) == b""
            await engine.remove(made)
            made = await engine.create(f"{empty}-2", spec.to_request())
            assert program.read_bytes() in await engine.get_archive(made, "/.agent/agent", 1 << 20)
            await engine.remove(made)
        finally:
            await anyio.run_process(["docker", "volume", "rm", name, empty])
            await engine.aclose()
            await backend.aclose()
