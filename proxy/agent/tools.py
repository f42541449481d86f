"""The tools of one run: their sandbox, and the execution of a turn's calls."""

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
from proxy.agent.checkpoint import UNKNOWN_OUTCOME, may_be_repeated
from proxy.agent.conversation import Conversation, ignore_delta
from proxy.agent.events import Emit, ToolCallFinished, ToolCallStarted, ToolOutput
from proxy.agent.guard import Guard
from proxy.agent.model import MAX_CALLS, Completion, Message
from proxy.agent.result import CapabilityCounter, RunOutcome, Stopwatch
from proxy.agent.suspension import NO_RESULT, result_messages
from proxy.agent.task import InputFile
from proxy.agent.tool_calls import ToolCall, Turn, parse_turn, recover_answer
from sandbox_runtime.errors import SandboxFileError, SandboxLostError
from sandbox_runtime.sandbox import Lease, Sandbox, StreamName
from sandbox_runtime.tools.base import Observation, Tool

Prepare = Callable[[Sandbox], Awaitable[Mapping[str, str]]]
"""Prepares a sandbox for a run. Returns the identities of the input files in it, by path."""
KeepWarm = Callable[[], AbstractAsyncContextManager[None]]
"""Keeps a connection to the model open during a block."""
MAX_LOSSES = 3
"""Number of lost sandboxes at which the run fails."""
GRACE_S = 0.5
"""A tool call is cancelled this many seconds after the end of the run's time. A command whose
timeout ends with the run's time can thus end by itself, and its output is not lost."""


_STATE = ("steps", "shown_steps", "sandbox_losses", "peak_memory_bytes")
"""The attributes of ToolExecutor that checkpoints store."""


