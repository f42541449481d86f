"""The spending of each API key per day, for daily budgets. `owner` identifies the key."""

import asyncio
from collections.abc import Callable
from dataclasses import asdict, dataclass

import anyio
from sqlalchemy import Connection, delete, select

from policies.budgets import (
    EXPENSE_KINDS,
    DailyBudget,
    Expense,
    Reservation,
    day_number,
    exhausted_kind,
    seconds_until_midnight,
)
from proxy.store.database import Database, upsert
from proxy.store.tables import SPENDING

_AMOUNT_COLUMNS = [SPENDING.c[kind] for kind in EXPENSE_KINDS]
KEEP_DAYS = 1
"""Days that a past day's row is stored: a run may begin before midnight and settle after it."""


@dataclass(frozen=True, slots=True)
class StoredBudgetAccount:
    """The daily budget of one key, with its expenses in the database. See `BudgetAccount`."""

    repository: "SpendingRepository"
    owner: str
    budget: DailyBudget

    async def take(self, expected: Expense) -> Reservation:
        return await self._take(self.budget, expected)

    async def overdraw(self, expected: Expense) -> Reservation:
        return await self._take(DailyBudget(), expected)

    async def settle(self, reservation: Reservation, actual: Expense) -> None:
        adding = asyncio.ensure_future(self._replace_expected(reservation, actual))
        with anyio.CancelScope(shield=True):  # the expense counts even if the client disconnects
            try:
                await asyncio.shield(adding)
            except asyncio.CancelledError:
                await adding
                raise

    async def _take(self, budget: DailyBudget, expected: Expense) -> Reservation:
        taking = asyncio.ensure_future(self.repository.take(self.owner, budget, expected))
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            # The store may have counted the expense, but no caller gets the reservation.
            with anyio.CancelScope(shield=True):
                await self._replace_expected(await taking, Expense())
            raise

    async def _replace_expected(self, reservation: Reservation, actual: Expense) -> None:
        await self.repository.add(self.owner, reservation.day, actual - reservation.expected)


class SpendingRepository:
    """Stores the spending of all keys, one row per key and day.

    The check of a budget and the expense are one transaction, so that concurrent requests, even in
    several processes, cannot spend the same remainder of a budget.
    """

    def __init__(self, database: Database, now: Callable[[], float]) -> None:
        self._database = database
        self._now = now

    def account(self, owner: str, budget: DailyBudget) -> StoredBudgetAccount:
        """Return the account that reserves and counts the expenses of a key."""
        return StoredBudgetAccount(self, owner, budget)

    def seconds_until_midnight(self) -> float:
        """Return the seconds until midnight UTC, when all budgets are reset."""
        return seconds_until_midnight(self._now())

    async def take(self, owner: str, budget: DailyBudget, expected: Expense) -> Reservation:
        """Count an expected expense and return its reservation. If the budget is exhausted, count
        nothing; the reservation then names the exhausted kind."""

        def transaction(connection: Connection) -> Reservation:
            day = day_number(self._now())
            spent = _day_expense(connection, owner, day)
            if kind := exhausted_kind(budget, spent, expected):
                return Reservation(day, Expense(), spent, exhausted_kind=kind)
            _add_expense(connection, owner, day, expected)
            return Reservation(day, expected, spent + expected)

        return await self._database.write(transaction)

    async def add(self, owner: str, day: int, expense: Expense) -> None:
        """Add an expense, usually the difference between the actual and the expected expense, to a
        day's sum."""
        await self._database.write(lambda connection: _add_expense(connection, owner, day, expense))

    async def spent_today(self, owner: str) -> Expense:
        """Return today's expense of a key."""
        return await self._database.read(
            lambda connection: _day_expense(connection, owner, day_number(self._now()))
        )

    def expire(self, connection: Connection, now: int, forget_before: int) -> bool:
        """Delete the rows of past days. See Repository."""
        connection.execute(delete(SPENDING).where(SPENDING.c.day < day_number(now) - KEEP_DAYS))
        return False


def _day_expense(connection: Connection, owner: str, day: int) -> Expense:
    query = select(*_AMOUNT_COLUMNS).where(SPENDING.c.owner == owner, SPENDING.c.day == day)
    row = connection.execute(query).one_or_none()
    return Expense(*row) if row else Expense()


def _add_expense(connection: Connection, owner: str, day: int, expense: Expense) -> None:
    row = upsert(connection, SPENDING).values(owner=owner, day=day, **asdict(expense))
    summed = {kind: SPENDING.c[kind] + row.excluded[kind] for kind in EXPENSE_KINDS}
    connection.execute(row.on_conflict_do_update(index_elements=["owner", "day"], set_=summed))
