"""Limits are written to cgroups; no cgroup is left behind, and no other is touched."""

import os
import re
import secrets
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest

from policies.isolation import Isolation
from sandbox_runtime.backends.base import LimitEvents
from sandbox_runtime.backends.cgroups import (
    CGROUP_DIR,
    Cgroups,
    Hierarchy,
    find_cgroups,
    process_key,
)
from sandbox_runtime.errors import SandboxStartError

ISOLATION = Isolation(memory_mib=64, pids=16, cpus=0.5)


def pretend_proc(tmp_path: Path, mountinfo: str, own_cgroup: str) -> Path:
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "self/mountinfo").write_text(mountinfo)
    (proc / "self/cgroup").write_text(own_cgroup)
    return proc


def pretend_cgroup(directory: Path, controllers: str = "") -> Path:
    directory.mkdir(parents=True)
    (directory / "cgroup.procs").write_text("")
    (directory / "cgroup.subtree_control").write_text(controllers)
    return directory


def usable(folder: Path, controllers: str) -> Path:
    """Make the cgroup folder of sandboxes with the files that the kernel would create."""
    folder.mkdir(parents=True)
    (folder / "cgroup.subtree_control").write_text(controllers)
    return folder


def test_cgroup_version_1_uses_the_mount_of_each_controller(tmp_path: Path) -> None:
    for name in ("memory", "pids", "cpu,cpuacct"):
        pretend_cgroup(tmp_path / name)
    lines = [
        f"3{n} 31 0:3{n} / {tmp_path}/{name} rw,relatime - cgroup cgroup rw,{name}"
        for n, name in enumerate(("memory", "pids", "cpu,cpuacct"))
    ]
    proc = pretend_proc(tmp_path, "\n".join(lines), "1:memory:/elsewhere\n")

    cgroups = find_cgroups(proc)

    assert cgroups is not None
    assert (cgroups.version, cgroups.controllers) == (1, ("memory", "pids", "cpu"))
    assert [each.folder for each in cgroups.hierarchies] == [
        tmp_path / name / CGROUP_DIR for name in ("memory", "pids", "cpu,cpuacct")
    ]


def test_cgroup_version_1_limits_memory_and_processes_and_cpu(tmp_path: Path) -> None:
    hierarchy = Hierarchy(tmp_path, frozenset({"memory", "pids", "cpu"}))
    (directory,) = Cgroups(1, (hierarchy,)).create("a1", ISOLATION).directories
    assert {file.name: file.read_text() for file in directory.iterdir()} == {
        "memory.limit_in_bytes": "67108864",
        "pids.max": "16",
        "cpu.cfs_period_us": "100000",
        "cpu.cfs_quota_us": "50000",
    }


def test_cgroup_version_2_limits_memory_processes_and_cpu(tmp_path: Path) -> None:
    hierarchy = Hierarchy(tmp_path, frozenset({"memory", "pids", "cpu"}))
    (directory,) = Cgroups(2, (hierarchy,)).create("a1", ISOLATION).directories
    assert re.fullmatch(rf"{process_key()}-\d+-a1", directory.name)
    assert {file.name: file.read_text() for file in directory.iterdir()} == {
        "memory.max": "67108864",
        "pids.max": "16",
        "cpu.max": "50000 100000",
    }


def test_cgroup_version_2_uses_the_top_of_the_hierarchy_if_writable(tmp_path: Path) -> None:
    top = pretend_cgroup(tmp_path / "cgroup", "cpu memory pids")
    folder = usable(top / CGROUP_DIR, "cpu memory pids")
    proc = pretend_proc(tmp_path, f"30 1 0:26 / {top} rw - cgroup2 cgroup2 rw", "0::/a.service\n")
    assert find_cgroups(proc) == Cgroups(
        2, (Hierarchy(folder, frozenset({"memory", "pids", "cpu"})),)
    )


def test_cgroup_version_2_uses_the_subtree_delegated_to_the_user(tmp_path: Path) -> None:
    top = tmp_path / "cgroup"
    given = pretend_cgroup(top / "user.slice/user@1.service", "memory pids")
    folder = usable(given / CGROUP_DIR, "memory pids")
    pretend_cgroup(given / "app.slice/a.scope")
    own = "0::/user.slice/user@1.service/app.slice/a.scope\n"
    proc = pretend_proc(tmp_path, f"30 1 0:26 / {top} rw - cgroup2 cgroup2 rw", own)
    # The top is not ours to write: it is passed by and left clean.
    assert find_cgroups(proc) == Cgroups(2, (Hierarchy(folder, frozenset({"memory", "pids"})),))
    assert not (top / CGROUP_DIR).exists()


def test_cgroups_need_memory_and_pids_controllers(tmp_path: Path) -> None:
    cpu = pretend_cgroup(tmp_path / "cpu")
    proc = pretend_proc(tmp_path, f"32 31 0:29 / {cpu} rw - cgroup cgroup rw,cpu", "1:cpu:/\n")
    assert find_cgroups(proc) is None


