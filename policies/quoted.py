"""What a backend's error quotes of the request that it refuses. Pure."""

from typing import Any

MAX_SEARCHED_CHARS = 16 << 20
"""How much prose of a request is searched, which takes about 20 ms. In a longer request every
passage counts as quoted."""


def is_quoted(words: str, body: Any) -> bool:
    """Return True if the whole passage occurs in a string of the body, in capitals or not. False
    does not prove that the backend wrote it. An empty passage occurs nowhere."""
    wanted, left = words.lower(), [body] if words else []
    has_blank, chars_left = " " in words, MAX_SEARCHED_CHARS
    while left:
        value = left.pop()
        if isinstance(value, str):
            if has_blank and " " not in value:
                continue  # as in base64: this is seen in a tenth of the time
            chars_left -= len(value)
            if chars_left < 0 or wanted in value.lower():
                return True
        elif isinstance(value, dict):
            left += [*value, *value.values()]
        elif isinstance(value, list | tuple):
            left += value
    return False
