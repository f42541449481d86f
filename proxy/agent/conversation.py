"""The conversation of a run with its model: the requests that are sent, the history that they
carry, and the usage that the replies report."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from policies.context import ContextSizes
from policies.limits import StopReason
from policies.prompts import final_request, tool_call_request
from policies.reply_checks import is_quoted
from policies.steps import UsageScope
from proxy.agent.budget import MeteredModel
from proxy.agent.context import ContextManager, ObservationFiles, TokenCounter
from proxy.agent.context_windows import ContextWindow
from proxy.agent.events import CallFailed, ModelDelta, OnDelta
from proxy.agent.history import History
from proxy.agent.model import Completion, Message, StopRetryingError
from proxy.agent.result import Compaction, Stopwatch, add, tokens
from proxy.agent.suspension import INSTRUCTING, SuspendedRun, leading
from proxy.agent.task import AgentTask, Params
from proxy.errors import BackendError, ContextOverflowError, ToolsRefusedError

FLOOR_SHARE = 4
"""The least that a call may take is at most this part (1/4) of the model's window."""
WITH_TURNS = ("logprobs", "top_logprobs")
"""Parameters of the visible answer that go with turns too, for prose may be the answer."""


@dataclass(slots=True)
class Trajectory:
    """The tokens of a run's conversation, each counted once however often it was sent."""

    llm_calls: int = 0
    tokens: int = 0
    env_tokens: int = 0
    """The part that was output of tools."""
    context_tokens: int = 0
    """The length of the last prompt."""
    known_tokens: int = 0
    """The length of that prompt and of the model's reply to it."""


