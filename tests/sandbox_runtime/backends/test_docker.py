"""Start, end and removal of containers."""

import asyncio
import subprocess
import tarfile
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from policies.isolation import Isolation
from sandbox_runtime.backends.docker import (
    EXPIRES_LABEL,
    INSTALL_LABEL,
    OWNER_LABEL,
    DockerBackend,
)
from sandbox_runtime.backends.docker_engine import DockerEngine, EngineJson
from sandbox_runtime.errors import EngineMissingError, SandboxLostError, SandboxStartError
from sandbox_runtime.guest_sandbox import start_sandbox
from tests.sandbox_runtime.backends.engine import (
    client,
    derived,
    docker_backend,
    imported,
    inspect,
    names,
)
from tests.sandbox_runtime.backends.root_tar import add_programs
from tests.sandbox_runtime.conformance.backends import DOCKER_IMAGE
from tests.sandbox_runtime.transfer import output

pytestmark = pytest.mark.docker


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[DockerBackend]:
    backend = docker_backend(tmp_path)
    yield backend
    await backend.aclose()


async def test_closing_a_sandbox_removes_its_container(
    backend: DockerBackend, tmp_path: Path
) -> None:
    sandbox = await start_sandbox(backend, Isolation())
    assert sandbox.id in await asyncio.to_thread(names, tmp_path)
    await sandbox.close()
    assert sandbox.id not in await asyncio.to_thread(names, tmp_path)


async def test_error_for_a_missing_image_has_its_name(tmp_path: Path) -> None:
    backend = docker_backend(tmp_path, image="no-such-image:here")
    with pytest.raises(SandboxStartError, match="no-such-image:here"):
        await start_sandbox(backend, Isolation())
    with pytest.raises(SandboxStartError, match="no-such-image:here"):
        await backend.fingerprint()
    checks = {check.name: check for check in await backend.check()}
    assert not checks["docker image"].ok
    assert "build-image" in checks["docker image"].detail
    await backend.aclose()


async def test_error_for_a_required_image_that_is_missing_names_the_engine_once(
    tmp_path: Path,
) -> None:
    await docker_backend(tmp_path).aclose()  # skips where there is no engine
    with pytest.raises(EngineMissingError) as raised:
        await asyncio.to_thread(
            DockerBackend, "no-such-image:here", state_dir=tmp_path, needs_image=True
        )
    engine, _, reason = str(raised.value).partition(" does ")
    assert engine.startswith("the engine at ")
    assert reason == "not have the image 'no-such-image:here'"


async def test_sandbox_image_needs_no_python(tmp_path: Path) -> None:
    archive = tmp_path / "root.tar"
    with tarfile.open(archive, "w") as tar:
        add_programs(tar, ("bash", "cat"))
    async with imported(archive) as image:
        backend = docker_backend(tmp_path, image)
        sandbox = await start_sandbox(backend, Isolation())
        assert await output(sandbox, "echo $((6 * 7)) > file; cat file") == "42\n"
        await sandbox.close()
        await backend.aclose()
    assert not await asyncio.to_thread(names, tmp_path)


class ForeignEngine(DockerEngine):
    """An engine whose images are for another machine."""

    async def image(self, name: str) -> EngineJson:
        return {**await super().image(name), "Architecture": "s390x"}


async def test_image_for_an_architecture_without_a_guest_agent_fails_start_and_check(
    backend: DockerBackend, tmp_path: Path
) -> None:
    await backend._engine.aclose()
    backend._engine = ForeignEngine()
    with pytest.raises(SandboxStartError, match=r"machine 's390x'.*make install"):
        await start_sandbox(backend, Isolation())
    checks = {check.name: check for check in await backend.check()}
    assert not checks["docker image"].ok
    assert "make install" in checks["docker image"].detail
    assert not await asyncio.to_thread(names, tmp_path)


async def test_guest_agent_executable_cannot_be_changed_from_inside_the_container(
    backend: DockerBackend,
) -> None:
    sandbox = await start_sandbox(backend, Isolation())
    assert await output(sandbox, "tr '\\0' ' ' < /proc/1/cmdline") == "/.agent/agent "
    for change in ("rm", "truncate -s 0", "chmod 0", "mv -t /tmp"):
        assert (await sandbox.exec(f"{change} /.agent/agent", timeout_s=20)).exit_code == 1
    await sandbox.close()


async def test_cancelled_start_leaves_no_container(backend: DockerBackend, tmp_path: Path) -> None:
    for delay_s in (0.0, 0.01, 0.03, 0.06, 0.1):
        with anyio.move_on_after(delay_s):
            sandbox = await start_sandbox(backend, Isolation())
            await sandbox.close()
    assert not await asyncio.to_thread(names, tmp_path)


@pytest.mark.parametrize("end", [("rm", "-f"), ("kill",)])
async def test_container_removed_by_another_client_is_reported(
    backend: DockerBackend, end: tuple[str, ...]
) -> None:
    sandbox = await start_sandbox(backend, Isolation())
    await anyio.run_process(["docker", *end, sandbox.id])
    with anyio.fail_after(30), pytest.raises(SandboxLostError) as lost:
        await sandbox.exec("sleep 60", timeout_s=60)
    assert "from outside" in str(lost.value)
    assert "memory" not in str(lost.value)
    await sandbox.close()
    await backend.sweep()  # its volume of terminals is left


