"""What a run holds while it lasts: a claim to one sandbox, and to another should that be lost."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from sandbox_runtime.guest_sandbox import GuestSandbox
from sandbox_runtime.pool.claim import Claim


@dataclass(frozen=True, slots=True)
class Loan:
    """One sandbox, lent or about to be."""

    claim: Claim
    acquiring: asyncio.Task[GuestSandbox]


class PoolLease:
    """A claim to one sandbox, which may still be starting; see `Lease`."""

    def __init__(self, borrow: Callable[[], Loan], give_back: Callable[[Loan], None]) -> None:
        self._borrow = borrow
        self._give_back = give_back
        self._loan = borrow()
        self._is_over = False

    async def sandbox(self) -> GuestSandbox:
        loan = self._loan
        sandbox = await asyncio.shield(loan.acquiring)
        if sandbox.lost is None or self._is_over:
            return sandbox
        if loan is self._loan:  # nobody else has noticed before
            self._give_back(loan)
            self._loan = self._borrow()
        return await asyncio.shield(self._loan.acquiring)

    def end(self) -> None:
        """Give it back."""
        self._is_over = True
        self._give_back(self._loan)
