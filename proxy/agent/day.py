"""The day of a run's key, as the run sees it."""

import anyio

from policies.budgets import STOPS, Expense, Left, Receipt, little_left_today, used_up
from policies.limits import StopReason
from policies.limits import egress_bytes as in_bytes
from proxy.agent.account import Account


class Day:
    """Takes out of it, and remembers what it was told."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self._spent = Expense()
        """By the key, when it was last asked."""
        self._calls: list[Receipt] = []
        """For calls that are to be made, the next one's last."""
        self._command: Receipt | None = None
        self._egress_counted = 0
        self._stop: StopReason | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing more can be taken out of it, by what was heard last."""
        return self._stop is not None or bool(used_up(self._account.budget, self._spent, Expense()))

    @property
    def bounds_egress(self) -> bool:
        return self._account.budget.egress_mib is not None

    async def take_call(self, expected: Expense) -> StopReason | None:
        receipt = None if self._stop else await self._taken(expected)
        self._calls += [receipt] if receipt else []
        return self._stop

    async def call_receipt(self, expected: Expense) -> Receipt:
        """The one that was taken before, else one for a call that must be made."""
        if self._calls:
            return self._calls.pop()
        receipt = await self._account.overdraw(expected)
        self._spent = receipt.spent
        return receipt

    async def give_back(self) -> None:
        """Return what was taken for calls that were not made after all."""
        while self._calls:
            await self.settle(self._calls.pop(), Expense())

    async def take_command(self) -> StopReason | None:
        if not self._stop:
            self._command = await self._taken(Expense(commands=1))
        return self._stop

    async def end_command(self, actual: Expense, egress_bytes: int) -> None:
        receipt, self._command = self._command, None
        if receipt:
            new = egress_bytes - self._egress_counted
            self._egress_counted = egress_bytes
            await self.settle(receipt, actual + Expense(egress_bytes=new))

    async def count_egress(self, egress_bytes: int) -> None:
        if new := egress_bytes - self._egress_counted:
            self._egress_counted = egress_bytes
            with anyio.CancelScope(shield=True):  # a client that leaves has had it all the same
                await self._account.overdraw(Expense(egress_bytes=new))

    async def settle(self, receipt: Receipt, actual: Expense) -> None:
        self._spent += actual - receipt.expected
        await self._account.settle(receipt, actual)

    def egress_left(self, usual: int, egress_bytes: int) -> int:
        """What may still pass, the run itself having had so many bytes pass."""
        mib = self._account.budget.egress_mib
        if mib is None:
            return usual
        uncounted = egress_bytes - self._egress_counted
        return min(usual, in_bytes(mib) - self._spent.egress_bytes - uncounted)

    def little_left(self) -> dict[str, Left]:
        return little_left_today(self._account.budget, self._spent)

    async def _taken(self, expected: Expense) -> Receipt | None:
        receipt = await self._account.take(expected)
        self._spent = receipt.spent
        if receipt.used_up:
            self._stop = STOPS[receipt.used_up]
            return None
        return receipt
