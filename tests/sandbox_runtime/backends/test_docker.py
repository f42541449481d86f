"""Containers as walls: what is in force, who may remove what, and engines that are far away."""

import asyncio
import contextlib
import os
import shutil
import ssl
import subprocess
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import docker
import pytest
from anyio.abc import ByteStream, SocketAttribute
from anyio.streams.tls import TLSListener

from policies.isolation import Isolation
from sandbox_runtime.backends.docker import INSTALL_LABEL, OWNER_LABEL, DockerBackend
from sandbox_runtime.errors import SandboxStartError
from sandbox_runtime.lending import start_sandbox
from tests.sandbox_runtime.conformance.backends import DOCKER_IMAGE, docker_backend
from tests.sandbox_runtime.transfer import output

pytestmark = pytest.mark.docker
SOCKET = "/var/run/docker.sock"


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[DockerBackend]:
    backend = docker_backend(tmp_path)
    yield backend
    await backend.aclose()


def _inspect(name: str) -> dict[str, Any]:
    client = docker.APIClient()
    try:
        facts: dict[str, Any] = client.inspect_container(name)
        return facts
    finally:
        client.close()


def _names(state_dir: Path) -> list[str]:
    """The containers of this test's installation."""
    label = f"{INSTALL_LABEL}={(state_dir / 'install-id').read_text()}"
    client = docker.APIClient()
    try:
        found = client.containers(all=True, filters={"label": label})
        return [container["Names"][0].strip("/") for container in found]
    finally:
        client.close()


async def test_every_wall_is_up(backend: DockerBackend) -> None:
    sandbox = await start_sandbox(backend, Isolation(memory_mib=256, cpus=0.5, pids=64))
    facts = await asyncio.to_thread(_inspect, sandbox.id)
    walls = facts["HostConfig"]
    assert walls["NetworkMode"] == "none"
    assert walls["CapDrop"] == ["ALL"]
    assert walls["SecurityOpt"] == ["no-new-privileges"]
    assert (walls["Memory"], walls["MemorySwap"]) == (256 << 20, 256 << 20)
    assert (walls["NanoCpus"], walls["PidsLimit"]) == (500_000_000, 64)
    assert walls["LogConfig"]["Type"] == "none"
    assert (walls["AutoRemove"], walls["Init"], walls["Privileged"]) == (True, True, False)
    assert not walls["Binds"]
    assert not facts["Mounts"]
    assert not walls["PortBindings"]
    assert facts["Config"]["StdinOnce"]
    await sandbox.close()


async def test_the_walls_hold_inside(backend: DockerBackend) -> None:
    sandbox = await start_sandbox(backend, Isolation(pids=64))
    assert await output(sandbox, "grep CapEff /proc/self/status") == "CapEff:\t00000000000000fb\n"
    assert "NoNewPrivs:\t1" in await output(sandbox, "cat /proc/self/status")
    assert (await output(sandbox, "tail -n +3 /proc/net/dev")).split(":")[0].strip() == "lo"
    assert await output(sandbox, "ulimit -n; ulimit -c") == "4096\n0\n"
    many = await sandbox.exec("for i in $(seq 200); do sleep 60 & done; wait", timeout_s=2)
    assert "fork" in many.stderr
    assert await output(sandbox, "echo still usable") == "still usable\n"
    await sandbox.close()


async def test_a_command_that_takes_all_memory_dies_alone(backend: DockerBackend) -> None:
    sandbox = await start_sandbox(backend, Isolation(memory_mib=64))
    hog = await sandbox.exec("python3 -c 'x = bytearray(200 << 20)'", timeout_s=30)
    assert hog.exit_code == 137
    assert await output(sandbox, "echo still usable") == "still usable\n"
    await sandbox.close()


async def test_closing_removes_the_container(backend: DockerBackend, tmp_path: Path) -> None:
    sandbox = await start_sandbox(backend, Isolation())
    assert sandbox.id in await asyncio.to_thread(_names, tmp_path)
    await sandbox.close()
    assert sandbox.id not in await asyncio.to_thread(_names, tmp_path)


async def test_a_missing_image_is_named(tmp_path: Path) -> None:
    backend = docker_backend(tmp_path, image="no-such-image:here")
    with pytest.raises(SandboxStartError, match="no-such-image:here"):
        await start_sandbox(backend, Isolation())
    checks = {check.name: check for check in await backend.check()}
    assert not checks["docker image"].ok
    assert "make image" in checks["docker image"].detail
    await backend.aclose()


