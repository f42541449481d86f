"""Handles large values in steps on the event loop, which runs other tasks between the steps. If
several values are handled at the same time, they take turns, one step each."""

import asyncio
import secrets
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from policies.json_bounds import encode_json
from policies.large_json import DecodedJSON, Steps, count_chars, decode_in_steps, encode_in_steps

LARGE_CHARS = 4 << 20
"""Number of characters or bytes above which a value is handled in steps. Handling a larger value at
once blocks the event loop for milliseconds."""
_MARK_BYTES = 12

T = TypeVar("T")

_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()
"""The lock that a step holds while it runs, by event loop. Waiting steps get the lock in the order
in which they asked for it. The event loop runs other tasks between two steps."""


def is_large(value: Any) -> bool:
    """Return True if a JSON value has so many characters or values that it is slow to encode."""
    return count_chars(value, LARGE_CHARS) > LARGE_CHARS


async def decode_large(text: bytes | bytearray) -> DecodedJSON:
    """Return the decoded JSON. See `decode_in_steps`."""
    return await run(decode_in_steps(text, secrets.token_hex(_MARK_BYTES)))


async def encode(
    value: Any, encode_small: Callable[[Any], bytes] = encode_json
) -> bytes | bytearray:
    """Return a value as JSON text, as `encode_small` encodes it. A large value is encoded in steps.
    Raises TypeError."""
    if not is_large(value):
        return encode_small(value)
    return await run(encode_in_steps(value, secrets.token_hex(_MARK_BYTES), encode_small))


async def call_in_thread_if_large(function: Callable[[Any], T], value: Any) -> T:
    """Return `function(value)`. For a large value the function runs in a thread, and must not keep
    the GIL for long."""
    if is_large(value):
        return await asyncio.to_thread(function, value)
    return function(value)


async def run(steps: Steps[T]) -> T:
    """Run the steps and return their result. The event loop runs other tasks between two steps."""
    turn = _turns.setdefault(asyncio.get_running_loop(), asyncio.Lock())
    while True:
        async with turn:
            try:
                next(steps)
            except StopIteration as end:
                result: T = end.value
                return result
            await asyncio.sleep(0)
