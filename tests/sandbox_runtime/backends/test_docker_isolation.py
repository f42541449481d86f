"""Isolation of containers: the settings in force, and their effect on programs inside."""

import asyncio
import ctypes
import errno
import re
import resource
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from policies.isolation import Isolation
from sandbox_runtime.backends.docker import DockerBackend
from sandbox_runtime.backends.limits import PENDING_SIGNALS, maps_host_uids
from sandbox_runtime.errors import SandboxStartError
from sandbox_runtime.escape.context import running_python
from sandbox_runtime.guest_sandbox import GuestSandbox, start_sandbox
from sandbox_runtime.sandbox import Sandbox
from tests.sandbox_runtime.backends import probes
from tests.sandbox_runtime.backends.engine import derived, docker_backend, inspect
from tests.sandbox_runtime.transfer import copy_workspace, output

pytestmark = pytest.mark.docker

STRICT = Isolation(level="strict", memory_mib=256, disk_mib=64, pids=64)


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[DockerBackend]:
    backend = docker_backend(tmp_path)
    yield backend
    await backend.aclose()


@asynccontextmanager
async def new_sandbox(backend: DockerBackend, isolation: Isolation) -> AsyncIterator[GuestSandbox]:
    sandbox = await start_sandbox(backend, isolation)
    try:
        yield sandbox
    finally:
        await sandbox.close()


async def python(sandbox: Sandbox, program: str) -> str:
    result = await sandbox.exec("python3 -", timeout_s=20, stdin=program.encode())
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


@pytest.mark.parametrize("isolation", [Isolation(), STRICT])
async def test_script_installed_with_pip_user_is_found_by_its_name(
    isolation: Isolation, backend: DockerBackend
) -> None:
    async with new_sandbox(backend, isolation) as sandbox:
        await python(sandbox, probes.INSTALL_USER_SCRIPT)
        assert await output(sandbox, "greet") == "hello\n"


async def test_container_settings_have_the_limits_and_no_network_or_host_directory(
    backend: DockerBackend,
) -> None:
    isolation = Isolation(memory_mib=256, cpus=0.5, pids=64, disk_mib=32, open_files=128)
    async with new_sandbox(backend, isolation) as sandbox:
        facts = await asyncio.to_thread(inspect, sandbox.id)
    walls = facts["HostConfig"]
    assert (walls["NetworkMode"], walls["IpcMode"], walls["CgroupnsMode"]) == (
        "none",
        "private",
        "private",
    )
    assert (walls["CapDrop"], len(walls["CapAdd"])) == (["ALL"], 7)
    assert [each.partition("=")[0] for each in walls["SecurityOpt"]] == [
        "no-new-privileges",
        "seccomp",
    ]
    assert (walls["Memory"], walls["MemorySwap"]) == (256 << 20, 256 << 20)
    assert (walls["NanoCpus"], walls["PidsLimit"]) == (500_000_000, 64)
    assert {each["Name"]: each["Hard"] for each in walls["Ulimits"]} == {
        "nofile": 128,
        "core": 1,
        "fsize": 32 << 20,
        "sigpending": 2048,
        "msgqueue": 0,
    }
    assert walls["LogConfig"]["Type"] == "none"
    assert (walls["AutoRemove"], walls["Privileged"]) == (True, False)
    written = {each["Destination"] for each in facts["Mounts"] if each["RW"]}
    assert written == {"/dev/pts"}
    # The other is the agent's program.
    assert {each["Destination"] for each in facts["Mounts"]} <= {"/dev/pts", "/.agent"}
    assert not walls["Binds"]
    assert not walls["PortBindings"]
    assert facts["Config"]["StdinOnce"]


async def test_capabilities_seccomp_network_and_ulimits_are_in_force_in_a_container(
    backend: DockerBackend,
) -> None:
    async with new_sandbox(backend, Isolation(pids=64)) as sandbox:
        status = await output(sandbox, "cat /proc/self/status")
        assert "CapEff:\t00000000000000fb\n" in status
        assert "NoNewPrivs:\t1\n" in status
        assert "Seccomp:\t2\n" in status
        devices = await output(sandbox, "tail -n +3 /proc/net/dev")
        assert devices.split(":")[0].strip() == "lo"
        assert await output(sandbox, "ulimit -n; ulimit -c; ulimit -f") == "1024\n0\n1572864\n"


