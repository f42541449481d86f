"""When a run must end."""

from dataclasses import replace

import pytest

from policies.limits import Limits, Spent, StopReason, exceeded

LIMITS = Limits(max_turns=3, wall_time_s=10.0, max_tokens=100, max_tool_output_chars=1000)
JUST_LESS = Spent(turns=2, wall_time_s=9.99, tokens=99, tool_output_chars=999)


def test_below_every_limit_a_run_goes_on() -> None:
    assert exceeded(LIMITS, Spent()) is None
    assert exceeded(LIMITS, JUST_LESS) is None


@pytest.mark.parametrize(
    ("spent", "stop"),
    [
        (replace(JUST_LESS, turns=3), StopReason.MAX_TURNS),
        (replace(JUST_LESS, wall_time_s=10.0), StopReason.WALL_TIME),
        (replace(JUST_LESS, tokens=100), StopReason.TOKEN_BUDGET),
        (replace(JUST_LESS, tool_output_chars=1000), StopReason.TOOL_OUTPUT_BUDGET),
        (Spent(99, 99.0, 999, 9999), StopReason.MAX_TURNS),
    ],
)
def test_a_limit_that_is_reached_says_which(spent: Spent, stop: StopReason) -> None:
    assert exceeded(LIMITS, spent) is stop


def test_a_limit_of_nothing_ends_a_run_before_it_begins() -> None:
    assert exceeded(Limits(max_turns=0), Spent()) is StopReason.MAX_TURNS
