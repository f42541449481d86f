"""A deadline leaves time for the answer and for the way back."""

import math

import pytest

from policies.deadline import TimePlan, time_plan
from policies.limits import StopReason

WALL_TIME, DEADLINE = StopReason.WALL_TIME, StopReason.DEADLINE


@pytest.mark.parametrize(
    ("wall_time_s", "deadline_s", "plan"),
    [
        (1800, None, TimePlan(1800, math.inf, WALL_TIME)),
        (1800, 100, TimePlan(75, 95, DEADLINE)),
        (1800, 30, TimePlan(18.5, 28.5, DEADLINE)),
        (1800, 10, TimePlan(4.5, 9.5, DEADLINE)),
        (1800, 600, TimePlan(470, 590, DEADLINE)),
        (1800, 1900, TimePlan(1770, 1890, DEADLINE)),
        (1800, 10_000, TimePlan(1800, 9990, WALL_TIME)),
        (75, 100, TimePlan(75, 95, WALL_TIME)),
    ],
)
def test_the_nearer_end_holds(wall_time_s: float, deadline_s: float | None, plan: TimePlan) -> None:
    assert time_plan(wall_time_s, deadline_s) == plan


@pytest.mark.parametrize("deadline_s", [0.001, 1, 30, 599, 86_400])
def test_work_ends_before_the_answer_and_that_before_the_deadline(deadline_s: float) -> None:
    plan = time_plan(math.inf, deadline_s)
    assert 0 < plan.work_s < plan.answer_s < deadline_s
