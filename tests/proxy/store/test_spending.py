"""Daily spending: shared by all processes, lasting across restarts, reset at midnight."""

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import anyio
import pytest
from sqlalchemy.exc import DBAPIError

from policies.budgets import DAY_S, DailyBudget, Expense
from proxy.store.store import Store
from tests.fakes.manual_clock import ManualClock
from tests.stores import connected, open_store

OWNER = "somebody"
MORNING = 20_000 * DAY_S + 3600.0
FIVE = DailyBudget(commands=5)
ONE = Expense(commands=1)


@pytest.fixture
def clock() -> ManualClock:
    clock = ManualClock()
    clock.advance(MORNING)
    return clock


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    with closing(open_store(tmp_path, now=clock.time)) as opened:
        yield opened


async def test_expense_counts_with_its_expected_amount_until_it_is_settled(store: Store) -> None:
    account = store.spending.account(OWNER, DailyBudget(tokens=100))
    reservation = await account.take(Expense(tokens=60))
    assert (reservation.exhausted_kind, reservation.spent) == (None, Expense(tokens=60))
    assert await store.spending.spent_today(OWNER) == Expense(tokens=60)
    await account.settle(reservation, Expense(tokens=20, cost_usd=0.5))
    assert await store.spending.spent_today(OWNER) == Expense(tokens=20, cost_usd=0.5)


@pytest.mark.parametrize("kind", ["take", "overdraw"])
async def test_expense_is_refunded_if_its_reservation_is_cancelled(kind: str, store: Store) -> None:
    account = store.spending.account(OWNER, DailyBudget(tokens=100))
    taking = asyncio.create_task(getattr(account, kind)(Expense(tokens=60)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # now the thread of the store executes it
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    assert await store.spending.spent_today(OWNER) == Expense()


async def test_cancellation_while_settling_keeps_the_actual_expense(store: Store) -> None:
    account = store.spending.account(OWNER, DailyBudget(tokens=100))
    reservation = await account.take(Expense(tokens=60))
    settling = asyncio.create_task(account.settle(reservation, Expense(tokens=5)))
    await asyncio.sleep(0)
    settling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await settling
    assert await store.spending.spent_today(OWNER) == Expense(tokens=5)


async def test_refused_reservation_names_the_exhausted_budget(store: Store) -> None:
    account = store.spending.account(OWNER, DailyBudget(tokens=100))
    await account.take(Expense(tokens=100))
    refused = await account.take(Expense(tokens=1))
    assert (refused.exhausted_kind, refused.spent.tokens) == ("tokens", 100)
    assert await store.spending.spent_today(OWNER) == Expense(tokens=100)


async def test_overdraw_beyond_the_budget_is_accepted_and_counted(store: Store) -> None:
    account = store.spending.account(OWNER, DailyBudget(tokens=100))
    for _ in range(2):
        reservation = await account.overdraw(Expense(tokens=70))
    assert (reservation.exhausted_kind, reservation.spent.tokens) == (None, 140)


async def test_each_key_has_its_own_budget(store: Store) -> None:
    await store.spending.account(OWNER, FIVE).overdraw(Expense(commands=9))
    assert (await store.spending.account("another", FIVE).take(ONE)).exhausted_kind is None


async def test_concurrent_processes_never_exceed_the_budget(
    tmp_path: Path, store: Store, clock: ManualClock
) -> None:
    refused = 0
    with closing(open_store(tmp_path, now=clock.time)) as other:

        async def take(each: Store) -> None:
            nonlocal refused
            reservation = await each.spending.account(OWNER, FIVE).take(ONE)
            refused += reservation.exhausted_kind is not None

        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                for _ in range(10):
                    tasks.start_soon(take, store)
                    tasks.start_soon(take, other)
    assert (refused, (await store.spending.spent_today(OWNER)).commands) == (15, 5)


async def test_spending_survives_a_restart(tmp_path: Path, clock: ManualClock) -> None:
    with closing(open_store(tmp_path, now=clock.time)) as before:
        await before.spending.account(OWNER, FIVE).overdraw(Expense(commands=5))
    with closing(open_store(tmp_path, now=clock.time)) as after:
        assert (await after.spending.account(OWNER, FIVE).take(ONE)).exhausted_kind == "commands"


async def test_budgets_are_reset_at_midnight(store: Store, clock: ManualClock) -> None:
    account = store.spending.account(OWNER, FIVE)
    await account.overdraw(Expense(commands=5))
    clock.advance(store.spending.seconds_until_midnight() - 1)
    assert (await account.take(ONE)).exhausted_kind == "commands"
    clock.advance(1)
    assert (await account.take(ONE)).spent == ONE


async def test_expense_counts_on_the_day_of_its_reservation(
    store: Store, clock: ManualClock
) -> None:
    account = store.spending.account(OWNER, DailyBudget(tokens=100))
    reservation = await account.take(Expense(tokens=50))
    clock.advance(store.spending.seconds_until_midnight())
    await store.sweep()
    await account.settle(reservation, Expense(tokens=80))
    assert await store.spending.spent_today(OWNER) == Expense()
    clock.advance(-DAY_S)
    assert await store.spending.spent_today(OWNER) == Expense(tokens=80)


async def test_spending_of_past_days_is_deleted(store: Store, clock: ManualClock) -> None:
    await store.spending.account(OWNER, FIVE).overdraw(ONE)
    clock.advance(2 * DAY_S)
    await store.sweep()
    clock.advance(-2 * DAY_S)
    assert await store.spending.spent_today(OWNER) == Expense()


async def test_failing_store_raises_instead_of_reserving_an_expense(
    tmp_path: Path, store: Store
) -> None:
    with connected(tmp_path) as database:
        database.exec_driver_sql("DROP TABLE spending")
    with pytest.raises(DBAPIError):
        await store.spending.account(OWNER, FIVE).take(ONE)


async def test_expense_settled_in_a_cancelled_scope_counts(store: Store) -> None:
    account = store.spending.account(OWNER, FIVE)
    reservation = await account.take(ONE)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await account.settle(reservation, Expense(commands=1, cpu_s=2.5))
    assert await store.spending.spent_today(OWNER) == Expense(commands=1, cpu_s=2.5)
