"""What requests spend of their key's day: asked for before they begin, counted as answers pass."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from starlette.requests import Request

from policies.budgets import NAMES, DailyBudget, Expense, Receipt
from policies.json_bounds import decoded
from policies.prices import Counted, Tariff, cost_usd, counted, expected_tokens
from proxy.agent.model import Relayed, RelayedBody
from proxy.agent.task import Account, Task
from proxy.api.dependencies import authorize, services
from proxy.errors import BadRequestError, BudgetError
from proxy.models.prices import Prices
from proxy.models.streamed_reply import UsageReader


async def charged(request: Request, task: Task, runs: int) -> Task:
    """The task with what its model costs and what its key may spend, if there is anything left.

    Raises BudgetError, and BadRequestError where a cost is bounded that nobody knows.
    """
    parts, per_day = services(request), task.profile.per_day
    if task.alone:
        per_day, runs = per_day.of_model_calls, 0
    if per_day.cost_usd is None and task.profile.limits.max_cost_usd is None:
        tariff = parts.prices.own(task.model)
    else:
        tariff = await _known(parts.prices, task.model)
    if tariff is not None:
        task = replace(task, tariff=tariff)
    if not per_day.is_set:
        return task
    account = _account(request, per_day)
    receipt = await _taken(request, account, Expense(runs=runs))
    return replace(task, account=account, charge=receipt)


async def relayed(
    request: Request,
    budget: DailyBudget,
    body: Mapping[str, Any] | bytes | None,
    ask: Callable[[], Awaitable[Relayed]],
) -> Relayed:
    """The backend's answer, counted where there is a budget; None is a body that was not read.

    Raises BudgetError, BadRequestError, and what `ask` raises."""
    if not budget.is_set:
        return await ask()
    asked = _read(body) if isinstance(body, bytes) else body or {}
    model = str(asked.get("model", ""))
    prices = services(request).prices
    tariff = prices.own(model) if budget.cost_usd is None else await _known(prices, model)
    account = _account(request, budget)
    prompt = Counted(prompt=expected_tokens(asked))
    receipt = await _taken(request, account, _expense(prompt, tariff))
    try:
        answer = await ask()
    except Exception:
        await account.settle(receipt, Expense())
        raise
    if answer.status >= 400:
        await account.settle(receipt, Expense())
        return answer
    return replace(answer, body=_Counted(answer, account, receipt, tariff))


class _Counted:
    """A body on its way; what it tells of its usage is the expense."""

    def __init__(
        self, answer: Relayed, account: Account, receipt: Receipt, tariff: Tariff | None
    ) -> None:
        self._body: RelayedBody = answer.body
        self._pieces: AsyncIterator[bytes] = aiter(answer.body)
        self._reader = UsageReader(answer.headers.get("content-type", ""))
        self._account = account
        self._receipt = receipt
        self._tariff = tariff
        self._is_settled = False

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        try:
            piece = await anext(self._pieces)
        except StopAsyncIteration:
            await self._settle()
            raise
        self._reader.feed(piece)
        return piece

    async def aclose(self) -> None:
        """See RelayedBody."""
        try:
            await self._body.aclose()
        finally:
            await self._settle()

    async def _settle(self) -> None:
        if self._is_settled:
            return
        self._is_settled = True
        self._reader.end()
        tokens = counted(self._reader.usage)
        if not tokens.total and tokens.reported_usd is None:
            # Not told: what was expected, and about what has passed.
            tokens = Counted(prompt=self._receipt.expected.tokens, completion=self._reader.made)
        await self._account.settle(self._receipt, _expense(tokens, self._tariff))


def _account(request: Request, budget: DailyBudget) -> Account:
    """Under the key's name: a new secret is no new day, nor is one that a client makes up."""
    return services(request).store.spending.account(authorize(request).name, budget)


async def _taken(request: Request, account: Account, expected: Expense) -> Receipt:
    receipt = await account.take(expected)
    if receipt.used_up:
        wait_s = services(request).store.spending.until_midnight_s()
        raise BudgetError(NAMES[receipt.used_up], wait_s)
    return receipt


async def _known(prices: Prices, model: str) -> Tariff:
    if tariff := await prices.find(model):
        return tariff
    # A bound that nobody can hold must not be passed over in silence.
    raise BadRequestError(
        f"What the model {model!r} costs is not known here, and cost is bounded: whoever runs this"
        " server can name its price (backend.prices).",
        param="model",
        code="model_price_unknown",
    )


def _expense(tokens: Counted, tariff: Tariff | None) -> Expense:
    return Expense(tokens=tokens.total, cost_usd=cost_usd(tariff, tokens) or 0.0)


def _read(body: bytes) -> Mapping[str, Any]:
    try:
        asked = decoded(body)
    except (ValueError, RecursionError):
        return {}
    return asked if isinstance(asked, dict) else {}
