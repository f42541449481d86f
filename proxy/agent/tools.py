"""The tools of one run: the sandbox they work in, and how the calls of a turn are run."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from dataclasses import replace
from typing import Any

from policies.limits import Limits, StopReason
from policies.observation import file_not_written_text, sandbox_lost_text
from policies.prompts import (
    CALLS_LEFT_OUT,
    NO_BUDGET,
    NO_MORE_CALLS,
    NOT_RUN,
    NOT_SUBMITTED,
    WHY_NO_MORE_TOOLS,
)
from policies.steps import is_shown
from proxy.agent.artifacts import write_manifest
from proxy.agent.budget import RunBudget
from proxy.agent.conversation import Conversation, ignore
from proxy.agent.events import Emit, ToolCallFinished, ToolCallStarted, ToolOutput
from proxy.agent.guard import Guard
from proxy.agent.model import MAX_CALLS, Completion, Message
from proxy.agent.outcome import RunOutcome
from proxy.agent.result import CapabilityUse, Stopwatch
from proxy.agent.suspension import NO_RESULT, answers
from proxy.agent.task import InputFile
from proxy.agent.tool_calls import ToolCall, Turn, recovered_answer, understand
from sandbox_runtime.errors import SandboxFileError, SandboxLostError
from sandbox_runtime.sandbox import Lease, Sandbox, StreamName
from sandbox_runtime.tools.base import Observation, Tool

Prepare = Callable[[Sandbox], Awaitable[Mapping[str, str]]]
"""Makes a sandbox ready for a run, and returns the files that clients gave to it already: their
paths and identities."""
KeepWarm = Callable[[], AbstractAsyncContextManager[None]]
"""Keeps a connection to the model open while a block runs."""
MAX_LOSSES = 3
"""The run fails when it has lost so many sandboxes."""
GRACE_S = 0.5
"""The time that a command has for ending by itself once its own is up: its output is seen."""


class ToolExecutor:
    """Runs the model's calls; whatever the model did wrong is an observation.

    So is the loss of the sandbox, for mostly it was the model's command that broke it: the next
    call gets a new sandbox, into which the client's files are put too.
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        lease: Lease,
        emit: Emit,
        guard: Guard,
        inputs: Sequence[InputFile] = (),
        *,
        prepare: Prepare,
        keep_warm: KeepWarm = nullcontext,
        taken: Collection[str] = (),
        max_calls: int | None = None,
    ) -> None:
        """`prepare` is called for each new sandbox before its first command; `keep_warm` runs
        beside each call, so that the next model call finds a connection open; `taken` are the
        names of the client's tools: the client keeps them, ours are renamed; `max_calls` is how
        many calls of ours the client allows."""
        self._tools = {_free(tool.name, taken): tool for tool in tools}
        self._lease = lease
        self._emit = emit
        self._guard = guard
        self._inputs = inputs
        self._prepare = prepare
        self._keep_warm = keep_warm
        self._max_calls = max_calls
        self._not_placed: list[str] = []
        self.computer: Sandbox | None = None
        """The sandbox, once a tool has asked for it."""
        self.is_begun = False
        """Whether a tool has asked for a sandbox."""
        self.losses = 0
        self.steps = 0
        """How many calls were made."""
        self.shown_steps = 0
        """How many of them clients are shown as steps."""
        self.waited = Stopwatch()
        """The time spent in tools, and until a sandbox was there."""
        self.peak_memory_bytes = 0

    @property
    def names(self) -> list[str]:
        """The names by which the model may call the tools."""
        return list(self._tools)

    def schemas_but(self, skipped_files: str) -> list[Mapping[str, Any]]:
        """Return the tools as the model is told of them, always in this order."""
        return [
            {**tool.schema, "function": {**tool.schema["function"], "name": name}}
            for name, tool in self._tools.items()
            if tool.name != skipped_files
        ]

    def proper_name(self, name: str) -> str:
        """Return our own name of a tool, which the model may know by another name."""
        tool = self._tools.get(name)
        return tool.name if tool else name

    def is_submit(self, name: str) -> bool:
        """Return whether a call of that name hands in the answer: the client may have a tool
        `submit` of its own."""
        tool = self._tools.get(name)
        return tool is not None and tool.name == "submit"

    @property
    def is_used_up(self) -> bool:
        """Whether the client allows no more calls but one of submit."""
        return self._max_calls is not None and self.steps >= self._max_calls

    async def run(self, call: ToolCall, timeout_s: float, left_s: float) -> Observation:
        """Run one call and emit its events. A command may take `timeout_s`; everything, the wait
        for a sandbox too, may take `left_s`, the rest of the run's time. Raises SandboxError."""
        self.steps += 1
        step, name = self.steps, self.proper_name(call.name)
        self.shown_steps += is_shown(name)
        shown = call.arguments if isinstance(call.arguments, dict) else {}
        await self._emit(ToolCallStarted(step, call.id, name, shown))
        started = time.monotonic()
        try:
            async with asyncio.timeout(left_s + GRACE_S), self._keep_warm():
                with self.waited:
                    observation = await self._observe(call, step, timeout_s)
        except TimeoutError:
            observation = Observation("Given up: the time is up.")
        duration_s = time.monotonic() - started
        self.peak_memory_bytes = max(self.peak_memory_bytes, observation.peak_memory_bytes)
        await self._emit(
            ToolCallFinished(
                step=step,
                call_id=call.id,
                name=name,
                observation=observation.text,
                exit_code=observation.exit_code,
                output_lines=observation.output_lines,
                duration_s=duration_s,
            )
        )
        return observation

    async def _observe(self, call: ToolCall, step: int, timeout_s: float) -> Observation:
        if call.mistake:
            return Observation(call.mistake)
        tool = self._tools.get(call.name)
        if tool is None:
            names = ", ".join(self._tools)
            return Observation(f"There is no tool {call.name!r}. The tools are: {names}.")

        if refused := await self._guard.refusal(tool.name, call.arguments):
            return Observation(refused)
        emit = self.waited.standing(self._emit)

        async def on_output(stream: StreamName, text: str) -> None:
            await emit(ToolOutput(step, stream, text))

        try:
            seen = await tool.run(self, call.arguments, timeout_s=timeout_s, on_output=on_output)
            text = self._guard.without_secrets("\n".join([*self._not_placed, seen.text]))
            return seen if text == seen.text else replace(seen, text=text)
        except SandboxLostError as error:
            self.losses += 1
            self.computer = None
            if self.losses == MAX_LOSSES:
                raise
            return Observation(sandbox_lost_text(str(error)))
        finally:
            self._not_placed.clear()

    async def sandbox(self) -> Sandbox:
        """Return the run's sandbox, as the tools see it. Raises SandboxStartError, and once
        SandboxLostError if a new sandbox has taken the place of the one in use."""
        self.is_begun = True
        computer = await self._lease.sandbox()
        if self.computer and self.computer is not computer:
            raise SandboxLostError(f"sandbox {self.computer.id} is gone")
        if self.computer is None:
            present = await self._prepare(computer)
            await self._place(computer, present)
        self.computer = computer
        return computer

    async def _place(self, computer: Sandbox, present: Mapping[str, str]) -> None:
        """Put the client's files into a sandbox that this run has not used yet."""
        given = dict(present)
        for file in self._inputs:
            if given.get(file.path) == file.identity:
                continue  # an earlier run got the file, and may have changed it
            try:
                async with aclosing(file.read()) as pieces:
                    await computer.put(file.path, pieces)
            except SandboxFileError as error:
                self._not_placed.append(file_not_written_text(file.path, str(error)))
            else:
                given[file.path] = file.identity
        if given != present:
            await write_manifest(computer, given)


