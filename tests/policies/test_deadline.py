"""Division of the time before a deadline among turns, final answer and artifact collection."""

import math

import pytest

from policies.limits import StopReason, TimePlan, time_plan

WALL_TIME, DEADLINE = StopReason.WALL_TIME, StopReason.DEADLINE


@pytest.mark.parametrize(
    ("wall_time_s", "deadline_s", "plan"),
    [
        (1800, None, TimePlan(1800, math.inf, 1800, WALL_TIME)),
        (1800, 100, TimePlan(75, 95, 100, DEADLINE)),
        (1800, 30, TimePlan(18.5, 28.5, 30, DEADLINE)),
        (1800, 10, TimePlan(4.5, 9.5, 10, DEADLINE)),
        (1800, 600, TimePlan(470, 590, 600, DEADLINE)),
        (1800, 1900, TimePlan(1770, 1890, 1900, DEADLINE)),
        (1800, 10_000, TimePlan(1800, 9990, 10_000, WALL_TIME)),
        (75, 100, TimePlan(75, 95, 100, WALL_TIME)),
    ],
)
def test_earlier_of_run_time_limit_and_client_deadline_applies(
    wall_time_s: float, deadline_s: float | None, plan: TimePlan
) -> None:
    assert time_plan(wall_time_s, deadline_s) == plan


@pytest.mark.parametrize("deadline_s", [0.001, 1, 30, 599, 86_400])
def test_turns_end_before_the_final_answer_which_ends_before_the_deadline(
    deadline_s: float,
) -> None:
    plan = time_plan(math.inf, deadline_s)
    assert 0 < plan.work_s < plan.answer_s < deadline_s


@pytest.mark.parametrize(
    ("deadline_s", "spent_s", "seconds"),
    [
        (None, 0, 120),
        (None, 1000, 120),
        (None, 1760, 40),
        (None, 1790, 30),
        (None, 5000, 30),
        (100, 10, 90),
        (100, 96, 5),
        (100, 200, 5),
        (1, 1, 0.05),
    ],
)
def test_file_collection_gets_the_remaining_time_but_at_least_the_reserved_time(
    deadline_s: float | None, spent_s: float, seconds: float
) -> None:
    assert time_plan(1800, deadline_s).collection_time_s(spent_s) == pytest.approx(seconds)
