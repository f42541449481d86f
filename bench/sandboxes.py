"""Sandboxes of this project, with and without a pool."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bench.backends import BenchBackend
from policies.isolation import Isolation
from sandbox_runtime.guest_sandbox import start_sandbox
from sandbox_runtime.pool.pool import Pool, PoolStats
from sandbox_runtime.sandbox import Sandbox

POLL_S = 0.005


@asynccontextmanager
async def fresh_sandbox(backend: BenchBackend) -> AsyncIterator[Sandbox]:
    """Yield a new sandbox that is not from a pool."""
    sandbox = await start_sandbox(backend.backend, Isolation())
    try:
        yield sandbox
    finally:
        await sandbox.close()


async def fill_pool(pool: Pool, idle_count: int) -> None:
    """Start the pool and wait until it has `idle_count` idle sandboxes and none is starting or
    ending."""
    pool.start()
    while not _is_filled(pool.stats(), idle_count):  # noqa: ASYNC110 - a pool has no event for it
        await asyncio.sleep(POLL_S)


def _is_filled(stats: PoolStats, idle_count: int) -> bool:
    return stats.idle >= idle_count and not (stats.starting or stats.ending)