async def test_system_calls_that_only_attacks_need_are_refused(backend: DockerBackend) -> None:
    async with new_sandbox(backend, Isolation()) as sandbox:
        command = f"python3 - '{probes.calls()}'"
        result = await sandbox.exec(command, timeout_s=20, stdin=probes.PROGRAM.encode())
    wrong = probes.refusals(result.stdout)
    # What the engine's library does not know by name yet is unknown to its sandboxes too.
    assert set(wrong.values()) <= {errno.ENOSYS}
    assert wrong.keys() <= {"statmount", "listmount", "lsm_set_self_attr", "open_tree_attr"}


async def test_ordinary_programs_work_in_a_container(backend: DockerBackend) -> None:
    async with new_sandbox(backend, Isolation()) as sandbox:
        assert await python(sandbox, probes.EVERYDAY) == probes.EVERYDAY_PRINTS
        assert await output(sandbox, "mkfifo pipe && test -p pipe && setarch -v true; echo $?")


async def test_signals_to_pid_1_do_not_kill_the_agent_of_a_container(
    backend: DockerBackend,
) -> None:
    async with new_sandbox(backend, Isolation()) as sandbox:
        await sandbox.exec("kill -9 1; kill -TERM 1; kill -INT 1", timeout_s=20)
        assert await output(sandbox, "echo still there") == "still there\n"


async def test_too_many_processes_are_refused_and_the_sandbox_stays_usable(
    backend: DockerBackend,
) -> None:
    async with new_sandbox(backend, Isolation(pids=64)) as sandbox:
        many = await sandbox.exec("for i in $(seq 200); do sleep 60 & done; wait", timeout_s=2)
        assert "fork" in many.stderr
        assert await output(sandbox, "echo still usable") == "still usable\n"


ALL_TIMERS = """
import ctypes, time
libc = ctypes.CDLL(None)
made = 0
while made < %d and libc.timer_create(1, None, ctypes.byref(ctypes.c_void_p())) == 0:
    made += 1
print(made, flush=True)
time.sleep(60)
"""


@pytest.mark.usefixtures("root_signal_counter")
async def test_sandbox_with_its_maximum_of_timers_does_not_keep_host_root_from_creating_timers(
    backend: DockerBackend,
) -> None:
    """Both are the same user, whose timers and queued signals are counted once."""
    most, _ = resource.getrlimit(resource.RLIMIT_SIGPENDING)
    async with (
        new_sandbox(backend, Isolation()) as sandbox,
        running_python(sandbox, ALL_TIMERS % most) as made,
    ):
        assert 0 < int(made) <= PENDING_SIGNALS
        timer = ctypes.c_void_p()
        libc = ctypes.CDLL(None)
        assert libc.timer_create(time.CLOCK_MONOTONIC, None, ctypes.byref(timer)) == 0
        libc.timer_delete(timer)


async def test_command_that_uses_all_memory_is_killed_and_its_sandbox_stays_usable(
    backend: DockerBackend,
) -> None:
    async with new_sandbox(backend, Isolation(memory_mib=64)) as sandbox:
        hog = await sandbox.exec("python3 -c 'x = bytearray(200 << 20)'", timeout_s=30)
        assert hog.exit_code == 137
        assert await output(sandbox, "echo still usable") == "still usable\n"


async def test_file_size_is_limited_to_the_disk_size(backend: DockerBackend) -> None:
    async with new_sandbox(backend, Isolation(disk_mib=4)) as sandbox:
        result = await sandbox.exec("head -c 8M /dev/zero > file", timeout_s=20)
        assert result.exit_code != 0
        assert await output(sandbox, "stat -c %s file") == f"{4 << 20}\n"


DISK_SPEED = """
cd /sys/fs/cgroup
cat io.max 2>/dev/null || cat blkio/blkio.throttle.*_bps_device
"""


