"""Start, failed start and end of bubblewrap sandboxes; none leaves anything behind."""

import asyncio
import os
import shutil
import sys
from pathlib import Path

import anyio
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream

from policies.isolation import Isolation
from sandbox_runtime.backends.bubblewrap import BubblewrapBackend
from sandbox_runtime.backends.bubblewrap_check import isolation_checks, start_failure_reason
from sandbox_runtime.backends.cgroups import find_cgroups
from sandbox_runtime.backends.process_guest import ProcessGuest
from sandbox_runtime.errors import SandboxStartError
from sandbox_runtime.guest_sandbox import start_sandbox
from tests.processes import all_end, descendants
from tests.sandbox_runtime.backends.guest_output import next_output

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bwrap is not installed")
needs_cgroups = pytest.mark.skipif(find_cgroups() is None, reason="no cgroup can be written here")

SMALL = Isolation(memory_mib=256, disk_mib=32, pids=32)
NOWHERE = Path("/nonexistent")
PROJECT = Path(__file__).parents[3]


def cgroups_of(id: str) -> list[Path]:
    cgroups = find_cgroups()
    hierarchies = cgroups.hierarchies if cgroups else ()
    return [path for each in hierarchies for path in each.folder.glob(f"*-{id}")]


async def test_killing_a_sandbox_ends_all_its_processes_and_leaves_no_cgroup() -> None:
    guest = await BubblewrapBackend(state_dir=NOWHERE).start(SMALL)
    with anyio.fail_after(10):
        assert await next_output(guest)
        pidfds = [os.pidfd_open(pid) for pid in (guest.pid, *descendants(guest.pid))]
        await guest.kill()
        await guest.kill()
        assert await next_output(guest) == b""
        with pytest.raises(OSError, match="gone"):
            await guest.drain()
    assert all_end(pidfds)
    assert cgroups_of(guest.id) == []
    assert not Path(f"/proc/{guest.pid}").exists()


async def test_sandbox_killed_at_many_moments_of_its_start_leaves_no_process_or_cgroup() -> None:
    backend = BubblewrapBackend(state_dir=NOWHERE)
    with anyio.fail_after(30):
        for turns in range(0, 400, 20):
            guest = await backend.start(SMALL)
            for _ in range(turns):
                await asyncio.to_thread(os.getpid)
            await guest.kill()
            assert cgroups_of(guest.id) == []
            assert not Path(f"/proc/{guest.pid}").exists()


async def test_many_sandboxes_start_concurrently() -> None:
    backend = BubblewrapBackend(state_dir=NOWHERE)
    guests: list[ProcessGuest] = []

    async def start() -> None:
        guests.append(await backend.start(SMALL))

    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            for _ in range(8):
                group.start_soon(start)
        for guest in guests:
            assert b"version" in await next_output(guest)
            await guest.kill()
    assert len({guest.id for guest in guests}) == 8


@needs_cgroups
async def test_start_error_reports_that_the_guest_agent_ran_out_of_memory() -> None:
    backend = BubblewrapBackend(state_dir=NOWHERE)
    backend._agent = b"#!/bin/sh\ntext=$(head -c 100M /dev/zero | tr '\\0' x)\n"
    with anyio.fail_after(10), pytest.raises(SandboxStartError, match="memory ran out"):
        await start_sandbox(backend, Isolation(memory_mib=16))
    await backend.aclose()


OWNER = """
import asyncio, sys
from pathlib import Path
from policies.isolation import Isolation
from sandbox_runtime.backends.bubblewrap import BubblewrapBackend
async def main():
    guest = await BubblewrapBackend(state_dir=Path("/nonexistent")).start(Isolation())
    received = asyncio.Event()
    receiving = asyncio.create_task(guest.receive(lambda data: received.set()))
    await received.wait()
    print(guest.pid, guest.id, flush=True)
    await asyncio.get_running_loop().create_future()
asyncio.run(main())
"""


async def test_sandbox_of_a_dead_proxy_ends_and_its_cgroup_is_swept() -> None:
    command = [sys.executable, "-c", OWNER]
    async with await anyio.open_process(command, cwd=PROJECT, stderr=None) as owner:
        try:
            assert owner.stdout is not None
            with anyio.fail_after(10):
                line = await BufferedByteReceiveStream(owner.stdout).receive_until(b"\n", 100)
            pid, id = line.decode().split()
            pidfds = [os.pidfd_open(each) for each in (int(pid), *descendants(int(pid)))]
        finally:
            owner.kill()
    assert len(pidfds) == 2
    assert all_end(pidfds)
    with anyio.fail_after(10):
        await BubblewrapBackend(state_dir=NOWHERE).sweep()
    assert cgroups_of(id) == []


async def test_failed_start_has_the_error_output_of_bubblewrap(tmp_path: Path) -> None:
    backend = BubblewrapBackend(state_dir=NOWHERE, inputs=tmp_path / "none")
    with (
        anyio.fail_after(10),
        pytest.raises(SandboxStartError, match=r"bwrap: Can't find source path .*none"),
    ):
        await start_sandbox(backend, SMALL)
    await backend.aclose()


async def test_bubblewrap_check_starts_a_sandbox_and_reports_each_isolation_boundary() -> None:
    with anyio.fail_after(20):
        checks = await BubblewrapBackend(state_dir=NOWHERE).check()
    assert [(check.name, check.ok) for check in checks] == [
        ("bubblewrap", True),
        ("user", True),
        ("trial", True),
        ("capabilities", True),
        ("system calls", True),
        ("network", True),
        ("host kernel", True),
        ("bounds", True),
    ]


def test_bubblewrap_check_reports_a_missing_isolation_boundary() -> None:
    printed = b"""CapEff: 0000000000000001
NoNewPrivs: 1
Seccomp: 0
interface lo
interface eth0
opens /proc/sys/kernel/core_pattern
"""
    assert [(check.ok, check.detail) for check in isolation_checks(printed)] == [
        (False, "some are left or can be gained"),
        (False, "not filtered"),
        (False, "interfaces lo, eth0"),
        (False, "opens for writing: /proc/sys/kernel/core_pattern"),
    ]


def test_empty_probe_output_fails_all_isolation_checks_except_host_kernel() -> None:
    assert [check.ok for check in isolation_checks(b"")] == [False, False, False, True]


def test_known_start_failures_are_reported_with_a_remedy(tmp_path: Path) -> None:
    settings = tmp_path / "sys/kernel"
    settings.mkdir(parents=True)
    assert start_failure_reason(tmp_path, tmp_path) == "for no known reason"
    (tmp_path / ".dockerenv").touch()
    assert "--security-opt" in start_failure_reason(tmp_path, tmp_path)
    (settings / "apparmor_restrict_unprivileged_userns").write_text("1\n")
    cure = "set sysctl kernel.apparmor_restrict_unprivileged_userns to 0"
    assert cure in start_failure_reason(tmp_path, tmp_path)


async def test_bubblewrap_check_reports_why_no_sandbox_starts(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        os.chown(tmp_path, 65534, -1)
    checks = await BubblewrapBackend(rootfs=tmp_path, state_dir=NOWHERE).check()
    (trial,) = [check for check in checks if check.name == "trial"]
    assert not trial.ok
    assert trial.detail.startswith("no sandbox starts: bwrap: execvp /bin/sh: No such file")
