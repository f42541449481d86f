"""Charges requests to the daily budget of the client's key: an expected expense in advance, and
later the usage that a relayed response reports."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from policies.budgets import BUDGET_LABELS, DailyBudget, Expense, Reservation
from policies.prices import Tariff, TokenUsage, cost_usd, estimate_prompt_tokens, parse_usage
from proxy.agent.model import UpstreamResponse, UpstreamResponseBody
from proxy.agent.task import BudgetAccount
from proxy.api.dependencies import ClientRequest, Services
from proxy.errors import BadRequestError, BudgetError
from proxy.models.streaming import UsageReader


async def metered_relay(
    request: ClientRequest,
    budget: DailyBudget,
    fields: Mapping[str, Any],
    send: Callable[[], Awaitable[UpstreamResponse]],
) -> UpstreamResponse:
    """Return the response of `send`. If the daily budget is set, the response's tokens are charged
    to it. `fields` are those of the request's body.

    Raises BudgetError, BadRequestError, and the errors of `send`.
    """
    if not budget.is_set:
        return await send()
    model = str(fields.get("model", ""))
    tariff = await find_tariff(request.services, model, is_required=budget.cost_usd is not None)
    prompt = TokenUsage(prompt=estimate_prompt_tokens(fields))
    account, reservation = await reserve_expense(request, budget, _expense(prompt, tariff))
    try:
        response = await send()
    except Exception:
        await account.settle(reservation, Expense())
        raise
    if response.status >= 400:
        await account.settle(reservation, Expense())
        return response
    return replace(response, body=_MeteredBody(response, account, reservation, tariff))


class _MeteredBody:
    """The body of a relayed response. When the body ends or is closed, the usage of the response is
    charged to the daily budget."""

    def __init__(
        self,
        response: UpstreamResponse,
        account: BudgetAccount,
        reservation: Reservation,
        tariff: Tariff | None,
    ) -> None:
        self._body: UpstreamResponseBody = response.body
        self._pieces: AsyncIterator[bytes] = aiter(response.body)
        self._reader = UsageReader(response.headers.get("content-type", ""))
        self._account = account
        self._reservation = reservation
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
        try:
            await self._body.aclose()
        finally:
            await self._settle()

    async def _settle(self) -> None:
        if self._is_settled:
            return
        self._is_settled = True
        self._reader.end()
        tokens = parse_usage(self._reader.usage)
        if not tokens.total and tokens.reported_usd is None:
            # The response reports no usage: charge estimates of the prompt and of the completion.
            tokens = TokenUsage(
                prompt=self._reservation.expected.tokens, completion=self._reader.estimated_tokens
            )
        await self._account.settle(self._reservation, _expense(tokens, self._tariff))


async def reserve_expense(
    request: ClientRequest, budget: DailyBudget, expected: Expense
) -> tuple[BudgetAccount, Reservation]:
    """Charge an expected expense to the daily budget of the client's key. Return the account and
    the reservation. Raises BudgetError.

    The account belongs to the key's name, so a new secret under the same name has the same budget.
    """
    spending = request.services.store.spending
    account = spending.account(request.key.name, budget)
    reservation = await account.take(expected)
    if reservation.exhausted_kind:
        raise BudgetError(
            BUDGET_LABELS[reservation.exhausted_kind], spending.seconds_until_midnight()
        )
    return account, reservation


async def find_tariff(services: Services, model: str, *, is_required: bool) -> Tariff | None:
    """Return the prices of a model, or None if the operator has not configured them. If
    `is_required`, also search litellm's table, and raise BadRequestError for unknown prices."""
    prices = services.prices
    if not is_required:
        return prices.configured_tariff(model)
    if tariff := await prices.find(model):
        return tariff
    raise BadRequestError(
        f"A limit on the cost applies to this request, and the server knows no prices of the model"
        f" {model!r}. The operator can set them in backend.prices.",
        param="model",
        code="model_price_unknown",
    )


def _expense(tokens: TokenUsage, tariff: Tariff | None) -> Expense:
    return Expense(tokens=tokens.total, cost_usd=cost_usd(tariff, tokens) or 0.0)
