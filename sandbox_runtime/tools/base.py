"""What a tool is: a schema for the model, and the doing."""

from dataclasses import dataclass
from typing import Any, Protocol

from sandbox_runtime.sandbox import Lease, OnOutput

ToolSchema = dict[str, Any]
"""An entry of `tools` in a chat-completions request."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What the model is told of a tool call, and what the agent learns from it."""

    text: str
    exit_code: int | None = None
    """The command's, where one ran."""
    output_lines: int | None = None
    """How many lines the command wrote, where one ran."""
    cpu_s: float = 0.0
    peak_memory_bytes: int = 0
    finished: bool = False
    """Whether the model has ended the run (submit only)."""
    answer: str | None = None
    """The final answer, where the run is finished and has one."""


class Mistake(Exception):
    """What the model did wrong, in words that tell it how to mend it. Never leaves a tool."""


class Tool(Protocol):
    """Something the model can do in a sandbox."""

    @property
    def name(self) -> str:
        """As the model calls it."""

    @property
    def schema(self) -> ToolSchema:
        """As the model is told of it."""

    async def run(
        self,
        lease: Lease,
        arguments: object,
        *,
        timeout_s: float,
        on_output: OnOutput | None = None,
    ) -> Observation:
        """Do it and say what came of it, also when the model did something wrong.

        The sandbox is asked for only when there is something to do in it. `arguments` is what the
        model wrote, parsed from JSON and not yet checked. Raises only SandboxStartError and
        SandboxLostError.
        """
