"""Sandboxes in Pods whose connections are cut: nothing is lost, and each command runs once."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from policies.isolation import Isolation
from sandbox_runtime.errors import SandboxLostError
from sandbox_runtime.guest_sandbox import GuestSandbox, start_sandbox
from tests.fakes.kubernetes_cluster import (
    Cuts,
    FakeCluster,
    RandomCuts,
    backend_of,
    fake_cluster,
)
from tests.fakes.waiting import until
from tests.sandbox_runtime.transfer import PLENTY_S, OutputRecorder, output, read, write

SMALL = Isolation(memory_mib=128, cpus=0.1)
MEGABYTE = 1 << 20


class OneInterruption(Cuts):
    """The first call after `cluster.cut_all` is cut in the middle of a message, whose rest arrives
    within a message of the next call."""

    def __init__(self) -> None:
        self._limits = [(40_000, None), (None, None)]
        self._is_interrupted = False

    def next(self) -> tuple[int | None, int | None]:
        return self._limits.pop(0) if self._limits else (None, None)

    def is_delayed(self) -> bool:
        return True

    def interrupts(self) -> bool:
        return not self._limits


@asynccontextmanager
async def started(
    directory: Path, **settings: Any
) -> AsyncIterator[tuple[FakeCluster, GuestSandbox]]:
    async with (
        fake_cluster() as cluster,
        backend_of(cluster, directory, **settings) as backend,
    ):
        with anyio.fail_after(120):
            sandbox = await start_sandbox(backend, SMALL)
            try:
                yield cluster, sandbox
            finally:
                await sandbox.close()


@pytest.mark.parametrize("seed", range(6))
async def test_cut_connections_lose_no_byte_and_repeat_no_command(
    seed: int, tmp_path: Path
) -> None:
    chance = random.Random(seed)
    async with started(tmp_path) as (cluster, sandbox):
        cuts = cluster.cuts = RandomCuts(seed, max_bytes=200_000)
        cluster.cut_all()
        for number in range(20):
            lines = chance.randrange(20_000)
            command = f"echo {number} >> /testbed/ran; seq {lines}"
            expected = "".join(f"{line}\n" for line in range(1, lines + 1))
            assert await output(sandbox, command) == expected
        content = chance.randbytes(5 * MEGABYTE)
        await write(sandbox, "/testbed/file", content)
        assert await read(sandbox, "/testbed/file") == content
        ran = await output(sandbox, "cat /testbed/ran")
        assert ran == "".join(f"{number}\n" for number in range(20))
        assert cuts.count > 50


async def test_upload_is_complete_if_the_rest_of_a_cut_message_arrives_within_a_later_message(
    tmp_path: Path,
) -> None:
    content = random.Random(1).randbytes(MEGABYTE)
    async with started(tmp_path) as (cluster, sandbox):
        cluster.cuts = OneInterruption()
        cluster.cut_all()
        await write(sandbox, "/testbed/file", content)
        assert await read(sandbox, "/testbed/file") == content


async def test_attach_is_repeated_until_it_is_accepted(tmp_path: Path) -> None:
    async with started(tmp_path) as (cluster, sandbox):
        recorder = OutputRecorder()
        command = "echo begun; read line < /testbed/gate; echo $line"
        assert await output(sandbox, "mkfifo /testbed/gate") == ""
        running = asyncio.create_task(sandbox.exec(command, timeout_s=PLENTY_S, on_output=recorder))
        await recorder.something.wait()
        cluster.refuses_to_attach = True
        cluster.cut_all()
        calls = cluster.attach_calls
        await until(lambda: cluster.attach_calls >= calls + 3)
        opened = asyncio.create_task(output(sandbox, "echo open > /testbed/gate"))
        cluster.refuses_to_attach = False
        await opened
        assert (await running).stdout == "begun\nopen\n"


async def test_ping_during_an_outage_waits_for_the_next_connection(tmp_path: Path) -> None:
    async with started(tmp_path) as (cluster, sandbox):
        cluster.refuses_to_attach = True
        cluster.cut_all()
        calls = cluster.attach_calls
        await until(lambda: cluster.attach_calls > calls)
        pinging = asyncio.create_task(sandbox.ping(0.001))
        await until(lambda: cluster.attach_calls > calls + 1)
        cluster.refuses_to_attach = False
        await pinging
        assert await output(sandbox, "echo still here") == "still here\n"


async def test_sandbox_is_lost_if_it_stays_unreachable_until_its_agent_has_ended(
    tmp_path: Path,
) -> None:
    async with started(tmp_path, lease_s=0.5) as (cluster, sandbox):
        recorder = OutputRecorder()
        command = "echo begun; sleep 600"
        running = asyncio.create_task(sandbox.exec(command, timeout_s=PLENTY_S, on_output=recorder))
        await recorder.something.wait()
        cluster.refuses_to_attach = True
        cluster.loses_events = True
        cluster.cut_all()
        with pytest.raises(SandboxLostError, match=r"no connection .* for 5\.5 s: .*refused"):
            await running
        assert cluster.pods[sandbox.id].process.returncode == 0  # it was not killed


async def test_end_of_a_pod_is_reported_at_once_during_an_outage(tmp_path: Path) -> None:
    async with started(tmp_path, lease_s=3600.0) as (cluster, sandbox):
        running = asyncio.create_task(sandbox.exec("sleep 600", timeout_s=PLENTY_S))
        cluster.refuses_to_attach = True
        cluster.cut_all()
        calls = cluster.attach_calls
        await until(lambda: cluster.attach_calls > calls)
        cluster.pods[sandbox.id].process.kill()
        with pytest.raises(SandboxLostError, match="it was killed on its node"):
            await running


async def test_end_of_a_pod_is_reported_if_its_watch_is_cut_in_the_middle_of_a_line(
    tmp_path: Path,
) -> None:
    async with started(tmp_path, lease_s=3600.0) as (cluster, sandbox):
        running = asyncio.create_task(sandbox.exec("sleep 600", timeout_s=PLENTY_S))
        cluster.cuts_the_watch = True
        cluster.pods[sandbox.id].process.kill()
        with pytest.raises(SandboxLostError, match="it was killed on its node"):
            await running


async def test_agent_is_ended_by_close_even_if_its_pod_cannot_be_deleted(tmp_path: Path) -> None:
    async with started(tmp_path, lease_s=3600.0) as (cluster, sandbox):
        cluster.refuses_to_delete = True
        agent = cluster.pods[sandbox.id].process
        await sandbox.close()
        await until(lambda: agent.returncode == 0)
        cluster.refuses_to_delete = False


async def test_sandbox_can_be_closed_during_an_outage(tmp_path: Path) -> None:
    async with started(tmp_path, lease_s=3600.0) as (cluster, sandbox):
        cluster.refuses_to_attach = True
        cluster.cut_all()
        calls = cluster.attach_calls
        await until(lambda: cluster.attach_calls > calls)
        await sandbox.close()
        pod = cluster.pods[sandbox.id]
        assert pod.process.returncode is not None
        calls = cluster.attach_calls
        cluster.refuses_to_attach = False
        with pytest.raises(SandboxLostError):
            await sandbox.exec("true", timeout_s=PLENTY_S)
        assert (cluster.attach_calls, pod.attached) == (calls, set())
