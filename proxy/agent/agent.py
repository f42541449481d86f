"""The loop: ask the model, do what it calls for, tell it what came of that, until it is done."""

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from policies.artifacts import ArtifactLimits, Selection, select
from policies.completion import is_answer
from policies.deadline import time_plan
from policies.isolation import Isolation
from policies.limits import Limits, Spent, StopReason, exceeded
from policies.prompts import NOT_RUN, NUDGE, WHY_NO_MORE_TOOLS, system_prompt
from policies.sessions import GoesOn, function_call_id
from proxy.agent.answer import AnswerWriter, answer_file
from proxy.agent.conversation import Conversation
from proxy.agent.egress_watch import EgressWatch
from proxy.agent.ending import Ending
from proxy.agent.events import (
    Emit,
    FileProduced,
    Refused,
    RunFinished,
    RunStarted,
    TurnStarted,
)
from proxy.agent.final import FinalCall, refusal_of
from proxy.agent.history import text_of
from proxy.agent.listener import TurnListener
from proxy.agent.model import Model, Reply
from proxy.agent.outputs import Outputs, given_files, remove_answers
from proxy.agent.parking import NO_RESULT, Parked, answers, minted_for
from proxy.agent.submit_stream import recovered_answer
from proxy.agent.task import Artifact, Result, Task
from proxy.agent.tool_calls import ToolCall, Turn, understand
from proxy.agent.toolbox import Toolbox
from proxy.errors import ContextOverflowError
from proxy.workspaces import Seat, Workspaces
from sandbox_runtime.errors import SandboxFileError
from sandbox_runtime.sandbox import Sandbox
from sandbox_runtime.tools.base import Observation, Tool

FINAL_ANSWER_S = 600.0
"""How long the one last question may take, the run's own time being up; less where a deadline is
near."""


@dataclass(frozen=True, slots=True)
class Agent:
    """A model, a place for computers, and what a run may use of both."""

    model: Model
    workspaces: Workspaces
    make_tools: Callable[[], Sequence[Tool]]
    limits: Limits = Limits()
    isolation: Isolation = Isolation()
    artifact_limits: ArtifactLimits = ArtifactLimits()

    async def run(self, task: Task, emit: Emit) -> Result:
        """Answer one request; what happens on the way goes to `emit`.

        Raises BackendError when the model fails for good, SandboxError when the sandbox does.
        """
        began = time.monotonic()
        watch = EgressWatch(task.run_id, emit)
        async with self.workspaces.use(task.goes_on, self.isolation, watch.decided) as seat:
            try:
                result = await _Run(self, task, emit, seat, began).go()
            finally:
                watch.close()
            seat.leave_as = task.leaves or (task.parks if result.parked else None)
            return result


