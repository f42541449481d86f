"""Every order in which the steps of several can come, each taken as far as it goes."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

import anyio
import anyio.lowlevel

TURNS = 12
"""How many turns of the loop a step has before the next one; what still waits then is held up."""

Step = Callable[[], Awaitable[object]]


def orders(**steps: int) -> Iterator[tuple[str, ...]]:
    """Whose step comes when: every way to merge so many steps of each."""
    left = {name: count for name, count in steps.items() if count}
    if not left:
        yield ()
    for name, count in left.items():
        for rest in orders(**{**left, name: count - 1}):
            yield (name, *rest)


def place(order: Sequence[str], name: str, number: int) -> int:
    """Where in an order somebody's step stands, counted from 1."""
    return [at for at, each in enumerate(order) if each == name][number - 1]


async def walk(order: Sequence[str], steps: Mapping[str, Sequence[Step]]) -> None:
    """Take the steps in that order. One that is held up goes on beside the others' next, and holds
    up its own next alone; when it returns, all have been taken."""
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
