"""What the key that a run is for may still spend today."""

from typing import Protocol

from policies.budgets import DailyBudget, Expense, Receipt


class Account(Protocol):
    """One key's. Runs of it at the same time, in other processes too, see what each has taken."""

    @property
    def budget(self) -> DailyBudget:
        """What bounds it."""

    async def take(self, expected: Expense) -> Receipt:
        """Count an expense before it is made, unless something of the budget is used up: the
        receipt then says what."""

    async def overdraw(self, expected: Expense) -> Receipt:
        """The same for what must be spent in any case."""

    async def settle(self, receipt: Receipt, actual: Expense) -> None:
        """Say what an expense has come to; until then it counts as it was expected."""