async def test_disk_throughput_is_limited(
    backend: DockerBackend,
) -> None:
    said = {check.name: check.detail for check in await backend.check()}["docker disk speed"]
    if said.startswith("NOT LIMITED"):
        pytest.skip(said)
    async with new_sandbox(backend, Isolation(disk_mib_per_s=16)) as sandbox:
        walls = (await asyncio.to_thread(inspect, sandbox.id))["HostConfig"]
        shown = re.findall(r"\b\d{5,}\b", await output(sandbox, DISK_SPEED))
    for limits in (walls["BlkioDeviceReadBps"], walls["BlkioDeviceWriteBps"]):
        assert [each["Rate"] for each in limits] == [16 << 20]
        assert limits[0]["Path"] in said
    assert shown == [str(16 << 20)] * 2
    async with new_sandbox(backend, Isolation(disk_mib_per_s=None)) as sandbox:
        assert await output(sandbox, DISK_SPEED) == ""


LIMITS = """
cd /sys/fs/cgroup
cat memory.max pids.max cpu.max 2>/dev/null || cat memory/memory.limit_in_bytes \
 memory/memory.memsw.limit_in_bytes pids/pids.max cpu/cpu.cfs_quota_us
"""


async def test_limits_of_a_running_sandbox_can_be_raised_and_lowered(
    backend: DockerBackend,
) -> None:
    async with new_sandbox(backend, Isolation(memory_mib=128, pids=64, cpus=1.0)) as sandbox:
        for isolation in (
            Isolation(memory_mib=512, pids=128, cpus=2.0),
            Isolation(memory_mib=64, pids=32, cpus=0.5),
        ):
            await sandbox.resize(isolation)
            shown = set((await output(sandbox, LIMITS)).split())
            assert {str(isolation.memory_mib << 20), str(isolation.pids)} <= shown
            assert str(int(isolation.cpus * 100_000)) in shown
        with pytest.raises(SandboxStartError, match=r"cannot be changed: .*memory"):
            await sandbox.resize(Isolation(memory_mib=1))


async def test_oom_kills_and_refused_forks_of_a_command_are_counted(
    backend: DockerBackend,
) -> None:
    async with new_sandbox(backend, Isolation(memory_mib=64, pids=32)) as sandbox:
        hog = await sandbox.exec("python3 -c 'x = bytearray(200 << 20)'", timeout_s=30)
        assert (hog.oom_kills, hog.pids_refused) == (1, 0)
        many = await sandbox.exec("for i in $(seq 60); do sleep 60 & done; wait", timeout_s=2)
        assert many.pids_refused > 0


async def test_strict_level_has_no_root_and_prevents_becoming_root(
    backend: DockerBackend,
) -> None:
    async with new_sandbox(backend, STRICT) as sandbox:
        uid, gid, home = (await output(sandbox, "id -u; id -g; echo ~")).split()
        assert uid == gid != "0"
        assert home == "/home/sandbox"
        status = await output(sandbox, "cat /proc/self/status")
        for kind in ("CapEff", "CapPrm", "CapBnd"):
            assert f"{kind}:\t0000000000000000\n" in status
        assert (await sandbox.exec("su -c true", timeout_s=20)).exit_code != 0


async def test_strict_level_gives_each_sandbox_its_own_host_uid(
    backend: DockerBackend,
) -> None:
    said = {check.name: check.detail for check in await backend.check()}["docker users at strict"]
    if not maps_host_uids():
        pytest.skip(said)
    assert said == "each sandbox has a host uid of its own"
    async with new_sandbox(backend, STRICT) as one, new_sandbox(backend, STRICT) as other:
        users = [host_user(sandbox.id) for sandbox in (one, other)]
    assert len(set(users)) == 2
    assert min(users) >= 0x7000_0000


def host_user(container: str) -> int:
    """Return the host uid of a container's first process."""
    pid = inspect(container)["State"]["Pid"]
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(re.findall(r"^Uid:\t(\d+)", status, re.MULTILINE)[0])


EVERYDAY_AT_STRICT = """
set -e
cd /testbed
git init -q repository && cd repository
git config user.name sandbox && git config user.email sandbox@localhost
echo line > file && git add file && git commit -qm first && git status --short
python3 -c 'import getpass, os, pathlib
print(getpass.getuser(), pathlib.Path.home(), os.path.expanduser("~"))'
python3 -m venv --without-pip /testbed/venv && /testbed/venv/bin/python -c 'print("venv")'
mktemp -d > /dev/null && touch ~/file && echo ~ && stat -c %U:%a file
"""


