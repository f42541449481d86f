"""The tools of one run and the sandbox they work in."""

import asyncio
import time
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from dataclasses import replace
from typing import Any

from policies.observation import lost_words, not_placed_words
from policies.steps import is_shown
from proxy.agent.events import Emit, ToolCallFinished, ToolCallStarted, ToolOutput
from proxy.agent.guard import Guard
from proxy.agent.outputs import remember_given
from proxy.agent.stopwatch import Stopwatch
from proxy.agent.task import InputFile
from proxy.agent.tool_calls import ToolCall
from sandbox_runtime.errors import SandboxFileError, SandboxGoneError, SandboxLostError
from sandbox_runtime.sandbox import Lease, Sandbox, StreamName
from sandbox_runtime.tools.base import Observation, Tool

Prepare = Callable[[Sandbox], Awaitable[Mapping[str, str]]]
"""Makes a computer ready for a run, and says which files were given to it already: their paths and
identities."""
KeepWarm = Callable[[], AbstractAsyncContextManager[None]]
"""Keeps the model's connection open while a block runs."""
MAX_LOSSES = 3
"""How many sandboxes one run may lose before it is the run that fails."""
GRACE_S = 0.5
"""What a command that used up its time has for ending by itself, so that its output is seen."""


class Toolbox:
    """Does what the model calls for; whatever the model did wrong is an observation.

    A sandbox that is lost is one too, for mostly it was the model's command that broke it: the next
    call gets a new one, and the client's files are put into that too.
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
        """`prepare` is called for each new computer before its first command; `keep_warm` runs
        beside each call, so that the model's next one finds its connection open; `taken` are the
        names of the client's tools: it keeps them, ours are renamed; `max_calls` is how many it
        allows of ours."""
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
        """Whether one was asked for."""
        self.losses = 0
        self.steps = 0
        """Calls that were made."""
        self.shown_steps = 0
        """Those of them that clients are shown as steps."""
        self.waited = Stopwatch()
        """For the tools, and for a sandbox to be there."""
        self.peak_memory_bytes = 0

    @property
    def names(self) -> list[str]:
        """What the model may call."""
        return list(self._tools)

    def schemas_but(self, left_out: str) -> list[Mapping[str, Any]]:
        """The tools as the model is told of them, always in this order."""
        tools = ((name, tool) for name, tool in self._tools.items() if tool.name != left_out)
        return [_named(tool.schema, name) for name, tool in tools]

    def proper_name(self, name: str) -> str:
        """What a tool is called by us, which the model may know by another name."""
        tool = self._tools.get(name)
        return tool.name if tool else name

    def is_submit(self, name: str) -> bool:
        """Whether a call of that name hands in the answer: the client may have a tool `submit`."""
        tool = self._tools.get(name)
        return tool is not None and tool.name == "submit"

    @property
    def is_used_up(self) -> bool:
        """Whether the client allows no more calls; one of submit it does."""
        return self._max_calls is not None and self.steps >= self._max_calls

    async def run(self, call: ToolCall, timeout_s: float, left_s: float) -> Observation:
        """Do one call and tell the listeners; a command may take `timeout_s`, and everything, the
        wait for a sandbox too, what is left of the run's time. Raises SandboxError."""
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
            return Observation(lost_words(str(error)))
        finally:
            self._not_placed.clear()

    async def sandbox(self) -> Sandbox:
        """The run's lease, as the tools see it. Raises SandboxStartError, and SandboxGoneError once
        where a new sandbox has taken the place of one that was in use."""
        self.is_begun = True
        computer = await self._lease.sandbox()
        if self.computer and self.computer is not computer:
            raise SandboxGoneError(f"sandbox {self.computer.id} is gone")
        if self.computer is None:
            present = await self._prepare(computer)
            await self._place(computer, present)
        self.computer = computer
        return computer

    async def _place(self, computer: Sandbox, present: Mapping[str, str]) -> None:
        """Put the client's files into a sandbox that nothing was done in yet by this run."""
        given = dict(present)
        for file in self._inputs:
            if given.get(file.path) == file.identity:
                continue  # an earlier run had it, and may have changed it
            try:
                async with aclosing(file.read()) as pieces:
                    await computer.put(file.path, pieces)
            except SandboxFileError as error:
                self._not_placed.append(not_placed_words(file.path, str(error)))
            else:
                given[file.path] = file.identity
        if given != present:
            await remember_given(computer, given)


def _free(name: str, taken: Collection[str]) -> str:
    while name in taken:
        name = f"sandbox_{name}"
    return name


def _named(schema: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return {**schema, "function": {**schema["function"], "name": name}}
