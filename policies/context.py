"""Token counts: the room in a model's context window, and estimates of a text's tokens."""

from dataclasses import dataclass, field

_MAX_ANSWER_TOKENS = 8192
_MAX_ANSWER_DIVISOR = 4
"""A model call without `max_tokens` reserves at most 1 / `_MAX_ANSWER_DIVISOR` of the window for
its answer."""
COMPACTED_SHARE = 2 / 3
"""A compaction replaces observations by stubs until the prompt has at most this share of its token
limit. Each compaction loses the backend's prefix cache, so it must free room for several turns."""
SUMMARY_SHARE = 1 / 2
"""Share of the prompt's token limit that the client's messages, the latest turns and the summary
may take together after a compaction by summary."""
TOKENS_PER_BYTE = 1 / 3
"""The ratio that is assumed for text that no backend has counted yet. English text has fewer tokens
per byte, digits have more."""
_MIN_TOKENS_PER_BYTE, _MAX_TOKENS_PER_BYTE = 1 / 8, 1.5
"""The plausible range of tokens per byte. A backend that reports a count outside this range has
counted something else."""
MEDIA_BYTES = 4500
"""Assumed size of an image or an audio clip. Its base64 data are not tokenized as text."""


@dataclass(frozen=True, slots=True)
class ContextSizes:
    """The sizes in a backend's error for a prompt that is too long, in tokens."""

    window: int | None = None
    """Context window: prompt and answer together."""
    prompt: int | None = None
    """Size of the refused prompt."""
    answer: int | None = None
    """Tokens that the request reserved for its answer."""
    excerpt: str = field(default="", compare=False)
    """The passage of the error text that states the window; empty if a separate field of the error
    states the window."""

    @property
    def is_overflow(self) -> bool:
        """True if a prompt of these sizes does not fit into the window. False if the window is
        unknown, or if the prompt would fit: the sizes then contradict the refusal, so the caller
        ignores them."""
        if self.window is None:
            return False
        return self.prompt is None or self.prompt + (self.answer or 0) > self.window


def reserved_tokens(window: int, max_tokens: int | None) -> int:
    """Return the tokens that a model call reserves for its answer.

    A call with `max_tokens` reserves this number, but at most half of the window: a client's large
    `max_tokens` would otherwise leave no room for the observations.
    """
    if max_tokens is not None:
        return min(max_tokens, window // 2)
    return min(_MAX_ANSWER_TOKENS, window // _MAX_ANSWER_DIVISOR)


def offload_threshold(limit: int | None, window: int | None) -> int | None:
    """Return the number of tokens above which a text is offloaded to files; None means never.

    The number is `limit`, but at most half of the window if the window is known.
    """
    return limit if limit is None or window is None else min(limit, window // 2)


def tokens_per_byte(prompt_tokens: int, prompt_bytes: int) -> float:
    """Return the tokens per byte of a prompt that a backend has counted, within plausible bounds;
    TOKENS_PER_BYTE if a count is not positive."""
    if prompt_tokens <= 0 or prompt_bytes <= 0:
        return TOKENS_PER_BYTE
    return min(_MAX_TOKENS_PER_BYTE, max(_MIN_TOKENS_PER_BYTE, prompt_tokens / prompt_bytes))


# Estimates. The weights were fitted to cl100k, o200k and Claude 2's tokenizer. Compared with these
# tokenizers, estimates of prose in Latin letters, code, logs and tables are off by at most a third
# (languages with many accents: at most 40 % too low). Estimates of other scripts are within a
# factor of three; they are too high for tokenizers with many tokens of the script. Base64 is
# estimated at a third of its tokens.

_NEAR_FACTOR = 2.0
"""Within this factor of a threshold an estimate is too inexact to decide."""
_LETTERS = b" abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_DIGITS = b"0123456789"
_TWO_BYTE_LEADS = bytes(range(0xC2, 0xE0))
_THREE_BYTE_LEADS = bytes(range(0xE0, 0xF0))
_FOUR_BYTE_LEADS = bytes(range(0xF0, 0xF8))
_CONTINUATION_BYTES = bytes(range(0x80, 0xC0))
_WEIGHTS = (
    (_LETTERS, 1 / 4.6),
    (_DIGITS, 1 / 1.8),
    (_TWO_BYTE_LEADS, 0.5),  # accents, Cyrillic, Greek, Hebrew, Arabic
    (_THREE_BYTE_LEADS, 0.9),  # Chinese, Japanese, Korean, Indic scripts
    (_FOUR_BYTE_LEADS, 2.0),  # emoji
    (_CONTINUATION_BYTES, 0.0),
)
_PIECE_CHARS = 1 << 18
_MAX_PIECES = 64
"""Maximum number of pieces of a text that are read for an estimate."""
_OTHER_WEIGHT = 1 / 1.7
"""The weight of line ends and punctuation."""
_MAX_WEIGHT = max(_OTHER_WEIGHT, *(weight for _, weight in _WEIGHTS))
_MIN_WEIGHT = min(_OTHER_WEIGHT, *(weight for _, weight in _WEIGHTS if weight))
"""The least weight of a character. The weight 0 of continuation bytes does not count, because they
are no characters of their own."""


def estimate_tokens(text: str) -> int:
    """Return an estimate of a text's tokens by the script of its characters, in linear time.

    A long text is read in pieces, because a thread that reads it as a whole would hold the GIL for
    50 ms at a time. Of a text with more than `_MAX_PIECES` pieces, only some pieces are read, and
    the estimate is extrapolated.
    """
    starts = range(0, len(text), _PIECE_CHARS)
    read = starts[:: -(-len(starts) // _MAX_PIECES) or 1]
    chars = sum(min(_PIECE_CHARS, len(text) - start) for start in read)
    tokens = sum(_estimate_piece(text[start : start + _PIECE_CHARS]) for start in read)
    return round(tokens * len(text) / chars) if chars else 0


def _estimate_piece(text: str) -> float:
    rest = text.encode(errors="replace")
    tokens = 0.0
    for characters, weight in _WEIGHTS:
        others = rest.translate(None, characters)
        tokens += weight * (len(rest) - len(others))
        rest = others
    return tokens + _OTHER_WEIGHT * len(rest)


def is_far_below(text: str, threshold: int) -> bool:
    """Return True if a text is so short that its estimate must be below the threshold and not near
    it. This check avoids the estimates, which take 0.7 s for 60,000 short messages."""
    return len(text) * _MAX_WEIGHT <= threshold / _NEAR_FACTOR


def is_far_above(text: str, threshold: int) -> bool:
    """Return True if a text is so long that its estimate must be above the threshold and not near
    it. This check avoids the estimate, which takes 0.2 s for a text of 100 MB."""
    return len(text) * _MIN_WEIGHT >= threshold * _NEAR_FACTOR


def is_near_threshold(tokens: int, threshold: int) -> bool:
    """Return True if an estimate is too near a threshold to decide on which side the text is."""
    return threshold / _NEAR_FACTOR < tokens < threshold * _NEAR_FACTOR
