"""The thinking that a model leaves in its text, between `<think>` and `</think>`."""

OPEN, CLOSE = "<think>", "</think>"


def spoken(text: str) -> str:
    """Return the text without thinking, also if a chat template opened it or its end is missing."""
    *blocks, rest = text.split(CLOSE)  # a regular expression would take quadratic time
    said = [block.partition(OPEN)[0] if OPEN in block else "" for block in blocks]
    return "".join([*said, rest.partition(OPEN)[0]]).strip()
