"""Isolation and limits of bubblewrap sandboxes, tested from inside."""

import asyncio
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from policies.isolation import Isolation
from sandbox_runtime.backends.base import Check
from sandbox_runtime.backends.bubblewrap import BubblewrapBackend
from sandbox_runtime.backends.cgroups import find_cgroups
from sandbox_runtime.errors import SandboxStartError
from sandbox_runtime.escape.context import running_python
from sandbox_runtime.guest.agent import GuestConfig
from sandbox_runtime.guest_sandbox import GuestSandbox, start_sandbox
from sandbox_runtime.sandbox import Sandbox
from tests.processes import descendants
from tests.sandbox_runtime.backends import probes
from tests.sandbox_runtime.backends.guest_output import next_output

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bwrap is not installed")
needs_cgroups = pytest.mark.skipif(find_cgroups() is None, reason="no cgroup can be written here")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="about being started by root")

SMALL = Isolation(memory_mib=256, disk_mib=32, pids=32, open_files=64)
NOWHERE = Path("/nonexistent")
PROJECT = Path(__file__).parents[3]


@asynccontextmanager
async def new_sandbox(isolation: Isolation = SMALL) -> AsyncIterator[GuestSandbox]:
    with anyio.fail_after(30):
        sandbox = await start_sandbox(BubblewrapBackend(state_dir=NOWHERE), isolation)
        try:
            yield sandbox
        finally:
            await sandbox.close()


async def output(sandbox: Sandbox, command: str) -> str:
    result = await sandbox.exec(command, timeout_s=20)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout.strip()


async def python(sandbox: Sandbox, program: str) -> str:
    result = await sandbox.exec("python3 -", timeout_s=20, stdin=program.encode())
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout.strip()


# Walls


async def test_sandbox_processes_are_not_root_on_the_host_and_have_no_capabilities() -> None:
    guest = await BubblewrapBackend(state_dir=NOWHERE).start(SMALL)
    try:
        with anyio.fail_after(10):
            assert await next_output(guest)
        pids = [guest.pid, *descendants(guest.pid)]
        assert len(pids) == 2
        for pid in pids:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            status = dict(line.split(":\t", 1) for line in lines)
            assert "0" not in status["Uid"].split()
            assert "0" not in status["Gid"].split()
            assert status["NoNewPrivs"] == "1"
            assert status["CapEff"] == "0000000000000000"
        # The last one is inside. The first one is bwrap's own, whose bounding set has no effect
        # without new privileges.
        assert status["CapBnd"] == "0000000000000000"
    finally:
        await guest.kill()


@needs_root
async def test_root_as_the_configured_uid_is_refused() -> None:
    backend = BubblewrapBackend(uid=0, state_dir=NOWHERE)
    with pytest.raises(SandboxStartError, match="must not run sandboxes as root"):
        await backend.start(SMALL)
    assert Check("user", False, "sandboxes run as host uid 0: refused") in await backend.check()


IN_FLIGHT = """
import os, socket, time
sent, (near, far) = 0, socket.socketpair()
try:
    while sent < 4 * %d:
        socket.send_fds(near, [b"x"], [0] * 8)
        sent += 8
except OSError:
    pass
print(sent, flush=True)
time.sleep(60)
"""
SEND_ONE = """
import socket
near, far = socket.socketpair()
print(socket.send_fds(near, [b"x"], [0]))
"""


@needs_root
async def test_file_descriptors_in_flight_are_counted_per_sandbox() -> None:
    """The kernel counts descriptors in flight per host user, up to RLIMIT_NOFILE."""
    async with (
        new_sandbox() as neighbour,
        new_sandbox() as sandbox,
        running_python(sandbox, IN_FLIGHT % SMALL.open_files) as sent,
    ):
        assert int(sent) > 0
        assert await python(neighbour, SEND_ONE) == "1"


@needs_root
async def test_proxy_running_as_root_gives_each_sandbox_its_own_uid() -> None:
    backend = BubblewrapBackend(state_dir=NOWHERE)
    guests = [await backend.start(SMALL) for _ in range(2)]
    try:
        uids = set()
        for guest in guests:
            assert await next_output(guest)
            lines = Path(f"/proc/{guest.pid}/status").read_text().splitlines()
            uids |= {line.split()[1] for line in lines if line.startswith("Uid:")}
    finally:
        for guest in guests:
            await guest.kill()
    assert len(uids) == 2
    assert Check("user", True, "each sandbox runs as a host uid of its own") in (
        await backend.check()
    )


async def test_host_kernel_settings_cannot_be_opened_for_writing() -> None:
    async with new_sandbox() as sandbox:
        for path in (
            "/proc/sys/kernel/core_pattern",
            "/proc/sysrq-trigger",
            "/proc/sys/vm/swappiness",
        ):
            result = await sandbox.exec(f"exec 3>> {path}", timeout_s=5)
            assert (result.exit_code, path in result.stderr) == (1, True)


