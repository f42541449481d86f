"""Polling for conditions without an event, such as the state of another process or of a peer."""

from collections.abc import Callable

import anyio


async def until(condition: Callable[[], bool]) -> None:
    """Poll until the condition is true. The caller bounds the time with `fail_after`."""
    while not condition():  # noqa: ASYNC110 - nothing sets an event
        await anyio.sleep(0.01)