class _Run:
    """One run of the loop."""

    def __init__(self, agent: Agent, task: Task, emit: Emit, seat: Seat, began: float) -> None:
        self._agent = agent
        self._task = task
        self._emit = emit
        self._times = time_plan(agent.limits.wall_time_s, task.deadline_s)
        self._limits = replace(agent.limits, wall_time_s=self._times.work_s)
        self._seat = seat
        self._client_names = [_tool_name(tool) for tool in task.client_tools]
        self._outputs = Outputs()
        self._toolbox = Toolbox(
            agent.make_tools(),
            seat,
            emit,
            task.inputs,
            prepare=self._prepare,
            taken=self._client_names,
            max_calls=task.max_tool_calls,
        )
        words = system_prompt(agent.limits, agent.isolation.egress, self._toolbox.names)
        tools = self._toolbox.schemas_but("submit" if task.must_call else "")
        self._talk = Conversation(agent.model, task, tools, words)
        self._writer = AnswerWriter(
            emit, task.outbox, agent.artifact_limits, rewrite_links=task.rewrite_links
        )
        self._ending = Ending()
        self._call_ids = (f"call_{task.run_id}_{n}" for n in itertools.count(1))
        self._as_text = False
        self._started = began
        self._turns = 0
        self._nudged = False

    async def go(self) -> Result:
        await self._emit(RunStarted(self._task.run_id))
        stop = None
        while stop is None:
            stop = exceeded(self._limits, self._spent()) or await self._turn()
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
        if not self._seat.goes_on:
            return {}
        if self._task.resumes is None or not self._task.resumes.began:
            await remove_answers(computer)
        await self._outputs.begin(computer)
        return await given_files(computer)

    def _spent(self) -> Spent:
        return Spent(
            turns=self._turns,
            wall_time_s=time.monotonic() - self._started,
            tokens=self._talk.tokens,
            tool_output_chars=self._toolbox.output_chars,
        )

    def _time_left_s(self) -> float:
        return max(0.001, self._limits.wall_time_s - self._spent().wall_time_s)

    # One turn

    async def _turn(self) -> StopReason | None:
        self._turns += 1
        await self._emit(TurnStarted(self._turns))
        await self._writer.begin()
        live = not self._task.final_only
        listener = TurnListener(self._emit, self._writer, self._toolbox, answer_live=live)
        try:
            async with asyncio.timeout(self._time_left_s()):
                reply = await self._talk.ask(listener.hear if self._task.stream else None)
        except TimeoutError:
            return StopReason.WALL_TIME
        except ContextOverflowError:
            if self._turns == 1:
                raise  # the request itself is too long
            return StopReason.CONTEXT_WINDOW
        self._ending.reply = reply
        names = [*self._toolbox.names, *self._client_names]
        turn = understand(reply.message, names, self._call_ids)
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
        is_final = not turn.calls and (self._nudged or is_answer(prose, reply.finish_reason))
        if prose:
            is_whole = is_final or is_answer(prose, "stop")
            self._ending.prose = prose
            self._ending.prose_reply = reply if is_whole else None
        return is_final

    def _nudge(self) -> None:
        self._nudged = True
        self._talk.history.append({"role": "user", "content": NUDGE})

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
        self._as_text = turn.as_text
        self._talk.history.append(*_told(told, as_text=turn.as_text))
        if ending.submitted is not None:
            return StopReason.SUBMITTED
        return StopReason.CLIENT_TOOL_CALLS if ending.client_calls else None

    async def _ask_for_call(self, stop: StopReason) -> StopReason:
        """The call that the client insists on, at the limit of a run that has not made it."""
        try:
            left_s = max(0.001, self._times.answer_s - self._spent().wall_time_s)
            async with asyncio.timeout(min(FINAL_ANSWER_S, left_s)):
                reply = await self._talk.ask_call(stop, None)
        except TimeoutError:
            return stop
        turn = understand(reply.message, self._client_names, self._call_ids)
        self._talk.history.append(turn.message)
        self._ending.reply, self._as_text = reply, turn.as_text
        self._ending.client_calls = [c for c in turn.calls if c.name in self._client_names]
        told = [(c, NO_RESULT) for c in turn.calls if c.name not in self._client_names]
        self._talk.history.append(*_told(told, as_text=turn.as_text))
        return StopReason.CLIENT_TOOL_CALLS if self._ending.client_calls else stop

    async def _run_tool(self, call: ToolCall, reply: Reply) -> Observation:
        is_submit = self._toolbox.proper_name(call.name) == "submit"
        answer = recovered_answer(call.written) if is_submit and call.written else ""
        if answer:  # it is there, though its JSON is cut off or wrongly escaped
            call = replace(call, arguments={"answer": answer}, mistake=None)
        timeout_s = min(self._limits.command_timeout_s, self._time_left_s())
        observation = await self._toolbox.run(call, timeout_s, self._time_left_s())
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
        left_s = max(0.001, self._times.answer_s - self._spent().wall_time_s)
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
        artifacts, selection = await self._collect()
        await self._emit(RunFinished(stop, self._talk.usage))
        reply = self._ending.reply
        calls = [{**call.raw, "id": self._minted(call)} for call in self._ending.client_calls]
        return Result(
            run_id=self._task.run_id,
            container_id=self._task.outbox.container_id,
            model=self._task.model,
            answer=self._writer.text,
            stop_reason=stop,
            finish_reason=self._finish_reason(stop, answer),
            tool_calls=calls,
            usage=self._talk.usage,
            usages=self._talk.usages,
            segments=len(self._talk.history.segments),
            tally=replace(
                self._talk.tally,
                tool_calls=self._toolbox.steps,
                wall_ms=int(self._spent().wall_time_s * 1000),
                sandbox_ms=int(self._toolbox.spent_s * 1000),
                cpu_ms=int(self._toolbox.cpu_s * 1000),
                peak_mem_bytes=self._toolbox.peak_memory_bytes,
            ),
            artifacts=artifacts,
            left_out=selection.left_out,
            choice=self._ending.choice,
            response=reply.response if reply else {},
            refusal=self._ending.refusal,
            notices=self._ending.notices,
            origin=self._seat.origin,
            parked=self._parked([call["id"] for call in calls]) if calls else None,
        )

    def _minted(self, call: ToolCall) -> str:
        """An id of ours: models' own are not unique, and by ours we find the run again."""
        if (state := self._task.legacy_state) is not None:
            made = call.raw["function"]
            return function_call_id(state, made["name"], made["arguments"])
        is_ours = minted_for(call.id) == self._task.run_id
        return call.id if is_ours else next(self._call_ids)

    def _parked(self, ids: Sequence[str]) -> Parked:
        task = self._task
        state = task.leaves or task.parks
        history = self._talk.history
        return Parked(
            messages=list(history.messages),
            ours_from=history.ours_from,
            calls=[
                (id, call.id, call.name)
                for id, call in zip(ids, self._ending.client_calls, strict=True)
            ],
            as_text=self._as_text,
            goes_on=GoesOn(state.session, [state.name]) if state else None,
            began=self._toolbox.computer is not None or bool(task.resumes and task.resumes.began),
        )

    def _finish_reason(self, stop: StopReason, answer: str) -> str:
        if stop is StopReason.CLIENT_TOOL_CALLS:
            return "tool_calls" if self._task.legacy_state is None else "function_call"
        if not answer and not self._ending.refusal:
            return "length"
        ended = self._ending.finish_reason
        return ended if ended in ("length", "content_filter") else "stop"

    async def _collect(self) -> tuple[list[Artifact], Selection]:
        sandbox = self._toolbox.computer
        if sandbox is None:
            return [], Selection((), ())
        produced = await self._outputs.produced(sandbox, await self._writer.dead_links())
        selection = select(produced, self._agent.artifact_limits)
        artifacts = []
        for file in selection.chosen:
            try:
                artifact = await self._task.outbox.save(sandbox, file)
            except SandboxFileError:
                continue  # it changed under our hands: a process still runs
            artifacts.append(artifact)
            await self._emit(FileProduced(artifact.file_id, artifact.path, artifact.bytes))
        return artifacts, selection


def _told(told: Sequence[tuple[ToolCall, str]], *, as_text: bool) -> list[dict[str, Any]]:
    results = [(call.id, call.name, {"content": text}) for call, text in told]
    return answers(results, as_text) if results else []


def _tool_name(tool: Any) -> str:
    return str(tool.get("function", {}).get("name", ""))