async def test_only_usr_of_the_host_is_visible() -> None:
    async with new_sandbox() as sandbox:
        links = {"bin", "sbin", "lib", "lib32", "lib64", "libx32"}
        top = set((await output(sandbox, "ls -A /")).split())
        own = {"etc", "home", "root", "run", "testbed", "tmp", "var"}
        assert top - links == own | {"dev", "proc", "usr"}
        assert await output(sandbox, "find /home /root /tmp /var /dev/shm -type f") == ""
        assert (
            await output(sandbox, "grep -c . /etc/passwd /etc/group")
            == "/etc/passwd:3\n/etc/group:3"
        )
        assert await output(sandbox, "ls /etc/shadow /work 2>&1 | grep -c 'No such'") == "2"
        assert await output(sandbox, "hostname; echo ~; id -un") == "sandbox\n/root\nroot"


async def test_environment_of_the_host_cannot_be_read() -> None:
    async with new_sandbox() as sandbox:
        every = "cat /proc/[0-9]*/environ 2> /dev/null"
        everywhere = f"{every} | tr '\\0' '\\n' | cut -d= -f1 | sort -u"
        names = set((await output(sandbox, everywhere)).split())
        ours = {"PATH", "HOME", "USER", "LANG", "LC_ALL", *GuestConfig().env}
        assert names <= ours | {"PWD", "OLDPWD", "SHLVL", "_"}


async def test_sandbox_has_only_its_own_loopback_interface() -> None:
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, new_sandbox() as sandbox:
        assert await output(sandbox, "grep -o '^ *[a-z0-9]*:' /proc/net/dev") == "lo:"
        result = await sandbox.exec(f"exec 3<> /dev/tcp/127.0.0.1/{port}", timeout_s=5)
        assert "Connection refused" in result.stderr
        alive = "import socket as s; a = s.create_server(('localhost', 0)); s.create_connection("
        assert await python(sandbox, f"{alive}a.getsockname()); print('reached')") == "reached"


