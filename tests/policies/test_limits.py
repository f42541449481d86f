"""Limits at which a run ends."""

from dataclasses import replace

import pytest

from policies.limits import Limits, SpentAmounts, StopReason, exceeded_command_limit, exceeded_limit

LIMITS = Limits(
    max_turns=3,
    max_run_seconds=10.0,
    max_total_tokens=100,
    max_cost_usd=0.5,
    max_commands=5,
    max_cpu_s=2.0,
    max_egress_mib=1,
    max_tool_output_chars=1000,
    max_trajectory_tokens=70,
)
JUST_LESS = SpentAmounts(
    turns=2,
    wall_time_s=9.99,
    tokens=99,
    tool_output_chars=999,
    cost_usd=0.49,
    commands=4,
    cpu_s=1.99,
    egress_bytes=(1 << 20) - 1,
    trajectory_tokens=70,
)


def test_run_below_every_limit_continues() -> None:
    assert exceeded_limit(LIMITS, SpentAmounts()) is None
    assert exceeded_limit(LIMITS, JUST_LESS) is None


@pytest.mark.parametrize(
    ("spent", "stop"),
    [
        (replace(JUST_LESS, turns=3), StopReason.MAX_TURNS),
        (replace(JUST_LESS, wall_time_s=10.0), StopReason.WALL_TIME),
        (replace(JUST_LESS, tokens=100), StopReason.TOKEN_BUDGET),
        (replace(JUST_LESS, trajectory_tokens=71), StopReason.TRAJECTORY_TOKENS),
        (replace(JUST_LESS, tool_output_chars=1000), StopReason.TOOL_OUTPUT_BUDGET),
        (replace(JUST_LESS, cost_usd=0.5), StopReason.COST_BUDGET),
        (replace(JUST_LESS, commands=5), StopReason.COMMAND_BUDGET),
        (replace(JUST_LESS, cpu_s=2.0), StopReason.CPU_BUDGET),
        (replace(JUST_LESS, egress_bytes=1 << 20), StopReason.EGRESS_BUDGET),
        (SpentAmounts(99, 99.0, 999, 9999), StopReason.MAX_TURNS),
    ],
)
def test_stop_reason_names_the_reached_limit(spent: SpentAmounts, stop: StopReason) -> None:
    assert exceeded_limit(LIMITS, spent) is stop


def test_limit_of_zero_turns_is_reached_at_the_start() -> None:
    assert exceeded_limit(Limits(max_turns=0), SpentAmounts()) is StopReason.MAX_TURNS


def test_next_prompt_counts_toward_the_token_and_cost_limits() -> None:
    spent = SpentAmounts(tokens=50, next_tokens=50, cost_usd=0.3, next_cost_usd=0.2)
    assert exceeded_limit(LIMITS, spent) is None
    assert exceeded_limit(LIMITS, replace(spent, next_tokens=51)) is StopReason.TOKEN_BUDGET
    assert exceeded_limit(LIMITS, replace(spent, next_cost_usd=0.21)) is StopReason.COST_BUDGET


def test_turn_and_token_limits_do_not_skip_the_remaining_commands_of_a_turn() -> None:
    assert exceeded_command_limit(LIMITS, SpentAmounts(99, 99.0, 999, 0, 9.9)) is None
    assert exceeded_command_limit(LIMITS, SpentAmounts(commands=5)) is StopReason.COMMAND_BUDGET


def test_egress_limit_of_zero_does_not_end_a_run() -> None:
    assert exceeded_limit(Limits(max_egress_mib=0), SpentAmounts()) is None
