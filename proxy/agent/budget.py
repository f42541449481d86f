"""What a run has spent and whether it may go on spending: its own limits, the daily budget of the
client's key, and the count of replies that are cut off."""

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
    exhausted,
    low_budget_hints,
    low_daily_budget_hints,
    reminder,
)
from policies.limits import (
    Limits,
    Spent,
    StopReason,
    exceeded,
    exceeded_command_limit,
    exceeded_spending,
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
    CallFailed,
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
    """The expenses of one run: it is asked before each expense, and told afterwards."""

    def __init__(self, task: AgentTask, limits: Limits, began: float) -> None:
        """`limits` are the run's own; their time is what the deadline leaves of it."""
        self.turns = 0
        self.commands = 0
        self.cpu_s = 0.0
        self.cost_usd: float | None = None
        """The cost of all model calls; None if the cost of one is unknown."""
        self._limits = limits
        self._tariff = task.limits.tariff
        self.unfinished: Completion | None = None
        """The reply to the last call as far as it came, if it was cut off."""
        reservation = task.limits.reservation
        self._day = DailyBudgetUse(reservation.account) if reservation else None
        self._began = began
        self._calls = 0
        self._tokens = 0
        self._prompt_tokens = 0
        self._output_chars = 0
        self._traffic_quotas: list[tuple[TrafficQuota, int]] = []
        self._told: dict[str, int] = {}

    @property
    def wall_time_s(self) -> float:
        return time.monotonic() - self._began

    @property
    def time_left_s(self) -> float:
        """The rest of the run's time for work, more than 0 in any case."""
        return max(0.001, self._limits.wall_time_s - self.wall_time_s)

    @property
    def egress_bytes(self) -> int:
        """The traffic between the run's sandboxes and the network, both ways."""
        return sum(traffic.bytes - before for traffic, before in self._traffic_quotas)

    # Model calls

    async def before_turn(
        self, messages: list[Message], trajectory_tokens: int
    ) -> StopReason | None:
        """Return the limit that leaves no room for another model call with tools, or None."""
        if stop := exceeded(self._limits, self._spent(trajectory_tokens)):
            return stop
        return await self._take_call(messages)

    async def before_aside(self, messages: Sequence[Message]) -> StopReason | None:
        """Return the limit that leaves no room for a call beside the turn's own call, which is
        still to be made, or None."""
        spent = self._spent()
        with_turn = replace(
            spent,
            tokens=spent.tokens + spent.next_tokens,
            cost_usd=spent.cost_usd + spent.next_cost_usd,
        )
        if stop := exceeded_spending(self._limits, with_turn):
            return stop
        return await self._take_call(messages)

    async def _take_call(self, messages: Sequence[Message]) -> StopReason | None:
        return await self._day.take_call(self._expected(messages)) if self._day else None

    async def call(
        self, model: ChatModel, body: Mapping[str, Any], hear: OnDelta | None
    ) -> Completion:
        """Make a model call, even if nothing is left: the last answer is always asked for. A reply
        that is cut off, by its listener or from outside, is counted as far as it came."""
        expected = self._expected(body["messages"]) if self._day else Expense()
        receipt = await self._day.call_receipt(expected) if self._day else None
        partial = PartialCompletion(body["messages"])
        self.unfinished = None
        try:
            reply = await model.complete(body, hear and partial.heard_by(hear))
        except CompletionStopped as stopped:
            reply = partial.reply(stopped)
        except (BackendError, asyncio.CancelledError) as error:
            with anyio.CancelScope(shield=True):
                await self._cut_off(partial, receipt, made=not isinstance(error, BackendError))
            raise
        await self._made(_counted(reply, body["messages"]), receipt)
        return reply

    async def _made(self, tokens: TokenUsage, receipt: Reservation | None) -> None:
        """Count a call that was made."""
        cost = cost_usd(self._tariff, tokens)
        is_known = cost is not None and (self.cost_usd is not None or not self._calls)
        self.cost_usd = (self.cost_usd or 0.0) + (cost or 0.0) if is_known else None
        self._calls += 1
        self._tokens += tokens.total
        self._prompt_tokens = tokens.prompt
        if self._day and receipt:
            await self._day.settle(receipt, Expense(tokens=tokens.total, cost_usd=cost or 0.0))

    async def _cut_off(
        self, partial: "PartialCompletion", receipt: Reservation | None, *, made: bool
    ) -> None:
        """Count a reply that was cut off. `made`: the backend had the call even if it sent
        nothing, so the receipt stays as it was expected."""
        if partial.has_begun:
            self.unfinished = partial.reply()
            await self._made(parse_usage(self.unfinished.usage), receipt)
        elif self._day and receipt and not made:
            await self._day.settle(receipt, Expense())

    def _expected(self, messages: Sequence[Message]) -> Expense:
        prompt = TokenUsage(prompt=max(self._prompt_tokens, estimate_prompt_tokens(messages)))
        return Expense(tokens=prompt.prompt, cost_usd=cost_usd(self._tariff, prompt) or 0.0)

    # Commands

    async def before_command(self) -> StopReason | None:
        """Count a command that is about to run. Return the limit that forbids it, or None."""
        stop = exceeded_command_limit(self._limits, self._spent())
        if not stop and self._day:
            stop = await self._day.take_command()
        if not stop:
            self.commands += 1
            self._limit_egress()
        return stop

    async def after_command(self, observation: Observation) -> None:
        """Count what a command has spent."""
        self.cpu_s += observation.cpu_s
        self._output_chars += len(observation.text)
        if self._day:
            chars = len(observation.text)
            actual = Expense(commands=1, cpu_s=observation.cpu_s, tool_output_chars=chars)
            await self._day.end_command(actual, self.egress_bytes)

    def watch(self, traffic: TrafficQuota) -> None:
        """Count the traffic of a sandbox that the run uses from now on."""
        self._traffic_quotas.append((traffic, traffic.bytes))
        self._limit_egress()

    def _limit_egress(self) -> None:
        """Let the current sandbox pass no more bytes than are left."""
        left = in_bytes(self._limits.max_egress_mib) - self.egress_bytes
        if self._day:
            left = self._day.egress_left(left, self.egress_bytes)
        self._allow(left)

    def _allow(self, count: int) -> None:
        for traffic, _ in self._traffic_quotas[-1:]:  # the sandboxes before it are lost
            traffic.cap(count)

    # What is left

    def reminder(self) -> str:
        """Return a line that tells the model which budgets are nearly used up, or "". Each budget
        is named at few levels, and once at each."""
        spent = self._spent()
        is_over = exceeded(self._limits, spent) or (self._day and self._day.is_over)
        if is_over or not self._limits.tell_remaining:
            return ""
        left = low_budget_hints(self._limits, spent)
        if self._day:
            left |= self._day.little_left()
        line = reminder(left, self._told)
        self._told |= {
            kind: max(each.level, self._told.get(kind, 0)) for kind, each in left.items()
        }
        return line

    async def close(self) -> None:
        """Count the traffic since the last command, and return receipts that were not used. If the
        daily budget bounds traffic, a sandbox that is kept passes nothing until its next run,
        which counts again."""
        if self._day:
            if self._day.bounds_egress:
                self._allow(0)
            await self._day.give_back()
            await self._day.count_egress(self.egress_bytes)

    def _spent(self, trajectory_tokens: int = 0) -> Spent:
        coming = TokenUsage(prompt=self._prompt_tokens, cached=self._prompt_tokens)
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
            next_cost_usd=cost_usd(self._tariff, coming) or 0.0,
        )