def test_failed_cgroup_creation_is_a_start_error_and_leaves_no_cgroup(tmp_path: Path) -> None:
    there, not_there = Hierarchy(tmp_path, frozenset()), Hierarchy(tmp_path / "no", frozenset())
    with pytest.raises(SandboxStartError, match="No such file or directory"):
        Cgroups(1, (there, not_there)).create("a1", ISOLATION)
    assert list(tmp_path.iterdir()) == []


def version_2_without_controllers() -> Cgroups | None:
    """Return a writable version 2 hierarchy without controllers, as beside version 1, or None."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if "cgroup2" in fields and os.access(fields[4], os.W_OK):
            return Cgroups(2, (Hierarchy(Path(fields[4]), frozenset()),))
    return None


@pytest.fixture(params=[find_cgroups, version_2_without_controllers])
def cgroups(request: pytest.FixtureRequest) -> Iterator[Cgroups]:
    """Real cgroups in a folder that is not swept by others."""
    found: Cgroups | None = request.param()
    if found is None:
        pytest.skip("no cgroup can be written here")
    name = f"test-{secrets.token_hex(4)}"
    hierarchies = tuple(
        Hierarchy(each.folder / name, each.controllers) for each in found.hierarchies
    )
    for each in hierarchies:
        each.folder.mkdir()
        if found.version == 2:
            for controller in each.controllers:
                (each.folder / "cgroup.subtree_control").write_text(f"+{controller}")
    yield Cgroups(found.version, hierarchies)
    for each in hierarchies:
        for directory in (*each.folder.glob("*/"), each.folder):
            directory.rmdir()


def start_in(procs_files: tuple[str, ...], *command: str) -> subprocess.Popen[bytes]:
    """Start a process and return it once it has entered the cgroup."""
    enter = 'while [ "$1" != -- ]; do echo $$ > "$1" || exit 1; shift; done; shift; echo; exec "$@"'
    process = subprocess.Popen(
        ["/bin/sh", "-c", enter, "sh", *procs_files, "--", *command], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


@contextmanager
def killed_at_last(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    with process:
        try:
            yield process
        finally:
            process.kill()


def has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(5000))


async def test_removing_a_cgroup_kills_its_processes(cgroups: Cgroups) -> None:
    cgroup = cgroups.create("a1", ISOLATION)
    with killed_at_last(start_in(cgroup.procs_files, "sleep", "1000")) as process:
        assert cgroup.limit_events() == LimitEvents()
        with anyio.fail_after(10):
            await cgroup.remove()
            await cgroup.remove()
        assert process.wait(5) == -signal.SIGKILL
    assert [each for each in cgroup.directories if each.exists()] == []


LEAVE_BEHIND = """
import subprocess, sys
from pathlib import Path
from policies.isolation import Isolation
from sandbox_runtime.backends.cgroups import Cgroups, Hierarchy
version, *folders = sys.argv[1:]
cgroups = Cgroups(int(version), tuple(Hierarchy(Path(each), frozenset()) for each in folders))
cgroup = cgroups.create("left", Isolation())
sleeper = subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL)
for entrance in cgroup.procs_files:
    Path(entrance).write_text(str(sleeper.pid))
print(sleeper.pid, flush=True)
sys.stdin.read()
"""


def start_owner(cgroups: Cgroups) -> subprocess.Popen[bytes]:
    folders = [str(each.folder) for each in cgroups.hierarchies]
    return subprocess.Popen(
        [sys.executable, "-c", LEAVE_BEHIND, str(cgroups.version), *folders],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    )


async def test_sweep_removes_only_leftovers_of_dead_owners(cgroups: Cgroups) -> None:
    folders = [each.folder for each in cgroups.hierarchies]
    ours = cgroups.create("ours", ISOLATION)
    gone = process_key(os.getpid()).replace("-", "0-")
    others = {"somebody-elses", f"{gone}-1-in_another_namespace"}
    for folder in folders:
        for name in others:
            (folder / name).mkdir()
    with killed_at_last(start_owner(cgroups)) as helper:
        assert helper.stdout is not None
        left_running = os.pidfd_open(int(helper.stdout.readline()))
        assert await cgroups.sweep() == 0
        helper.kill()
        helper.wait(5)
        with anyio.fail_after(10):
            assert await cgroups.sweep() == 1
    assert has_ended(left_running)
    os.close(left_running)
    for folder in folders:
        names = {each.name for each in folder.iterdir() if each.is_dir()}
        assert names == {ours.directories[0].name, *others}


def test_process_key_has_the_pid_and_the_start_time_of_its_process() -> None:
    pid, start = process_key().split("-")
    assert int(pid) == os.getpid()
    assert int(start) > 0
    assert process_key(2**22 + 1) == ""
