"""Reminders of low budgets, at a few levels."""

import pytest

from policies.budgets import (
    DailyBudget,
    Expense,
    LowBudgetHint,
    low_budget_hints,
    low_daily_budget_hints,
    reminder,
)
from policies.limits import Limits, SpentAmounts

LIMITS = Limits(
    max_turns=100,
    max_run_seconds=1000,
    max_total_tokens=100_000,
    max_cost_usd=1.0,
    max_commands=100,
)


def reminder_of(limits: Limits, spent: SpentAmounts) -> str:
    return reminder(low_budget_hints(limits, spent), {})


def test_sufficient_budget_gives_no_reminder() -> None:
    assert reminder_of(LIMITS, SpentAmounts()) == ""
    assert reminder_of(LIMITS, SpentAmounts(turns=79, wall_time_s=799, tokens=79_999)) == ""


@pytest.mark.parametrize(
    ("spent", "line"),
    [
        (SpentAmounts(turns=80), "[20 steps remain.]"),
        (SpentAmounts(turns=97), "[3 steps remain. Hand in what you have.]"),
        (SpentAmounts(turns=99), "[1 step remains. Hand in what you have.]"),
        (SpentAmounts(wall_time_s=850), "[2 min remain.]"),
        (SpentAmounts(wall_time_s=945), "[55 s remain. Hand in what you have.]"),
        (SpentAmounts(tokens=88_000), "[12,000 tokens remain.]"),
        (SpentAmounts(cost_usd=0.97), "[0.03 USD for model calls remain. Hand in what you have.]"),
        (SpentAmounts(commands=99), "[1 tool call remains. Hand in what you have.]"),
        (SpentAmounts(cpu_s=6600), "[10 min of processor time remain.]"),
        (
            SpentAmounts(egress_bytes=8190 << 20),
            "[2 MiB of network traffic remain. Hand in what you have.]",
        ),
        (
            SpentAmounts(tool_output_chars=1_990_000),
            "[10,000 characters of tool output remain. Hand in what you have.]",
        ),
        (
            SpentAmounts(turns=97, wall_time_s=850),
            "[3 steps and 2 min remain. Hand in what you have.]",
        ),
        (
            SpentAmounts(turns=80, wall_time_s=850, tokens=88_000),
            "[20 steps, 2 min and 12,000 tokens remain.]",
        ),
    ],
)
def test_reminder_names_the_budgets_that_are_low(spent: SpentAmounts, line: str) -> None:
    assert reminder_of(LIMITS, spent) == line


def test_budget_reminder_is_not_repeated_at_the_same_level() -> None:
    hints = {"turns": LowBudgetHint("19 steps", 1)}
    assert reminder(hints, {"turns": 1}) == ""
    assert reminder(hints, {}) == "[19 steps remain.]"
    hints |= {"tokens": LowBudgetHint("7 tokens", 2)}
    assert reminder(hints, {"turns": 1, "tokens": 2}) == ""
    reminder_text = reminder(hints, {"turns": 1, "tokens": 1})
    assert reminder_text == "[19 steps and 7 tokens remain. Hand in what you have.]"


def test_unlimited_budget_gives_no_reminder() -> None:
    assert reminder_of(Limits(max_cost_usd=None), SpentAmounts(cost_usd=1000.0)) == ""
    assert reminder_of(Limits(max_egress_mib=0), SpentAmounts()) == ""


def test_daily_budget_is_named_in_the_reminder() -> None:
    budget = DailyBudget(runs=1, tokens=1000, cpu_s=100)
    hints = low_daily_budget_hints(budget, Expense(runs=1, tokens=990, cpu_s=10))
    assert reminder(hints, {}) == "[10 tokens of today's budget remain. Hand in what you have.]"