class CallRunner:
    """Runs the calls of a run's turns: of our tools, while the client's are left to the client."""

    def __init__(
        self,
        toolbox: ToolExecutor,
        talk: Conversation,
        budget: RunBudget,
        outcome: RunOutcome,
        use: CapabilityUse,
        limits: Limits,
        client_names: Collection[str],
    ) -> None:
        self._toolbox = toolbox
        self._talk = talk
        self._budget = budget
        self._outcome = outcome
        self._use = use
        self._limits = limits
        self._client_names = client_names

    async def run(self, turn: Turn, reply: Completion) -> StopReason | None:
        """Run every call of a turn, in order, and answer each; the client's are left to the client.
        If the client has been sent one already, nothing is submitted. Return why the run ends, or
        None."""
        outcome = self._outcome
        told: list[tuple[ToolCall, str]] = []
        for call in turn.calls:
            if words := self._why_not_run(call):
                told.append((call, words))
            elif call.name in self._client_names:
                outcome.client_calls.append(call)
            else:
                observation = await self._run_tool(call, reply)
                told.append((call, observation.text))
                if observation.finished:
                    outcome.submitted = observation.answer or ""
        if outcome.submitted is not None:
            told += [(call, NOT_RUN) for call in outcome.client_calls]
            outcome.client_calls.clear()
        elif told and not outcome.client_calls and (notes := self._notes(turn)):
            told[-1] = (told[-1][0], "\n".join([told[-1][1], *notes]))
        outcome.as_text = turn.as_text
        self._talk.history.append(*_results(told, as_text=turn.as_text))
        if outcome.submitted is not None:
            return StopReason.SUBMITTED
        return StopReason.CLIENT_TOOL_CALLS if outcome.client_calls else None

    def _notes(self, turn: Turn) -> list[str]:
        """Return what the model is told below the last result of a turn."""
        skipped_files = [CALLS_LEFT_OUT.format(count=MAX_CALLS)] if turn.has_more else []
        left = self._budget.reminder()
        return [*skipped_files, left] if left else skipped_files

    def _why_not_run(self, call: ToolCall) -> str:
        """Return what the model is told of a call that is not run; "" if it is run."""
        if self._outcome.submitted is not None:
            return NOT_RUN
        is_too_early = self._outcome.sent_ids and self._toolbox.is_submit(call.name)
        return NOT_SUBMITTED if is_too_early else ""

    async def ask_for(self, stop: StopReason, new_id: Iterator[str], seconds: float) -> StopReason:
        """Ask for the call of a client's tool that a run has to end in, at the limit `stop`. Return
        why the run ends."""
        try:
            async with asyncio.timeout(seconds):
                reply = await self._talk.ask_call(stop, ignore)
        except TimeoutError:
            return stop
        turn = understand(reply.message, self._client_names, new_id)
        self._talk.history.append(turn.message)
        self._outcome.reply, self._outcome.as_text = reply, turn.as_text
        self._outcome.client_calls = [c for c in turn.calls if c.name in self._client_names]
        told = [(c, NO_RESULT) for c in turn.calls if c.name not in self._client_names]
        self._talk.history.append(*_results(told, as_text=turn.as_text))
        return StopReason.CLIENT_TOOL_CALLS if self._outcome.client_calls else stop

    async def _run_tool(self, call: ToolCall, reply: Completion) -> Observation:
        is_submit = self._toolbox.is_submit(call.name)
        if not is_submit and self._toolbox.is_used_up:
            return Observation(NO_MORE_CALLS)
        if not is_submit and (stop := await self._budget.before_command()):
            return Observation(NO_BUDGET.format(why=WHY_NO_MORE_TOOLS[stop]))
        answer = recovered_answer(call.written) if is_submit and call.written else ""
        if answer:  # it can be read, though its JSON is cut off or wrongly escaped
            call = replace(call, arguments={"answer": answer}, mistake=None)
        timeout_s = min(self._limits.command_timeout_s, self._budget.time_left_s)
        self._use.note(self._toolbox.proper_name(call.name), call.arguments)
        if not is_submit and not call.mistake and call.name in self._toolbox.names:
            self._talk.has_worked = True
        observation = await self._toolbox.run(call, timeout_s, self._budget.time_left_s)
        if not is_submit:
            await self._budget.after_command(observation)
        if answer and observation.finished:
            self._outcome.finish_reason = reply.finish_reason
        return observation


def tool_name(tool: Mapping[str, Any]) -> str:
    """Return the name of a tool, given its entry in a request's `tools`."""
    return str(tool.get("function", {}).get("name", ""))


def _free(name: str, taken: Collection[str]) -> str:
    """Return a name that the client has not taken."""
    while name in taken:
        name = f"sandbox_{name}"
    return name


def _results(told: Sequence[tuple[ToolCall, str]], *, as_text: bool) -> list[Message]:
    results = [(call.id, call.name, {"content": text}) for call, text in told]
    return answers(results, as_text) if results else []