class MeteredModel:
    """A model whose calls are counted by a budget."""

    def __init__(self, model: Model, budget: RunBudget, timeout_s: float | None = None) -> None:
        """`timeout_s` is the longest silence of the backend; None keeps the model's own."""
        self._model = model if timeout_s is None else model.with_timeout(timeout_s)
        self._budget = budget

    async def complete(self, body: Mapping[str, Any], on_delta: OnDelta | None) -> Completion:
        """See Answering. If the reply is cut off, `unfinished` is what came of it."""
        return await self._budget.call(self._model, body, on_delta)

    @property
    def unfinished(self) -> Completion | None:
        """The reply to the last call as far as it came, if it was cut off."""
        return self._budget.unfinished

    async def allows(self, messages: Sequence[Message]) -> bool:
        """Return whether there is room for a call beside the turn's own."""
        return await self._budget.before_aside(messages) is None


class DailyBudgetUse:
    """One run's use of its key's daily budget: takes receipts from the account and settles them."""

    def __init__(self, account: BudgetAccount) -> None:
        self._account = account
        self._spent = Expense()
        """What the key had spent when the account last told."""
        self._calls: list[Reservation] = []
        """Receipts for calls that are still to be made; the next call's is the last."""
        self._command: Reservation | None = None
        self._egress_counted = 0
        self._stop: StopReason | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing more can be taken, by what the account last told."""
        return self._stop is not None or bool(
            exhausted(self._account.budget, self._spent, Expense())
        )

    @property
    def bounds_egress(self) -> bool:
        return self._account.budget.egress_mib is not None

    async def take_call(self, expected: Expense) -> StopReason | None:
        receipt = None if self._stop else await self._taken(expected)
        self._calls += [receipt] if receipt else []
        return self._stop

    async def call_receipt(self, expected: Expense) -> Reservation:
        """Return the receipt that was taken before, else one for a call that must be made."""
        if self._calls:
            return self._calls.pop()
        receipt = await self._account.overdraw(expected)
        self._spent = receipt.spent
        return receipt

    async def give_back(self) -> None:
        """Settle the receipts of calls that were not made after all."""
        while self._calls:
            await self.settle(self._calls.pop(), Expense())

    async def take_command(self) -> StopReason | None:
        if not self._stop:
            self._command = await self._taken(Expense(commands=1))
        return self._stop

    async def end_command(self, actual: Expense, egress_bytes: int) -> None:
        receipt, self._command = self._command, None
        if receipt:
            new = egress_bytes - self._egress_counted
            self._egress_counted = egress_bytes
            await self.settle(receipt, actual + Expense(egress_bytes=new))

    async def count_egress(self, egress_bytes: int) -> None:
        if new := egress_bytes - self._egress_counted:
            self._egress_counted = egress_bytes
            with anyio.CancelScope(shield=True):  # traffic counts even if the client has left
                await self._account.overdraw(Expense(egress_bytes=new))

    async def settle(self, receipt: Reservation, actual: Expense) -> None:
        self._spent += actual - receipt.expected
        await self._account.settle(receipt, actual)

    def egress_left(self, usual: int, egress_bytes: int) -> int:
        """Return how many bytes may still pass after a run's `egress_bytes`, `usual` at most."""
        mib = self._account.budget.egress_mib
        if mib is None:
            return usual
        uncounted = egress_bytes - self._egress_counted
        return min(usual, in_bytes(mib) - self._spent.egress_bytes - uncounted)

    def little_left(self) -> dict[str, LowBudgetHint]:
        return low_daily_budget_hints(self._account.budget, self._spent)

    async def _taken(self, expected: Expense) -> Reservation | None:
        receipt = await self._account.take(expected)
        self._spent = receipt.spent
        if receipt.exhausted:
            self._stop = STOP_REASONS[receipt.exhausted]
            return None
        return receipt


