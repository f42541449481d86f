"""How a run ends, as far as is known while it goes on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from policies.answer_form import is_answer
from policies.limits import StopReason
from policies.prompts import WHY_NO_MORE_TOOLS
from policies.routing import RouteReason
from proxy.agent.history import text_of
from proxy.agent.model import Reply
from proxy.agent.task import Notice, ToolTrouble
from proxy.agent.tool_calls import ToolCall, Turn


@dataclass
class Ending:
    """What is known of one run's outcome."""

    submitted: str | None = None
    prose: str = ""
    """The model's last words that were no tool call."""
    prose_reply: Reply | None = None
    """The reply they came in, where they show that the model is done."""
    finish_reason: str = "stop"
    client_calls: list[ToolCall] = field(default_factory=list)
    sent_ids: Mapping[str, str] = field(default_factory=dict)
    """Of each client call that was sent while the model wrote it the id that the client has, by
    the model's own."""
    has_cut_call: bool = False
    """Whether the time was up while a client call was being sent: nothing can follow it."""
    as_text: bool = False
    """Whether the last calls were written as text."""
    reply: Reply | None = None
    """The reply that wrote the answer, or the last one."""
    choice: Mapping[str, Any] = field(default_factory=dict)
    """The choice's other fields, such as `logprobs`, where the answer is one reply."""
    announced: str = ""
    """Prose that announced a call and made none, until a call or another answer follows."""
    trouble: list[ToolTrouble] = field(default_factory=list)
    """The signs that the model cannot use tools."""
    refusal: str | None = None
    notices: Sequence[Notice] = ()
    route: RouteReason | None = None
    """Why the run was answered without tools; None: as the task says."""

    def finish_reason_of(self, stop: StopReason, answer: str, legacy_state: str | None) -> str:
        """Return the run's finish reason, in OpenAI's words."""
        if stop is StopReason.CLIENT_TOOL_CALLS:
            return "tool_calls" if legacy_state is None else "function_call"
        if not answer and not self.refusal and stop in WHY_NO_MORE_TOOLS:
            return "length"
        return self.finish_reason if self.finish_reason in ("length", "content_filter") else "stop"

    def note_narration(self, turn: Turn, reply: Reply, *, is_echo: bool) -> None:
        """Note what is said beside calls: it is an answer if nothing better comes. `is_echo`: it
        repeats the proxy's own texts."""
        prose = "" if turn.as_text or is_echo else text_of(reply.message).strip()
        if prose:
            self.prose = prose
            self.prose_reply = reply if is_answer(prose, "stop") else None

    def note(self, trouble: ToolTrouble) -> None:
        """Note that the model showed it cannot use tools."""
        if trouble not in self.trouble:
            self.trouble.append(trouble)
