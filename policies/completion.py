"""Whether a turn without a tool call is the answer."""

import re

_ANNOUNCES = re.compile(
    r"^\W*(?:(?:ok(?:ay)?|now|next|first|then|so)\b[\s,]*)*"
    r"(?:let me|let's|let us|i'll|i will|i'm going to|i am going to|i need to)\b"
    r"(?! (?:know|be (?:happy|glad))\b)",  # how answers end
    re.IGNORECASE,
)
_ANNOUNCES_BY_ENDING = (":", "...", "\N{HORIZONTAL ELLIPSIS}")


def is_answer(text: str, finish_reason: str) -> bool:
    """Whether prose shows that the model is done: it is whole and does not announce a next step."""
    lines = text.strip().splitlines()
    if not lines or finish_reason == "length":
        return False
    last = lines[-1].strip()
    return not last.endswith(_ANNOUNCES_BY_ENDING) and not _ANNOUNCES.match(last)
