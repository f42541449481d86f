"""Sizes in tokens: how much fits into a model's context window, how much of it is kept free, and
how many tokens a text has."""

from dataclasses import dataclass, field

_MAX_ROOM_TOKENS = 8192
_ROOM_SHARE = 4
"""A turn is left at most this part (1/4) of the window, where nothing says how long it may get."""
EASED_SHARE = 2 / 3
"""How full the context may be after it was made smaller. What is freed lasts for several turns,
because the backend's prefix cache is lost each time."""
SUMMARY_SHARE = 1 / 2
"""The same where a summary has taken the place of earlier messages."""
TOKENS_PER_BYTE = 1 / 3
"""Of text that no backend has counted yet: more than of English, less than of digits."""
_MIN_DENSITY, _MAX_DENSITY = 1 / 8, 1.5
"""Tokens per byte. A backend that reports a density outside of these has counted something else."""
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
    excerpt: str = field(default="", compare=False)
    """The passage of the refusal that told the window; empty where a field of its own did."""

    @property
    def is_overflow(self) -> bool:
        """True if by these numbers the prompt did not fit. Numbers by which it fits are not to be
        trusted."""
        if self.window is None:
            return False
        return self.prompt is None or self.prompt + (self.answer or 0) > self.window


def reserved_tokens(window: int, asked: int | None) -> int:
    """Return the tokens that a call leaves for its answer; `asked` is its `max_tokens`, if it has
    one.

    Half of the window at most: a client's `max_tokens` is no reason to forget what was found out.
    """
    if asked is not None:
        return min(asked, window // 2)
    return min(_MAX_ROOM_TOKENS, window // _ROOM_SHARE)


def offload_threshold(limit: int | None, window: int | None) -> int | None:
    """Return the number of tokens above which a text is moved out of the prompt, or None for never:
    the limit, but half of a known window at most."""
    return limit if limit is None or window is None else min(limit, window // 2)


def tokens_per_byte(prompt_tokens: int, prompt_bytes: int) -> float:
    """Return the tokens per byte of a prompt that a backend has counted."""
    if prompt_tokens <= 0 or prompt_bytes <= 0:
        return TOKENS_PER_BYTE
    return min(_MAX_DENSITY, max(_MIN_DENSITY, prompt_tokens / prompt_bytes))


# Estimates. The weights were fitted to cl100k, o200k and Claude 2's tokenizer. Against those, prose
# in Latin letters, code, logs and tables come out within a third (languages with many accents 40 %
# low at worst), other scripts within a factor of three, too high for tokenizers that know them
# well, and random letters (base64) at a third of what they are.

_NEAR = 2.0
"""Within this factor of a threshold an estimate does not decide, where somebody can count."""
_LETTERS = b" abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_DIGITS = b"0123456789"
_FIRST_OF_TWO = bytes(range(0xC2, 0xE0))
_FIRST_OF_THREE = bytes(range(0xE0, 0xF0))
_FIRST_OF_FOUR = bytes(range(0xF0, 0xF8))
_FOLLOWING = bytes(range(0x80, 0xC0))
_WEIGHTS = (
    (_LETTERS, 1 / 4.6),
    (_DIGITS, 1 / 1.8),
    (_FIRST_OF_TWO, 0.5),  # accents, Cyrillic, Greek, Hebrew, Arabic
    (_FIRST_OF_THREE, 0.9),  # Chinese, Japanese, Korean, Indic scripts
    (_FIRST_OF_FOUR, 2.0),  # pictures
    (_FOLLOWING, 0.0),
)
_OTHER_WEIGHT = 1 / 1.7
"""Of a line's end or a sign."""


def estimate_tokens(text: str) -> int:
    """Return about how many tokens a text has, by the script of each character, in time linear in
    the text."""
    left = text.encode(errors="replace")
    tokens = 0.0
    for characters, weight in _WEIGHTS:
        rest = left.translate(None, characters)
        tokens += weight * (len(left) - len(rest))
        left = rest
    return round(tokens + _OTHER_WEIGHT * len(left))


def is_near_threshold(tokens: int, threshold: int) -> bool:
    """Return True if an estimate is too close to a threshold to tell on which side the text is."""
    return threshold / _NEAR < tokens < threshold * _NEAR
