"""What one run has spent, and whether it may go on spending: its own limits, and its key's day."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import anyio

from policies.budgets import Expense, Receipt
from policies.limits import (
    Limits,
    Spent,
    StopReason,
    egress_bytes,
    exceeded,
    no_more_commands,
    paid_out,
)
from policies.prices import CHARS_PER_TOKEN, Counted, cost_usd, counted, expected_tokens
from policies.remaining import little_left, reminder
from proxy.agent.day import Day
from proxy.agent.events import OnDelta
from proxy.agent.history import text_of
from proxy.agent.model import Answering, Message, Model, Reply, ReplyStopped
from proxy.agent.partial_reply import PartialReply
from proxy.agent.task import Task
from proxy.errors import BackendError
from sandbox_runtime.egress.limits import Meter
from sandbox_runtime.tools.base import Observation


class Budget:
    """Asked before each expense, and told after it."""

    def __init__(self, task: Task, limits: Limits, began: float) -> None:
        """`limits` are the run's own, its time as the deadline leaves it."""
        self.turns = 0
        self.commands = 0
        self.cpu_s = 0.0
        self.cost_usd: float | None = None
        """Of all model calls; None where that of one is not known."""
        self._limits = limits
        self._tariff = task.tariff
        self.unfinished: Reply | None = None
        """What came of the last call, where it was cut off."""
        self._day = Day(task.account) if task.account else None
        self._began = began
        self._calls = 0
        self._tokens = 0
        self._prompt_tokens = 0
        self._output_chars = 0
        self._meters: list[tuple[Meter, int]] = []
        self._told: dict[str, int] = {}

    @property
    def wall_time_s(self) -> float:
        return time.monotonic() - self._began

    @property
    def egress_bytes(self) -> int:
        """What has passed between the run's sandboxes and the world."""
        return sum(meter.bytes - before for meter, before in self._meters)

    # Model calls

    async def before_turn(
        self, messages: list[Message], trajectory_tokens: int
    ) -> StopReason | None:
        """What leaves no room for another model call with tools."""
        if stop := exceeded(self._limits, self._spent(trajectory_tokens)):
            return stop
        return await self._take_call(messages)

    async def before_aside(self, messages: Sequence[Message]) -> StopReason | None:
        """What leaves no room for a call beside the turn's own, which is still to be made."""
        spent = self._spent()
        with_turn = replace(
            spent,
            tokens=spent.tokens + spent.next_tokens,
            cost_usd=spent.cost_usd + spent.next_cost_usd,
        )
        if stop := paid_out(self._limits, with_turn):
            return stop
        return await self._take_call(messages)

    async def _take_call(self, messages: Sequence[Message]) -> StopReason | None:
        return await self._day.take_call(self._expected(messages)) if self._day else None

    async def call(self, model: Answering, body: Mapping[str, Any], hear: OnDelta | None) -> Reply:
        """Make a model call, whatever is left: who asks for the last answer must have it. A reply
        that is cut off, by its listener or from outside, is counted as far as it came."""
        expected = self._expected(body["messages"]) if self._day else Expense()
        receipt = await self._day.call_receipt(expected) if self._day else None
        partial = PartialReply(body["messages"])
        self.unfinished = None
        try:
            reply = await model.complete(body, hear and partial.heard_by(hear))
        except ReplyStopped as stopped:
            reply = partial.reply(stopped)
        except (BackendError, asyncio.CancelledError) as error:
            with anyio.CancelScope(shield=True):
                await self._cut_off(partial, receipt, made=not isinstance(error, BackendError))
            raise
        await self._made(_counted(reply, body["messages"]), receipt)
        return reply

    async def _made(self, tokens: Counted, receipt: Receipt | None) -> None:
        cost = cost_usd(self._tariff, tokens)
        self._count(tokens, cost)
        if self._day and receipt:
            await self._day.settle(receipt, Expense(tokens=tokens.total, cost_usd=cost or 0.0))

    async def _cut_off(self, partial: PartialReply, receipt: Receipt | None, *, made: bool) -> None:
        """Count a reply that did not come to its end; `made` says that the backend had the call
        even if nothing came of it."""
        if partial.has_begun:
            self.unfinished = partial.reply()
            await self._made(counted(self.unfinished.usage), receipt)
        elif self._day and receipt and not made:
            await self._day.settle(receipt, Expense())

    def _expected(self, messages: Sequence[Message]) -> Expense:
        prompt = Counted(prompt=max(self._prompt_tokens, expected_tokens(messages)))
        return Expense(tokens=prompt.prompt, cost_usd=cost_usd(self._tariff, prompt) or 0.0)

    def _count(self, tokens: Counted, cost: float | None) -> None:
        is_known = cost is not None and (self.cost_usd is not None or not self._calls)
        self.cost_usd = (self.cost_usd or 0.0) + (cost or 0.0) if is_known else None
        self._calls += 1
        self._tokens += tokens.total
        self._prompt_tokens = tokens.prompt

    # Commands

    async def before_command(self) -> StopReason | None:
        """What leaves no room for another command."""
        stop = no_more_commands(self._limits, self._spent())
        if not stop and self._day:
            stop = await self._day.take_command()
        if not stop:
            self.commands += 1
            self._let_out()
        return stop

    async def after_command(self, observation: Observation) -> None:
        """Count what a command has come to."""
        self.cpu_s += observation.cpu_s
        self._output_chars += len(observation.text)
        if self._day:
            await self._day.end_command(
                Expense(
                    commands=1,
                    cpu_s=observation.cpu_s,
                    tool_output_chars=len(observation.text),
                ),
                self.egress_bytes,
            )

    def watch(self, meter: Meter) -> None:
        """A computer that the run uses from now on."""
        self._meters.append((meter, meter.bytes))
        self._let_out()

    def _let_out(self) -> None:
        """Have no more pass than is left for it."""
        left = egress_bytes(self._limits.max_egress_mib) - self.egress_bytes
        if self._day:
            left = self._day.egress_left(left, self.egress_bytes)
        self._allow(left)

    def _allow(self, count: int) -> None:
        for meter, _ in self._meters[-1:]:  # those before are lost
            meter.allow(count)

    # What is left

    def reminder(self) -> str:
        """What the model is told of what is left, "" for nothing: at few points, each once."""
        spent = self._spent()
        is_over = exceeded(self._limits, spent) or (self._day and self._day.is_over)
        if is_over or not self._limits.tell_remaining:
            return ""
        left = little_left(self._limits, spent)
        if self._day:
            left |= self._day.little_left()
        line = reminder(left, self._told)
        self._told |= {
            kind: max(each.level, self._told.get(kind, 0)) for kind, each in left.items()
        }
        return line

    async def close(self) -> None:
        """Count what has passed since the last command, and give back what was not used. Where the
        day bounds traffic, a computer that is kept has no more pass until its next run, which
        counts again."""
        if self._day:
            if self._day.bounds_egress:
                self._allow(0)
            await self._day.give_back()
            await self._day.count_egress(self.egress_bytes)

    def _spent(self, trajectory_tokens: int = 0) -> Spent:
        coming = Counted(prompt=self._prompt_tokens, cached=self._prompt_tokens)
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


class Paying:
    """A model whose calls are counted."""

    def __init__(self, model: Model, budget: Budget, timeout_s: float | None = None) -> None:
        """`timeout_s` is the longest silence of the backend; None: as the model has it."""
        self._model = model if timeout_s is None else model.with_timeout(timeout_s)
        self._budget = budget

    async def complete(self, body: Mapping[str, Any], on_delta: OnDelta | None) -> Reply:
        """See Answering. Where it is cut off, `unfinished` has what came."""
        return await self._budget.call(self._model, body, on_delta)

    @property
    def unfinished(self) -> Reply | None:
        """What came of the last call, where it was cut off."""
        return self._budget.unfinished

    async def allows(self, messages: Sequence[Message]) -> bool:
        """Whether there is room for a call beside the turn's own."""
        return await self._budget.before_aside(messages) is None


def _counted(reply: Reply, messages: list[Message]) -> Counted:
    """The tokens of a call; reckoned where the backend has not counted them."""
    tokens = counted(reply.usage)
    if tokens.total or tokens.reported_usd is not None:
        return tokens
    said = len(text_of(reply.message)) // CHARS_PER_TOKEN
    return Counted(prompt=expected_tokens(messages), completion=said)
