"""The limits of memory that a process finds, and what it does before it refuses work."""

import gc
import weakref

import pytest

from proxy.available_memory import AvailableMemory, memory_cgroups
from proxy.errors import BusyError

VERSION_1 = "36 30 0:31 / /sys/fs/cgroup/memory rw,nosuid - cgroup cgroup rw,memory"
VERSION_2 = "36 30 0:31 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
OTHERS = """\
21 30 0:19 / /proc rw,nosuid - proc proc rw
44 30 0:40 / /x rw,relatime - tmpfs  rw
45 30 0:41 / /a\\040b rw,relatime - tmpfs none rw"""


def directories(mount: str, paths: str) -> list[str]:
    """Return the directories of the cgroups that are found beside other mounts."""
    mounts = f"{OTHERS}\n{mount}\n"
    return [str(cgroup.directory) for cgroup in memory_cgroups(mounts, paths)]


def test_cgroup_of_the_process_and_its_parent_cgroups_are_found_in_cgroup_version_2() -> None:
    found = directories(VERSION_2, "0::/system.slice/proxy.service\n")
    assert found == [
        "/sys/fs/cgroup/system.slice/proxy.service",
        "/sys/fs/cgroup/system.slice",
        "/sys/fs/cgroup",
    ]


def test_cgroup_of_the_process_and_its_parent_cgroups_are_found_in_cgroup_version_1() -> None:
    found = directories(VERSION_1, "5:cpu,cpuacct:/elsewhere\n4:memory:/docker/abc\n")
    assert found == [
        "/sys/fs/cgroup/memory/docker/abc",
        "/sys/fs/cgroup/memory/docker",
        "/sys/fs/cgroup/memory",
    ]


def test_mount_entry_without_a_source_is_parsed_and_not_taken_for_a_cgroup() -> None:
    assert directories("46 30 0:42 / /y rw - tmpfs  rw", "0::/\n") == []


class Cycle:
    """An object that refers to itself, as the objects of a run do."""

    def __init__(self) -> None:
        self.itself = self


def test_garbage_is_collected_before_a_request_is_refused() -> None:
    memory = AvailableMemory(1 << 62)  # more than any machine has
    gc.disable()
    try:
        ended = weakref.ref(Cycle())
        with pytest.raises(BusyError):
            memory.require()
        assert ended() is None
    finally:
        gc.enable()
    assert memory.refused_count == 1
