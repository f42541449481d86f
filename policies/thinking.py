"""Thinking that a model leaves in its words, between `<think>` and `</think>`."""

OPEN, CLOSE = "<think>", "</think>"


def spoken(text: str) -> str:
    """The text without it, also where a chat template has opened it or the end was cut off."""
    *blocks, rest = text.split(CLOSE)  # a regular expression would take quadratic time
    said = [block.partition(OPEN)[0] if OPEN in block else "" for block in blocks]
    return "".join([*said, rest.partition(OPEN)[0]]).strip()