async def test_an_image_without_python_fails_with_the_engines_words(
    backend: DockerBackend, tmp_path: Path
) -> None:
    tag = f"llm-sandbox-proxy-test-empty:{uuid.uuid4().hex[:8]}"
    empty = tmp_path / "empty.tar"
    await anyio.run_process(["tar", "-cf", str(empty), "-T", os.devnull])
    await anyio.run_process(["docker", "import", str(empty), tag])
    pythonless = docker_backend(tmp_path, image=tag)
    try:
        with pytest.raises(SandboxStartError, match="python3"):
            await start_sandbox(pythonless, Isolation())
        assert not await asyncio.to_thread(_names, tmp_path)
    finally:
        await pythonless.aclose()
        await anyio.run_process(["docker", "rmi", tag])


async def test_a_start_that_is_given_up_leaves_no_container(
    backend: DockerBackend, tmp_path: Path
) -> None:
    for delay_s in (0.0, 0.01, 0.03, 0.06, 0.1):
        with anyio.move_on_after(delay_s):
            sandbox = await start_sandbox(backend, Isolation())
            await sandbox.close()
    assert not await asyncio.to_thread(_names, tmp_path)


async def test_a_sweep_removes_what_dead_owners_left_and_nothing_else(tmp_path: Path) -> None:
    living, sweeping = docker_backend(tmp_path), docker_backend(tmp_path)
    theirs = await start_sandbox(living, Isolation())
    labels = _inspect(theirs.id)["Config"]["Labels"]
    dead = {**labels, OWNER_LABEL: "0123456789abcdef"}
    elsewhere = {**dead, INSTALL_LABEL: "another-installation"}
    leftovers = [_leftover(dead), _leftover(elsewhere), _leftover({})]
    try:
        assert await sweeping.sweep() == 1
        left = [_exists(name) for name in [theirs.id, *leftovers]]
        assert left == [True, False, True, True]
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


async def test_an_engine_reached_over_tcp_serves_as_well(tmp_path: Path) -> None:
    await docker_backend(tmp_path).aclose()  # skips where there is none
    async with _relay(None) as port:
        backend = await asyncio.to_thread(_engine_at, port, tmp_path)
        sandbox = await start_sandbox(backend, Isolation())
        assert await output(sandbox, "echo far away") == "far away\n"
        await sandbox.close()
        await backend.aclose()


async def test_an_engine_behind_tls_serves_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await docker_backend(tmp_path).aclose()
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):  # requests puts them above all else
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DOCKER_CERT_PATH", str(tmp_path))
    monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
    async with _relay(await _certificates(tmp_path)) as port:
        backend = await asyncio.to_thread(_engine_at, port, tmp_path)
        sandbox = await start_sandbox(backend, Isolation())
        assert await output(sandbox, "echo in secret") == "in secret\n"
        await sandbox.close()
        await backend.aclose()


def _engine_at(port: int, state_dir: Path) -> DockerBackend:
    return DockerBackend(DOCKER_IMAGE, state_dir=state_dir, host=f"tcp://127.0.0.1:{port}")


async def _certificates(directory: Path) -> ssl.SSLContext:
    """One self-signed certificate plays the authority, the engine and the client."""
    cert, key = directory / "cert.pem", directory / "key.pem"
    request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    await anyio.run_process([*request, *names, "-keyout", str(key), "-out", str(cert)])
    await asyncio.to_thread(shutil.copy, cert, directory / "ca.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    context.load_verify_locations(cert)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


async def test_an_unknown_scheme_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SandboxStartError, match="no Docker engine answers"):
        DockerBackend(DOCKER_IMAGE, state_dir=tmp_path, host="carrier-pigeon://roof")


@asynccontextmanager
async def _relay(tls: ssl.SSLContext | None) -> AsyncIterator[int]:
    """The local engine on a TCP port."""

    async def pump(source: ByteStream, target: ByteStream) -> None:
        with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            async for data in source:
                await target.send(data)

    async def serve(client: ByteStream) -> None:
        engine = await anyio.connect_unix(SOCKET)
        async with client, engine, anyio.create_task_group() as both:
            both.start_soon(pump, client, engine)
            await pump(engine, client)
            both.cancel_scope.cancel()

    plain = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = plain.extra(SocketAttribute.local_port)
    async with plain, anyio.create_task_group() as serving:
        listener = TLSListener(plain, tls, standard_compatible=False) if tls else plain
        serving.start_soon(listener.serve, serve)
        yield port
        serving.cancel_scope.cancel()
