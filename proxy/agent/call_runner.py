"""The tool calls of a run's turns: ours are run, the client's are left to it."""

import asyncio
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from policies.limits import Limits, StopReason
from policies.prompts import (
    CALLS_LEFT_OUT,
    NO_BUDGET,
    NO_MORE_CALLS,
    NOT_RUN,
    NOT_SUBMITTED,
    WHY_NO_MORE_TOOLS,
)
from proxy.agent.budget import Budget
from proxy.agent.conversation import Conversation, ignore
from proxy.agent.efficiency import CapabilityUse
from proxy.agent.ending import Ending
from proxy.agent.model import MAX_CALLS, Reply
from proxy.agent.parking import NO_RESULT, answers
from proxy.agent.text_argument import recovered_answer
from proxy.agent.tool_calls import ToolCall, Turn, understand
from proxy.agent.toolbox import Toolbox
from sandbox_runtime.tools.base import Observation


class CallRunner:
    """Runs the calls of one run's turns."""

    def __init__(
        self,
        toolbox: Toolbox,
        talk: Conversation,
        budget: Budget,
        ending: Ending,
        use: CapabilityUse,
        limits: Limits,
        client_names: Collection[str],
    ) -> None:
        self._toolbox = toolbox
        self._talk = talk
        self._budget = budget
        self._ending = ending
        self._use = use
        self._limits = limits
        self._client_names = client_names

    async def run(self, turn: Turn, reply: Reply) -> StopReason | None:
        """Run every call of a turn, in order, and answer each; the client's are left to it. Where
        the client has been sent one already, nothing is submitted. Returns why the run ends, if it
        does."""
        ending = self._ending
        told: list[tuple[ToolCall, str]] = []
        for call in turn.calls:
            if words := self._why_not_run(call):
                told.append((call, words))
            elif call.name in self._client_names:
                ending.client_calls.append(call)
            else:
                observation = await self._run_tool(call, reply)
                told.append((call, observation.text))
                if observation.finished:
                    ending.submitted = observation.answer or ""
        if ending.submitted is not None:
            told += [(call, NOT_RUN) for call in ending.client_calls]
            ending.client_calls.clear()
        elif told and not ending.client_calls and (notes := self._notes(turn)):
            told[-1] = (told[-1][0], "\n".join([told[-1][1], *notes]))
        ending.as_text = turn.as_text
        self._talk.history.append(*_told(told, as_text=turn.as_text))
        if ending.submitted is not None:
            return StopReason.SUBMITTED
        return StopReason.CLIENT_TOOL_CALLS if ending.client_calls else None

    def _notes(self, turn: Turn) -> list[str]:
        """Return what the model is told below the last result of a turn."""
        left_out = [CALLS_LEFT_OUT.format(count=MAX_CALLS)] if turn.has_more else []
        left = self._budget.reminder()
        return [*left_out, left] if left else left_out

    def _why_not_run(self, call: ToolCall) -> str:
        """What the model is told of a call that is left out; "" for one that is not."""
        if self._ending.submitted is not None:
            return NOT_RUN
        is_too_early = self._ending.sent_ids and self._toolbox.is_submit(call.name)
        return NOT_SUBMITTED if is_too_early else ""

    async def ask_for(
        self, stop: StopReason, new_id: "Iterator[str]", seconds: float
    ) -> StopReason:
        """Ask for the call that the client insists on, at the limit of a run that has not made it.
        Returns why the run ends."""
        try:
            async with asyncio.timeout(seconds):
                reply = await self._talk.ask_call(stop, ignore)
        except TimeoutError:
            return stop
        turn = understand(reply.message, self._client_names, new_id)
        self._talk.history.append(turn.message)
        self._ending.reply, self._ending.as_text = reply, turn.as_text
        self._ending.client_calls = [c for c in turn.calls if c.name in self._client_names]
        told = [(c, NO_RESULT) for c in turn.calls if c.name not in self._client_names]
        self._talk.history.append(*_told(told, as_text=turn.as_text))
        return StopReason.CLIENT_TOOL_CALLS if self._ending.client_calls else stop

    async def _run_tool(self, call: ToolCall, reply: Reply) -> Observation:
        is_submit = self._toolbox.is_submit(call.name)
        if not is_submit and self._toolbox.is_used_up:
            return Observation(NO_MORE_CALLS)
        if not is_submit and (stop := await self._budget.before_command()):
            return Observation(NO_BUDGET.format(why=WHY_NO_MORE_TOOLS[stop]))
        answer = recovered_answer(call.written) if is_submit and call.written else ""
        if answer:  # it is there, though its JSON is cut off or wrongly escaped
            call = replace(call, arguments={"answer": answer}, mistake=None)
        timeout_s = min(self._limits.command_timeout_s, self._time_left_s())
        self._use.note(self._toolbox.proper_name(call.name), call.arguments)
        if not is_submit and not call.mistake and call.name in self._toolbox.names:
            self._talk.has_worked = True
        observation = await self._toolbox.run(call, timeout_s, self._time_left_s())
        if not is_submit:
            await self._budget.after_command(observation)
        if answer and observation.finished:
            self._ending.finish_reason = reply.finish_reason
        return observation

    def _time_left_s(self) -> float:
        return max(0.001, self._limits.wall_time_s - self._budget.wall_time_s)


def _told(told: Sequence[tuple[ToolCall, str]], *, as_text: bool) -> list[dict[str, Any]]:
    results = [(call.id, call.name, {"content": text}) for call, text in told]
    return answers(results, as_text) if results else []
