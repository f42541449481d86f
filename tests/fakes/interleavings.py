"""Every interleaving of the steps of several tasks."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

import anyio
import anyio.lowlevel

TURNS = 12
"""Number of event loop turns before the next step starts. A step that is not done by then is
blocked.
"""

Step = Callable[[], Awaitable[object]]


def interleavings(**steps: int) -> Iterator[tuple[str, ...]]:
    """Yield every interleaving, as the names of the tasks in order; `steps` are counts by name."""
    left = {name: count for name, count in steps.items() if count}
    if not left:
        yield ()
    for name, count in left.items():
        for rest in interleavings(**{**left, name: count - 1}):
            yield (name, *rest)


def step_index(order: Sequence[str], name: str, number: int) -> int:
    """Return the index in an order of a task's step; `number` counts from 1."""
    return [at for at, each in enumerate(order) if each == name][number - 1]


async def run_in_order(order: Sequence[str], steps: Mapping[str, Sequence[Step]]) -> None:
    """Start the steps in that order and return when all are done. A blocked step delays only the
    next step of its own task."""
    permits = {name: asyncio.Semaphore(0) for name in steps}

    async def go(name: str) -> None:
        for step in steps[name]:
            await permits[name].acquire()
            await step()

    async with anyio.create_task_group() as group:
        for name in steps:
            group.start_soon(go, name)
        for name in order:
            permits[name].release()
            for _ in range(TURNS):
                await anyio.lowlevel.checkpoint()
