"""What keys have spent outlives the process, is seen by all, and ends at midnight."""

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import anyio
import pytest
from sqlalchemy.exc import OperationalError

from policies.budgets import DAY_S, DailyBudget, Expense
from proxy.store.store import Store

OWNER = "somebody"
MORNING = 20_000 * DAY_S + 3600.0
FIVE = DailyBudget(commands=5)
ONE = Expense(commands=1)


class Clock:
    """The time of day, set by hand."""

    def __init__(self) -> None:
        self.now = MORNING

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[Store]:
    with closing(Store(tmp_path, now=clock)) as opened:
        yield opened


async def test_an_expense_counts_as_expected_until_it_is_settled(store: Store) -> None:
    account = store.spending.account(OWNER, DailyBudget(tokens=100))
    receipt = await account.take(Expense(tokens=60))
    assert (receipt.exhausted, receipt.spent) == (None, Expense(tokens=60))
    assert await store.spending.spent(OWNER) == Expense(tokens=60)
    await account.settle(receipt, Expense(tokens=20, cost_usd=0.5))
    assert await store.spending.spent(OWNER) == Expense(tokens=20, cost_usd=0.5)


@pytest.mark.parametrize("kind", ["take", "overdraw"])
async def test_what_is_taken_while_its_request_is_cancelled_is_given_back(
    kind: str, store: Store
) -> None:
    account = store.spending.account(OWNER, DailyBudget(tokens=100))
    taking = asyncio.create_task(getattr(account, kind)(Expense(tokens=60)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # the store's thread has it now
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    assert await store.spending.spent(OWNER) == Expense()


async def test_what_is_settled_while_its_request_is_cancelled_is_counted(store: Store) -> None:
    account = store.spending.account(OWNER, DailyBudget(tokens=100))
    receipt = await account.take(Expense(tokens=60))
    settling = asyncio.create_task(account.settle(receipt, Expense(tokens=5)))
    await asyncio.sleep(0)
    settling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await settling
    assert await store.spending.spent(OWNER) == Expense(tokens=5)


async def test_what_is_used_up_is_named_and_nothing_is_taken(store: Store) -> None:
    account = store.spending.account(OWNER, DailyBudget(tokens=100))
    await account.take(Expense(tokens=100))
    refused = await account.take(Expense(tokens=1))
    assert (refused.exhausted, refused.spent.tokens) == ("tokens", 100)
    assert await store.spending.spent(OWNER) == Expense(tokens=100)


async def test_what_must_be_spent_is_counted_beyond_the_budget(store: Store) -> None:
    account = store.spending.account(OWNER, DailyBudget(tokens=100))
    for _ in range(2):
        receipt = await account.overdraw(Expense(tokens=70))
    assert (receipt.exhausted, receipt.spent.tokens) == (None, 140)


async def test_each_key_has_a_day_of_its_own(store: Store) -> None:
    await store.spending.account(OWNER, FIVE).overdraw(Expense(commands=9))
    assert (await store.spending.account("another", FIVE).take(ONE)).exhausted is None


async def test_two_processes_at_once_never_take_more_than_there_is(
    tmp_path: Path, store: Store, clock: Clock
) -> None:
    refused = 0
    with closing(Store(tmp_path, now=clock)) as other:

        async def take(each: Store) -> None:
            nonlocal refused
            receipt = await each.spending.account(OWNER, FIVE).take(ONE)
            refused += receipt.exhausted is not None

        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                for _ in range(10):
                    tasks.start_soon(take, store)
                    tasks.start_soon(take, other)
    assert (refused, (await store.spending.spent(OWNER)).commands) == (15, 5)


async def test_a_restart_forgets_nothing(tmp_path: Path, clock: Clock) -> None:
    with closing(Store(tmp_path, now=clock)) as before:
        await before.spending.account(OWNER, FIVE).overdraw(Expense(commands=5))
    with closing(Store(tmp_path, now=clock)) as after:
        assert (await after.spending.account(OWNER, FIVE).take(ONE)).exhausted == "commands"


async def test_every_budget_begins_anew_at_midnight(store: Store, clock: Clock) -> None:
    account = store.spending.account(OWNER, FIVE)
    await account.overdraw(Expense(commands=5))
    clock.now += store.spending.until_midnight_s() - 1
    assert (await account.take(ONE)).exhausted == "commands"
    clock.now += 1
    assert (await account.take(ONE)).spent == ONE


async def test_what_began_before_midnight_counts_to_the_day_it_began(
    store: Store, clock: Clock
) -> None:
    account = store.spending.account(OWNER, DailyBudget(tokens=100))
    receipt = await account.take(Expense(tokens=50))
    clock.now += store.spending.until_midnight_s()
    await store.sweep()
    await account.settle(receipt, Expense(tokens=80))
    assert await store.spending.spent(OWNER) == Expense()
    clock.now -= DAY_S
    assert await store.spending.spent(OWNER) == Expense(tokens=80)


async def test_days_that_are_over_are_forgotten(store: Store, clock: Clock) -> None:
    await store.spending.account(OWNER, FIVE).overdraw(ONE)
    clock.now += 2 * DAY_S
    await store.sweep()
    clock.now -= 2 * DAY_S
    assert await store.spending.spent(OWNER) == Expense()


async def test_a_store_that_fails_gives_no_receipt(tmp_path: Path, store: Store) -> None:
    with closing(sqlite3.connect(tmp_path / "store.sqlite3")) as vandal:
        vandal.execute("DROP TABLE spending")
        vandal.commit()
    with pytest.raises(OperationalError):
        await store.spending.account(OWNER, FIVE).take(ONE)


async def test_who_leaves_while_it_is_settled_has_spent_it_all_the_same(store: Store) -> None:
    account = store.spending.account(OWNER, FIVE)
    receipt = await account.take(ONE)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await account.settle(receipt, Expense(commands=1, cpu_s=2.5))
    assert await store.spending.spent(OWNER) == Expense(commands=1, cpu_s=2.5)
