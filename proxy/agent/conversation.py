"""What is said between us and the model, and what it costs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from policies.limits import StopReason
from policies.prompts import call_request, final_request
from proxy.agent.events import OnDelta
from proxy.agent.history import History
from proxy.agent.model import Message, Model, Reply
from proxy.agent.task import Tally, Task
from proxy.agent.usage import add, tokens
from proxy.errors import ContextOverflowError


class Conversation:
    """The history of one run and the calls that make it grow."""

    def __init__(
        self, model: Model, task: Task, tools: Sequence[Mapping[str, Any]], words: str
    ) -> None:
        """`words` go to the model before the client's own."""
        self._model = model
        self._task = task
        self._tools = [*tools, *task.client_tools]
        self.history = _history(task, words)
        self.usage: dict[str, Any] = {}
        self.usages: list[Mapping[str, Any]] = []
        """Of each call."""
        self.tally = Tally()
        self._known_tokens = 0

    async def ask(self, on_delta: OnDelta | None) -> Reply:
        """The model's next turn, tools at hand. Raises BackendError."""
        with_tools: dict[str, Any] = {"tools": self._tools}
        if self._task.must_call:
            with_tools["tool_choice"] = "required"
        elif self._task.tool_choice is not None and self.tally.llm_calls == 0:
            # A forced call holds for the first turn; repeated, the run would never end.
            with_tools["tool_choice"] = self._task.tool_choice
        if self._task.parallel_tool_calls is not None:
            with_tools["parallel_tool_calls"] = self._task.parallel_tool_calls
        return await self._complete(with_tools, on_delta)

    async def ask_call(self, stop: StopReason, on_delta: OnDelta | None) -> Reply:
        """A call of one of the client's tools, none of ours being at hand any more."""
        self.history.append({"role": "user", "content": call_request(stop)})
        tools: dict[str, Any] = {"tools": self._task.client_tools, "tool_choice": "required"}
        return await self._complete(tools, on_delta)

    async def ask_final(self, stop: StopReason, on_delta: OnDelta | None) -> Reply:
        """The visible answer, without tools and in the form the client asked for."""
        request = final_request(stop, self._task.form)
        self.history.append({"role": "user", "content": request})
        return await self._complete_final(on_delta)

    async def ask_again(self, answer: str, request: str, on_delta: OnDelta | None) -> Reply:
        """The visible answer once more, the last one not being what was asked for."""
        self.history.append({"role": "assistant", "content": answer})
        self.history.append({"role": "user", "content": request})
        return await self._complete_final(on_delta)

    async def _complete_final(self, on_delta: OnDelta | None) -> Reply:
        return await self._complete({**self._task.final_only, **self._task.final_budget}, on_delta)

    async def _complete(self, extra: Mapping[str, Any], on_delta: OnDelta | None) -> Reply:
        while True:
            body = {
                "model": self._task.model,
                "messages": list(self.history.messages),
                **self._task.every_turn,
                **extra,
            }
            try:
                reply = await self._model.complete(body, on_delta)
            except ContextOverflowError:
                if not self.history.shorten():
                    raise
            else:
                self._count(reply)
                return reply

    def _count(self, reply: Reply) -> None:
        self.usage = add(self.usage, reply.usage)
        self.usages.append(reply.usage)
        prompt = tokens(reply.usage, "prompt_tokens")
        # What the prompt grew by, beyond the model's own words, is what we told it.
        told = max(0, prompt - self._known_tokens) if self._known_tokens else 0
        self._known_tokens = prompt + tokens(reply.usage, "completion_tokens")
        self.tally = replace(
            self.tally,
            llm_calls=self.tally.llm_calls + 1,
            context_tokens=prompt,
            env_tokens=self.tally.env_tokens + told,
        )

    @property
    def tokens(self) -> int:
        """Prompt and completion tokens so far."""
        return tokens(self.usage, "prompt_tokens") + tokens(self.usage, "completion_tokens")


def _history(task: Task, words: str) -> History:
    if task.resumes:
        return History(task.resumes.continued(task.messages), task.resumes.ours_from)
    return History(opening(task.messages, words))


def opening(messages: Sequence[Message], words: str) -> list[Message]:
    """The client's messages with our words before its own system prompt.

    One system message, at the beginning: many chat templates refuse any other.
    """
    first = messages[0] if messages else {}
    if first.get("role") not in ("system", "developer"):
        return [{"role": "system", "content": words}, *messages]
    content = first.get("content")
    if isinstance(content, list):
        merged: Any = [{"type": "text", "text": words}, *content]
    else:
        merged = f"{words}\n\n{content}" if content else words
    return [{**first, "content": merged}, *messages[1:]]
