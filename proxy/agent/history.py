"""What the model has been told, in order. Nothing in it is ever edited: prefix caches and token
histories depend on that. Where it must shrink, a new segment begins."""

import copy
from collections.abc import Sequence

from proxy.agent.model import Message

STUB_CHARS = 400
"""What is left of a shortened observation."""
SHORTEN_SHARE = 3
"""One shortening takes away at least this part (1/3) of all observations."""


class History:
    """The messages of one run."""

    def __init__(self, messages: Sequence[Message], ours_from: int | None = None) -> None:
        """`ours_from`: where the run's own messages begin; after all of them if not told."""
        self.ours_from = len(messages) if ours_from is None else ours_from
        self.segments: list[list[Message]] = [list(messages)]

    @property
    def messages(self) -> list[Message]:
        """The current segment, as the model gets it."""
        return self.segments[-1]

    def append(self, *messages: Message) -> None:
        """Add what was said."""
        self.messages.extend(messages)

    def shorten(self) -> bool:
        """Begin a segment in which the largest old observations are stubs.

        Returns False, and changes nothing, when there is nothing left to shorten.
        """
        sizes = {
            index: len(message["content"])
            for index, message in enumerate(self.messages)
            if index >= self.ours_from and _is_observation(message)
        }
        largest = sorted(sizes, key=lambda index: -sizes[index])
        goal = sum(sizes.values()) / SHORTEN_SHARE
        segment = list(self.messages)
        removed = 0
        for index in largest:
            if removed >= goal or sizes[index] <= 2 * STUB_CHARS:
                break
            segment[index] = _stub(segment[index])
            removed += sizes[index] - STUB_CHARS
        if removed:
            self.segments.append(segment)
        return removed > 0


def text_of(message: Message) -> str:
    """A message's text, whether it is a string or a list of parts."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        return "".join(part for part in parts if isinstance(part, str))
    return ""


def _is_observation(message: Message) -> bool:
    return message.get("role") in ("tool", "user") and isinstance(message.get("content"), str)


def _stub(message: Message) -> Message:
    text = message["content"]
    left_out = len(text) - STUB_CHARS
    stub = copy.copy(message)
    stub["content"] = (
        f"{text[: STUB_CHARS // 2]}\n[... {left_out} characters of this result were left out to fit"
        f" the context window; run the command again if you need them ...]\n"
        f"{text[-STUB_CHARS // 2 :]}"
    )
    return stub
