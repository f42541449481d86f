"""JSON with large files in it, decoded and encoded in a fraction of the time that `json` takes.

In that time the server answers nobody else, and a thread would not help: a string is decoded in one
call.
"""

import json
from collections.abc import Iterable
from contextlib import suppress
from math import inf
from typing import Any

import orjson
from pydantic_core import from_json

LARGE_BYTES = 64 << 10
_INFINITE = (inf, -inf)


def decoded(text: bytes) -> Any:
    """Return what `json.loads` does. Raises ValueError, RecursionError."""
    if len(text) > LARGE_BYTES:
        with suppress(ValueError):  # halves of surrogate pairs, UTF-16, or no JSON
            return from_json(text)
    return json.loads(text)


def encoded(value: Any) -> bytes:
    """Return a value as JSON, in UTF-8; NaN and infinite numbers as null. Raises TypeError."""
    try:
        return orjson.dumps(value)
    except TypeError:  # an integer of more than 64 bits, or half a surrogate pair
        return json.dumps(value).encode()


def has_infinity(value: Any) -> bool:
    """Return True if there is a number in a decoded value that is none in JSON."""
    found: list[Any] = [value]
    while found:
        each = found.pop()
        if isinstance(each, dict | list):
            items: Iterable[Any] = each.values() if isinstance(each, dict) else each
            found += [item for item in items if isinstance(item, dict | list | float)]
        elif each in _INFINITE or each != each:
            return True
    return False