class ToolExecutor:
    """Runs the model's calls of the proxy's tools. A mistake of the model becomes an observation.

    Implements `Lease` for the tools: gets sandboxes from the workspace's lease, prepares each new
    sandbox for the run, and uploads the input files into it.

    The loss of the sandbox, which is mostly caused by the model's command, becomes an observation
    too, and the next call gets a new sandbox with the input files. The run fails once MAX_LOSSES
    sandboxes were lost."""

    def __init__(
        self,
        tools: Sequence[Tool],
        workspace: Lease,
        emit: Emit,
        guard: Guard,
        input_files: Sequence[InputFile] = (),
        *,
        prepare: Prepare,
        keep_warm: KeepWarm = nullcontext,
        client_tool_names: Collection[str] = (),
        max_calls: int | None = None,
    ) -> None:
        """`prepare` is called for each new sandbox before its first command. `keep_warm` surrounds
        each call, so that the next model call finds an open connection. A tool of the proxy whose
        name is in `client_tool_names` is renamed. `max_calls` is the client's limit of calls."""
        self._tools = {_unique_name(tool.name, client_tool_names): tool for tool in tools}
        self._workspace = workspace
        self._emit = emit
        self._guard = guard
        self._input_files = input_files
        self._prepare = prepare
        self._keep_warm = keep_warm
        self._max_calls = max_calls
        self._upload_failures: list[str] = []
        self.current_sandbox: Sandbox | None = None
        """The sandbox in use; None before the run requests it."""
        self.is_sandbox_requested = False
        """True once the run has requested a sandbox."""
        self.sandbox_losses = 0
        """Number of sandboxes that were lost during a tool call."""
        self.steps = 0
        """Number of calls so far, including calls of `submit`."""
        self.shown_steps = 0
        """Number of calls that clients see as steps."""
        self.tool_time = Stopwatch()
        """Time spent in tools, including the wait for a sandbox."""
        self.peak_memory_bytes = 0
        self._command_prefix = ""
        self._call_count_of_turn = 0
        self._is_repeating = False
        self._has_unknown_outcome = False
        """True once a call of the turn was not executed because a dead server may have run it."""

    @property
    def command_id(self) -> str | None:
        """See `Lease.command_id`."""
        prefix = self._command_prefix
        return f"{prefix}-{self._call_count_of_turn}" if prefix else None

    def begin_turn(self, command_prefix: str = "", *, is_repeated: bool = False) -> None:
        """Begin the calls of a turn. The ids of its commands begin with `command_prefix`, if it is
        not empty. If `is_repeated` is True, a dead server may have run some of the calls."""
        self._command_prefix, self._call_count_of_turn = command_prefix, 0
        self._is_repeating, self._has_unknown_outcome = is_repeated, False

    def begin_call(self) -> None:
        """Count the next call of the turn, even if it will not be executed, so that a repeated turn
        gives each command the same id."""
        self._call_count_of_turn += 1

    def state(self) -> dict[str, Any]:
        """Return the counts so far, as JSON values."""
        return {name: getattr(self, name) for name in _STATE}

    def restore(self, state: Mapping[str, Any], sandbox: Sandbox) -> None:
        """Restore the counts of the run on its previous server, and use `sandbox`, which was
        adopted from that server. `state` is the value that the method `state` returned there."""
        for name in _STATE:
            setattr(self, name, state[name])
        self.current_sandbox, self.is_sandbox_requested = sandbox, True

    @property
    def names(self) -> list[str]:
        """The names under which the model calls the tools."""
        return list(self._tools)

    def schemas_except(self, excluded: str) -> list[Mapping[str, Any]]:
        """Return the schemas of the tools except `excluded`, in a fixed order for prefix caches."""
        return [
            {**tool.schema, "function": {**tool.schema["function"], "name": name}}
            for name, tool in self._tools.items()
            if tool.name != excluded
        ]

    def canonical_name(self, name: str) -> str:
        """Return the proxy's own name of a tool that may have been renamed."""
        tool = self._tools.get(name)
        return tool.name if tool else name

    def is_submit(self, name: str) -> bool:
        """Return True if the name is that of the proxy's submit tool. The client may have a tool
        `submit` too."""
        tool = self._tools.get(name)
        return tool is not None and tool.name == "submit"

    @property
    def is_call_limit_reached(self) -> bool:
        """True if the client allows no more calls, except of submit."""
        return self._max_calls is not None and self.steps >= self._max_calls

    async def execute(self, call: ToolCall, timeout_s: float, time_left_s: float) -> Observation:
        """Run one call and emit its events. `timeout_s` is the timeout of the command, unless the
        model sets another. `time_left_s`, the rest of the run's time, limits the call and the wait
        for a sandbox. Raises SandboxError."""
        self.steps += 1
        step, name = self.steps, self.canonical_name(call.name)
        self.shown_steps += is_shown(name)
        shown = call.arguments if isinstance(call.arguments, dict) else {}
        await self._emit(ToolCallStarted(step, call.id, name, shown))
        started = time.monotonic()
        try:
            async with asyncio.timeout(time_left_s + GRACE_S), self._keep_warm():
                with self.tool_time:
                    observation = await self._execute_tool(call, step, timeout_s)
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
                timed_out=observation.timed_out,
            )
        )
        return observation

    async def _execute_tool(self, call: ToolCall, step: int, timeout_s: float) -> Observation:
        if call.mistake:
            return Observation(call.mistake)
        tool = self._tools.get(call.name)
        if tool is None:
            names = ", ".join(self._tools)
            return Observation(f"There is no tool {call.name!r}. The tools are: {names}.")

        if refused := await self._guard.refusal(tool.name, call.arguments):
            return Observation(refused)
        if self._has_unknown_effect(tool, call):
            return Observation(UNKNOWN_OUTCOME)
        emit = self.tool_time.pause_during(self._emit)

        async def on_output(stream: StreamName, text: str) -> None:
            await emit(ToolOutput(step, stream, text))

        try:
            seen = await tool.run(self, call.arguments, timeout_s=timeout_s, on_output=on_output)
            text = self._guard.redact("\n".join([*self._upload_failures, seen.text]))
            return seen if text == seen.text else replace(seen, text=text)
        except SandboxLostError as error:
            self.sandbox_losses += 1
            self.current_sandbox = None
            if self.sandbox_losses == MAX_LOSSES:
                raise
            return Observation(sandbox_lost_text(str(error)))
        finally:
            self._upload_failures.clear()

    def _has_unknown_effect(self, tool: Tool, call: ToolCall) -> bool:
        """Return True for a call that a dead server may have run and that must not be repeated, and
        for the calls after it, which may need its effect."""
        if self._is_repeating and not may_be_repeated(tool.name, call.arguments):
            self._has_unknown_outcome = True
        return self._has_unknown_outcome

    async def sandbox(self) -> Sandbox:
        """Return the run's sandbox. Raises SandboxStartError. Raises SandboxLostError if a new
        sandbox has replaced the sandbox in use; the next tool call then gets the new sandbox."""
        self.is_sandbox_requested = True
        sandbox = await self._workspace.sandbox()
        if self.current_sandbox and self.current_sandbox is not sandbox:
            raise SandboxLostError(f"sandbox {self.current_sandbox.id} is gone")
        if self.current_sandbox is None:
            existing_identities = await self._prepare(sandbox)
            await self._upload_inputs(sandbox, existing_identities)
        self.current_sandbox = sandbox
        return sandbox

    async def _upload_inputs(
        self, sandbox: Sandbox, existing_identities: Mapping[str, str]
    ) -> None:
        """Upload the input files that a new sandbox does not contain yet."""
        uploaded = dict(existing_identities)
        for file in self._input_files:
            if uploaded.get(file.path) == file.identity:
                continue  # uploaded by an earlier run, which may have changed the file
            try:
                async with aclosing(file.read()) as pieces:
                    await sandbox.put(file.path, pieces)
            except SandboxFileError as error:
                self._upload_failures.append(file_not_written_text(file.path, str(error)))
            else:
                uploaded[file.path] = file.identity
        if uploaded != existing_identities:
            await write_manifest(sandbox, uploaded)


