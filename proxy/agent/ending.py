"""How a run ends, as far as is known while it goes on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from proxy.agent.model import Reply
from proxy.agent.task import Notice
from proxy.agent.tool_calls import ToolCall


@dataclass
class Ending:
    """One run's."""

    submitted: str | None = None
    prose: str = ""
    """The model's last words that were no tool call."""
    prose_reply: Reply | None = None
    """The reply they came in, where they show that the model is done."""
    finish_reason: str = "stop"
    client_calls: list[ToolCall] = field(default_factory=list)
    as_text: bool = False
    """Whether the last calls were written as text."""
    reply: Reply | None = None
    """The reply that wrote the answer, or the last one."""
    choice: Mapping[str, Any] = field(default_factory=dict)
    """What came beside the answer, where a reply consists of it."""
    refusal: str | None = None
    notices: Sequence[Notice] = ()
