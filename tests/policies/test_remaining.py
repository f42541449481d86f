"""The model is told what remains when that is little, at few points."""

import pytest

from policies.budgets import (
    DailyBudget,
    Expense,
    LowBudgetHint,
    low_budget_hints,
    low_daily_budget_hints,
    reminder,
)
from policies.limits import Limits, Spent

LIMITS = Limits(
    max_turns=100,
    max_run_seconds=1000,
    max_total_tokens=100_000,
    max_cost_usd=1.0,
    max_commands=100,
)


def told(limits: Limits, spent: Spent) -> str:
    return reminder(low_budget_hints(limits, spent), {})


def test_while_there_is_enough_nothing_is_said() -> None:
    assert told(LIMITS, Spent()) == ""
    assert told(LIMITS, Spent(turns=79, wall_time_s=799, tokens=79_999)) == ""


@pytest.mark.parametrize(
    ("spent", "line"),
    [
        (Spent(turns=80), "[20 steps remain.]"),
        (Spent(turns=97), "[3 steps remain. Hand in what you have.]"),
        (Spent(turns=99), "[1 step remains. Hand in what you have.]"),
        (Spent(wall_time_s=850), "[2 min remain.]"),
        (Spent(wall_time_s=945), "[55 s remain. Hand in what you have.]"),
        (Spent(tokens=88_000), "[12,000 tokens remain.]"),
        (Spent(cost_usd=0.97), "[0.03 USD for model calls remain. Hand in what you have.]"),
        (Spent(commands=99), "[1 tool call remains. Hand in what you have.]"),
        (Spent(cpu_s=6600), "[10 min of processor time remain.]"),
        (
            Spent(egress_bytes=8190 << 20),
            "[2 MiB of network traffic remain. Hand in what you have.]",
        ),
        (
            Spent(tool_output_chars=1_990_000),
            "[10,000 characters of tool output remain. Hand in what you have.]",
        ),
        (
            Spent(turns=97, wall_time_s=850),
            "[3 steps and 2 min remain. Hand in what you have.]",
        ),
        (
            Spent(turns=80, wall_time_s=850, tokens=88_000),
            "[20 steps, 2 min and 12,000 tokens remain.]",
        ),
    ],
)
def test_reminder_names_the_low_budget(spent: Spent, line: str) -> None:
    assert told(LIMITS, spent) == line


def test_the_same_is_not_said_again() -> None:
    left = {"turns": LowBudgetHint("19 steps", 1)}
    assert reminder(left, {"turns": 1}) == ""
    assert reminder(left, {}) == "[19 steps remain.]"
    left |= {"tokens": LowBudgetHint("7 tokens", 2)}
    assert reminder(left, {"turns": 1, "tokens": 2}) == ""
    again = reminder(left, {"turns": 1, "tokens": 1})
    assert again == "[19 steps and 7 tokens remain. Hand in what you have.]"


def test_unlimited_budget_gives_no_reminder() -> None:
    assert told(Limits(max_cost_usd=None), Spent(cost_usd=1000.0)) == ""
    assert told(Limits(max_egress_mib=0), Spent()) == ""


def test_the_keys_day_is_told_of_as_such() -> None:
    budget = DailyBudget(runs=1, tokens=1000, cpu_s=100)
    left = low_daily_budget_hints(budget, Expense(runs=1, tokens=990, cpu_s=10))
    assert reminder(left, {}) == "[10 tokens of today's budget remain. Hand in what you have.]"
