"""Trajectories in the store: their quota and their expiry."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from policies.sessions import TrajectorySettings
from proxy.store.store import Store
from proxy.store.trajectories import TOMBSTONE_S, StoredTrajectory
from tests.fakes.manual_clock import ManualClock

MINE, YOURS = "somebody", "somebody else"
HOUR_S = 3600
PART = b"x" * (300 << 10)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    """A store whose trajectories expire after an hour and whose quota is 1 MiB."""
    settings = TrajectorySettings(retention_hours=1, quota_mib=1)
    store = Store(tmp_path, trajectories=settings, now=clock.time)
    yield store
    store.close()


async def keep(store: Store, run_id: str, *parts: bytes, owner: str = MINE) -> None:
    """Store the trajectory of a run that has ended."""
    await store.trajectories.begin(owner, [run_id])
    for part in parts[:-1]:
        await store.trajectories.append(owner, run_id, part, is_last=False)
    await store.trajectories.append(owner, run_id, parts[-1], is_last=True)


async def find(store: Store, run_id: str, owner: str = MINE) -> StoredTrajectory | None:
    return await store.trajectories.find(owner, run_id)


async def gone(store: Store, *run_ids: str) -> list[str | None]:
    found = [await find(store, run_id) for run_id in run_ids]
    return [each.gone for each in found if each]


async def test_parts_are_returned_in_the_order_in_which_they_were_appended(store: Store) -> None:
    await keep(store, "one", b"a", b"b", b"c")
    found = await find(store, "one")
    assert found is not None
    assert list(found.parts) == [b"a", b"b", b"c"]
    assert (found.id, found.gone, found.is_lost) == ("one", None, False)
    assert await find(store, "one", YOURS) is None
    assert await find(store, "two") is None


async def test_oldest_trajectories_beyond_the_quota_of_an_owner_are_deleted(store: Store) -> None:
    await keep(store, "theirs", PART * 3, owner=YOURS)
    for run_id in ("one", "two", "three"):
        await keep(store, run_id, PART)
    assert await gone(store, "one", "two", "three") == [None] * 3
    await keep(store, "four", PART)
    assert await gone(store, "one", "two", "three", "four") == ["quota", None, None, None]
    await keep(store, "huge", PART * 10)
    assert await gone(store, "one", "two", "three", "four", "huge") == [*["quota"] * 4, None]
    theirs = await find(store, "theirs", YOURS)
    assert theirs is not None
    assert theirs.gone is None


async def test_expired_trajectory_leaves_a_tombstone_that_expires_too(
    store: Store, clock: ManualClock
) -> None:
    for number in range(120):  # more than a sweep deletes in one transaction
        await keep(store, f"run-{number}", b"part")
    clock.advance(HOUR_S)
    await store.sweep()
    assert await gone(store, "run-0", "run-119") == ["expired"] * 2
    clock.advance(TOMBSTONE_S)
    await store.sweep()
    assert [await find(store, run_id) for run_id in ("run-0", "run-119")] == [None, None]


async def test_expiry_counts_from_the_end_of_the_run(store: Store, clock: ManualClock) -> None:
    await store.trajectories.begin(MINE, ["one"])
    clock.advance(HOUR_S - 1)
    await store.trajectories.append(MINE, "one", b"a", is_last=True)
    clock.advance(HOUR_S - 1)
    assert await gone(store, "one") == [None]
    clock.advance(1)
    assert await gone(store, "one") == ["expired"]


async def test_deleted_trajectory_takes_no_further_parts(store: Store) -> None:
    await store.trajectories.begin(MINE, ["one"])
    assert await store.trajectories.delete(YOURS, "one") is False
    assert await store.trajectories.delete(MINE, "one") is True
    assert await store.trajectories.delete(MINE, "one") is False
    await store.trajectories.append(MINE, "one", b"a", is_last=True)
    found = await find(store, "one")
    assert found is not None
    assert (found.gone, list(found.parts)) == ("deleted", [])


async def test_trajectory_of_a_dead_process_is_lost(tmp_path: Path) -> None:
    first, second = Store(tmp_path), Store(tmp_path)
    await first.trajectories.begin(MINE, ["one"])
    await first.trajectories.append(MINE, "one", b"a", is_last=False)
    running = await find(second, "one")
    first.close()
    lost = await find(second, "one")
    second.close()
    assert running is not None
    assert lost is not None
    assert (running.is_lost, lost.is_lost, list(lost.parts)) == (False, True, [b"a"])
