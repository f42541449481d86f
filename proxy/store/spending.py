"""What each key has spent on which day."""

import asyncio
from collections.abc import Callable
from dataclasses import asdict, dataclass

import anyio
from sqlalchemy import Connection, delete, select
from sqlalchemy.dialects.sqlite import insert

from policies.budgets import KINDS, DailyBudget, Expense, Receipt, day_of, until_midnight_s, used_up
from proxy.store.database import Database
from proxy.store.tables import SPENDING

_AMOUNTS = [SPENDING.c[kind] for kind in KINDS]
KEEP_DAYS = 1
"""Beyond its own: what was begun before midnight is settled after it."""


@dataclass(frozen=True, slots=True)
class DayAccount:
    """See `Account`."""

    shelf: "SpendingShelf"
    owner: str
    budget: DailyBudget

    async def take(self, expected: Expense) -> Receipt:
        return await self._take(self.budget, expected)

    async def overdraw(self, expected: Expense) -> Receipt:
        return await self._take(DailyBudget(), expected)

    async def settle(self, receipt: Receipt, actual: Expense) -> None:
        adding = asyncio.ensure_future(self._add(receipt, actual))
        with anyio.CancelScope(shield=True):  # a client that leaves now has spent it all the same
            try:
                await asyncio.shield(adding)
            except asyncio.CancelledError:
                await adding
                raise

    async def _take(self, budget: DailyBudget, expected: Expense) -> Receipt:
        taking = asyncio.ensure_future(self.shelf.take(self.owner, budget, expected))
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            # The store may have counted it already, and nobody gets the receipt.
            with anyio.CancelScope(shield=True):
                await self._add(await taking, Expense())
            raise

    async def _add(self, receipt: Receipt, actual: Expense) -> None:
        await self.shelf.add(self.owner, receipt.day, actual - receipt.expected)


class SpendingShelf:
    """A row for each key and day; to look and to take is one transaction, so that of several at
    once, in several processes too, each sees what those before it have taken."""

    def __init__(self, database: Database, now: Callable[[], float]) -> None:
        self._database = database
        self._now = now

    def account(self, owner: str, budget: DailyBudget) -> DayAccount:
        """That key's."""
        return DayAccount(self, owner, budget)

    def until_midnight_s(self) -> float:
        """When every budget begins anew."""
        return until_midnight_s(self._now())

    async def take(self, owner: str, budget: DailyBudget, expected: Expense) -> Receipt:
        """Count an expense unless the budget is used up."""

        def work(connection: Connection) -> Receipt:
            day = day_of(self._now())
            spent = _spent(connection, owner, day)
            if kind := used_up(budget, spent, expected):
                return Receipt(day, Expense(), spent, used_up=kind)
            _add(connection, owner, day, expected)
            return Receipt(day, expected, spent + expected)

        return await self._database.write(work)

    async def add(self, owner: str, day: int, more: Expense) -> None:
        """Count what is more, or less, than was expected."""
        await self._database.write(lambda connection: _add(connection, owner, day, more))

    async def spent(self, owner: str) -> Expense:
        """By that key today."""
        return await self._database.read(
            lambda connection: _spent(connection, owner, day_of(self._now()))
        )

    def expire(self, connection: Connection, now: int, forget_before: int) -> bool:
        """Forget the days that are over."""
        connection.execute(delete(SPENDING).where(SPENDING.c.day < day_of(now) - KEEP_DAYS))
        return False  # a row for each key and day


def _spent(connection: Connection, owner: str, day: int) -> Expense:
    query = select(*_AMOUNTS).where(SPENDING.c.owner == owner, SPENDING.c.day == day)
    row = connection.execute(query).one_or_none()
    return Expense(*row) if row else Expense()


def _add(connection: Connection, owner: str, day: int, more: Expense) -> None:
    row = insert(SPENDING).values(owner=owner, day=day, **asdict(more))
    summed = {kind: SPENDING.c[kind] + row.excluded[kind] for kind in KINDS}
    connection.execute(row.on_conflict_do_update(index_elements=["owner", "day"], set_=summed))
