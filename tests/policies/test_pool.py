"""Settings of the pool, compatibility of sandboxes, eviction, backoff and retry delay."""

from dataclasses import fields, replace
from typing import Any

import pytest

from policies.egress import Egress
from policies.isolation import Isolation
from policies.pool import (
    Load,
    PoolSettings,
    eviction_count,
    exact_pool_key,
    fits,
    pool_key,
    retry_after_s,
    start_backoff_s,
    without_lease_fields,
)

OTHER_FIXED: dict[str, Any] = {
    "level": "strict",
    "disk_mib": 17,
    "disk_mib_per_s": 17,
    "open_files": 17,
}
OTHER_LIMITS: dict[str, Any] = {"memory_mib": 17, "cpus": 0.5, "pids": 17}
OPEN = Egress(mode="open")


@pytest.mark.parametrize(
    ("message", "invalid"),
    [
        ("min_ready must not be negative", {"min_ready": -1}),
        ("max_sandboxes must be at least 1", {"min_ready": 0, "max_sandboxes": 0}),
        ("min_ready must not be more than max_sandboxes", {"min_ready": 3, "max_sandboxes": 2}),
        ("memory_budget_mib must be at least 1", {"memory_budget_mib": 0}),
        ("max_parallel_starts must be at least 1", {"max_parallel_starts": 0}),
        ("ttl_s must be more than 0", {"ttl_s": 0}),
        ("ttl_s must be more than 0", {"ttl_s": float("nan")}),
        ("queue_size must not be negative", {"queue_size": -1}),
        ("queue_timeout_s must be more than 0", {"queue_timeout_s": -1.0}),
        ("on_miss: fail needs min_ready of at least 1", {"on_miss": "fail", "min_ready": 0}),
    ],
)
def test_invalid_pool_settings_are_refused(message: str, invalid: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message):
        PoolSettings(**invalid)


@pytest.mark.parametrize("field", OTHER_FIXED)
def test_isolation_field_that_is_fixed_at_creation_changes_pool_key_and_exact_pool_key(
    field: str,
) -> None:
    other = replace(Isolation(), **{field: OTHER_FIXED[field]})
    assert pool_key(other) != pool_key(Isolation())
    assert exact_pool_key(other) != exact_pool_key(Isolation())


@pytest.mark.parametrize("limit", OTHER_LIMITS)
def test_limit_that_a_lease_can_change_is_in_the_exact_pool_key_but_not_in_the_pool_key(
    limit: str,
) -> None:
    other = replace(Isolation(), **{limit: OTHER_LIMITS[limit]})
    assert pool_key(other) == pool_key(Isolation())
    assert exact_pool_key(other) != exact_pool_key(Isolation())


def test_egress_is_part_of_no_pool_key() -> None:
    other = replace(Isolation(), network=OPEN)
    assert pool_key(other) == pool_key(Isolation())
    assert exact_pool_key(other) == exact_pool_key(Isolation())
    assert without_lease_fields(other) == Isolation()


def test_pool_key_tests_cover_every_isolation_field_except_the_network() -> None:
    assert {isolation_field.name for isolation_field in fields(Isolation)} == {
        *OTHER_FIXED,
        *OTHER_LIMITS,
        "network",
    }


def test_load_is_bounded_by_sandbox_count_and_memory_budget() -> None:
    settings = PoolSettings(min_ready=0, max_sandboxes=3, memory_budget_mib=100)
    assert fits(settings, Load(3, 100))
    assert not fits(settings, Load(4, 100))
    assert not fits(settings, Load(3, 101))
    assert fits(PoolSettings(min_ready=0, max_sandboxes=3), Load(3, 1_000_000))


def test_only_as_many_idle_sandboxes_are_evicted_as_needed() -> None:
    settings = PoolSettings(min_ready=0, max_sandboxes=3, memory_budget_mib=100)
    idle = [Load(1, 10), Load(1, 10), Load(1, 10)]
    assert eviction_count(settings, Load(3, 100), idle) == 0
    assert eviction_count(settings, Load(4, 100), idle) == 1
    assert eviction_count(settings, Load(4, 120), idle) == 2
    assert eviction_count(settings, Load(4, 131), idle) is None


def test_start_backoff_doubles_up_to_thirty_seconds() -> None:
    assert [start_backoff_s(failures) for failures in (1, 2, 3, 5, 6, 10_000)] == [
        1,
        2,
        4,
        16,
        30,
        30,
    ]


def test_retry_delay_is_the_start_duration_if_there_is_room_and_the_queue_time_otherwise() -> None:
    times = {"start_s": 2.5, "lease_s": 20.0}
    assert retry_after_s(has_room=True, waiting_ahead=9, leased_count=4, **times) == 2.5
    assert retry_after_s(has_room=False, waiting_ahead=9, leased_count=4, **times) == 50
    assert retry_after_s(has_room=False, waiting_ahead=0, leased_count=0, **times) == 20
    assert (
        retry_after_s(has_room=True, waiting_ahead=0, leased_count=0, start_s=0.1, lease_s=20) == 1
    )
    assert retry_after_s(has_room=False, waiting_ahead=999, leased_count=1, **times) == 300
