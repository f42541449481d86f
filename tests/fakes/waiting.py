"""Waiting for what no event tells of: another process, or the far end of a connection."""

from collections.abc import Callable

import anyio


async def until(condition: Callable[[], bool]) -> None:
    """Return once the condition holds; the caller's `fail_after` says how long that may take."""
    while not condition():  # noqa: ASYNC110 - what is waited for can set no event
        await anyio.sleep(0.01)
