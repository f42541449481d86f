"""The benchmarks that compare two checkouts."""

from contextlib import AsyncExitStack

from bench.compare import COMPARISONS
from bench.compare_worker import Worker
from bench.servers import BenchServer


async def test_benchmark_worker_has_exactly_the_operations_that_are_compared() -> None:
    async with AsyncExitStack() as opened:
        assert set(Worker(opened, "no-image", BenchServer(0, 0, 0), []).operations) == set(
            COMPARISONS
        )
