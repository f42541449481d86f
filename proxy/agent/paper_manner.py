"""The paper's way with a model: what its requests look like is the reference's, not its faults.

Of a turn's calls the first is run, and the others stay unanswered; a turn without one is told to
call; how many turns are left ends the last message before each.
"""

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from policies.profile import Profile
from policies.prompts import Equipment
from policies.reference_style import PaperWords, steps_words, unknown_words
from policies.workspace import last_of_user
from proxy.agent.history import History, text_of
from proxy.agent.model import Message
from proxy.agent.task import Task
from proxy.agent.tool_calls import ToolCall, Turn, call_of, repaired

TEMPERATURE = 1.0
MAX_TOKENS = 65_536
"""Of one turn."""
_COLD = ("o3", "o4")
"""Models with this in their names take no temperature."""


class PaperManner:
    """As the reference does it, in these words."""

    prose_ends = False

    def __init__(self, words: PaperWords) -> None:
        self._words = words
        self.no_call = words.no_call

    def posed(self, task: Task) -> Task:
        """What the client asks for itself wins; its token limit holds for each turn, as here."""
        warm = {} if any(name in task.model for name in _COLD) else {"temperature": TEMPERATURE}
        return replace(
            task,
            messages=task.messages if task.resumes else self._posed(task),
            every_turn={**warm, **task.every_turn, **task.final_budget},
            while_it_fits={} if task.final_budget else {"max_tokens": MAX_TOKENS},
            final_budget={},  # it goes with every turn as it is
        )

    def words(self, profile: Profile, equipment: Equipment, names: Sequence[str]) -> str:
        return self._words.system_prompt()

    def before_turn(self, history: History, turns_left: int) -> None:
        if history.messages[-1].get("role") != "assistant":
            history.end_with(steps_words(turns_left))

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
            call = replace(call, mistake=unknown_words(call.name))
        return Turn(told, (call,), as_text=False)

    def _posed(self, task: Task) -> Sequence[Message]:
        """The messages, the user's last one posed as a problem."""
        told = list(task.messages)
        index = last_of_user(told)
        if index is not None:
            told[index] = {**told[index], "content": self._problem(told[index], task.file_notes)}
        return told

    def _problem(self, message: Message, notes: Sequence[str]) -> Any:
        """The problem and the notes on its files in one text; parts only where there are other
        than text."""
        text = self._words.problem(text_of(message))
        if notes:
            text = "\n\n".join([text, "\n".join(notes)])
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        rest = [part for part in parts if not isinstance(part, dict) or "text" not in part]
        return [{"type": "text", "text": text}, *rest] if rest else text


def _told(message: Message) -> Message:
    """The reply as the reference sends it back: no nulls, the thinking under SGLang's name."""
    told = {key: value for key, value in message.items() if value is not None}
    thought = told.pop("reasoning", None)
    if thought is not None:
        told.setdefault("reasoning_content", thought)
    if not isinstance(told.get("tool_calls"), list) or not told["tool_calls"]:
        told.pop("tool_calls", None)
    return told


def _without_mistake(call: ToolCall) -> ToolCall:
    """The call, where its arguments are JSON at least: the tool has an observation for that."""
    try:
        arguments = json.loads(call.written)
    except (ValueError, RecursionError):
        return call
    return replace(call, arguments=arguments, written="", mistake=None)