async def test_terminal_volume_is_removed_with_its_container_or_by_a_sweep(
    backend: DockerBackend,
) -> None:
    closed, removed = [await start_sandbox(backend, Isolation()) for _ in range(2)]
    volumes = [_terminals_of(each.id) for each in (closed, removed)]
    await closed.close()
    await anyio.run_process(["docker", "rm", "-f", removed.id])
    await removed.close()
    with client() as engine:
        assert volumes[0] not in _volumes(engine)
        await backend.sweep()
        assert not {*volumes} & _volumes(engine)


def _terminals_of(container: str) -> str:
    (name,) = (str(each["Name"]) for each in inspect(container)["Mounts"] if each["RW"])
    return name


def _volumes(engine: Any) -> set[str]:
    return {each["Name"] for each in engine.volumes()["Volumes"] or ()}


async def test_replaced_image_of_the_same_name_has_a_new_fingerprint(tmp_path: Path) -> None:
    await docker_backend(tmp_path).aclose()  # skips where there is no engine
    async with derived("LABEL edition=1") as first, derived("LABEL edition=2") as second:
        backend = docker_backend(tmp_path, first)
        before = await backend.fingerprint()
        assert await backend.fingerprint() == before
        await anyio.run_process(["docker", "tag", second, first])
        after = await backend.fingerprint()
        assert after != before
        sandbox = await start_sandbox(backend, Isolation())
        assert (await asyncio.to_thread(inspect, sandbox.id))["Image"] == after
        await sandbox.close()
        await backend.aclose()


async def test_sweep_removes_untracked_containers_of_this_proxy(
    tmp_path: Path,
) -> None:
    backend = docker_backend(tmp_path)
    ours = await start_sandbox(backend, Isolation())
    labels = inspect(ours.id)["Config"]["Labels"]
    lost = _leftover(labels)
    name = f"{ours.id[:-4]}lost"
    await anyio.run_process(["docker", "rename", lost, name])
    try:
        assert await backend.sweep() == 1
        assert [_exists(name), _exists(ours.id)] == [False, True]
    finally:
        await anyio.run_process(["docker", "rm", "-f", name], check=False)
        await ours.close()
        await backend.aclose()


class KilledEngine(DockerEngine):
    """An engine that was killed while it removed containers, and lists them without names."""

    half_removed = ""

    async def containers(self, label: str) -> list[EngineJson]:
        found = await super().containers(label)
        return [
            {**each, "Names": []} if f"/{self.half_removed}" in each["Names"] else each
            for each in found
        ]


async def test_sweep_removes_a_container_without_a_name(tmp_path: Path) -> None:
    backend = docker_backend(tmp_path)
    used_elsewhere = backend._engine
    backend._engine = engine = KilledEngine()
    ours = await start_sandbox(backend, Isolation())
    engine.half_removed = leftover = _leftover(inspect(ours.id)["Config"]["Labels"])
    try:
        assert await backend.sweep() == 1
        assert [_exists(leftover), _exists(ours.id)] == [False, True]
    finally:
        await anyio.run_process(["docker", "rm", "-f", leftover], check=False)
        await ours.close()
        await backend.aclose()
        await used_elsewhere.aclose()


async def test_sweep_removes_only_leftovers_of_dead_owners(tmp_path: Path) -> None:
    living, sweeping = docker_backend(tmp_path), docker_backend(tmp_path)
    theirs = await start_sandbox(living, Isolation())
    labels = inspect(theirs.id)["Config"]["Labels"]
    now = int(time.time())
    assert now + 24 * 3600 < int(labels[EXPIRES_LABEL]) < now + 25 * 3600
    dead = {**labels, OWNER_LABEL: "0123456789abcdef"}
    nobodys = {INSTALL_LABEL: labels[INSTALL_LABEL]}
    expired = {**labels, EXPIRES_LABEL: str(now - 1)}
    elsewhere = {**dead, INSTALL_LABEL: "another-installation"}
    leftovers = [_leftover(each) for each in (dead, nobodys, expired, elsewhere, {})]
    try:
        assert await sweeping.sweep() == 3
        left = [_exists(name) for name in [theirs.id, *leftovers]]
        assert left == [True, False, False, False, True, True]
        assert await output(theirs, "echo alive") == "alive\n"
    finally:
        await anyio.run_process(["docker", "rm", "-f", *leftovers], check=False)
        await theirs.close()
        await living.aclose()
        await sweeping.aclose()


def _exists(name: str) -> bool:
    found = subprocess.run(["docker", "inspect", name], capture_output=True, check=False)
    return found.returncode == 0


def _leftover(labels: dict[str, str]) -> str:
    name = f"leftover-{uuid.uuid4().hex[:8]}"
    flags = [part for key, value in labels.items() for part in ("--label", f"{key}={value}")]
    command = ["docker", "create", "--name", name, *flags, DOCKER_IMAGE, "true"]
    subprocess.run(command, check=True, capture_output=True)
    return name
