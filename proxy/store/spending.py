"""The spending of each key on each day, against its daily budget."""

import asyncio
from collections.abc import Callable
from dataclasses import asdict, dataclass

import anyio
from sqlalchemy import Connection, delete, select
from sqlalchemy.dialects.sqlite import insert

from policies.budgets import (
    EXPENSE_KINDS,
    DailyBudget,
    Expense,
    Reservation,
    day_number,
    exhausted,
    seconds_until_midnight,
)
from proxy.store.database import Database
from proxy.store.tables import SPENDING

_AMOUNTS = [SPENDING.c[kind] for kind in EXPENSE_KINDS]
KEEP_DAYS = 1
"""How long the row of a day is kept: runs begun before midnight are settled after it."""


@dataclass(frozen=True, slots=True)
class StoredBudgetAccount:
    """The account of one key. See `BudgetAccount`."""

    shelf: "SpendingRepository"
    owner: str
    budget: DailyBudget

    async def take(self, expected: Expense) -> Reservation:
        return await self._take(self.budget, expected)

    async def overdraw(self, expected: Expense) -> Reservation:
        return await self._take(DailyBudget(), expected)

    async def settle(self, receipt: Reservation, actual: Expense) -> None:
        adding = asyncio.ensure_future(self._add(receipt, actual))
        with anyio.CancelScope(shield=True):  # a client that disconnects now has spent it too
            try:
                await asyncio.shield(adding)
            except asyncio.CancelledError:
                await adding
                raise

    async def _take(self, budget: DailyBudget, expected: Expense) -> Reservation:
        taking = asyncio.ensure_future(self.shelf.take(self.owner, budget, expected))
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            # The store may have counted it already, and nobody gets the receipt.
            with anyio.CancelScope(shield=True):
                await self._add(await taking, Expense())
            raise

    async def _add(self, receipt: Reservation, actual: Expense) -> None:
        await self.shelf.add(self.owner, receipt.day, actual - receipt.expected)


class SpendingRepository:
    """Keeps a row for each key and day. The check and the expense are one transaction, so that
    concurrent requests, of several processes too, cannot exceed a budget together."""

    def __init__(self, database: Database, now: Callable[[], float]) -> None:
        self._database = database
        self._now = now

    def account(self, owner: str, budget: DailyBudget) -> StoredBudgetAccount:
        """Return the account of a key."""
        return StoredBudgetAccount(self, owner, budget)

    def until_midnight_s(self) -> float:
        """Return the seconds until all budgets begin anew."""
        return seconds_until_midnight(self._now())

    async def take(self, owner: str, budget: DailyBudget, expected: Expense) -> Reservation:
        """Count an expense unless the budget is used up."""

        def work(connection: Connection) -> Reservation:
            day = day_number(self._now())
            spent = _spent(connection, owner, day)
            if kind := exhausted(budget, spent, expected):
                return Reservation(day, Expense(), spent, exhausted=kind)
            _add(connection, owner, day, expected)
            return Reservation(day, expected, spent + expected)

        return await self._database.write(work)

    async def add(self, owner: str, day: int, more: Expense) -> None:
        """Add the difference between the actual and the expected expense."""
        await self._database.write(lambda connection: _add(connection, owner, day, more))

    async def spent(self, owner: str) -> Expense:
        """Return what a key has spent today."""
        return await self._database.read(
            lambda connection: _spent(connection, owner, day_number(self._now()))
        )

    def expire(self, connection: Connection, now: int, forget_before: int) -> bool:
        """Delete the rows of past days. See Shelf."""
        connection.execute(delete(SPENDING).where(SPENDING.c.day < day_number(now) - KEEP_DAYS))
        return False  # a row for each key and day


def _spent(connection: Connection, owner: str, day: int) -> Expense:
    query = select(*_AMOUNTS).where(SPENDING.c.owner == owner, SPENDING.c.day == day)
    row = connection.execute(query).one_or_none()
    return Expense(*row) if row else Expense()


def _add(connection: Connection, owner: str, day: int, more: Expense) -> None:
    row = insert(SPENDING).values(owner=owner, day=day, **asdict(more))
    summed = {kind: SPENDING.c[kind] + row.excluded[kind] for kind in EXPENSE_KINDS}
    connection.execute(row.on_conflict_do_update(index_elements=["owner", "day"], set_=summed))
