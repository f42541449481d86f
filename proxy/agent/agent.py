"""The loop: ask the model, do what it calls for, tell it what came of that, until it is done."""

import asyncio
import hashlib
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from policies.completion import is_answer
from policies.deadline import time_plan
from policies.limits import StopReason
from policies.profile import Profile
from policies.prompts import NO_BUDGET, NO_MORE_CALLS, NOT_RUN, WHY_NO_MORE_TOOLS, Equipment
from proxy.agent.answer import AnswerWriter, answer_file
from proxy.agent.budget import Budget, Paying
from proxy.agent.conversation import Conversation
from proxy.agent.efficiency import CapabilityUse, tally_of
from proxy.agent.egress_watch import EgressWatch
from proxy.agent.ending import Ending
from proxy.agent.events import (
    Emit,
    Refused,
    RunFinished,
    RunStarted,
    TurnStarted,
)
from proxy.agent.final import FinalCall, refusal_of
from proxy.agent.guard import Guard
from proxy.agent.handed_back import SANDBOX_LOST, HandedBack, hand_back
from proxy.agent.handed_over import HandedOver
from proxy.agent.history import text_of
from proxy.agent.listener import TurnListener
from proxy.agent.manner import manner_of
from proxy.agent.model import Model, Reply
from proxy.agent.observation_files import ObservationFiles
from proxy.agent.outputs import Outputs, given_files, remove_answers
from proxy.agent.parking import NO_RESULT, answers
from proxy.agent.submit_stream import recovered_answer
from proxy.agent.task import Result, Task
from proxy.agent.tool_calls import ToolCall, Turn, understand
from proxy.agent.toolbox import Toolbox
from proxy.agent.windows import Window, Windows
from proxy.errors import ContextOverflowError
from proxy.workspaces import Seat, Workspaces
from sandbox_runtime.errors import SandboxError, SandboxLostError
from sandbox_runtime.sandbox import Sandbox
from sandbox_runtime.tools.base import Observation, Tool

FINAL_ANSWER_S = 600.0
"""How long the one last question may take, the run's own time being up; less where a deadline is
near."""


@dataclass(frozen=True, slots=True)
class Agent:
    """A model, a place for computers, and what the model can do in one."""

    model: Model
    workspaces: Workspaces
    make_tools: Callable[[Profile], Sequence[Tool]]
    equipment: Equipment = Equipment()
    windows: Windows = field(default_factory=Windows)

    async def run(self, task: Task, emit: Emit) -> Result:
        """Answer one request; what happens on the way goes to `emit`.

        Raises BackendError when the model fails for good, SandboxError when the sandbox does.
        """
        began = time.monotonic()
        watch = EgressWatch(task, emit)
        async with self.workspaces.use(
            task.goes_on, task.profile.isolation, watch.decided, watch.asked
        ) as seat:
            if task.profile.computer == "always":
                await seat.ask()
            run = _Run(self, task, emit, seat, watch, began)
            try:
                result = await run.go()
            finally:
                watch.close()
                await run.budget.close()
            seat.leave_as = task.leaves or (task.parks if result.parked else None)
            return result