class CallRunner:
    """Runs the calls of a run's turns. Calls of client tools are left to the client."""

    def __init__(
        self,
        executor: ToolExecutor,
        conversation: Conversation,
        budget: RunBudget,
        outcome: RunOutcome,
        capability_counter: CapabilityCounter,
        limits: Limits,
        client_tool_names: Collection[str],
    ) -> None:
        self._executor = executor
        self._conversation = conversation
        self._budget = budget
        self._outcome = outcome
        self._capability_counter = capability_counter
        self._limits = limits
        self._client_tool_names = client_tool_names

    async def run_calls(self, turn: Turn, reply: Completion) -> StopReason | None:
        """Run the calls of a turn in order and append their observations. Return the stop reason,
        or None if another turn follows. A submit call is not run if a client call of the turn was
        already streamed."""
        outcome = self._outcome
        observations: list[tuple[ToolCall, str]] = []
        for call in turn.calls:
            self._executor.begin_call()
            if reason := self._skip_reason(call):
                observations.append((call, reason))
            elif call.name in self._client_tool_names:
                outcome.client_calls.append(call)
            else:
                observation = await self._run_call(call, reply)
                observations.append((call, observation.text))
                if observation.finished:
                    outcome.submitted_answer = observation.answer or ""
        if outcome.submitted_answer is not None:
            observations += [(call, NOT_RUN) for call in outcome.client_calls]
            outcome.client_calls.clear()
        elif observations and not outcome.client_calls and (notes := self._notes(turn)):
            call, text = observations[-1]
            observations[-1] = (call, "\n".join([text, *notes]))
        outcome.calls_are_text = turn.calls_are_text
        self._conversation.history.append(
            *_observation_messages(observations, calls_are_text=turn.calls_are_text)
        )
        if outcome.submitted_answer is not None:
            return StopReason.SUBMITTED
        return StopReason.CLIENT_TOOL_CALLS if outcome.client_calls else None

    def _notes(self, turn: Turn) -> list[str]:
        """Return the notes to append to the last observation of a turn."""
        notes = [CALLS_LEFT_OUT.format(count=MAX_CALLS)] if turn.has_more_calls else []
        reminder = self._budget.reminder()
        return [*notes, reminder] if reminder else notes

    def _skip_reason(self, call: ToolCall) -> str:
        """Return the observation for a call that must not be run, or "" if it may be run."""
        if self._outcome.submitted_answer is not None:
            return NOT_RUN
        is_too_early = self._outcome.client_ids_by_model_id and self._executor.is_submit(call.name)
        return NOT_SUBMITTED if is_too_early else ""

    async def require_client_call(
        self, stop: StopReason, new_ids: Iterator[str], timeout_s: float
    ) -> StopReason:
        """Request the client tool call that the run has to end in, after the limit `stop`. Return
        CLIENT_TOOL_CALLS, or `stop` if the model makes no such call within `timeout_s`. Raises
        BackendError."""
        try:
            async with asyncio.timeout(timeout_s):
                reply = await self._conversation.complete_required_call(stop, ignore_delta)
        except TimeoutError:
            return stop
        turn = parse_turn(reply.message, self._client_tool_names, new_ids)
        self._conversation.append_reply(reply, turn.message)
        self._outcome.reply, self._outcome.calls_are_text = reply, turn.calls_are_text
        self._outcome.client_calls = [c for c in turn.calls if c.name in self._client_tool_names]
        observations = [(c, NO_RESULT) for c in turn.calls if c.name not in self._client_tool_names]
        self._conversation.history.append(
            *_observation_messages(observations, calls_are_text=turn.calls_are_text)
        )
        return StopReason.CLIENT_TOOL_CALLS if self._outcome.client_calls else stop

    async def _run_call(self, call: ToolCall, reply: Completion) -> Observation:
        is_submit = self._executor.is_submit(call.name)
        if not is_submit and self._executor.is_call_limit_reached:
            return Observation(NO_MORE_CALLS)
        if not is_submit and (stop := await self._budget.reserve_command()):
            return Observation(NO_BUDGET.format(why=WHY_NO_MORE_TOOLS[stop]))
        answer = (
            recover_answer(call.invalid_arguments) if is_submit and call.invalid_arguments else ""
        )
        if answer:  # readable, although its JSON is cut off or wrongly escaped
            call = replace(call, arguments={"answer": answer}, mistake=None)
        timeout_s = min(self._limits.command_timeout_s, self._budget.time_left_s)
        self._capability_counter.record(self._executor.canonical_name(call.name), call.arguments)
        if not is_submit and not call.mistake and call.name in self._executor.names:
            self._conversation.has_used_tools = True
        observation = await self._executor.execute(call, timeout_s, self._budget.time_left_s)
        if not is_submit:
            await self._budget.settle_command(observation)
        if answer and observation.finished:
            self._outcome.finish_reason = reply.finish_reason
        return observation


def tool_name(tool: Mapping[str, Any]) -> str:
    """Return the name of a tool, given its entry in a request's `tools`."""
    return str(tool.get("function", {}).get("name", ""))


def _unique_name(name: str, taken_names: Collection[str]) -> str:
    """Return the name, prefixed with `sandbox_` until it is not in `taken_names`."""
    while name in taken_names:
        name = f"sandbox_{name}"
    return name


def _observation_messages(
    observations: Sequence[tuple[ToolCall, str]], *, calls_are_text: bool
) -> list[Message]:
    results = [(call.id, call.name, {"content": text}) for call, text in observations]
    return result_messages(results, calls_are_text) if results else []
