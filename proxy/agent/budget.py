"""The budget of a run: its own limits, the daily budget of the client's key, and the usage of
replies that are cut off."""

import asyncio
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
    Spent,
    StopReason,
    exceeded_command_limit,
    exceeded_limit,
    exceeded_spending_limit,
)
from policies.limits import mib_to_bytes as in_bytes
from policies.prices import (
    CHARS_PER_TOKEN,
    TokenUsage,
    cost_usd,
    estimate_prompt_tokens,
    parse_usage,
)
from proxy.agent.events import (
    ModelCallFailed,
    ModelDelta,
    OnDelta,
    ReasoningDelta,
    TextDelta,
    TokenCount,
    ToolCallDelta,
)
from proxy.agent.history import text_of
from proxy.agent.model import ChatModel, Completion, CompletionStopped, Message, Model
from proxy.agent.prose import estimated_tokens
from proxy.agent.task import AgentTask, BudgetAccount
from proxy.errors import BackendError
from sandbox_runtime.egress.limits import TrafficQuota
from sandbox_runtime.tools.base import Observation


class RunBudget:
    """The limits and expenses of one run. The run reserves each expense in advance and reports the
    actual expense afterwards."""

    def __init__(self, task: AgentTask, limits: Limits, started_at: float) -> None:
        """`limits` are those of the profile, with the wall time cut to the client's deadline.
        `started_at` is the start of the run, by time.monotonic."""
        self.turns = 0
        self.commands = 0
        self.cpu_s = 0.0
        self.cost_usd: float | None = None
        """Cost of all model calls; None before the first call, and if the cost of a call is
        unknown."""
        self._limits = limits
        self._tariff = task.limits.tariff
        self.partial_completion: Completion | None = None
        """The reply to the last call as far as it arrived, if an error or a cancellation cut it
        off; else None."""
        reservation = task.limits.reservation
        self._daily_budget = DailyBudgetUse(reservation.account) if reservation else None
        self._started_at = started_at
        self._call_count = 0
        self._tokens = 0
        self._prompt_tokens = 0
        self._output_chars = 0
        self._traffic_quotas: list[tuple[TrafficQuota, int]] = []
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
        return sum(traffic.bytes - before for traffic, before in self._traffic_quotas)

    async def reserve_turn(
        self, messages: list[Message], trajectory_tokens: int
    ) -> StopReason | None:
        """Reserve a model call with tools. Return the limit that rules the call out, or None."""
        if stop := exceeded_limit(self._limits, self._spent_so_far(trajectory_tokens)):
            return stop
        return await self._reserve_call(messages)

    async def reserve_out_of_band_call(self, messages: Sequence[Message]) -> StopReason | None:
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

    async def call(
        self, model: ChatModel, body: Mapping[str, Any], on_delta: OnDelta | None
    ) -> Completion:
        """Make a model call, even over budget: the final-answer call is always allowed. If
        `on_delta` raises CompletionStopped, return the reply as far as it arrived. A reply that an
        error or a cancellation cuts off is counted as far as it arrived, and is left in
        `partial_completion`. Raises BackendError."""
        expected = self._expected_expense(body["messages"]) if self._daily_budget else Expense()
        reservation = (
            await self._daily_budget.pop_call_reservation(expected) if self._daily_budget else None
        )
        recorder = CompletionRecorder(body["messages"])
        self.partial_completion = None
        try:
            reply = await model.complete(body, on_delta and recorder.wrap(on_delta))
        except CompletionStopped as stopped:
            reply = recorder.completion(stopped)
        except (BackendError, asyncio.CancelledError) as error:
            with anyio.CancelScope(shield=True):
                was_made = not isinstance(error, BackendError)
                await self._count_cut_off_reply(recorder, reservation, was_made=was_made)
            raise
        await self._count_call(_token_usage(reply, body["messages"]), reservation)
        return reply

    async def _count_call(self, tokens: TokenUsage, reservation: Reservation | None) -> None:
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

    async def _count_cut_off_reply(
        self, recorder: "CompletionRecorder", reservation: Reservation | None, *, was_made: bool
    ) -> None:
        """Count a reply that was cut off. `was_made` is True if the backend may have worked on the
        call. The expected expense then stays reserved even if nothing arrived."""
        if recorder.has_begun:
            self.partial_completion = recorder.completion()
            await self._count_call(parse_usage(self.partial_completion.usage), reservation)
        elif self._daily_budget and reservation and not was_made:
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
        left = in_bytes(self._limits.max_egress_mib) - self.egress_bytes
        if self._daily_budget:
            left = self._daily_budget.egress_bytes_left(left, self.egress_bytes)
        self._cap_traffic(left)

    def _cap_traffic(self, max_bytes: int) -> None:
        for traffic, _ in self._traffic_quotas[-1:]:  # earlier sandboxes are lost
            traffic.limit_further_traffic(max_bytes)

    def reminder(self) -> str:
        """Return a line that names the budgets that are nearly used up, or "". Each budget is named
        once at each of a few levels."""
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
            if self._daily_budget.bounds_egress:
                self._cap_traffic(0)
            await self._daily_budget.refund_unused_calls()
            await self._daily_budget.count_egress(self.egress_bytes)

    def _spent_so_far(self, trajectory_tokens: int = 0) -> Spent:
        next_prompt = TokenUsage(prompt=self._prompt_tokens, cached=self._prompt_tokens)
        return Spent(
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


class MeteredModel:
    """A model whose calls are counted by a RunBudget."""

    def __init__(self, model: Model, budget: RunBudget, timeout_s: float | None = None) -> None:
        """`timeout_s` is the read timeout of the backend; None keeps the model's own."""
        self._model = model if timeout_s is None else model.with_timeout(timeout_s)
        self._budget = budget

    async def complete(self, body: Mapping[str, Any], on_delta: OnDelta | None) -> Completion:
        """See `ChatModel` and `RunBudget.call`."""
        return await self._budget.call(self._model, body, on_delta)

    @property
    def partial_completion(self) -> Completion | None:
        """See `RunBudget`."""
        return self._budget.partial_completion

    async def reserve_out_of_band_call(self, messages: Sequence[Message]) -> bool:
        """Reserve a call in addition to the turn's own call. Return False if the budget rules the
        call out."""
        return await self._budget.reserve_out_of_band_call(messages) is None


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
    def bounds_egress(self) -> bool:
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
        return min(limit, in_bytes(mib) - self._spent.egress_bytes - uncounted)

    def low_budget_hints(self) -> dict[str, LowBudgetHint]:
        return low_daily_budget_hints(self._account.budget, self._spent)

    async def _reserve(self, expected: Expense) -> Reservation | None:
        reservation = await self._account.take(expected)
        self._spent = reservation.spent
        if reservation.exhausted_kind:
            self._stop_reason = STOP_REASONS[reservation.exhausted_kind]
            return None
        return reservation


class CompletionRecorder:
    """Records the deltas of one reply, so that a Completion can be built of a reply that is cut
    off."""

    def __init__(self, messages: Sequence[Message]) -> None:
        """`messages` is the prompt."""
        self._messages = messages
        self._text_deltas: list[TextDelta] = []
        self._reasoning_texts: list[str] = []
        self._piece_count = 0
        self._chars = 0
        self._token_count: TokenCount | None = None
        self._counted_pieces = 0
        """Number of pieces that had arrived when the backend last sent a token count."""

    def wrap(self, on_delta: OnDelta) -> OnDelta:
        """Return a callback that records each delta before it calls `on_delta`."""

        async def record(delta: ModelDelta) -> None:
            self._record(delta)
            await on_delta(delta)

        return record

    @property
    def has_begun(self) -> bool:
        """True once a piece of the reply has arrived."""
        return self._piece_count > 0

    def completion(self, stopped: CompletionStopped | None = None) -> Completion:
        """Return the reply as far as it arrived. `stopped` is the cause if the proxy cut it off.

        Tool calls are left out, except in a reply that was cut off because of too many calls. That
        reply keeps its complete calls and one further call, so that `Turn.has_more_calls` is
        True."""
        if stopped is not None and stopped.cause == "many_calls" and stopped.partial_completion:
            return replace(stopped.partial_completion, usage=self._usage(), stop_cause="many_calls")
        reasoning = "".join(self._reasoning_texts)
        text = "".join(delta.text for delta in self._text_deltas)
        if stopped is not None and stopped.stop_string:
            text = text.partition(stopped.stop_string)[0]
        message: Message = {"role": "assistant", "content": text}
        if reasoning:
            message |= {"reasoning": reasoning, "reasoning_content": reasoning}
        is_complete = stopped is not None and stopped.cause in ("stop", "no_call")
        sent = stopped.partial_completion if stopped else None
        return Completion(
            message=message,
            finish_reason="stop" if is_complete else "length",
            usage=self._usage(),
            choice={**(sent.choice if sent else {}), **self._choice_fields(stopped)},
            response=sent.response if sent else {},
            stop_cause=stopped.cause if stopped else None,
        )

    def _record(self, delta: ModelDelta) -> None:
        match delta:
            case TextDelta(text):
                self._text_deltas.append(delta)
                self._count_piece(text)
            case ReasoningDelta(text):
                self._reasoning_texts.append(text)
                self._count_piece(text)
            case ToolCallDelta(arguments=text):
                self._count_piece(text)
            case TokenCount():
                self._token_count, self._counted_pieces = delta, self._piece_count
            case ModelCallFailed():  # its tokens still count
                self._text_deltas.clear()
                self._reasoning_texts.clear()

    def _count_piece(self, text: str) -> None:
        self._piece_count += 1
        self._chars += len(text)

    def _usage(self) -> dict[str, Any]:
        """Return the usage so far: from the backend's running count, else an estimate that is
        marked `estimated`."""
        if self._token_count is not None:
            prompt = self._token_count.prompt
            completion = self._token_count.completion + self._piece_count - self._counted_pieces
        else:
            prompt = estimate_prompt_tokens(self._messages)
            completion = estimated_tokens(self._piece_count, self._chars)
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }
        return usage if self._token_count is not None else {**usage, "estimated": True}

    def _choice_fields(self, stopped: CompletionStopped | None) -> dict[str, Any]:
        contents = [
            d.logprobs.get("content") for d in self._text_deltas if isinstance(d.logprobs, dict)
        ]
        found = [tokens for tokens in contents if isinstance(tokens, list)]
        choice: dict[str, Any] = {}
        if found:
            choice["logprobs"] = {"content": [token for tokens in found for token in tokens]}
        if stopped is not None and stopped.stop_string is not None:
            choice["stop_reason"] = stopped.stop_string
        return choice


def _token_usage(reply: Completion, messages: list[Message]) -> TokenUsage:
    """Return the tokens of a call, or an estimate if the backend reports neither tokens nor a
    cost."""
    tokens = parse_usage(reply.usage)
    if tokens.total or tokens.reported_usd is not None:
        return tokens
    completion = len(text_of(reply.message)) // CHARS_PER_TOKEN
    return TokenUsage(prompt=estimate_prompt_tokens(messages), completion=completion)