class Conversation:
    """The history of one run, and the model calls that make it grow."""

    def __init__(
        self,
        model: MeteredModel,
        task: AgentTask,
        messages: Sequence[Message],
        params: Params,
        tools: Sequence[Mapping[str, Any]],
        words: str,
        window: ContextWindow,
        files: ObservationFiles,
    ) -> None:
        """`messages` and `params` are the task's as the run's style words them; `words` go to the
        model before the messages."""
        self._model = model
        self._task, self._request, self._params = task, task.request, params
        self._clients = len(messages)
        """The number of the client's messages."""
        self._tools = [*tools, *task.request.client_tools]
        self.history = _history(messages, task.session.suspended_run, words)
        self._ours_before = len(self.history.entries) - len(messages)
        """How many messages of ours stand before the client's, unless the run was resumed."""
        self.usage: dict[str, Any] = {}
        self.usages: list[Mapping[str, Any]] = []
        """The usage of each call."""
        self.trajectory = Trajectory()
        self.waited = Stopwatch()
        """The time spent waiting for the model, without that spent on pieces of its replies."""
        self._known_stubs = 0
        self._is_last = False
        self._optional = params.optional
        self._floor: int | None = task.profile.limits.min_turn_tokens
        """The least token limit that calls are given; None once the backend refused it."""
        self._with_turns = {k: v for k, v in params.final.items() if k in WITH_TURNS}
        self.has_worked = False
        """True once a tool has run: only then may the history be shortened."""
        self._counter = TokenCounter(self._tools)
        self._context = ContextManager(
            *(window, self.history, self._counter, files, self._ask_aside),
            compacts=task.profile.limits.compact,
        )

    @property
    def compactions(self) -> Sequence[Compaction]:
        """How the history was made smaller."""
        return self._context.compactions

    def trajectory_tokens(self) -> int:
        """Return the trajectory's tokens, with an estimate of what no call has sent yet; 0 where
        they are not limited."""
        if self._task.profile.limits.max_trajectory_tokens is None:
            return 0
        prompt = self._counter.tokens(self.history.messages)
        return self.trajectory.tokens + max(0, prompt - self.trajectory.known_tokens)

    def usage_of(self, calls: UsageScope) -> Mapping[str, Any]:
        """Return the usage that the client is told: of the last call, or of all."""
        return self.usages[-1] if calls == "last_call" and self.usages else self.usage

    @property
    def unfinished(self) -> Completion | None:
        """The reply to the last call as far as it came, if it was cut off."""
        return self._model.unfinished

    async def ask(self, on_delta: OnDelta) -> Completion:
        """Ask for the model's next turn, with tools. Raises BackendError."""
        with_tools: dict[str, Any] = {"tools": self._tools, **self._with_turns}
        if self._request.must_call:
            with_tools["tool_choice"] = "required"
        elif self._request.tool_choice is not None and self.trajectory.llm_calls == 0:
            # A forced call holds for the first turn; repeated, the run would never end.
            with_tools["tool_choice"] = self._request.tool_choice
        if self._request.parallel_tool_calls is not None:
            with_tools["parallel_tool_calls"] = self._request.parallel_tool_calls
        try:
            return await self._complete(with_tools, on_delta)
        except BackendError as error:
            if not self._with_turns or error.status != 400 or self.trajectory.llm_calls:
                raise
            if isinstance(error, ContextOverflowError | ToolsRefusedError):
                raise
            # llama.cpp has no log probabilities beside tools in a stream.
            for name in self._with_turns:
                del with_tools[name]
            self._with_turns = {}
            return await self._complete(with_tools, on_delta)

    async def ask_plainly(self, on_delta: OnDelta | None) -> Completion:
        """Send the client's request as it came, without words or tools of ours. Raises
        BackendError."""
        asked: dict[str, Any] = {
            "model": self._task.model,
            "messages": self._request.messages,
            **self._params.base,
            **self._params.final,
            **self._params.token_limits,
        }
        if self._request.client_tools:
            asked["tools"] = self._request.client_tools
            if self._request.tool_choice is not None:
                asked["tool_choice"] = self._request.tool_choice
        hear = on_delta and self.waited.standing(on_delta)
        reply = await self._answered(asked, hear, ours_before=0)
        self._count(reply)
        return reply

    async def ask_call(self, stop: StopReason, on_delta: OnDelta | None) -> Completion:
        """Ask for a call of one of the client's tools, without ours."""
        self._is_last = True
        self.history.ask(tool_call_request(stop))
        tools: dict[str, Any] = {"tools": self._request.client_tools, "tool_choice": "required"}
        return await self._complete(tools, on_delta)

    async def ask_final(self, stop: StopReason, on_delta: OnDelta | None) -> Completion:
        """Ask for the visible answer, without tools and in the form that the client wants."""
        self._is_last = True
        self.history.ask(final_request(stop, self._request.answer_form))
        return await self._complete_final(on_delta)

    async def ask_again(self, answer: str, request: str, on_delta: OnDelta | None) -> Completion:
        """Ask for the visible answer once more, because `answer` lacks its form."""
        self.history.append({"role": "assistant", "content": answer})
        self.history.ask(request)
        return await self._complete_final(on_delta)

    async def _complete_final(self, on_delta: OnDelta | None) -> Completion:
        return await self._complete(self._params.final, on_delta)

    async def _complete(self, extra: Mapping[str, Any], on_delta: OnDelta | None) -> Completion:
        hear = on_delta and self.waited.standing(on_delta)
        extra = {**extra, **self._budget()}
        extra = await self._context.fit(extra, shortens=self.has_worked)
        while True:
            messages = self.history.messages
            try:
                reply = await self._answered(self._body(messages, extra), hear)
            except ContextOverflowError as error:
                await self._may_ask_again(error, hear)
                if self._optional:
                    self._optional = {}
                elif self._floor is not None and self._budget() != self._params.token_limits:
                    self._floor = None
                    extra = await self._context.relimit({**extra, **self._budget()}, error)
                else:
                    extra = await self._context.refit(extra, error, shortens=self.has_worked)
            else:
                self._count(reply)
                self._context.counted(messages, reply)
                return reply

    async def _may_ask_again(self, error: BackendError, hear: OnDelta | None) -> None:
        """Tell the listener that a reply broke off. Raises the error if the client would see that
        another one follows."""
        if hear is None or self._model.unfinished is None:
            return
        try:
            await hear(CallFailed(error.status, 0.0))
        except StopRetryingError:
            raise error from None

    def _budget(self) -> dict[str, Any]:
        """Return the token limit of a call under the client's name for it, raised to leave room for
        thinking and for a call's arguments."""
        if not self._params.token_limits:
            return {}
        floor = self._floor or 0
        if (window := self._context.known_window) is not None:
            floor = min(floor, window // FLOOR_SHARE)
        return {name: max(limit, floor) for name, limit in self._params.token_limits.items()}

    async def _ask_aside(self, messages: Sequence[Message]) -> Completion | None:
        """Make a call that is no part of the history, without tools. Return None if the budget has
        no room for it; once the last answer is asked for, it is made in any case."""
        if not self._is_last and not await self._model.allows(messages):
            return None
        reply = await self._answered(self._body(messages, self._budget()), ignore)
        self._count(reply)
        return reply

    async def _answered(
        self, body: Mapping[str, Any], on_delta: OnDelta | None, ours_before: int | None = None
    ) -> Completion:
        """Make a model call. `ours_before`: how many messages of ours stand before the client's;
        None: as many as in the history."""
        if body.get("prompt_logprobs") is not None:
            on_delta = None  # no engine has them in a stream
        try:
            with self.waited:
                return await self._model.complete(body, on_delta)
        except (BackendError, asyncio.CancelledError) as error:
            if unfinished := self._model.unfinished:
                self._count(unfinished)
            if isinstance(error, ContextOverflowError) and is_quoted(error.sizes.excerpt, body):
                error.sizes = ContextSizes()
            if isinstance(error, BackendError):
                before = self._ours_before if ours_before is None else ours_before
                error.renumber(partial(self._clients_index, before))
            raise

    def _clients_index(self, ours_before: int, index: int) -> int | None:
        """Return the index of a message in the client's request, or None if it is not there."""
        is_new = self._request.has_client_indexes and self._task.session.suspended_run is None
        index -= ours_before
        return index if is_new and 0 <= index < self._clients else None

    def _body(self, messages: Sequence[Message], extra: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "model": self._task.model,
            "messages": messages,
            **self._optional,
            **self._params.base,
            **extra,
        }

    def _count(self, reply: Completion) -> None:
        self.usage = add(self.usage, reply.usage)
        self.usages.append(reply.usage)
        prompt = tokens(reply.usage, "prompt_tokens")
        completion = tokens(reply.usage, "completion_tokens")
        said = self.trajectory
        # What the prompt grew by, beyond the model's own words, is what we told it.
        told = self._newly_told(prompt) if said.known_tokens else 0
        said.tokens += completion + (told if said.llm_calls else prompt)
        said.env_tokens += self._put_out(told)
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
        return self._counter.estimate([entry.message for entry in turns[-1][1:]]) if turns else 0

    def _put_out(self, told: int) -> int:
        """Return how many of `told`, the tokens after the model's last words, came from tools."""
        new = turns[-1][1:] if told and (turns := self.history.turns()) else []
        ours = [entry.message for entry in new if entry.kind == "asked"]
        if len(ours) == len(new):
            return 0
        return max(0, told - self._counter.estimate(ours)) if ours else told


async def ignore(delta: ModelDelta) -> None:
    """Ignore the piece: the whole reply is enough."""


def _history(messages: Sequence[Message], waited: SuspendedRun | None, words: str) -> History:
    """Return the history that a run begins with, or goes on with if `waited` is suspended."""
    if waited is None:
        return History(opening(messages, words))
    if instructions := leading(messages):
        waited = waited.instructed(opening(instructions, words))
    continued, marks = waited.continued(messages)
    return History(continued, waited.ours_from, marks)


def opening(messages: Sequence[Message], words: str) -> list[Message]:
    """Return the client's messages with our words before its own system prompt, as one system
    message at the beginning: many chat templates refuse any other.
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
