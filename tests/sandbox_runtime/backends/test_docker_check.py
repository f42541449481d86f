"""The checks of `doctor` for an engine, from its info and the block devices of its host."""

import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sandbox_runtime.backends.docker_check import (
    BlockDevice,
    EngineInfo,
    block_device,
    engine_checks,
    engine_info,
)

SOUND: dict[str, Any] = {
    "DefaultRuntime": "runc",
    "Runtimes": {"runc": {}, "runsc": {}},
    "SecurityOptions": ["name=apparmor", "name=seccomp,profile=default", "name=userns"],
    "MemoryLimit": True,
    "SwapLimit": True,
    "CpuCfsQuota": True,
    "PidsLimit": True,
    "CgroupVersion": "2",
}
DISK = BlockDevice("/dev/vda")


def engine_at(directory: Path | None, **answer: Any) -> EngineInfo:
    """Return the info of an engine whose data directory is on this host, or elsewhere if None."""
    return replace(engine_info({**SOUND, **answer}, "tcp://far.away:2375"), directory=directory)


def said(
    runtime: str | None = None, device: BlockDevice = DISK, **facts: Any
) -> dict[str, tuple[bool, str]]:
    found = engine_checks(engine_at(None, **facts), runtime, "disk watched", device)
    return {each.name.removeprefix("docker "): (each.ok, each.detail) for each in found}


def test_check_warns_about_a_shared_kernel_and_not_about_gvisor() -> None:
    fine, words = said()["runtime"]
    assert fine
    assert "SHARE THE HOST'S KERNEL" in words
    assert said("runsc")["runtime"] == (
        True,
        "runsc: each sandbox has a kernel of its own, in user space",
    )
    assert said("kata")["runtime"] == (False, "the engine has no 'kata'; it has runc, runsc")


def test_docker_check_reports_limits_that_the_engine_does_not_support() -> None:
    assert said()["limits"] == (True, "memory, swap, cpu, pids by cgroup v2; disk watched")
    fine, words = said(SwapLimit=False)["limits"]
    assert (fine, words.rpartition("; ")[2]) == (True, "NOT LIMITED: swap")
    fine, words = said(PidsLimit=False, MemoryLimit=False)["limits"]
    assert (fine, words.rpartition("; ")[2]) == (False, "NOT LIMITED: memory, pids")


def test_check_reports_whether_disk_throughput_is_limited() -> None:
    limited = "the speed of each sandbox's reads and writes of /dev/vda is limited"
    assert said()["disk speed"] == (True, limited)
    assert said(CgroupVersion="1")["disk speed"][1].startswith(f"{limited}, except writes")
    without = said(device=BlockDevice(None, "it lies nowhere"))
    assert without["disk speed"] == (True, "NOT LIMITED: it lies nowhere")


def test_docker_check_reports_which_host_user_the_containers_root_is() -> None:
    assert "userns-remap is on" in said()["users"][1]
    assert "userns-remap is OFF" in said(SecurityOptions=["name=seccomp"])["users"][1]
    assert "without root" in said(SecurityOptions=["name=seccomp", "name=rootless"])["users"][1]


def test_engine_without_seccomp_fails_the_check() -> None:
    assert said()["system calls"] == (True, "filtered by our own profile")
    assert said("runsc")["system calls"] == (True, "handled by runsc's kernel")
    assert said(SecurityOptions=None)["system calls"][0] is False


def test_check_reports_the_security_module_that_confines_containers() -> None:
    assert said()["confinement"][1].endswith("; apparmor")
    assert said(SecurityOptions=["name=seccomp"])["confinement"][1].endswith("no SELinux")


def devices_of(directory: Path, top: Path, *, partition: bool) -> dict[str, Path]:
    """The host's devices as Linux shows them, where the directory lies on one of its own."""
    disk = top / "devices/sda"
    found = disk / "sda1" if partition else disk
    found.mkdir(parents=True)
    (disk / "uevent").write_text("MAJOR=8\nDEVNAME=sda\nDEVTYPE=disk\n")
    if partition:
        (found / "uevent").write_text("MAJOR=8\nDEVNAME=sda1\nDEVTYPE=partition\n")
        (found / "partition").write_text("1\n")
    number = directory.stat().st_dev
    numbers, files = top / "block", top / "dev"
    numbers.mkdir()
    files.mkdir()
    (numbers / f"{os.major(number)}:{os.minor(number)}").symlink_to(found)
    (files / "sda").touch()
    return {"numbers_dir": numbers, "devices_dir": files}


@pytest.mark.parametrize("partition", [False, True])
def test_block_device_of_the_engine_is_a_disk_and_not_a_partition(
    tmp_path: Path, partition: bool
) -> None:
    devices = devices_of(tmp_path, tmp_path, partition=partition)
    engine = engine_at(tmp_path)
    found = block_device(engine, **devices)
    assert found == BlockDevice(str(devices["devices_dir"] / "sda"))
    (devices["devices_dir"] / "sda").unlink()
    assert block_device(engine, **devices).why_unlimited.endswith("/sda is missing")


def test_check_reports_why_block_io_cannot_be_limited(tmp_path: Path) -> None:
    devices = devices_of(tmp_path, tmp_path, partition=False)
    unable = {"Warnings": ["WARNING: No blkio throttle.read_bps_device support"]}
    for answer, directory, numbers, why in (
        ({}, None, devices["numbers_dir"], "cannot be seen"),
        (unable, tmp_path, devices["numbers_dir"], "cannot limit"),
        ({}, tmp_path, tmp_path, "names no block device"),
    ):
        engine = engine_at(directory, **answer)
        found = block_device(engine, numbers_dir=numbers, devices_dir=devices["devices_dir"])
        assert (found.path, why in found.why_unlimited) == (None, True)


@pytest.mark.parametrize(
    ("answer", "may"),
    [
        ({"Driver": "zfs"}, True),
        ({"Driver": "overlay2", "DriverStatus": [["Backing Filesystem", "xfs"]]}, True),
        ({"Driver": "overlay2", "DriverStatus": [["Backing Filesystem", "extfs"]]}, False),
        ({}, False),
    ],
)
def test_storage_drivers_that_may_support_disk_quotas_are_recognised(
    answer: dict[str, Any], may: bool
) -> None:
    assert engine_at(None, **answer).may_have_quota is may


def test_data_directory_of_a_remote_engine_is_ignored(tmp_path: Path) -> None:
    answer = {**SOUND, "DockerRootDir": str(tmp_path), "Name": socket.gethostname()}
    assert engine_info(answer, "unix:///run/docker.sock").directory == tmp_path
    assert engine_info(answer, "tcp://far.away:2375").directory is None
    assert engine_info({**answer, "Name": "another"}, "unix:///run/docker.sock").directory is None
    by_containerd = {**answer, "DriverStatus": [["driver-type", "io.containerd.snapshotter.v1"]]}
    assert engine_info(by_containerd, "unix:///run/docker.sock").directory is None
