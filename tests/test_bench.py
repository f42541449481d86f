"""The benchmarks that compare two checkouts."""

from contextlib import AsyncExitStack

from bench.compare import COMPARISONS
from bench.compare_worker import Worker


async def test_worker_has_each_compared_operation() -> None:
    async with AsyncExitStack() as opened:
        assert set(Worker(opened, "no-image", []).operations) == set(COMPARISONS)
