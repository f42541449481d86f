"""What is said between us and the model, and what it costs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from policies.limits import StopReason
from policies.prompts import call_request, final_request
from policies.usage import UsageOf
from proxy.agent.context import Context
from proxy.agent.events import OnDelta
from proxy.agent.gauge import Gauge
from proxy.agent.history import History
from proxy.agent.model import Answering, Message, Reply
from proxy.agent.observation_files import ObservationFiles
from proxy.agent.parking import INSTRUCTING, leading
from proxy.agent.stopwatch import Stopwatch
from proxy.agent.task import Compaction, Task
from proxy.agent.usage import add, tokens
from proxy.agent.windows import Window
from proxy.errors import ContextOverflowError


class PaidModel(Answering, Protocol):
    """A model whose calls come out of a budget."""

    async def allows(self, messages: Sequence[Message]) -> bool:
        """Whether there is room for a call beside the turn's own."""


@dataclass(slots=True)
class Trajectory:
    """All that was said, each token counted once however often it was sent."""

    llm_calls: int = 0
    tokens: int = 0
    env_tokens: int = 0
    """How much of it we told the model after its turns: mostly the sandbox's output."""
    context_tokens: int = 0
    """The last prompt's length."""
    known_tokens: int = 0
    """That prompt's and what the model answered to it."""


class Conversation:
    """The history of one run and the calls that make it grow."""

    def __init__(
        self,
        model: PaidModel,
        task: Task,
        tools: Sequence[Mapping[str, Any]],
        words: str,
        window: Window,
        files: ObservationFiles,
    ) -> None:
        """`words` go to the model before the client's own."""
        self._model = model
        self._task = task
        self._tools = [*tools, *task.client_tools]
        self.history = _history(task, words)
        self.usage: dict[str, Any] = {}
        self.usages: list[Mapping[str, Any]] = []
        """Of each call."""
        self.trajectory = Trajectory()
        self.waited = Stopwatch()
        """For the model; what is done with its words while it speaks is our time."""
        self._known_stubs = 0
        self._is_last = False
        self._while_it_fits = task.while_it_fits
        self._gauge = Gauge(self._tools)
        self._context = Context(window, self.history, self._gauge, files, self._ask_aside)

    @property
    def compactions(self) -> Sequence[Compaction]:
        """How the history was made smaller."""
        return self._context.compactions

    def usage_of(self, calls: UsageOf) -> Mapping[str, Any]:
        """What is told of the usage: of no call where none was answered."""
        return self.usages[-1] if calls == "last_call" and self.usages else self.usage

    async def ask(self, on_delta: OnDelta | None) -> Reply:
        """The model's next turn, tools at hand. Raises BackendError."""
        with_tools: dict[str, Any] = {"tools": self._tools}
        if self._task.must_call:
            with_tools["tool_choice"] = "required"
        elif self._task.tool_choice is not None and self.trajectory.llm_calls == 0:
            # A forced call holds for the first turn; repeated, the run would never end.
            with_tools["tool_choice"] = self._task.tool_choice
        if self._task.parallel_tool_calls is not None:
            with_tools["parallel_tool_calls"] = self._task.parallel_tool_calls
        return await self._complete(with_tools, on_delta)

    async def ask_call(self, stop: StopReason, on_delta: OnDelta | None) -> Reply:
        """A call of one of the client's tools, none of ours being at hand any more."""
        self._is_last = True
        self.history.ask(call_request(stop))
        tools: dict[str, Any] = {"tools": self._task.client_tools, "tool_choice": "required"}
        return await self._complete(tools, on_delta)

    async def ask_final(self, stop: StopReason, on_delta: OnDelta | None) -> Reply:
        """The visible answer, without tools and in the form the client asked for."""
        self._is_last = True
        self.history.ask(final_request(stop, self._task.form))
        return await self._complete_final(on_delta)

    async def ask_again(self, answer: str, request: str, on_delta: OnDelta | None) -> Reply:
        """The visible answer once more, the last one not being what was asked for."""
        self.history.append({"role": "assistant", "content": answer})
        self.history.ask(request)
        return await self._complete_final(on_delta)

    async def _complete_final(self, on_delta: OnDelta | None) -> Reply:
        return await self._complete({**self._task.final_only, **self._task.final_budget}, on_delta)

    async def _complete(self, extra: Mapping[str, Any], on_delta: OnDelta | None) -> Reply:
        hear = on_delta and self.waited.standing(on_delta)
        extra = await self._context.fitted(extra)
        while True:
            messages = self.history.messages
            try:
                reply = await self._answered(self._body(messages, extra), hear)
            except ContextOverflowError as error:
                if self._while_it_fits:
                    self._while_it_fits = {}
                else:
                    extra = await self._context.refitted(extra, error)
            else:
                self._count(reply)
                self._context.counted(messages, reply)
                return reply

    async def _ask_aside(self, messages: Sequence[Message]) -> Reply | None:
        """A call that is not part of the history, without tools; None where there is no budget for
        it. Who asks for the last answer must have it."""
        if not self._is_last and not await self._model.allows(messages):
            return None
        reply = await self._answered(self._body(messages, {}), None)
        self._count(reply)
        return reply

    async def _answered(self, body: Mapping[str, Any], on_delta: OnDelta | None) -> Reply:
        with self.waited:
            return await self._model.complete(body, on_delta)

    def _body(self, messages: Sequence[Message], extra: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "model": self._task.model,
            "messages": messages,
            **self._while_it_fits,
            **self._task.every_turn,
            **extra,
        }

    def _count(self, reply: Reply) -> None:
        self.usage = add(self.usage, reply.usage)
        self.usages.append(reply.usage)
        prompt = tokens(reply.usage, "prompt_tokens")
        completion = tokens(reply.usage, "completion_tokens")
        said = self.trajectory
        # What the prompt grew by, beyond the model's own words, is what we told it.
        told = self._newly_told(prompt) if said.known_tokens else 0
        said.tokens += completion + (told if said.llm_calls else prompt)
        said.env_tokens += told
        said.context_tokens = prompt
        said.known_tokens = prompt + completion
        said.llm_calls += 1

    def _newly_told(self, prompt: int) -> int:
        stubs = sum(each.kind == "stubs" for each in self.compactions)
        if stubs == self._known_stubs:
            return max(0, prompt - self.trajectory.known_tokens)
        # What became shorter hides what came: that is told after the model's last words.
        self._known_stubs = stubs
        turns = self.history.turns()
        return self._gauge.estimate([entry.message for entry in turns[-1][1:]]) if turns else 0


def _history(task: Task, words: str) -> History:
    if task.resumes is None:
        return History(opening(task.messages, words))
    waited = task.resumes
    if instructions := leading(task.messages):
        waited = waited.instructed(opening(instructions, words))
    messages, marks = waited.continued(task.messages)
    return History(messages, waited.ours_from, marks)


def opening(messages: Sequence[Message], words: str) -> list[Message]:
    """The client's messages with our words before its own system prompt.

    One system message, at the beginning: many chat templates refuse any other.
    """
    if not words:
        return list(messages)
    first = messages[0] if messages else {}
    if first.get("role") not in INSTRUCTING:
        return [{"role": "system", "content": words}, *messages]
    content = first.get("content")
    if isinstance(content, list):
        merged: Any = [{"type": "text", "text": words}, *content]
    else:
        merged = f"{words}\n\n{content}" if content else words
    return [{**first, "content": merged}, *messages[1:]]
