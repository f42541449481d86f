"""The disk watch measures and stops sandboxes on a fake disk."""

import asyncio
from collections import Counter

import anyio
import pytest

from sandbox_runtime.backends.docker_disk import DiskUsage, DiskWatch
from tests.fakes.waiting import until

MIB = 1 << 20
LIMIT = DiskUsage(100 * MIB, 1000)


class FakeDisk:
    """A fake disk to which the test writes."""

    def __init__(self) -> None:
        self.usages: dict[str, DiskUsage] = {}
        self.by_others = DiskUsage()
        self.free: int | None = None
        self.looks = 0
        self.measured: Counter[str] = Counter()

    def total_written(self) -> DiskUsage:
        self.looks += 1
        all_of_them = (*self.usages.values(), self.by_others)
        return DiskUsage(
            sum(each.bytes for each in all_of_them), sum(each.files for each in all_of_them)
        )

    async def usage(self, name: str, limit: DiskUsage) -> DiskUsage | None:
        self.measured[name] += 1
        return self.usages.get(name)

    def free_bytes(self) -> int | None:
        return self.free


class WatchedSandboxes:
    """The sandboxes on the disk, and the reasons why they were stopped."""

    def __init__(self, disk: FakeDisk, reserve_bytes: int = 0) -> None:
        self.watch = DiskWatch(disk, period_s=0.001, reserve_bytes=reserve_bytes)
        self.stopped: dict[str, str] = {}

    def begin(self, *names: str) -> None:
        for name in names:
            self.watch.add(name, LIMIT, lambda why, name=name: self.stopped.update({name: why}))

    async def is_stopped(self, name: str) -> str:
        with anyio.fail_after(5):
            await until(lambda: name in self.stopped)
        return self.stopped[name]


async def a_few_looks(disk: FakeDisk) -> None:
    enough = disk.looks + 5
    with anyio.fail_after(5):
        await until(lambda: disk.looks >= enough)


async def test_sandbox_beyond_its_disk_limit_is_stopped_with_the_reason() -> None:
    disk = FakeDisk()
    sandboxes = WatchedSandboxes(disk)
    sandboxes.begin("greedy", "modest")
    disk.usages = {"greedy": DiskUsage(101 * MIB - 1, 5), "modest": DiskUsage(90 * MIB, 5)}
    assert await sandboxes.is_stopped("greedy") == (
        "its disk use of 101 MiB exceeded the limit of 100 MiB"
    )
    await a_few_looks(disk)
    assert sandboxes.stopped.keys() == {"greedy"}
    await sandboxes.watch.aclose()


async def test_sandbox_with_too_many_files_exceeds_its_disk_limit() -> None:
    disk = FakeDisk()
    sandboxes = WatchedSandboxes(disk)
    sandboxes.begin("bomb")
    disk.usages = {"bomb": DiskUsage(0, 1001)}
    assert await sandboxes.is_stopped("bomb") == (
        "it has more than the 1000 files that its disk may have"
    )
    await sandboxes.watch.aclose()


async def test_sandbox_disk_is_not_measured_before_it_could_exceed_its_limit() -> None:
    disk = FakeDisk()
    sandboxes = WatchedSandboxes(disk)
    sandboxes.begin("idle", "idle too")
    disk.by_others = DiskUsage(99 * MIB, 10)
    await a_few_looks(disk)
    assert not disk.measured
    await sandboxes.watch.aclose()


async def test_measured_sandbox_is_measured_again_only_when_it_could_exceed_its_limit() -> None:
    disk = FakeDisk()
    sandboxes = WatchedSandboxes(disk)
    sandboxes.begin("working")
    disk.usages = {"working": DiskUsage(40 * MIB, 10)}
    disk.by_others = DiskUsage(90 * MIB, 10)
    with anyio.fail_after(5):
        await until(lambda: disk.measured["working"] == 1)
    disk.by_others = DiskUsage(140 * MIB, 10)
    await a_few_looks(disk)
    assert disk.measured["working"] == 1
    disk.by_others = DiskUsage(160 * MIB, 10)
    with anyio.fail_after(5):
        await until(lambda: disk.measured["working"] == 2)
    await sandboxes.watch.aclose()


@pytest.mark.parametrize("seen_bytes", [MIB, -MIB])
async def test_space_freed_by_one_sandbox_does_not_hide_writes_of_another(seen_bytes: int) -> None:
    disk = FakeDisk()
    disk.free = 1000 * MIB
    sandboxes = WatchedSandboxes(disk)
    sandboxes.begin("hidden")
    disk.usages = {"hidden": DiskUsage(101 * MIB, 10)}
    disk.by_others = DiskUsage(-101 * MIB, -10)
    await a_few_looks(disk)
    assert not sandboxes.stopped
    disk.free += seen_bytes
    assert "exceeded" in await sandboxes.is_stopped("hidden")
    await sandboxes.watch.aclose()


async def test_failed_disk_measurement_is_repeated() -> None:
    disk = FakeDisk()
    sandboxes = WatchedSandboxes(disk)
    sandboxes.begin("unseen")
    disk.by_others = DiskUsage(200 * MIB, 10)
    with anyio.fail_after(5):
        await until(lambda: disk.measured["unseen"] >= 3)
    disk.usages = {"unseen": DiskUsage(200 * MIB, 10)}
    assert "exceeded" in await sandboxes.is_stopped("unseen")
    await sandboxes.watch.aclose()


async def test_nearly_full_host_disk_stops_the_largest_sandboxes_but_no_small_one() -> None:
    disk = FakeDisk()
    sandboxes = WatchedSandboxes(disk, reserve_bytes=1000 * MIB)
    sandboxes.begin("large", "larger", "small")
    disk.usages = {
        "large": DiskUsage(50 * MIB, 5),
        "larger": DiskUsage(60 * MIB, 5),
        "small": DiskUsage(15 * MIB, 5),
    }
    disk.free = 999 * MIB
    why = await sandboxes.is_stopped("larger")
    assert why == (
        "the host's disk is nearly full, and this sandbox used more of it than any other, 60 MiB"
    )
    await sandboxes.is_stopped("large")
    await a_few_looks(disk)
    assert sandboxes.stopped.keys() == {"large", "larger"}
    await sandboxes.watch.aclose()


async def test_disk_is_watched_only_while_sandboxes_exist() -> None:
    disk = FakeDisk()
    sandboxes = WatchedSandboxes(disk)
    sandboxes.begin("first")
    await a_few_looks(disk)
    sandboxes.watch.discard("first")
    sandboxes.watch.discard("first")
    with anyio.fail_after(5):
        await until(lambda: "disk watch" not in {task.get_name() for task in asyncio.all_tasks()})
    sandboxes.begin("second")
    await a_few_looks(disk)
    await sandboxes.watch.aclose()