async def test_strict_level_works_with_a_uid_missing_in_the_image(
    backend: DockerBackend,
) -> None:
    async with new_sandbox(backend, STRICT) as sandbox:
        printed = await output(sandbox, EVERYDAY_AT_STRICT)
        whoami = await sandbox.exec("whoami", timeout_s=20)
    home = "/home/sandbox"
    assert printed == f"sandbox {home} {home}\nvenv\n{home}\nUNKNOWN:644\n"
    assert (whoami.exit_code, "cannot find name" in whoami.stderr) == (1, True)


async def test_workspace_of_a_strict_sandbox_can_be_restored_under_another_uid(
    backend: DockerBackend,
) -> None:
    async with new_sandbox(backend, STRICT) as one, new_sandbox(backend, STRICT) as other:
        await output(one, "mkdir -m 700 folder; echo text > folder/file; chmod 600 folder/file")
        await copy_workspace(one, other)
        assert await output(other, "cat folder/file; echo more >> folder/file") == "text\n"


async def test_strict_level_makes_only_the_workspace_writable(
    backend: DockerBackend,
) -> None:
    async with new_sandbox(backend, STRICT) as sandbox:
        lines = (await python(sandbox, probes.WRITABLE_MOUNTS)).splitlines()
        # What Docker hides of /proc, it hides behind /dev/null.
        hidden = ("/proc/", "/dev")
        written = {point for _, point in map(str.split, lines) if not point.startswith(hidden)}
        assert written == {"/testbed", "/home", "/tmp", "/run"}
        for place in ("/", "/etc", "/usr", "/var/tmp", "/root"):
            assert (await sandbox.exec(f"test -w {place}", timeout_s=20)).exit_code == 1
        script = "cd; printf '#!/bin/sh\\necho runs' > script; chmod +x script; ./script"
        assert await output(sandbox, script) == "runs\n"


async def test_strict_level_limits_the_disk(backend: DockerBackend) -> None:
    async with new_sandbox(backend, STRICT) as sandbox:
        for place in ("/testbed", "/tmp", "/home", "/run"):
            result = await sandbox.exec(f"head -c 60M /dev/zero > {place}/file", timeout_s=20)
            assert "No space left on device" in result.stderr
        total = await output(sandbox, "cat /testbed/file /tmp/file /home/file /run/file | wc -c")
        assert 60 << 20 < int(total) <= STRICT.disk_mib << 20
        many = await sandbox.exec("cd; rm file; for n in {1..2000}; do : > $n; done", timeout_s=20)
        assert "No space left on device" in many.stderr


async def test_user_volume_and_health_check_of_an_image_do_not_weaken_isolation(
    tmp_path: Path,
) -> None:
    await docker_backend(tmp_path).aclose()  # skips where there is none
    lines = ("VOLUME /data", "USER nobody", "HEALTHCHECK --interval=1s CMD touch /sick")
    async with derived(*lines) as image:
        backend = docker_backend(tmp_path, image)
        async with new_sandbox(backend, Isolation()) as sandbox:
            assert await output(sandbox, "id -un; findmnt -no FSTYPE /data") == "root\ntmpfs\n"
            result = await sandbox.exec("head -c 80M /dev/zero > /data/file", timeout_s=20)
            assert "No space left on device" in result.stderr
            facts = await asyncio.to_thread(inspect, sandbox.id)
            assert facts["Config"]["Healthcheck"]["Test"] == ["NONE"]
        await backend.aclose()


async def test_sandbox_can_read_shared_inputs_and_cannot_write_them(tmp_path: Path) -> None:
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    (inputs / "table.csv").write_text("a,b\n")
    backend = docker_backend(tmp_path, inputs=inputs)
    for isolation in (Isolation(), STRICT):
        async with new_sandbox(backend, isolation) as sandbox:
            assert await output(sandbox, "cat /testbed/shared/table.csv") == "a,b\n"
            refused = await sandbox.exec("touch /testbed/shared/more", timeout_s=20)
            assert refused.exit_code == 1
    assert [each.name for each in inputs.iterdir()] == ["table.csv"]
    await backend.aclose()