async def test_only_the_size_limited_disk_and_standard_devices_can_be_written() -> None:
    async with new_sandbox() as sandbox:
        written = dict.fromkeys((await python(sandbox, probes.WRITABLE_MOUNTS)).splitlines())
        on_disk = {line.split()[1] for line in written if line.startswith("disk ")}
        assert on_disk == {"/"}
        others = {line.split()[1] for line in written if not line.startswith("disk ")}
        assert others <= {f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom")}


async def test_system_calls_that_only_attacks_need_are_refused() -> None:
    async with new_sandbox() as sandbox:
        command = f"python3 - '{probes.calls()}'"
        result = await sandbox.exec(command, timeout_s=20, stdin=probes.PROGRAM.encode())
    assert probes.refusals(result.stdout) == {}


def test_refused_system_calls_are_permitted_outside_a_sandbox() -> None:
    """Positive control, as the user nobody; the arguments let each call fail or do no harm."""
    as_nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs"]
    calls = probes.calls(only=probes.FREE_FOR_ALL)
    done = subprocess.run(
        [*(as_nobody if os.geteuid() == 0 else ()), "/usr/bin/python3", "-", calls],
        input=probes.PROGRAM,
        capture_output=True,
        check=True,
        text=True,
    )
    errors: dict[str, int] = json.loads(done.stdout)
    refused = {errno.EPERM, errno.ENOSYS}
    assert {name for name in probes.FREE_FOR_ALL if errors[name] in refused} == set()


async def test_ordinary_programs_work_in_a_sandbox() -> None:
    async with new_sandbox() as sandbox:
        printed = await python(sandbox, probes.EVERYDAY)
        assert f"{printed}\n" == probes.EVERYDAY_PRINTS
        assert (
            await output(sandbox, "getent hosts localhost | wc -l; script -qc tty /dev/null") != ""
        )


# Bounds


async def test_all_writable_directories_share_one_disk_limit() -> None:
    async with new_sandbox() as sandbox:
        places = ("/testbed", "/tmp", "/root", "/var/tmp", "/run", "/dev/shm", "/etc")
        for place in places:
            result = await sandbox.exec(f"head -c 8M /dev/zero > {place}/file", timeout_s=20)
        assert "No space left on device" in result.stderr
        sizes = await output(sandbox, f"stat -c %s {' '.join(f'{each}/file' for each in places)}")
        assert 30 << 20 < sum(map(int, sizes.split())) <= 32 << 20
        assert await output(sandbox, "rm /tmp/file && head -c 1M /dev/zero > /tmp/again") == ""


async def test_number_of_empty_files_is_limited() -> None:
    async with new_sandbox(Isolation(disk_mib=1)) as sandbox:
        result = await sandbox.exec("for n in {1..200}; do : > file$n || exit; done", timeout_s=20)
        assert "No space left on device" in result.stderr
        assert int(await output(sandbox, "ls | wc -l")) < 128


@needs_cgroups
async def test_full_disk_fails_writes_before_memory_runs_out() -> None:
    async with new_sandbox(Isolation(memory_mib=128, disk_mib=4096)) as sandbox:
        result = await sandbox.exec("head -c 200M /dev/zero > file", timeout_s=20)
        assert "No space left on device" in result.stderr
        assert await output(sandbox, "echo alive") == "alive"


TOO_LARGE_TOGETHER = """
import os, signal
for _ in range(4):
    if os.fork() == 0:
        block = b"x" * (100 << 20)
        signal.pause()
print(os.wait()[1])
"""


@needs_cgroups
async def test_process_beyond_the_memory_limit_is_killed() -> None:
    async with new_sandbox() as sandbox:
        command = "python3 -c 'len(bytearray(512 << 20))'"
        result = await sandbox.exec(command, timeout_s=20)
        assert (result.exit_code, result.oom_kills) == (128 + signal.SIGKILL, 1)
        assert await python(sandbox, TOO_LARGE_TOGETHER) == str(int(signal.SIGKILL))
        assert await output(sandbox, "echo alive") == "alive"


FORK_UNTIL_REFUSED = """
import os, signal
made = []
try:
    while len(made) < 100:
        pid = os.fork()
        if pid == 0:
            signal.pause()
        made.append(pid)
except BlockingIOError:
    print(len(made))
for pid in made:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
"""


@needs_cgroups
async def test_number_of_processes_is_limited() -> None:
    async with new_sandbox() as sandbox:
        result = await sandbox.exec("python3 -", timeout_s=20, stdin=FORK_UNTIL_REFUSED.encode())
        assert 20 <= int(result.stdout) < SMALL.pids
        assert result.pids_refused == 1


async def test_file_size_is_limited_to_the_disk_size() -> None:
    async with new_sandbox() as sandbox:
        result = await sandbox.exec(f"truncate -s {SMALL.disk_mib + 1}M sparse", timeout_s=20)
        assert re.search("File too large|File size limit exceeded", result.stderr)


@needs_cgroups
async def test_limits_of_a_running_sandbox_can_be_raised_and_lowered() -> None:
    hog = "python3 -c 'len(bytearray(300 << 20))'"
    async with new_sandbox() as sandbox:
        for isolation, exit_code in (
            (replace(SMALL, memory_mib=512, pids=64, cpus=1.0), 0),
            (replace(SMALL, memory_mib=64, pids=16, cpus=0.5), 128 + signal.SIGKILL),
        ):
            await sandbox.resize(isolation)
            assert (await sandbox.exec(hog, timeout_s=20)).exit_code == exit_code
            result = await sandbox.exec(
                "python3 -", timeout_s=20, stdin=FORK_UNTIL_REFUSED.encode()
            )
            assert isolation.pids // 2 < int(result.stdout) < isolation.pids


async def test_open_files_are_limited_and_core_files_are_disabled() -> None:
    async with new_sandbox() as sandbox:
        assert await output(sandbox, "ulimit -Hn; ulimit -Hc") == f"{SMALL.open_files}\n0"


UNPRIVILEGED = """
import asyncio, concurrent.futures.thread, json, os, sys
from pathlib import Path
from policies.isolation import Isolation
from sandbox_runtime.backends.bubblewrap import BubblewrapBackend
from sandbox_runtime.guest_sandbox import start_sandbox
is_weak = json.loads(sys.argv[2])
backend = BubblewrapBackend(state_dir=Path("/nonexistent"), allow_weak=is_weak)  # reads the agent
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
async def main():
    checks = {check.name: (check.ok, check.detail) for check in await backend.check()}
    sandbox = await start_sandbox(backend, Isolation(memory_mib=256, pids=32))
    results = []
    for stdin in json.loads(sys.argv[1]):
        results.append(await sandbox.exec("python3 -", timeout_s=20, stdin=stdin.encode()))
    await sandbox.close()
    print(json.dumps([checks, *[[r.exit_code, r.stdout, r.stderr] for r in results]]))
asyncio.run(main())
"""


@pytest.mark.parametrize("allow_weak", [False, True])
async def test_unprivileged_proxy_limits_the_memory_and_the_number_of_processes(
    allow_weak: bool,
) -> None:
    memory = "try: bytearray(512 << 20)\nexcept MemoryError: print('refused')"
    programs = [memory, FORK_UNTIL_REFUSED]
    with anyio.fail_after(30):
        done = await anyio.run_process(
            [sys.executable, "-c", UNPRIVILEGED, json.dumps(programs), json.dumps(allow_weak)],
            stderr=None,
            cwd=PROJECT,
        )
    checks, allocation, forks = json.loads(done.stdout)
    is_refused = "per process only" in checks["bounds"][1] and not allow_weak
    assert [name for name, (ok, _) in checks.items() if not ok] == ["bounds"] * is_refused
    if "per process only" in checks["bounds"][1]:
        assert allocation == [0, "refused\n", ""]
    assert forks[0] == 0
    assert 20 <= int(forks[1]) < 32
