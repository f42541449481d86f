"""How much room there is, who must go for it, and how long to wait."""

from dataclasses import fields, replace
from typing import Any

import pytest

from policies.egress import Egress
from policies.isolation import Isolation
from policies.pool import (
    Load,
    PoolSettings,
    exact_pool_key,
    fits,
    idle_to_evict,
    pool_key,
    retry_after_s,
    start_backoff_s,
    without_lease_fields,
)

OTHER_WALLS: dict[str, Any] = {
    "level": "strict",
    "disk_mib": 17,
    "disk_mib_per_s": 17,
    "open_files": 17,
}
OTHER_LIMITS: dict[str, Any] = {"memory_mib": 17, "cpus": 0.5, "pids": 17}
OPEN = Egress(mode="open")


@pytest.mark.parametrize(
    ("fault", "wrong"),
    [
        ("min_ready must not be negative", {"min_ready": -1}),
        ("max_sandboxes must be at least 1", {"min_ready": 0, "max_sandboxes": 0}),
        ("min_ready must not be more than max_sandboxes", {"min_ready": 3, "max_sandboxes": 2}),
        ("memory_budget_mib must be at least 1", {"memory_budget_mib": 0}),
        ("ttl_s must be more than 0", {"ttl_s": 0}),
        ("ttl_s must be more than 0", {"ttl_s": float("nan")}),
        ("queue_size must not be negative", {"queue_size": -1}),
        ("queue_timeout_s must be more than 0", {"queue_timeout_s": -1.0}),
        ("on_miss: fail needs min_ready of at least 1", {"on_miss": "fail", "min_ready": 0}),
    ],
)
def test_settings_that_make_no_sense_are_refused(fault: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=fault):
        PoolSettings(**wrong)


@pytest.mark.parametrize("wall", OTHER_WALLS)
def test_sandboxes_with_other_walls_cannot_stand_for_each_other(wall: str) -> None:
    other = replace(Isolation(), **{wall: OTHER_WALLS[wall]})
    assert pool_key(other) != pool_key(Isolation())
    assert exact_pool_key(other) != exact_pool_key(Isolation())


@pytest.mark.parametrize("limit", OTHER_LIMITS)
def test_limits_can_be_changed_and_so_make_no_other_recipe_but_an_exact_one(limit: str) -> None:
    other = replace(Isolation(), **{limit: OTHER_LIMITS[limit]})
    assert pool_key(other) == pool_key(Isolation())
    assert exact_pool_key(other) != exact_pool_key(Isolation())


def test_egress_is_no_part_of_any_recipe() -> None:
    other = replace(Isolation(), network=OPEN)
    assert pool_key(other) == pool_key(Isolation())
    assert exact_pool_key(other) == exact_pool_key(Isolation())
    assert without_lease_fields(other) == Isolation()


def test_everything_about_an_isolation_is_a_wall_a_limit_or_egress() -> None:
    assert {field.name for field in fields(Isolation)} == {*OTHER_WALLS, *OTHER_LIMITS, "network"}


def test_load_is_bounded_by_sandbox_count_and_memory_budget() -> None:
    settings = PoolSettings(min_ready=0, max_sandboxes=3, memory_budget_mib=100)
    assert fits(settings, Load(3, 100))
    assert not fits(settings, Load(4, 100))
    assert not fits(settings, Load(3, 101))
    assert fits(PoolSettings(min_ready=0, max_sandboxes=3), Load(3, 1_000_000))


def test_no_more_idle_ones_end_than_must() -> None:
    settings = PoolSettings(min_ready=0, max_sandboxes=3, memory_budget_mib=100)
    idle = [Load(1, 10), Load(1, 10), Load(1, 10)]
    assert idle_to_evict(settings, Load(3, 100), idle) == 0
    assert idle_to_evict(settings, Load(4, 100), idle) == 1
    assert idle_to_evict(settings, Load(4, 120), idle) == 2
    assert idle_to_evict(settings, Load(4, 131), idle) is None


def test_rests_grow_up_to_half_a_minute() -> None:
    assert [start_backoff_s(failures) for failures in (1, 2, 3, 5, 6, 10_000)] == [
        1,
        2,
        4,
        16,
        30,
        30,
    ]


def test_coming_again_pays_after_a_start_or_when_everybody_ahead_has_had_a_turn() -> None:
    times = {"start_s": 2.5, "lease_s": 20.0}
    assert retry_after_s(has_room=True, ahead=9, leased=4, **times) == 2.5
    assert retry_after_s(has_room=False, ahead=9, leased=4, **times) == 50
    assert retry_after_s(has_room=False, ahead=0, leased=0, **times) == 20
    assert retry_after_s(has_room=True, ahead=0, leased=0, start_s=0.1, lease_s=20) == 1
    assert retry_after_s(has_room=False, ahead=999, leased=1, **times) == 300
