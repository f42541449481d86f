"""How a run goes about its turns: the proxy's own style, or the reference's.

The reference style sends the requests that the paper's implementation sends, without its faults: of
a turn's calls the first is run and the others stay unanswered, a turn without a call is told to
make one, and the last message before each turn ends with how many are left.
"""

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

from policies.profile import Profile
from policies.prompts import NUDGE, SandboxContents, system_prompt
from policies.reference_style import (
    ReferencePrompts,
    steps_remaining_line,
    unknown_tool_observation,
)
from policies.workspace import last_user_index
from proxy.agent.history import History, text_of
from proxy.agent.model import Message
from proxy.agent.task import AgentInput, AgentTask, Params
from proxy.agent.tool_calls import ToolCall, Turn, call_of, repaired, understand

TEMPERATURE = 1.0
MAX_TOKENS = 65_536
"""The token limit of one turn."""
_COLD = ("o3", "o4")
"""Models with this in their names take no temperature."""


class AgentStyle(Protocol):
    """How a run goes about its turns."""

    @property
    def no_call(self) -> str:
        """What the model is told after a turn that calls nothing and is no answer."""

    @property
    def prose_ends(self) -> bool:
        """Whether a turn that calls nothing can be the answer."""

    def messages(self, task: AgentTask, given: AgentInput) -> Sequence[Message]:
        """Return the client's messages as the model is sent them."""

    def params(self, task: AgentTask) -> Params:
        """Return the parameters of the run's model calls."""

    def words(self, profile: Profile, equipment: SandboxContents, names: Sequence[str]) -> str:
        """Return the words before the client's own; `names` are those of our tools."""

    def before_turn(self, history: History, turns_left: int) -> None:
        """Add what the model is told before each turn."""

    def understand(self, message: Message, names: Collection[str], new_id: Iterator[str]) -> Turn:
        """Return what to echo of a reply and which of its calls to run; `names` are those of all
        tools."""


class DefaultStyle:
    """The proxy's own style: every call of a turn is run, and prose may be the answer."""

    no_call = NUDGE
    prose_ends = True

    def messages(self, task: AgentTask, given: AgentInput) -> Sequence[Message]:
        return given.messages

    def params(self, task: AgentTask) -> Params:
        return task.params

    def words(self, profile: Profile, equipment: SandboxContents, names: Sequence[str]) -> str:
        return system_prompt(profile, equipment, names)

    def before_turn(self, history: History, turns_left: int) -> None:
        """Nothing."""

    def understand(self, message: Message, names: Collection[str], new_id: Iterator[str]) -> Turn:
        return understand(message, names, new_id)


class ReferenceStyle:
    """The style of the paper's implementation, in the words of a profile."""

    prose_ends = False

    def __init__(self, words: ReferencePrompts) -> None:
        self._words = words
        self.no_call = words.no_call

    def messages(self, task: AgentTask, given: AgentInput) -> Sequence[Message]:
        """Return the messages, the user's last one posed as a problem unless the run is resumed."""
        told = list(given.messages)
        index = None if task.session.suspended_run else last_user_index(told)
        if index is not None:
            told[index] = {**told[index], "content": self._problem(told[index], given.notes)}
        return told

    def params(self, task: AgentTask) -> Params:
        """Return the reference's parameters. The client's own win; its token limit holds for each
        turn."""
        warm = {} if any(name in task.model for name in _COLD) else {"temperature": TEMPERATURE}
        own = task.params
        return Params(
            base={**warm, **own.base, **own.token_limits},
            optional={} if own.token_limits else {"max_tokens": MAX_TOKENS},
            final=own.final,
        )

    def words(self, profile: Profile, equipment: SandboxContents, names: Sequence[str]) -> str:
        return self._words.system_prompt()

    def before_turn(self, history: History, turns_left: int) -> None:
        if history.messages[-1].get("role") != "assistant":
            history.end_with(steps_remaining_line(turns_left))

    def understand(self, message: Message, names: Collection[str], new_id: Iterator[str]) -> Turn:
        told = _told(message)
        if not told.get("tool_calls"):
            return Turn(told, (), as_text=False)
        told = repaired(told, new_id)
        call = call_of(told["tool_calls"][0])
        if call.mistake is not None:
            call = _without_mistake(call)
        if call.mistake is not None:
            return Turn(told, (), as_text=False)
        if call.name not in names:
            call = replace(call, mistake=unknown_tool_observation(call.name))
        return Turn(told, (call,), as_text=False)

    def _problem(self, message: Message, notes: Sequence[str]) -> Any:
        """Return the problem and the notes on its files in one text; a list of parts only if the
        message has others than text."""
        text = self._words.problem(text_of(message))
        if notes:
            text = "\n\n".join([text, "\n".join(notes)])
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        rest = [part for part in parts if not isinstance(part, dict) or "text" not in part]
        return [{"type": "text", "text": text}, *rest] if rest else text


def _told(message: Message) -> Message:
    """Return the reply as the reference sends it back: no nulls, the thinking in SGLang's field."""
    told = {key: value for key, value in message.items() if value is not None}
    thought = told.pop("reasoning", None)
    if thought is not None:
        told.setdefault("reasoning_content", thought)
    if not isinstance(told.get("tool_calls"), list) or not told["tool_calls"]:
        told.pop("tool_calls", None)
    return told


def _without_mistake(call: ToolCall) -> ToolCall:
    """Return the call with its arguments if they are JSON at least: the tool has an observation for
    what is wrong with them."""
    try:
        arguments = json.loads(call.written)
    except (ValueError, RecursionError):
        return call
    return replace(call, arguments=arguments, written="", mistake=None)


def style_of(profile: Profile) -> AgentStyle:
    """Return the style that the profile asks for."""
    if profile.manner.kind == "paper":
        return ReferenceStyle(profile.manner.words)
    return DefaultStyle()
