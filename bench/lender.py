"""A process that leases sandboxes as a proxy does: `python -m bench.lender SETUP`.

SETUP is JSON with image, state_dir and pools, each with kind, idle and max_sandboxes. The process
reads orders from stdin, one JSON object a line, and writes one result line for each. On SIGTERM it
ends all sandboxes, then itself.
"""

import asyncio
import json
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from bench.backends import make_backend
from bench.processes import raise_open_file_limit
from bench.sandboxes import fill_pool
from policies.isolation import Isolation
from policies.pool import PoolSettings
from sandbox_runtime.backends.base import Backend
from sandbox_runtime.pool.pool import Pool
from sandbox_runtime.sandbox import Sandbox

ISOLATION = Isolation()
COMMAND_TIMEOUT_S = 60
MAX_WAIT_S = 900
LARGE_FILE = "/testbed/large"
CHUNK = bytes(1 << 20)


class SandboxLender:
    """Pools of several backends, and their leased sandboxes."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self._pools: dict[str, Pool] = {}
        self._idle: dict[str, int] = {}
        self._backends: list[Backend] = []
        self._leased_sandboxes: dict[str, list[Sandbox]] = {}
        self._leases = AsyncExitStack()
        for each in setup["pools"]:
            backend = make_backend(
                each["kind"], image=setup["image"], state_dir=Path(setup["state_dir"])
            )
            settings = PoolSettings(
                min_ready=each["idle"],
                max_sandboxes=each["max_sandboxes"],
                on_miss="wait",
                queue_size=each["max_sandboxes"],
                queue_timeout_s=MAX_WAIT_S,
            )
            self._backends.append(backend)
            self._pools[each["kind"]] = Pool(backend, settings, [ISOLATION])
            self._idle[each["kind"]] = each["idle"]

    async def run_order(self, do: str, **details: Any) -> None:
        """Run one order."""
        works: dict[str, Callable[..., Awaitable[None]]] = {
            "fill": self._fill,
            "hold": self._hold,
            "cycle": self._cycle,
            "put": self._put,
            "get": self._get,
        }
        await works[do](**details)

    async def _fill(self, kind: str) -> None:
        """Wait until the pool has its idle sandboxes and none is starting or ending."""
        await fill_pool(self._pools[kind], self._idle[kind])

    async def _hold(self, kind: str, count: int, command: str) -> None:
        """Lease `count` more sandboxes, then run a command in all of them at once."""
        leases = [
            await self._leases.enter_async_context(self._pools[kind].lease(ISOLATION))
            for _ in range(count)
        ]
        sandboxes = [await lease.sandbox() for lease in leases]
        self._leased_sandboxes.setdefault(kind, []).extend(sandboxes)
        await asyncio.gather(*(_run(sandbox, command) for sandbox in sandboxes))

    async def _cycle(self, kind: str, count: int) -> None:
        """Lease, use and release a sandbox, `count` times."""
        for _ in range(count):
            async with self._pools[kind].lease(ISOLATION) as lease:
                await _run(await lease.sandbox(), "true")
        await self._fill(kind)

    async def _put(self, kind: str, size: int) -> None:
        """Write a file into the sandbox leased last."""

        async def source() -> AsyncIterator[bytes]:
            for _ in range(size // len(CHUNK)):
                yield CHUNK

        await self._leased_sandboxes[kind][-1].put(LARGE_FILE, source())

    async def _get(self, kind: str, size: int) -> None:
        """Read the file that `_put` wrote."""

        async def sink(piece: bytes) -> None:
            del piece

        await self._leased_sandboxes[kind][-1].get(LARGE_FILE, sink, max_bytes=size)

    async def aclose(self) -> None:
        """End all sandboxes."""
        await self._leases.aclose()
        await asyncio.gather(*(pool.aclose() for pool in self._pools.values()))
        for backend in self._backends:
            await backend.aclose()


async def _run(sandbox: Sandbox, command: str) -> None:
    done = await sandbox.exec(command, timeout_s=COMMAND_TIMEOUT_S)
    if done.exit_code:
        raise RuntimeError(f"{command!r}: exit {done.exit_code}: {done.stderr}")


async def _follow_orders(lender: SandboxLender) -> None:
    orders = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    while line := await orders.readline():
        started = time.perf_counter()
        await lender.run_order(**json.loads(line))
        sys.stdout.write(f"{json.dumps({'seconds': time.perf_counter() - started})}\n")
        sys.stdout.flush()


async def _main(setup: dict[str, Any]) -> None:
    raise_open_file_limit()  # a sandbox takes up to three
    lender = SandboxLender(setup)
    work = asyncio.create_task(_follow_orders(lender))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, work.cancel)
    try:
        await work
    except asyncio.CancelledError:
        await lender.aclose()


if __name__ == "__main__":
    asyncio.run(_main(json.loads(sys.argv[1])))
