"""What a run holds while it lasts: a claim to one sandbox, and to another should that be lost."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from sandbox_runtime.errors import SandboxGoneError
from sandbox_runtime.guest_sandbox import GuestSandbox
from sandbox_runtime.pool.claim import Claim


@dataclass(slots=True)
class Loan:
    """One sandbox, lent or about to be."""

    claim: Claim
    acquiring: asyncio.Task[GuestSandbox]
    is_taken: bool = False
    """Whether it was asked for."""


class PoolLease:
    """A claim to one sandbox, which may still be starting; see `Lease`."""

    def __init__(
        self,
        borrow: Callable[[], Loan],
        take: Callable[[Claim], None],
        give_back: Callable[[Loan], None],
    ) -> None:
        self._borrow = borrow
        self._take = take
        self._give_back = give_back
        self._loan = borrow()
        self._is_over = False

    async def sandbox(self) -> GuestSandbox:
        loan = self._loan
        sandbox = await self._taken(loan)
        if sandbox.lost is None or self._is_over:
            return sandbox
        if loan is self._loan:  # nobody else has noticed before
            self._give_back(loan)
            self._loan = self._borrow()
        return await self._taken(self._loan)

    async def _taken(self, loan: Loan) -> GuestSandbox:
        sandbox = await asyncio.shield(loan.acquiring)
        if not loan.is_taken:
            if self._is_over:
                raise SandboxGoneError("the lease is over")
            self._take(loan.claim)
            loan.is_taken = True
        return sandbox

    def end(self) -> None:
        """Give it back."""
        self._is_over = True
        self._give_back(self._loan)
