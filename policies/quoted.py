"""What a backend's error quotes of the request that it refuses. Pure."""

from typing import Any


def is_quoted(words: str, body: Any) -> bool:
    """Return True if the words stand in a string of the request's body, in capitals or not: then an
    error that has them may only repeat what the client wrote. No words are never quoted."""
    wanted, left = words.lower(), [body] if words else []
    while left:
        value = left.pop()
        if isinstance(value, str):
            if wanted in value.lower():
                return True
        elif isinstance(value, dict):
            left += [*value, *value.values()]
        elif isinstance(value, list | tuple):
            left += value
    return False
