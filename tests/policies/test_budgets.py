"""Daily budgets of keys."""

from dataclasses import fields, replace

import pytest

from policies.budgets import (
    BUDGET_LABELS,
    DAY_S,
    EXPENSE_KINDS,
    STOP_REASONS,
    DailyBudget,
    Expense,
    day_number,
    exhausted_kind,
    limits_by_kind,
    seconds_until_midnight,
)
from policies.prompts import WHY_NO_MORE_TOOLS

BUDGET = DailyBudget(
    runs=2, tokens=100, cost_usd=0.5, commands=3, cpu_s=1.5, egress_mib=2, tool_output_chars=50
)
JUST_LESS = Expense(2, 99, 0.49, 2, 1.4, (2 << 20) - 1, 49)
RUN = Expense(runs=1)


def test_budget_without_limits_is_never_exhausted() -> None:
    assert not DailyBudget().is_set
    assert exhausted_kind(DailyBudget(), Expense(9, 9, 9, 9, 9, 9, 9), RUN) is None


@pytest.mark.parametrize("kind", [kind for kind in EXPENSE_KINDS if kind != "runs"])
def test_budget_is_exhausted_when_the_limit_of_a_kind_is_reached(kind: str) -> None:
    assert exhausted_kind(BUDGET, JUST_LESS, Expense(commands=1)) is None
    limit = limits_by_kind(BUDGET)[kind]
    assert exhausted_kind(BUDGET, replace(JUST_LESS, **{kind: limit}), Expense()) == kind


def test_daily_budget_of_runs_applies_only_to_new_runs() -> None:
    assert exhausted_kind(BUDGET, Expense(runs=1), RUN) is None
    assert exhausted_kind(BUDGET, Expense(runs=1), Expense(runs=2)) == "runs"
    assert exhausted_kind(BUDGET, Expense(runs=2), RUN) == "runs"
    assert exhausted_kind(BUDGET, Expense(runs=2), Expense(tokens=7)) is None


def test_daily_egress_budget_of_zero_does_not_end_a_run() -> None:
    assert exhausted_kind(DailyBudget(egress_mib=0), Expense(), RUN) is None


def test_requests_without_a_sandbox_have_only_token_and_cost_limits() -> None:
    assert BUDGET.for_model_calls == DailyBudget(tokens=100, cost_usd=0.5)
    assert not DailyBudget(commands=1).for_model_calls.is_set


def test_every_kind_of_expense_has_a_limit_a_label_and_a_stop_reason() -> None:
    assert len(EXPENSE_KINDS) == len(fields(DailyBudget))
    assert set(BUDGET_LABELS) == set(EXPENSE_KINDS) == {*STOP_REASONS, "runs"}
    assert set(STOP_REASONS.values()) <= set(WHY_NO_MORE_TOOLS)


def test_expenses_are_added_and_subtracted_kind_by_kind() -> None:
    assert Expense(runs=1, cpu_s=0.5) + Expense(cpu_s=0.25) == Expense(runs=1, cpu_s=0.75)
    assert Expense(tokens=5) - Expense(tokens=7) == Expense(tokens=-2)


def test_budget_day_ends_at_midnight_utc() -> None:
    assert (day_number(DAY_S - 0.5), seconds_until_midnight(DAY_S - 0.5)) == (0, 0.5)
    assert (day_number(DAY_S), seconds_until_midnight(DAY_S)) == (1, DAY_S)
