"""The budget of a run: its own limits, and the daily budget of the client's key."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import anyio

from policies.budgets import (
    STOP_REASONS,
    Expense,
    LowBudgetHint,
    Reservation,
    exhausted_kind,
    low_budget_hints,
    low_daily_budget_hints,
    reminder,
)
from policies.limits import (
    Limits,
    SpentAmounts,
    StopReason,
    exceeded_command_limit,
    exceeded_limit,
    exceeded_spending_limit,
    mib_to_bytes,
)
from policies.prices import (
    TokenUsage,
    cost_usd,
    estimate_prompt_tokens,
)
from proxy.agent.model import Message
from proxy.agent.task import AgentTask, BudgetAccount
from sandbox_runtime.egress.limits import TrafficQuota
from sandbox_runtime.tools.base import Observation

_STATE = (
    *("turns", "commands", "cpu_s", "cost_usd", "_call_count", "_tokens", "_prompt_tokens"),
    *("_output_chars", "_reminded_levels"),
)
"""The attributes of RunBudget that checkpoints store."""


class RunBudget:
    """The limits and expenses of one run. The run reserves each expense in advance and reports the
    actual expense afterwards."""

    def __init__(self, task: AgentTask, limits: Limits, started_at: float) -> None:
        """`limits` are those of the profile. A run with tools has lowered `max_run_seconds` in them
        to keep the client's deadline. `started_at` is the start of the run, by time.monotonic."""
        self.turns = 0
        self.commands = 0
        self.cpu_s = 0.0
        self.cost_usd: float | None = None
        """Cost of all model calls; None before the first call, and if the cost of a call is
        unknown."""
        self._limits = limits
        self._tariff = task.limits.tariff
        reservation = task.limits.reservation
        self._daily_budget = DailyBudgetUse(reservation.account) if reservation else None
        self._started_at = started_at
        self._call_count = 0
        self._tokens = 0
        self._prompt_tokens = 0
        self._output_chars = 0
        self._traffic_quotas: list[tuple[TrafficQuota, int]] = []
        self._earlier_egress_bytes = 0
        """Bytes that the run transferred on earlier servers, before this one took it over."""
        self._reminded_levels: dict[str, int] = {}
        """By kind of budget, the highest level (see `LowBudgetHint`) at which the model was
        reminded."""

    @property
    def wall_time_s(self) -> float:
        return time.monotonic() - self._started_at

    @property
    def time_left_s(self) -> float:
        """Seconds left for turns, always more than 0."""
        return max(0.001, self._limits.max_run_seconds - self.wall_time_s)

    @property
    def egress_bytes(self) -> int:
        """Bytes transferred between the run's sandboxes and the network, in both directions."""
        counted = sum(traffic.bytes - before for traffic, before in self._traffic_quotas)
        return self._earlier_egress_bytes + counted

    def state(self) -> dict[str, Any]:
        """Return the expenses so far, as JSON values."""
        return {
            **{name: getattr(self, name) for name in _STATE},
            "_earlier_egress_bytes": self.egress_bytes,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the expenses of the run on its previous server. `state` is the value that the
        method `state` returned there."""
        for name in (*_STATE, "_earlier_egress_bytes"):
            setattr(self, name, state[name])
        if self._daily_budget:
            self._daily_budget.mark_egress_as_counted(self._earlier_egress_bytes)

    async def reserve_turn(
        self, messages: list[Message], trajectory_tokens: int
    ) -> StopReason | None:
        """Reserve a model call with tools. Return the limit that rules the call out, or None."""
        if stop := exceeded_limit(self._limits, self._spent_so_far(trajectory_tokens)):
            return stop
        return await self._reserve_call(messages)

    async def reserve_extra_call(self, messages: Sequence[Message]) -> StopReason | None:
        """Reserve a model call in addition to the turn's own call, which is still to be made.
        Return the limit that rules the call out, or None."""
        spent = self._spent_so_far()
        with_turn = replace(
            spent,
            tokens=spent.tokens + spent.next_tokens,
            cost_usd=spent.cost_usd + spent.next_cost_usd,
        )
        if stop := exceeded_spending_limit(self._limits, with_turn):
            return stop
        return await self._reserve_call(messages)

    async def _reserve_call(self, messages: Sequence[Message]) -> StopReason | None:
        return (
            await self._daily_budget.reserve_call(self._expected_expense(messages))
            if self._daily_budget
            else None
        )

    async def begin_call(self, messages: Sequence[Message]) -> Reservation | None:
        """Return the reservation of the next model call in the daily budget, or None if there is
        no daily budget. The call is allowed even if the budget is used up, because the last call of
        a run gives the answer."""
        if not self._daily_budget:
            return None
        return await self._daily_budget.pop_call_reservation(self._expected_expense(messages))

    async def end_call(self, tokens: TokenUsage, reservation: Reservation | None) -> None:
        """Count a call and settle its reservation."""
        cost = cost_usd(self._tariff, tokens)
        is_known = cost is not None and (self.cost_usd is not None or not self._call_count)
        self.cost_usd = (self.cost_usd or 0.0) + (cost or 0.0) if is_known else None
        self._call_count += 1
        self._tokens += tokens.total
        self._prompt_tokens = tokens.prompt
        if self._daily_budget and reservation:
            await self._daily_budget.settle(
                reservation, Expense(tokens=tokens.total, cost_usd=cost or 0.0)
            )

    async def refund_call(self, reservation: Reservation | None) -> None:
        """Refund the reservation of a call that failed before any of the reply arrived."""
        if self._daily_budget and reservation:
            await self._daily_budget.settle(reservation, Expense())

    def _expected_expense(self, messages: Sequence[Message]) -> Expense:
        prompt = TokenUsage(prompt=max(self._prompt_tokens, estimate_prompt_tokens(messages)))
        return Expense(tokens=prompt.prompt, cost_usd=cost_usd(self._tariff, prompt) or 0.0)

    async def reserve_command(self) -> StopReason | None:
        """Reserve and count a command. Return the limit that rules the command out, or None."""
        stop = exceeded_command_limit(self._limits, self._spent_so_far())
        if not stop and self._daily_budget:
            stop = await self._daily_budget.reserve_command()
        if not stop:
            self.commands += 1
            self._limit_egress()
        return stop

    async def settle_command(self, observation: Observation) -> None:
        """Count the expenses of a command that has ended."""
        self.cpu_s += observation.cpu_s
        self._output_chars += len(observation.text)
        if self._daily_budget:
            chars = len(observation.text)
            actual = Expense(commands=1, cpu_s=observation.cpu_s, tool_output_chars=chars)
            await self._daily_budget.end_command(actual, self.egress_bytes)

    def track_traffic(self, traffic: TrafficQuota) -> None:
        """Count the traffic of a sandbox from now on."""
        self._traffic_quotas.append((traffic, traffic.bytes))
        self._limit_egress()

    def _limit_egress(self) -> None:
        """Cap the traffic of the current sandbox at the bytes that are left."""
        left = mib_to_bytes(self._limits.max_egress_mib) - self.egress_bytes
        if self._daily_budget:
            left = self._daily_budget.egress_bytes_left(left, self.egress_bytes)
        self._cap_traffic(left)

    def _cap_traffic(self, max_bytes: int) -> None:
        for traffic, _ in self._traffic_quotas[-1:]:  # earlier sandboxes are lost
            traffic.limit_further_traffic(max_bytes)

    def reminder(self) -> str:
        """Return a line that tells the model which budgets are nearly used up, or "" if no budget
        has reached a new level (see `LowBudgetHint`) since the last line."""
        spent = self._spent_so_far()
        is_over = exceeded_limit(self._limits, spent) or (
            self._daily_budget and self._daily_budget.is_over
        )
        if is_over or not self._limits.tell_remaining:
            return ""
        left = low_budget_hints(self._limits, spent)
        if self._daily_budget:
            left |= self._daily_budget.low_budget_hints()
        line = reminder(left, self._reminded_levels)
        self._reminded_levels |= {
            kind: max(remaining.level, self._reminded_levels.get(kind, 0))
            for kind, remaining in left.items()
        }
        return line

    async def close(self) -> None:
        """Settle the daily budget, if there is one: refund the reservations of calls that were not
        made, and count the traffic since the last command. If the budget limits traffic, the
        sandbox is cut off from the network until its next run."""
        if self._daily_budget:
            if self._daily_budget.has_egress_limit:
                self._cap_traffic(0)
            await self._daily_budget.refund_unused_calls()
            await self._daily_budget.count_egress(self.egress_bytes)

    def _spent_so_far(self, trajectory_tokens: int = 0) -> SpentAmounts:
        next_prompt = TokenUsage(prompt=self._prompt_tokens, cached=self._prompt_tokens)
        return SpentAmounts(
            turns=self.turns,
            wall_time_s=self.wall_time_s,
            tokens=self._tokens,
            tool_output_chars=self._output_chars,
            cost_usd=self.cost_usd or 0.0,
            commands=self.commands,
            cpu_s=self.cpu_s,
            egress_bytes=self.egress_bytes,
            trajectory_tokens=trajectory_tokens,
            next_tokens=self._prompt_tokens,
            next_cost_usd=cost_usd(self._tariff, next_prompt) or 0.0,
        )


class DailyBudgetUse:
    """One run's use of its key's daily budget: makes reservations in the account and settles
    them."""

    def __init__(self, account: BudgetAccount) -> None:
        self._account = account
        self._spent = Expense()
        """Expenses of the key as of the last reservation, and this run's settlements since then."""
        self._call_reservations: list[Reservation] = []
        """Reservations of calls that are still to be made. The next call uses the last
        reservation."""
        self._command_reservation: Reservation | None = None
        self._counted_egress_bytes = 0
        self._stop_reason: StopReason | None = None

    @property
    def is_over(self) -> bool:
        """True if a part of the daily budget is used up, as of the last reservation."""
        return self._stop_reason is not None or bool(
            exhausted_kind(self._account.budget, self._spent, Expense())
        )

    @property
    def has_egress_limit(self) -> bool:
        return self._account.budget.egress_mib is not None

    async def reserve_call(self, expected: Expense) -> StopReason | None:
        reservation = None if self._stop_reason else await self._reserve(expected)
        self._call_reservations += [reservation] if reservation else []
        return self._stop_reason

    async def pop_call_reservation(self, expected: Expense) -> Reservation:
        """Remove and return the reservation of the next call. If none was made, reserve `expected`
        even if the daily budget is used up, and return that reservation."""
        if self._call_reservations:
            return self._call_reservations.pop()
        reservation = await self._account.overdraw(expected)
        self._spent = reservation.spent
        return reservation

    async def refund_unused_calls(self) -> None:
        """Refund the reservations of calls that were not made."""
        while self._call_reservations:
            await self.settle(self._call_reservations.pop(), Expense())

    async def reserve_command(self) -> StopReason | None:
        if not self._stop_reason:
            self._command_reservation = await self._reserve(Expense(commands=1))
        return self._stop_reason

    async def end_command(self, actual: Expense, egress_bytes: int) -> None:
        reservation, self._command_reservation = self._command_reservation, None
        if reservation:
            new = egress_bytes - self._counted_egress_bytes
            self._counted_egress_bytes = egress_bytes
            await self.settle(reservation, actual + Expense(egress_bytes=new))

    def mark_egress_as_counted(self, egress_bytes: int) -> None:
        """Do not count the first `egress_bytes` bytes of the run's traffic, because the previous
        server has counted them."""
        self._counted_egress_bytes = egress_bytes

    async def count_egress(self, egress_bytes: int) -> None:
        if new := egress_bytes - self._counted_egress_bytes:
            self._counted_egress_bytes = egress_bytes
            with anyio.CancelScope(shield=True):  # traffic counts even if the client disconnects
                await self._account.overdraw(Expense(egress_bytes=new))

    async def settle(self, reservation: Reservation, actual: Expense) -> None:
        self._spent += actual - reservation.expected
        await self._account.settle(reservation, actual)

    def egress_bytes_left(self, limit: int, egress_bytes: int) -> int:
        """Return the number of bytes that may still pass, at most `limit`. `egress_bytes` is the
        run's traffic so far."""
        mib = self._account.budget.egress_mib
        if mib is None:
            return limit
        uncounted = egress_bytes - self._counted_egress_bytes
        return min(limit, mib_to_bytes(mib) - self._spent.egress_bytes - uncounted)

    def low_budget_hints(self) -> dict[str, LowBudgetHint]:
        return low_daily_budget_hints(self._account.budget, self._spent)

    async def _reserve(self, expected: Expense) -> Reservation | None:
        reservation = await self._account.take(expected)
        self._spent = reservation.spent
        if reservation.exhausted_kind:
            self._stop_reason = STOP_REASONS[reservation.exhausted_kind]
            return None
        return reservation