class PartialCompletion:
    """The pieces of one reply that have arrived so far, from which a cut-off reply is made."""

    def __init__(self, messages: Sequence[Message]) -> None:
        """`messages` are the prompt."""
        self._messages = messages
        self._text: list[TextDelta] = []
        self._thinking: list[str] = []
        self._pieces = 0
        self._chars = 0
        self._count: TokenCount | None = None
        self._counted_pieces = 0
        """How many pieces had come when the engine sent that count."""

    def heard_by(self, hear: OnDelta) -> OnDelta:
        """Return a listener that notes each piece before `hear` does."""

        async def note_and_hear(delta: ModelDelta) -> None:
            self._note(delta)
            await hear(delta)

        return note_and_hear

    @property
    def has_begun(self) -> bool:
        """True once the model has generated something."""
        return self._pieces > 0

    def reply(self, stopped: CompletionStopped | None = None) -> Completion:
        """Return what has come so far, cut off for the cause that `stopped` tells, or by the end
        of the time or the connection. Unfinished tool calls are left out; a reply that was ended
        for its many calls has all complete calls and one more, which tells that there were more.
        """
        if stopped is not None and stopped.cause == "many_calls" and stopped.reply:
            return replace(stopped.reply, usage=self._usage(), stopped="many_calls")
        thinking = "".join(self._thinking)
        text = "".join(delta.text for delta in self._text)
        if stopped is not None and stopped.stop:
            text = text.partition(stopped.stop)[0]
        message: Message = {"role": "assistant", "content": text}
        if thinking:
            message |= {"reasoning": thinking, "reasoning_content": thinking}
        ends_by_itself = stopped is not None and stopped.cause in ("stop", "no_call")
        sent = stopped.reply if stopped else None
        return Completion(
            message=message,
            finish_reason="stop" if ends_by_itself else "length",
            usage=self._usage(),
            choice={**(sent.choice if sent else {}), **self._choice(stopped)},
            response=sent.response if sent else {},
            stopped=stopped.cause if stopped else None,
        )

    def _note(self, delta: ModelDelta) -> None:
        match delta:
            case TextDelta(text):
                self._text.append(delta)
                self._add(text)
            case ReasoningDelta(text):
                self._thinking.append(text)
                self._add(text)
            case ToolCallDelta(arguments=text):
                self._add(text)
            case TokenCount():
                self._count, self._counted_pieces = delta, self._pieces
            case CallFailed():  # tokens of the failed attempt count all the same
                self._text.clear()
                self._thinking.clear()

    def _add(self, text: str) -> None:
        self._pieces += 1
        self._chars += len(text)

    def _usage(self) -> dict[str, Any]:
        """Return the engine's running count, or an estimate marked `estimated`."""
        if self._count is not None:
            prompt = self._count.prompt
            completion = self._count.completion + self._pieces - self._counted_pieces
        else:
            prompt = estimate_prompt_tokens(self._messages)
            completion = estimated_tokens(self._pieces, self._chars)
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }
        return usage if self._count is not None else {**usage, "estimated": True}

    def _choice(self, stopped: CompletionStopped | None) -> dict[str, Any]:
        given = [d.logprobs.get("content") for d in self._text if isinstance(d.logprobs, dict)]
        found = [tokens for tokens in given if isinstance(tokens, list)]
        choice: dict[str, Any] = {}
        if found:
            choice["logprobs"] = {"content": [token for tokens in found for token in tokens]}
        if stopped is not None and stopped.stop is not None:
            choice["stop_reason"] = stopped.stop
        return choice


def _counted(reply: Completion, messages: list[Message]) -> TokenUsage:
    """Return the tokens of a call; an estimate where the backend has not counted them."""
    tokens = parse_usage(reply.usage)
    if tokens.total or tokens.reported_usd is not None:
        return tokens
    said = len(text_of(reply.message)) // CHARS_PER_TOKEN
    return TokenUsage(prompt=estimate_prompt_tokens(messages), completion=said)
