"""A listener that remembers."""

from proxy.agent.events import (
    CallAccepted,
    CallFailed,
    CallProgress,
    ModelDelta,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
)


class DeltaRecorder(list[ModelDelta]):
    """What a model passed on of its reply, piece by piece."""

    def __init__(self) -> None:
        self.progress: list[CallProgress] = []
        """What it told of its calls."""

    async def __call__(self, delta: ModelDelta) -> None:
        if isinstance(delta, CallAccepted | CallFailed):
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
        """The arguments of one tool call."""
        calls = [delta for delta in self if isinstance(delta, ToolCallDelta)]
        return "".join(delta.arguments for delta in calls if delta.index == index)
