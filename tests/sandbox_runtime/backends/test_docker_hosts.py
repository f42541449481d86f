"""Several Docker engines as one backend: placement, lost engines, and engines that come back.

Most tests reach one engine by two URLs, of which one can be cut; the last test kills an engine.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio
import pytest

from policies.isolation import Isolation
from policies.pool import PoolSettings
from sandbox_runtime.backends.base import Backend, parallel_starts_per_host
from sandbox_runtime.backends.docker import INSTALL_LABEL, OWNER_LABEL, DockerBackend
from sandbox_runtime.backends.docker_hosts import ANSWER_TIMEOUT_S, DockerHost, DockerHosts
from sandbox_runtime.backends.docker_sdk import connect
from sandbox_runtime.errors import NoCapacityError, SandboxLostError, SandboxStartError
from sandbox_runtime.guest_sandbox import GuestSandbox, start_sandbox
from sandbox_runtime.pool.pool import Pool
from tests.e2e.own_engine import own_engine
from tests.fakes.waiting import until
from tests.sandbox_runtime.backends.engine import docker_backend, names
from tests.sandbox_runtime.backends.relay import SOCKET, EngineSocketRelay, relay
from tests.sandbox_runtime.conformance.backends import DOCKER_IMAGE
from tests.sandbox_runtime.transfer import output

pytestmark = pytest.mark.docker

SHARED = f"unix://{SOCKET}"
NOWHERE = "unix:///nonexistent/docker.sock"


def host(url: str, state_dir: Path, max_sandboxes: int = 10) -> DockerHost:
    backend = partial(DockerBackend, DOCKER_IMAGE, state_dir=state_dir, host=url)
    return DockerHost(url, backend, max_sandboxes)


@dataclass
class TwoHosts:
    """An engine as two hosts; `line` is the connection to the second one."""

    backend: DockerHosts
    line: EngineSocketRelay

    @property
    def is_up(self) -> list[bool]:
        return [each.is_up for each in self.backend.stats()]

    @property
    def counts(self) -> list[int]:
        return [each.sandboxes for each in self.backend.stats()]

    async def start(self) -> GuestSandbox:
        return await start_sandbox(self.backend, Isolation())


@asynccontextmanager
async def two_hosts(
    state_dir: Path,
    max_sandboxes: tuple[int, int] = (10, 10),
    answer_timeout_s: float = ANSWER_TIMEOUT_S,
) -> AsyncIterator[TwoHosts]:
    """Yield two hosts. Fails if a container is left."""
    await docker_backend(state_dir).aclose()  # skips where there is no engine
    with anyio.fail_after(120):
        async with relay() as line:
            first = host(SHARED, state_dir, max_sandboxes[0])
            second = host(f"tcp://127.0.0.1:{line.port}", state_dir, max_sandboxes[1])
            backend = DockerHosts([first, second], answer_timeout_s=answer_timeout_s)
            try:
                yield TwoHosts(backend, line)
            finally:
                with anyio.CancelScope(shield=True):
                    await backend.aclose()
            await until(lambda: not names(state_dir))


async def close_all(*sandboxes: GuestSandbox) -> None:
    for sandbox in sandboxes:
        await sandbox.close()


async def test_sandboxes_start_on_the_least_loaded_host(tmp_path: Path) -> None:
    async with two_hosts(tmp_path, (2, 4)) as hosts:
        sandboxes = [await hosts.start() for _ in range(3)]
        assert hosts.counts == [1, 2]
        sandboxes += await asyncio.gather(*(hosts.start() for _ in range(3)))
        assert hosts.counts == [2, 4]
        with pytest.raises(NoCapacityError, match="every Docker engine has its max_sandboxes"):
            await hosts.start()
        await sandboxes[0].close()
        assert hosts.counts == [1, 4]
        sandboxes.append(await hosts.start())
        assert hosts.counts == [2, 4]
        await close_all(*sandboxes)
        assert hosts.counts == [0, 0]


async def test_pool_spreads_ready_sandboxes_and_waits_for_room_on_the_hosts(
    tmp_path: Path,
) -> None:
    async with two_hosts(tmp_path, (2, 1)) as hosts:
        pool = Pool(hosts.backend, PoolSettings(min_ready=2, max_sandboxes=10), [Isolation()])
        pool.start()
        await until(lambda: pool.stats().idle == 2)
        assert hosts.counts == [1, 1]
        async with pool.lease(Isolation()) as one, pool.lease(Isolation()) as two:
            async with pool.lease(Isolation()) as three:
                sandboxes = [await lease.sandbox() for lease in (one, two, three)]
                assert hosts.counts == [2, 1]
                async with pool.lease(Isolation()) as four:
                    waiting = asyncio.create_task(four.sandbox())
                    await until(lambda: pool.stats().waiting == 1)
                    one.end()
                    assert await output(await waiting, "echo well") == "well\n"
            assert len({sandbox.id for sandbox in sandboxes}) == 3
        assert pool.stats().failed == 0
        await pool.aclose()


async def test_host_that_is_cut_off_gets_sandboxes_again_after_it_was_swept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with two_hosts(tmp_path) as hosts:
        kept, lost = [await hosts.start() for _ in range(2)]
        assert hosts.counts == [1, 1]
        assert hosts.backend.parallel_starts == 2 * parallel_starts_per_host()
        hosts.line.cut()
        with pytest.raises(SandboxLostError, match="the engine closed the connection"):
            await lost.exec("true", timeout_s=20)
        await lost.close()
        replacement = await hosts.start()  # the second host has fewer sandboxes
        assert (hosts.is_up, hosts.counts) == ([True, False], [2, 0])
        assert hosts.backend.parallel_starts == parallel_starts_per_host()
        url = f"tcp://127.0.0.1:{hosts.line.port}"
        assert f"{url} gets no new sandboxes until it answers" in caplog.text
        leave_container(SHARED, tmp_path)
        hosts.line.restore()
        await until(lambda: hosts.is_up == [True, True])
        assert "sandbox-dead-1" not in names(tmp_path)
        another = await hosts.start()
        assert hosts.counts == [2, 1]
        await close_all(kept, replacement, another)


def leave_container(url: str, state_dir: Path) -> None:
    """Create a container of a proxy that has died."""
    client, _ = connect(url)
    install_id = (state_dir / "install-id").read_text(encoding="ascii")
    labels = {INSTALL_LABEL: install_id, OWNER_LABEL: "dead"}
    client.create_container(DOCKER_IMAGE, "true", labels=labels, name="sandbox-dead-1")
    client.close()


async def test_start_goes_to_another_host_when_its_host_stops_answering(tmp_path: Path) -> None:
    async with two_hosts(tmp_path, answer_timeout_s=0.5) as hosts:
        first = await hosts.start()
        hosts.line.pause()
        starting = asyncio.create_task(hosts.start())
        await until(lambda: hosts.counts == [1, 1])
        await hosts.backend.fingerprint()
        assert hosts.is_up == [True, False]
        second = await starting
        assert hosts.counts[0] == 2
        hosts.line.resume()
        await until(lambda: hosts.is_up == [True, True])
        await until(lambda: hosts.counts == [2, 0])
        await close_all(first, second)


async def test_docker_host_that_is_unreachable_at_first_gets_sandboxes_once_it_answers(
    tmp_path: Path,
) -> None:
    async with two_hosts(tmp_path) as hosts:
        hosts.line.cut()
        first = await hosts.start()
        assert hosts.is_up == [True, False]
        hosts.line.restore()
        await until(lambda: hosts.is_up == [True, True])
        second = await hosts.start()
        assert hosts.counts == [1, 1]
        await close_all(first, second)


async def test_docker_host_gets_no_sandbox_before_its_checks_have_passed(tmp_path: Path) -> None:
    is_safe = asyncio.Event()
    async with two_hosts(tmp_path) as hosts:

        async def admit(engine: Backend) -> None:
            first, *_ = await engine.check()
            if "127.0.0.1" in first.detail and not is_safe.is_set():
                raise SandboxStartError("its isolation is weak")

        await hosts.backend.open(admit)
        assert [check.detail for check in await hosts.backend.check()] == [
            "it answers",
            "its isolation is weak",
        ]
        sandboxes = [await hosts.start() for _ in range(2)]
        assert hosts.counts == [2, 0]
        is_safe.set()
        await until(lambda: hosts.is_up == [True, True])
        sandboxes.append(await hosts.start())
        assert hosts.counts == [2, 1]
        await close_all(*sandboxes)


async def test_start_error_names_the_reason_of_each_host_if_none_is_usable(tmp_path: Path) -> None:
    hosts = [host(NOWHERE, tmp_path), host(f"{NOWHERE}2", tmp_path)]
    backend = DockerHosts(hosts)
    with pytest.raises(SandboxStartError, match="no Docker engine can be used") as error:
        await start_sandbox(backend, Isolation())
    assert all(f"{each.url}: no Docker engine answers" in str(error.value) for each in hosts)
    assert await backend.sweep() == 0
    await backend.aclose()


@pytest.mark.parametrize("moment", range(0, 300, 50))
async def test_start_that_is_cancelled_at_any_moment_leaves_no_sandbox(
    moment: int, tmp_path: Path
) -> None:
    async with two_hosts(tmp_path) as hosts:
        await hosts.backend.open()
        starting = asyncio.create_task(hosts.start())
        for _ in range(moment):
            await asyncio.sleep(0.001)
        starting.cancel()
        await asyncio.wait([starting])
        if not starting.cancelled():
            await starting.result().close()
        await until(lambda: hosts.counts == [0, 0])


async def test_killed_engine_loses_only_its_own_sandboxes(tmp_path: Path) -> None:
    await docker_backend(tmp_path).aclose()
    with anyio.fail_after(240):
        async with own_engine() as own:
            backend = DockerHosts([host(SHARED, tmp_path), host(own.url, tmp_path)])
            kept, lost = [await start_sandbox(backend, Isolation()) for _ in range(2)]
            assert len(own.containers()) == 1
            assert await output(kept, "echo kept > note; echo done") == "done\n"
            working = asyncio.create_task(lost.exec("sleep 600", timeout_s=600))
            await output(lost, "true")
            await own.kill()
            with pytest.raises(SandboxLostError, match="the engine closed the connection") as loss:
                await working
            assert own.url.removeprefix("unix://") in str(loss.value)
            await lost.close()
            replacement = await start_sandbox(backend, Isolation())
            assert [each.is_up for each in backend.stats()] == [True, False]
            assert await output(kept, "cat note") == "kept\n"
            await own.start()
            await until(lambda: backend.stats()[1].is_up)
            assert own.containers() == []
            another = await start_sandbox(backend, Isolation())
            assert [each.sandboxes for each in backend.stats()] == [2, 1]
            assert len(own.containers()) == 1
            await close_all(kept, replacement, another)
            await backend.aclose()
