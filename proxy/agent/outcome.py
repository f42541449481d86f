"""The outcome of a run, which `RunOutcome` collects during the run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from policies.answer_form import is_answer
from policies.limits import StopReason
from policies.prompts import WHY_NO_MORE_TOOLS
from policies.routing import RouteReason
from proxy.agent.history import text_of
from proxy.agent.model import Completion
from proxy.agent.result import RunWarning, ToolTrouble
from proxy.agent.tool_calls import ToolCall, Turn


@dataclass
class RunOutcome:
    """The outcome of one run so far."""

    submitted_answer: str | None = None
    prose: str = ""
    """The model's last prose."""
    prose_reply: Completion | None = None
    """The reply that contains `prose`, if `prose` can be the answer; else None."""
    finish_reason: str = "stop"
    client_calls: list[ToolCall] = field(default_factory=list)
    client_ids_by_model_id: Mapping[str, str] = field(default_factory=dict)
    """The client's id of each call that was already streamed, by the model's id."""
    has_cut_call: bool = False
    """True if a timeout cut off a streamed client tool call: nothing can follow it in the
    stream."""
    calls_are_text: bool = False
    """True if the last calls were written as text."""
    reply: Completion | None = None
    """The reply with the answer, or else the last reply."""
    choice: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of the choice, such as `logprobs`, if the answer is one reply."""
    announcement: str = ""
    """Prose that announces a tool call which the model has not made yet."""
    trouble: list[ToolTrouble] = field(default_factory=list)
    """Signs that the model cannot use tools, each once."""
    refusal: str | None = None
    warnings: Sequence[RunWarning] = ()
    route: RouteReason | None = None
    """The reason for which the run was answered without tools; None if the task's route applies."""

    def finish_reason_of(self, stop: StopReason, answer: str, legacy_state: str | None) -> str:
        """Return the run's OpenAI finish reason."""
        if stop is StopReason.CLIENT_TOOL_CALLS:
            return "tool_calls" if legacy_state is None else "function_call"
        if not answer and not self.refusal and stop in WHY_NO_MORE_TOOLS:
            return "length"
        return self.finish_reason if self.finish_reason in ("length", "content_filter") else "stop"

    def record_narration(self, turn: Turn, reply: Completion, *, is_echo: bool) -> None:
        """Record the prose beside tool calls, which becomes the answer if the run finds no better
        answer. Ignore prose that repeats the proxy's own texts (`is_echo`), and the prose of a turn
        whose calls were written as text."""
        prose = "" if turn.calls_are_text or is_echo else text_of(reply.message).strip()
        if prose:
            self.prose = prose
            self.prose_reply = reply if is_answer(prose, "stop") else None

    def record_trouble(self, trouble: ToolTrouble) -> None:
        """Record a sign that the model cannot use tools."""
        if trouble not in self.trouble:
            self.trouble.append(trouble)
