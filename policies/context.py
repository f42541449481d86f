"""How much fits into a model's context window, and what is left free in it."""

from dataclasses import dataclass, field

MAX_ROOM_TOKENS = 8192
ROOM_SHARE = 4
"""A turn is left at most this part (1/4) of the window, where nothing says how long it may get."""
EASED_SHARE = 2 / 3
"""How full the context may be after it was made smaller: it is to last for several turns, for each
time the backend's prefix cache is lost."""
SUMMARY_SHARE = 1 / 2
"""The same where a summary has taken the place of what was said."""
TOKENS_PER_BYTE = 1 / 3
"""Of text that no backend has counted yet: more than of English, less than of digits."""
MIN_DENSITY, MAX_DENSITY = 1 / 8, 1.5
"""Tokens per byte; what is said to lie beyond was counted by something else."""
PICTURE_BYTES = 4500
"""What a picture or a sound counts for: it is not read as text, however long its data are."""


@dataclass(frozen=True, slots=True)
class ContextSizes:
    """What a backend's refusal tells of sizes, in tokens."""

    window: int | None = None
    """Prompt and answer together."""
    prompt: int | None = None
    """The one that was refused."""
    answer: int | None = None
    """What was to be left for the answer."""
    words: str = field(default="", compare=False)
    """The passage of the refusal that told the window; empty where a field of its own did."""

    @property
    def is_overflow(self) -> bool:
        """Whether by these numbers the prompt did not fit: others are not to be trusted."""
        if self.window is None:
            return False
        return self.prompt is None or self.prompt + (self.answer or 0) > self.window


def room(window: int, asked: int | None) -> int:
    """What a call leaves for its answer; `asked` is its `max_tokens`, if it has one.

    A client's `max_tokens` is no reason to forget what was found out: half of the window at most.
    """
    if asked is not None:
        return min(asked, window // 2)
    return min(MAX_ROOM_TOKENS, window // ROOM_SHARE)


def moved_over(limit: int | None, window: int | None) -> int | None:
    """From how many tokens on a long text is moved out of the prompt: half of a window at most."""
    return limit if limit is None or window is None else min(limit, window // 2)


def density(prompt_tokens: int, prompt_bytes: int) -> float:
    """Tokens per byte, from a prompt that a backend has counted."""
    if prompt_tokens <= 0 or prompt_bytes <= 0:
        return TOKENS_PER_BYTE
    return min(MAX_DENSITY, max(MIN_DENSITY, prompt_tokens / prompt_bytes))