class _Run:
    """One run of the loop."""

    def __init__(
        self, agent: Agent, task: Task, emit: Emit, seat: Seat, watch: EgressWatch, began: float
    ) -> None:
        self._agent = agent
        profile = task.profile
        self._manner = manner_of(profile)
        self._task = task = self._manner.posed(task)
        self._emit = emit
        self._use = CapabilityUse()
        self._times = time_plan(profile.limits.wall_time_s, task.deadline_s)
        self._limits = replace(profile.limits, wall_time_s=self._times.work_s)
        self._seat = seat
        self._watch = watch
        self._client_names = [_tool_name(tool) for tool in task.client_tools]
        self._outputs = Outputs(task.inputs)
        self._guard = Guard(profile, emit)
        self._toolbox = Toolbox(
            agent.make_tools(profile),
            seat,
            emit,
            self._guard,
            task.inputs,
            prepare=self._prepare,
            taken=self._client_names,
            max_calls=task.max_tool_calls,
        )
        words = self._manner.words(profile, agent.equipment, self._toolbox.names)
        self._prompt = hashlib.sha256(words.encode()).hexdigest() if words else ""
        tools = self._toolbox.schemas_but("submit" if task.must_call else "")
        self.budget = Budget(task, self._limits, began)
        files = ObservationFiles(task.run_id, self._computer)
        window = Window(agent.windows, agent.model, task.model)
        paying = Paying(agent.model, self.budget)
        self._talk = Conversation(paying, task, tools, words, window, files)
        self._writer = AnswerWriter(emit, task.outbox, profile, rewrite_links=task.rewrite_links)
        self._ending = Ending()
        self._call_ids = (f"call_{task.run_id}_{n}" for n in itertools.count(1))
        self._nudged = False

    async def go(self) -> Result:
        await self._emit(RunStarted(self._task.run_id, self._prompt))
        stop = None
        while stop is None:
            stop = await self.budget.before_turn(self._talk.history.messages)
            stop = stop or await self._turn()
        if stop is StopReason.WALL_TIME:
            stop = self._times.stop
        if self._task.must_call and stop in WHY_NO_MORE_TOOLS:
            stop = await self._ask_for_call(stop)
        answer = await self._answer(stop)
        await self._writer.finish(answer, self._toolbox.computer)
        if self._ending.refusal:
            await self._emit(Refused(self._ending.refusal))
        return await self._result(stop, answer)

    async def _prepare(self, computer: Sandbox) -> Mapping[str, str]:
        """Make a computer ready for this run; returns the client's files that are in it already."""
        self.budget.watch(computer.meter)
        if not self._seat.goes_on:
            return {}
        if self._task.resumes is None or not self._task.resumes.began:
            await remove_answers(computer)
        await self._outputs.begin(computer)
        return await given_files(computer)

    async def _computer(self) -> Sandbox | None:
        """The one in use; where the run goes on with one, also before its next command."""
        waited = self._task.resumes
        if waited and waited.began and not self._toolbox.is_begun:
            with suppress(SandboxError):  # the next command hears of it
                await self._toolbox.sandbox()
        return self._toolbox.computer

    def _time_left_s(self) -> float:
        return max(0.001, self._limits.wall_time_s - self.budget.wall_time_s)

    # One turn

    async def _turn(self) -> StopReason | None:
        left = self._limits.max_turns - self.budget.turns
        self._manner.before_turn(self._talk.history, left)
        self.budget.turns += 1
        self._use.begin_turn()
        await self._emit(TurnStarted(self.budget.turns))
        await self._writer.begin()
        live = self._manner.prose_ends and not self._task.final_only
        listener = TurnListener(self._emit, self._writer, self._toolbox, answer_live=live)
        try:
            async with asyncio.timeout(self._time_left_s()):
                reply = await self._talk.ask(listener.hear if self._task.stream else None)
        except TimeoutError:
            return StopReason.WALL_TIME
        except ContextOverflowError:
            if self.budget.turns == 1:
                raise  # the request itself is too long
            return StopReason.CONTEXT_WINDOW
        self._ending.reply = reply
        names = [*self._toolbox.names, *self._client_names]
        turn = self._manner.understand(reply.message, names, self._call_ids)
        self._talk.history.append(turn.message)
        is_final = self._hear_out(turn, reply)
        if not self._task.stream:
            narration = "" if is_final else text_of(reply.message)
            await listener.hear_whole(reply, narration=narration)
        elif not is_final:
            await listener.narrate()
        if turn.calls:
            return await self._act(turn, reply)
        return self._without_calls(reply, is_final=is_final)

    def _without_calls(self, reply: Reply, *, is_final: bool) -> StopReason | None:
        """Whether a turn in which nothing was called ends the run, and as what."""
        ending = self._ending
        if refusal := refusal_of(reply.message):
            ending.refusal, ending.choice = refusal, reply.choice
            ending.finish_reason = reply.finish_reason
            return StopReason.REFUSED
        if is_final:
            return StopReason.ANSWERED
        self._nudge()
        return None

    def _hear_out(self, turn: Turn, reply: Reply) -> bool:
        """Note the turn's prose; whether it ends the run."""
        prose = "" if turn.as_text else text_of(reply.message).strip()
        may_end = self._manner.prose_ends and not turn.calls
        is_final = may_end and (self._nudged or is_answer(prose, reply.finish_reason))
        if prose:
            is_whole = is_final or is_answer(prose, "stop")
            self._ending.prose = prose
            self._ending.prose_reply = reply if is_whole else None
        return is_final

    def _nudge(self) -> None:
        self._nudged = True
        self._talk.history.ask(self._manner.no_call)

    async def _act(self, turn: Turn, reply: Reply) -> StopReason | None:
        """Run every call of a turn, in order, and answer each; the client's are left to it."""
        self._nudged = False
        ending = self._ending
        told: list[tuple[ToolCall, str]] = []
        for call in turn.calls:
            if ending.submitted is not None:
                told.append((call, NOT_RUN))
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
        elif told and not ending.client_calls and (left := self.budget.reminder()):
            told[-1] = (told[-1][0], f"{told[-1][1]}\n{left}")
        ending.as_text = turn.as_text
        self._talk.history.append(*_told(told, as_text=turn.as_text))
        if ending.submitted is not None:
            return StopReason.SUBMITTED
        return StopReason.CLIENT_TOOL_CALLS if ending.client_calls else None

    async def _ask_for_call(self, stop: StopReason) -> StopReason:
        """The call that the client insists on, at the limit of a run that has not made it."""
        try:
            left_s = max(0.001, self._times.answer_s - self.budget.wall_time_s)
            async with asyncio.timeout(min(FINAL_ANSWER_S, left_s)):
                reply = await self._talk.ask_call(stop, None)
        except TimeoutError:
            return stop
        turn = understand(reply.message, self._client_names, self._call_ids)
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
        if not is_submit and (stop := await self.budget.before_command()):
            return Observation(NO_BUDGET.format(why=WHY_NO_MORE_TOOLS[stop]))
        answer = recovered_answer(call.written) if is_submit and call.written else ""
        if answer:  # it is there, though its JSON is cut off or wrongly escaped
            call = replace(call, arguments={"answer": answer}, mistake=None)
        timeout_s = min(self._limits.command_timeout_s, self._time_left_s())
        self._use.note(self._toolbox.proper_name(call.name), call.arguments)
        observation = await self._toolbox.run(call, timeout_s, self._time_left_s())
        if not is_submit:
            await self.budget.after_command(observation)
        if answer and observation.finished:
            self._ending.finish_reason = reply.finish_reason
        return observation

    # The answer

    async def _answer(self, stop: StopReason) -> str:
        """The best answer there is: the one handed in, one in a file, the last prose, or one
        asked for. A limit, or a form that holds for the answer alone, has it asked for first."""
        if stop in (StopReason.CLIENT_TOOL_CALLS, StopReason.REFUSED):
            return ""
        must_ask = bool(self._task.final_only) or stop in WHY_NO_MORE_TOOLS
        found = await self._found_answer()
        if found and not must_ask:
            return found
        best = found or self._ending.prose
        return await self._asked_answer(stop, best)

    async def _found_answer(self) -> str:
        ending = self._ending
        if ending.submitted:
            return ending.submitted
        sandbox = self._toolbox.computer
        if in_file := await answer_file(sandbox) if sandbox else "":
            return in_file
        if ending.prose_reply is None:
            return ""
        ending.finish_reason = ending.prose_reply.finish_reason
        ending.choice = ending.prose_reply.choice
        return ending.prose

    async def _asked_answer(self, stop: StopReason, fallback: str) -> str:
        call = FinalCall(self._task, self._talk, self._writer, self._toolbox, self._emit)
        left_s = max(0.001, self._times.answer_s - self.budget.wall_time_s)
        final = await call.answer(stop, fallback, min(FINAL_ANSWER_S, left_s))
        ending = self._ending
        ending.reply = final.reply or ending.reply
        ending.choice = final.reply.choice if final.reply else {}
        ending.finish_reason = final.finish_reason or ending.finish_reason
        ending.refusal = final.refusal
        ending.notices = final.notices
        return final.text

    # The end

    async def _result(self, stop: StopReason, answer: str) -> Result:
        handed_back = await self._hand_back()
        await self._watch.tell_open()
        await self._emit(RunFinished(stop, self._talk.usage))
        reply = self._ending.reply
        handed_over = HandedOver(self._task, self._ending, self._call_ids)
        return Result(
            run_id=self._task.run_id,
            container_id=self._task.outbox.container_id,
            model=self._task.model,
            answer=self._writer.text,
            stop_reason=stop,
            finish_reason=self._finish_reason(stop, answer),
            tool_calls=handed_over.calls,
            usage=self._talk.usage_of(self._task.usage_of),
            usages=self._talk.usages,
            segments=len(self._talk.compactions) + 1,
            compactions=self._talk.compactions,
            tally=tally_of(self._task, self._talk, self.budget, self._toolbox, self._use),
            artifacts=handed_back.artifacts,
            left_out=handed_back.left_out,
            choice=self._ending.choice,
            response=reply.response if reply else {},
            refusal=self._ending.refusal,
            notices=(*self._ending.notices, *handed_back.notices),
            origin=self._seat.origin,
            route=self._task.route,
            parked=handed_over.parked(self._talk.history, began=self._toolbox.computer is not None),
        )

    def _finish_reason(self, stop: StopReason, answer: str) -> str:
        if stop is StopReason.CLIENT_TOOL_CALLS:
            return "tool_calls" if self._task.legacy_state is None else "function_call"
        if not answer and not self._ending.refusal:
            return "length"
        ended = self._ending.finish_reason
        return ended if ended in ("length", "content_filter") else "stop"

    async def _hand_back(self) -> HandedBack:
        sandbox = self._toolbox.computer
        if sandbox is None:
            return HandedBack()
        try:
            produced = await self._outputs.produced(sandbox, await self._writer.dead_links())
        except SandboxLostError:  # the answer is there all the same
            self._toolbox.computer = None
            return HandedBack(notices=(SANDBOX_LOST,))
        return await hand_back(sandbox, produced, self._task, self._guard, self._emit)


def _told(told: Sequence[tuple[ToolCall, str]], *, as_text: bool) -> list[dict[str, Any]]:
    results = [(call.id, call.name, {"content": text}) for call, text in told]
    return answers(results, as_text) if results else []


def _tool_name(tool: Any) -> str:
    return str(tool.get("function", {}).get("name", ""))
