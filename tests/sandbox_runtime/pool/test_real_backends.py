"""The pool with real backends: sandboxes are leased warm, used once and removed."""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from policies.isolation import Isolation
from policies.pool import PoolSettings
from sandbox_runtime.errors import SandboxLostError
from sandbox_runtime.guest_sandbox import PING_INTERVAL_S
from sandbox_runtime.pool.pool import Pool
from tests.e2e.leftovers import Engine, cgroups_of, open_files, tasks
from tests.fakes.manual_clock import ManualClock
from tests.fakes.server import REAL_KINDS, Kind, open_backend
from tests.fakes.waiting import until
from tests.processes import descendants
from tests.sandbox_runtime.transfer import PLENTY_S, OutputRecorder, output

SMALL = Isolation(memory_mib=256, pids=64)
LARGE = replace(SMALL, memory_mib=512, pids=128)


@pytest.fixture(params=REAL_KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    chosen: Kind = request.param
    return chosen


@asynccontextmanager
async def real_pool(
    kind: Kind, state_dir: Path, settings: PoolSettings, clock: ManualClock | None = None
) -> AsyncIterator[Pool]:
    """Yield a started pool. Fails if a sandbox is left after its end."""
    files, at_work = open_files(), tasks()
    with anyio.fail_after(120):
        backend = open_backend(kind, state_dir)
        pool = Pool(backend, settings, [SMALL], clock=clock)
        pool.start()
        try:
            yield pool
        finally:
            with anyio.CancelScope(shield=True):
                await pool.aclose()
                await backend.aclose()
        await until(lambda: not _living(kind, state_dir))
        await until(lambda: not tasks() - at_work)
        await until(lambda: not open_files() - files)


def _living(kind: Kind, state_dir: Path) -> bool:
    if kind == "bubblewrap":
        return bool([*descendants(os.getpid()), *cgroups_of(os.getpid())])
    with closing(Engine()) as engine:
        return bool(engine.containers(state_dir))


async def test_twenty_leases_use_twenty_sandboxes_and_leave_none(
    kind: Kind, tmp_path: Path
) -> None:
    async with real_pool(kind, tmp_path, PoolSettings(min_ready=2)) as pool:
        seen = set()
        for _ in range(20):
            async with pool.lease(SMALL) as lease:
                sandbox = await lease.sandbox()
                assert await output(sandbox, "cat /tmp/mine 2>/dev/null; echo x > /tmp/mine") == ""
                seen.add(sandbox.id)
        assert len(seen) == 20
        assert pool.stats().failed == 0


async def test_leases_cancelled_at_random_moments_leave_no_sandbox(
    kind: Kind, tmp_path: Path
) -> None:
    chance = random.Random(kind)
    async with real_pool(kind, tmp_path, PoolSettings(min_ready=1, max_sandboxes=4)) as pool:

        async def use() -> None:
            async with pool.lease(SMALL) as lease:
                await output(await lease.sandbox(), "true")

        async def give_up() -> None:
            with anyio.move_on_after(chance.uniform(0, 0.3)):
                await use()

        for _ in range(8):
            await asyncio.gather(*(give_up() for _ in range(5)))
        await use()


async def test_pings_of_the_pool_do_not_disturb_a_command(kind: Kind, tmp_path: Path) -> None:
    clock, recorder = ManualClock(), OutputRecorder()
    async with (
        real_pool(kind, tmp_path, PoolSettings(min_ready=0), clock) as pool,
        pool.lease(SMALL) as lease,
    ):
        sandbox = await lease.sandbox()
        await output(sandbox, "mkfifo go")
        command = "seq 50000; cat go; seq 50000"
        running = asyncio.create_task(sandbox.exec(command, timeout_s=PLENTY_S, on_output=recorder))
        await recorder.something.wait()
        for _ in range(20):
            clock.advance(PING_INTERVAL_S)
            await until(lambda: PING_INTERVAL_S in clock.alarms)
        await output(sandbox, "echo went > go")
        numbers = "".join(f"{n}\n" for n in range(1, 50_001))
        assert (await running).stdout == f"{numbers}went\n{numbers}"


async def test_lease_of_a_killed_sandbox_gets_another_sandbox(kind: Kind, tmp_path: Path) -> None:
    recorder = OutputRecorder()
    async with (
        real_pool(kind, tmp_path, PoolSettings(min_ready=0)) as pool,
        pool.lease(SMALL) as lease,
    ):
        first = await lease.sandbox()
        running = asyncio.create_task(
            first.exec("echo begun; sleep 60", timeout_s=PLENTY_S, on_output=recorder)
        )
        await recorder.something.wait()
        await asyncio.to_thread(_kill, kind, first.id)
        with pytest.raises(SandboxLostError):
            await running
        second = await lease.sandbox()
        assert second.id != first.id
        assert await output(second, "echo well") == "well\n"


def _kill(kind: Kind, id: str) -> None:
    """Kill the only sandbox without the pool."""
    if kind == "bubblewrap":
        for pid in descendants(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    else:
        with closing(Engine()) as engine:
            engine.client.kill(id)


@pytest.mark.docker
async def test_limits_of_an_idle_container_are_changed_at_the_lease(tmp_path: Path) -> None:
    async with real_pool("docker", tmp_path, PoolSettings(min_ready=1)) as pool:
        await until(lambda: pool.stats().idle == 1)
        async with pool.lease(LARGE) as lease:
            sandbox = await lease.sandbox()
            with closing(Engine()) as engine:
                walls = engine.client.inspect_container(sandbox.id)["HostConfig"]
        assert (walls["Memory"], walls["PidsLimit"]) == (512 << 20, 128)
        assert pool.stats().hits == 1
