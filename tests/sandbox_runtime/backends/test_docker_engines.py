"""Remote engines, engines behind TLS, and lost engines."""

import asyncio
import shutil
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from policies.isolation import Isolation
from sandbox_runtime.backends.docker import DockerBackend
from sandbox_runtime.errors import SandboxLostError, SandboxStartError
from sandbox_runtime.guest_sandbox import start_sandbox
from tests.fakes.waiting import until
from tests.sandbox_runtime.backends.engine import docker_backend, inspect, names
from tests.sandbox_runtime.backends.guest_output import next_output
from tests.sandbox_runtime.backends.relay import EngineSocketRelay, relay
from tests.sandbox_runtime.conformance.backends import DOCKER_IMAGE
from tests.sandbox_runtime.transfer import PLENTY_S, OutputRecorder, output

pytestmark = pytest.mark.docker


def _engine_at(port: int, state_dir: Path) -> DockerBackend:
    return DockerBackend(DOCKER_IMAGE, state_dir=state_dir, host=f"tcp://127.0.0.1:{port}")


@pytest.fixture
async def engine_relay(tmp_path: Path) -> AsyncIterator[EngineSocketRelay]:
    await docker_backend(tmp_path).aclose()  # skips where there is no engine
    async with relay() as opened:
        yield opened


async def test_engine_over_tcp_runs_sandboxes(
    engine_relay: EngineSocketRelay, tmp_path: Path
) -> None:
    backend = await asyncio.to_thread(_engine_at, engine_relay.port, tmp_path)
    sandbox = await start_sandbox(backend, Isolation())
    assert await output(sandbox, "echo far away") == "far away\n"
    await sandbox.close()
    await backend.aclose()


async def test_engine_is_reached_directly_despite_http_proxy_variables(
    engine_relay: EngineSocketRelay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = await asyncio.to_thread(_engine_at, engine_relay.port, tmp_path)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    sandbox = await start_sandbox(backend, Isolation())
    assert await output(sandbox, "echo straight") == "straight\n"
    await sandbox.close()
    assert await backend.sweep() == 0
    await backend.aclose()


async def test_engine_behind_tls_runs_sandboxes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await docker_backend(tmp_path).aclose()
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):  # requests puts them above all else
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DOCKER_CERT_PATH", str(tmp_path))
    monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
    async with relay(await _certificates(tmp_path)) as engine_relay:
        backend = await asyncio.to_thread(_engine_at, engine_relay.port, tmp_path)
        sandbox = await start_sandbox(backend, Isolation())
        assert await output(sandbox, "echo in secret") == "in secret\n"
        await sandbox.close()
        await backend.aclose()


async def _certificates(directory: Path) -> ssl.SSLContext:
    """Write one self-signed certificate, which serves as authority, engine and client."""
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


async def test_docker_host_with_an_unknown_scheme_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SandboxStartError, match="no Docker engine answers"):
        DockerBackend(DOCKER_IMAGE, state_dir=tmp_path, host="carrier-pigeon://roof")


async def test_sandbox_of_a_lost_engine_is_lost_but_can_still_be_closed(
    engine_relay: EngineSocketRelay, tmp_path: Path
) -> None:
    backend = await asyncio.to_thread(_engine_at, engine_relay.port, tmp_path)
    sandbox = await start_sandbox(backend, Isolation())
    recorder = OutputRecorder()

    async def run() -> None:
        command = "echo begun; mkfifo never; cat never"
        with pytest.raises(SandboxLostError, match="the engine closed the connection"):
            await sandbox.exec(command, timeout_s=PLENTY_S, on_output=recorder)

    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            group.start_soon(run)
            await recorder.something.wait()
            engine_relay.cut()
        with pytest.raises(SandboxStartError):
            await start_sandbox(backend, Isolation())
        with pytest.raises(SandboxStartError):
            await backend.fingerprint()
        assert await backend.sweep() == 0
        await sandbox.close()
        # The container's input has ended with the connection, and so has the agent.
        await until(lambda: not names(tmp_path))
        engine_relay.restore()
        again = await start_sandbox(backend, Isolation())
        assert await output(again, "echo healed") == "healed\n"
        await again.close()
    await backend.aclose()


async def test_guest_diagnostics_report_that_the_engine_closed_the_connection(
    engine_relay: EngineSocketRelay, tmp_path: Path
) -> None:
    backend = await asyncio.to_thread(_engine_at, engine_relay.port, tmp_path)
    guest = await backend.start(Isolation())
    with anyio.fail_after(30):
        assert await next_output(guest)
        engine_relay.cut()
        assert await next_output(guest) == b""
        assert guest.diagnostics().startswith("the engine closed the connection")
        engine_relay.restore()
        await guest.kill()
    await backend.aclose()


async def test_remote_engine_runs_all_strict_sandboxes_as_one_user(
    engine_relay: EngineSocketRelay, tmp_path: Path
) -> None:
    """The proxy cannot see whether a remote host maps a range of uids for sandboxes."""
    backend = await asyncio.to_thread(_engine_at, engine_relay.port, tmp_path)
    sandbox = await start_sandbox(backend, Isolation(level="strict"))
    assert await output(sandbox, "id -u; id -g") == "1000\n1000\n"
    await sandbox.close()
    said = {check.name: check.detail for check in await backend.check()}["docker users at strict"]
    assert said == "all sandboxes run as uid 1000"
    await backend.aclose()


async def test_missing_block_io_limit_is_logged_once_and_sandboxes_start(
    engine_relay: EngineSocketRelay, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend = await asyncio.to_thread(_engine_at, engine_relay.port, tmp_path)
    for _ in range(2):
        sandbox = await start_sandbox(backend, Isolation())
        walls = (await asyncio.to_thread(inspect, sandbox.id))["HostConfig"]
        assert (walls["BlkioDeviceReadBps"], walls["BlkioDeviceWriteBps"]) == (None, None)
        await sandbox.close()
    assert caplog.text.count("the disk speed of sandboxes is not limited") == 1
    said = {check.name: check for check in await backend.check()}["docker disk speed"]
    assert (said.ok, said.detail.partition(":")[0]) == (True, "NOT LIMITED")
    await backend.aclose()


def _pretend_quota(answer: bytes) -> bytes:
    return answer.replace(b'"extfs"', b'"xfs"  ')


async def test_disk_is_watched_if_the_engine_rejects_a_quota(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    await docker_backend(tmp_path).aclose()
    fill = "for n in 1 2 3; do head -c 12M /dev/zero > $n; done; mkfifo never; cat never"
    async with relay(change=_pretend_quota) as engine_relay:
        backend = await asyncio.to_thread(_engine_at, engine_relay.port, tmp_path)
        sandbox = await start_sandbox(backend, Isolation(disk_mib=16))
        assert "the storage driver sets no disk limit" in caplog.text
        with anyio.fail_after(40), pytest.raises(SandboxLostError, match="exceeded the limit"):
            await sandbox.exec(fill, timeout_s=PLENTY_S)
        await sandbox.close()
        await backend.aclose()
