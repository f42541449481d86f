"""A listener that records the deltas of a completion."""

from proxy.agent.events import (
    CallProgress,
    ModelCallAccepted,
    ModelCallFailed,
    ModelDelta,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
)


class DeltaRecorder(list[ModelDelta]):
    """The deltas of a completion, in order."""

    def __init__(self) -> None:
        self.progress: list[CallProgress] = []
        """The progress events of the calls."""

    async def __call__(self, delta: ModelDelta) -> None:
        if isinstance(delta, ModelCallAccepted | ModelCallFailed):
            self.progress.append(delta)
        else:
            self.append(delta)

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self if isinstance(delta, TextDelta))

    @property
    def reasoning(self) -> str:
        return "".join(delta.text for delta in self if isinstance(delta, ReasoningDelta))

    def arguments(self, index: int) -> str:
        """Return the arguments of one tool call."""
        calls = [delta for delta in self if isinstance(delta, ToolCallDelta)]
        return "".join(delta.arguments for delta in calls if delta.index == index)
