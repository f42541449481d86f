"""The style of a run's turns: the proxy's default style, or the reference style.

The reference style sends the same requests as the paper's implementation, but does not repeat its
bugs. Only the first call of a turn is run, and the other calls stay unanswered. After a turn
without a call, the model is asked to make a call. The last message before each turn ends with the
number of turns left, unless it is an assistant message."""

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

from policies.paper_prompts import ReferencePrompts
from policies.profile import Profile
from policies.prompts import NUDGE, SandboxContents, system_prompt
from policies.reference_style import steps_remaining_line, unknown_tool_observation
from policies.workspace import last_user_index
from proxy.agent.history import History, text_of
from proxy.agent.model import Message
from proxy.agent.task import AgentInput, AgentTask, Params
from proxy.agent.tool_calls import ToolCall, Turn, parse_call, parse_turn, repair_calls

TEMPERATURE = 1.0
MAX_TOKENS = 65_536
"""The token limit of one turn."""
_MODELS_WITHOUT_TEMPERATURE = ("o3", "o4")
"""Models with these strings in their names accept no temperature."""


class AgentStyle(Protocol):
    """The style of a run's turns."""

    @property
    def request_for_missing_call(self) -> str:
        """The request to the model after a turn that has no tool calls and is not the answer."""

    @property
    def accepts_prose(self) -> bool:
        """True if the prose of a turn without tool calls can be the answer."""

    def messages(self, task: AgentTask, agent_input: AgentInput) -> Sequence[Message]:
        """Return the client's messages as they are sent to the model."""

    def params(self, task: AgentTask) -> Params:
        """Return the parameters of the run's model calls."""

    def system_prompt(
        self, profile: Profile, sandbox_contents: SandboxContents, tool_names: Sequence[str]
    ) -> str:
        """Return the system prompt. `tool_names` are those of the proxy's tools."""

    def prepare_turn(self, history: History, turns_left: int) -> None:
        """Append the style's text for the next turn to the history, if the style has one."""

    def parse_turn(
        self, message: Message, tool_names: Collection[str], new_ids: Iterator[str]
    ) -> Turn:
        """Return the reply as it enters the history, and the calls to run. `tool_names` are those
        of all tools."""


class DefaultStyle:
    """The default style: every call of a turn is run, and prose may be the answer."""

    request_for_missing_call = NUDGE
    accepts_prose = True

    def messages(self, task: AgentTask, agent_input: AgentInput) -> Sequence[Message]:
        return agent_input.messages

    def params(self, task: AgentTask) -> Params:
        return task.params

    def system_prompt(
        self, profile: Profile, sandbox_contents: SandboxContents, tool_names: Sequence[str]
    ) -> str:
        return system_prompt(profile, sandbox_contents, tool_names)

    def prepare_turn(self, history: History, turns_left: int) -> None:
        """Do nothing."""

    def parse_turn(
        self, message: Message, tool_names: Collection[str], new_ids: Iterator[str]
    ) -> Turn:
        return parse_turn(message, tool_names, new_ids)


class ReferenceStyle:
    """The style of the paper's implementation, with the prompts of a profile."""

    accepts_prose = False

    def __init__(self, prompts: ReferencePrompts) -> None:
        self._prompts = prompts
        self.request_for_missing_call = prompts.no_call

    def messages(self, task: AgentTask, agent_input: AgentInput) -> Sequence[Message]:
        """Return the messages. Rephrase the last user message as a problem, unless the run is
        resumed."""
        messages = list(agent_input.messages)
        index = None if task.session.suspended_run else last_user_index(messages)
        if index is not None:
            problem = self._problem_content(messages[index], agent_input.notes)
            messages[index] = {**messages[index], "content": problem}
        return messages

    def params(self, task: AgentTask) -> Params:
        """Return the reference's parameters, overridden by the client's. The client's token limit
        applies to each turn."""
        temperature = (
            {}
            if any(name in task.model for name in _MODELS_WITHOUT_TEMPERATURE)
            else {"temperature": TEMPERATURE}
        )
        own = task.params
        return Params(
            base={**temperature, **own.base, **own.token_limits},
            optional={} if own.token_limits else {"max_tokens": MAX_TOKENS},
            final=own.final,
        )

    def system_prompt(
        self, profile: Profile, sandbox_contents: SandboxContents, tool_names: Sequence[str]
    ) -> str:
        return self._prompts.system_prompt()

    def prepare_turn(self, history: History, turns_left: int) -> None:
        if history.messages[-1].get("role") != "assistant":
            history.append_to_last_message(steps_remaining_line(turns_left))

    def parse_turn(
        self, message: Message, tool_names: Collection[str], new_ids: Iterator[str]
    ) -> Turn:
        message = _without_nulls(message)
        if not message.get("tool_calls"):
            return Turn(message, (), calls_are_text=False)
        message = repair_calls(message, new_ids)
        call = parse_call(message["tool_calls"][0])
        if call.mistake is not None:
            call = _accept_any_json(call)
        if call.mistake is not None:
            return Turn(message, (), calls_are_text=False)
        if call.name not in tool_names:
            call = replace(call, mistake=unknown_tool_observation(call.name))
        return Turn(message, (call,), calls_are_text=False)

    def _problem_content(self, message: Message, notes: Sequence[str]) -> Any:
        """Return the problem and the notes on its files as one text, or as a list of parts if the
        message has parts other than text."""
        text = self._prompts.problem_message(text_of(message))
        if notes:
            text = "\n\n".join([text, "\n".join(notes)])
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        rest = [part for part in parts if not isinstance(part, dict) or "text" not in part]
        return [{"type": "text", "text": text}, *rest] if rest else text


def _without_nulls(message: Message) -> Message:
    """Return the reply as the reference sends it back: without nulls, and with the reasoning in
    SGLang's field."""
    kept = {key: value for key, value in message.items() if value is not None}
    reasoning = kept.pop("reasoning", None)
    if reasoning is not None:
        kept.setdefault("reasoning_content", reasoning)
    if not isinstance(kept.get("tool_calls"), list) or not kept["tool_calls"]:
        kept.pop("tool_calls", None)
    return kept


def _accept_any_json(call: ToolCall) -> ToolCall:
    """Return the call as a valid call if its arguments are JSON of any type, because the tool
    itself rejects wrong types. Else return the call unchanged."""
    try:
        arguments = json.loads(call.invalid_arguments)
    except (ValueError, RecursionError):
        return call
    return replace(call, arguments=arguments, invalid_arguments="", mistake=None)


def style_of(profile: Profile) -> AgentStyle:
    """Return the style that the profile selects."""
    if profile.agent.style == "reference":
        return ReferenceStyle(profile.agent.prompts)
    return DefaultStyle()
