"""The measurements of one checkout for `bench.compare`.

`python -P bench/compare_worker.py IMAGE MODEL_PORT` imports the packages on PYTHONPATH, which may
be of an older checkout than this file. The model server at MODEL_PORT is that of this file's
checkout. The command prints the names of the backends that work as a JSON list, then reads orders
from stdin, one JSON list a line: [operation, backend, repetitions]. For each order it prints the
durations in ms as a JSON list.
"""

import asyncio
import json
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack

from bench.backends import BenchBackend, Kind, working_backends
from bench.load import post_request, send_burst
from bench.loop import EXPECTED_BYTES, REQUEST
from bench.sandboxes import fill_pool, fresh_sandbox
from bench.servers import DEFAULT_POOL, BenchServer, run_proxy
from policies.isolation import Isolation
from policies.pool import PoolSettings
from sandbox_runtime.guest_sandbox import GuestSandbox, start_sandbox
from sandbox_runtime.pool.pool import Pool
from sandbox_runtime.sandbox import Sandbox

ISOLATION = Isolation()
PIECE = bytes(1 << 20)
SMALL_FILE, LARGE_FILE = "/testbed/small/file", "/testbed/large/file"
LARGE_PIECES = 100
COMMAND_TIMEOUT_S = 60
SANDBOX_COUNT = 16
PLAIN_SERVER_COUNT = 2
"""Number of servers that take turns at `:plain` requests."""
WARM_UP_COUNT = 300
"""Number of requests to a new `:plain` server that do not count."""
SETTLE_S = 0.4
"""Pause after runs, in seconds, so that the removal of their sandboxes does not slow the next
measurement."""
PLAIN_BODY = {
    "model": "bench:plain",
    "messages": [{"role": "user", "content": "Tell me something."}],
}
REQUESTS = {
    kind: post_request("/v1/chat/completions", {**PLAIN_BODY, "stream": kind == "stream"}, "none")
    for kind in ("whole", "stream")
}
Operation = Callable[[Kind, int], Awaitable[Sequence[float]]]


class Worker:
    """Sandboxes, pools and servers, each started when an operation first needs it."""

    def __init__(
        self,
        opened: AsyncExitStack,
        image: str,
        model: BenchServer,
        backends: Sequence[BenchBackend],
    ) -> None:
        self._opened = opened
        self._image = image
        self._model = model
        self._backends = {backend.kind: backend for backend in backends}
        self._sandboxes: dict[Kind, list[GuestSandbox]] = {}
        self._pools: dict[Kind, Pool] = {}
        self._servers: dict[Kind, BenchServer] = {}
        self._plain_servers: dict[Kind, deque[BenchServer]] = {}
        self.operations: dict[str, Operation] = {
            "command": self._command,
            "commands16": self._commands16,
            "cold": self._cold,
            "warm": self._warm,
            "ping": self._ping,
            "put1k": self._put_small,
            "get1k": self._get_small,
            "put100m": self._put_large,
            "get100m": self._get_large,
            "run": self._run,
            "run-cpu": self._run_cpu,
            "runs64": self._runs64,
            "plain": self._plain,
            "plain64": self._plain64,
            "plain64-cpu": self._plain64_cpu,
            "stream64": self._stream64,
            "start": self._start,
            "start-cpu": self._start_cpu,
        }

    async def _command(self, kind: Kind, count: int) -> Sequence[float]:
        (sandbox,) = await self._running_sandboxes(kind, 1)
        return [await _duration_ms(_run_true(sandbox)) for _ in range(count)]

    async def _commands16(self, kind: Kind, count: int) -> Sequence[float]:
        async def work(sandbox: Sandbox) -> None:
            for _ in range(count):
                await _run_true(sandbox)

        return [
            await _duration_ms(
                asyncio.gather(*map(work, await self._running_sandboxes(kind, SANDBOX_COUNT)))
            )
        ]

    async def _cold(self, kind: Kind, count: int) -> Sequence[float]:
        took_ms = []
        for _ in range(count):
            began = time.perf_counter()
            async with fresh_sandbox(self._backends[kind]) as sandbox:
                await _run_true(sandbox)
                took_ms.append((time.perf_counter() - began) * 1000)
        return took_ms

    async def _warm(self, kind: Kind, count: int) -> Sequence[float]:
        if kind not in self._pools:
            settings = PoolSettings(min_ready=1)
            self._pools[kind] = Pool(self._backends[kind].backend, settings, [ISOLATION])
            self._opened.push_async_callback(self._pools[kind].aclose)
        took_ms = []
        for _ in range(count):
            await fill_pool(self._pools[kind], 1)
            began = time.perf_counter()
            async with self._pools[kind].lease(ISOLATION) as lease:
                await lease.sandbox()
                took_ms.append((time.perf_counter() - began) * 1000)
        await fill_pool(self._pools[kind], 1)  # not in the turn of the other checkout
        return took_ms

    async def _ping(self, kind: Kind, count: int) -> Sequence[float]:
        (sandbox,) = await self._running_sandboxes(kind, 1)
        return [await _duration_ms(sandbox.ping(COMMAND_TIMEOUT_S)) for _ in range(count)]

    async def _put_small(self, kind: Kind, count: int) -> Sequence[float]:
        (sandbox,) = await self._running_sandboxes(kind, 1)
        return [await _duration_ms(_put(sandbox, SMALL_FILE, [PIECE[:1000]])) for _ in range(count)]

    async def _get_small(self, kind: Kind, count: int) -> Sequence[float]:
        (sandbox,) = await self._running_sandboxes(kind, 1)
        await _put(sandbox, SMALL_FILE, [PIECE[:1000]])
        return [await _duration_ms(_get(sandbox, SMALL_FILE)) for _ in range(count)]

    async def _put_large(self, kind: Kind, count: int) -> Sequence[float]:
        (sandbox,) = await self._running_sandboxes(kind, 1)
        pieces = [PIECE] * LARGE_PIECES
        return [await _duration_ms(_put(sandbox, LARGE_FILE, pieces)) for _ in range(count)]

    async def _get_large(self, kind: Kind, count: int) -> Sequence[float]:
        (sandbox,) = await self._running_sandboxes(kind, 1)
        await _put(sandbox, LARGE_FILE, [PIECE] * LARGE_PIECES)
        return [await _duration_ms(_get(sandbox, LARGE_FILE)) for _ in range(count)]

    async def _run(self, kind: Kind, count: int) -> Sequence[float]:
        server = await self._server(kind)
        took_ms: list[float] = []
        for _ in range(count):
            took_ms += await _send(server, REQUEST, 1, 1, EXPECTED_BYTES)
            await asyncio.sleep(SETTLE_S)
        return took_ms

    async def _run_cpu(self, kind: Kind, count: int) -> Sequence[float]:
        server = await self._server(kind)
        before_s = server.cpu_s()
        await _send(server, REQUEST, count, 1, EXPECTED_BYTES)
        await asyncio.sleep(SETTLE_S)
        return [(server.cpu_s() - before_s) * 1000 / count]

    async def _runs64(self, kind: Kind, count: int) -> Sequence[float]:
        server = await self._server(kind)
        took_ms = await _duration_ms(_send(server, REQUEST, count, 64, EXPECTED_BYTES))
        await asyncio.sleep(SETTLE_S)
        return [took_ms / count]

    async def _plain(self, kind: Kind, count: int) -> Sequence[float]:
        return await _send(await self._plain_server(kind), REQUESTS["whole"], count, 1)

    async def _plain64(self, kind: Kind, count: int) -> Sequence[float]:
        server = await self._plain_server(kind)
        return [await _duration_ms(_send(server, REQUESTS["whole"], count, 64)) / count]

    async def _plain64_cpu(self, kind: Kind, count: int) -> Sequence[float]:
        server = await self._plain_server(kind)
        before_s = server.cpu_s()
        await _send(server, REQUESTS["whole"], count, 64)
        return [(server.cpu_s() - before_s) * 1000 / count]

    async def _stream64(self, kind: Kind, count: int) -> Sequence[float]:
        server = await self._plain_server(kind)
        return [await _duration_ms(_send(server, REQUESTS["stream"], count, 64)) / count]

    async def _start(self, kind: Kind, count: int) -> Sequence[float]:
        return [server.ready_s * 1000 async for server in self._started_servers(kind, count)]

    async def _start_cpu(self, kind: Kind, count: int) -> Sequence[float]:
        return [server.cpu_s() * 1000 async for server in self._started_servers(kind, count)]

    async def _started_servers(self, kind: Kind, count: int) -> AsyncIterator[BenchServer]:
        """Start a server, yield it when it answers, and end it; `count` times."""
        for _ in range(count):
            async with run_proxy(self._model, sandbox=kind, image=self._image, idle=0) as server:
                yield server

    async def _running_sandboxes(self, kind: Kind, count: int) -> Sequence[GuestSandbox]:
        """Return the first `count` running sandboxes. A sandbox that nobody has used for half a
        minute is lost, and is replaced."""
        sandboxes = [each for each in self._sandboxes.get(kind, []) if not each.lost]
        while len(sandboxes) < count:
            sandbox = await start_sandbox(self._backends[kind].backend, ISOLATION)
            self._opened.push_async_callback(sandbox.close)
            sandboxes.append(sandbox)
        self._sandboxes[kind] = sandboxes
        return sandboxes[:count]

    async def _server(self, kind: Kind) -> BenchServer:
        if kind not in self._servers:
            self._servers[kind] = await self._start_server(kind, DEFAULT_POOL.min_ready)
        return self._servers[kind]

    async def _plain_server(self, kind: Kind) -> BenchServer:
        """Return the next of the servers that take turns at `:plain` requests."""
        if kind not in self._plain_servers:
            servers = [await self._start_server(kind, 0) for _ in range(PLAIN_SERVER_COUNT)]
            for server in servers:
                await _send(server, REQUESTS["whole"], WARM_UP_COUNT, 1)
            self._plain_servers[kind] = deque(servers)
        self._plain_servers[kind].rotate()
        return self._plain_servers[kind][0]

    async def _start_server(self, kind: Kind, idle: int) -> BenchServer:
        server = run_proxy(self._model, sandbox=kind, image=self._image, idle=idle)
        return await self._opened.enter_async_context(server)


async def _duration_ms(work: Awaitable[object]) -> float:
    began = time.perf_counter()
    await work
    return (time.perf_counter() - began) * 1000


async def _run_true(sandbox: Sandbox) -> None:
    await sandbox.exec("true", timeout_s=COMMAND_TIMEOUT_S)


async def _put(sandbox: Sandbox, path: str, pieces: Sequence[bytes]) -> None:
    async def read() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    await sandbox.put(path, read())


async def _get(sandbox: Sandbox, path: str) -> None:
    async def discard(piece: bytes) -> None:
        pass

    await sandbox.get(path, discard, max_bytes=LARGE_PIECES * len(PIECE))


async def _send(
    server: BenchServer, request: bytes, count: int, concurrency: int, expected: bytes = b""
) -> Sequence[float]:
    sent = await send_burst(
        server.port, request, count=count, concurrency=concurrency, expected_bytes=expected
    )
    return sent.latencies_ms


async def main(image: str, model_port: int) -> None:
    """Run the orders from stdin until stdin ends."""
    async with AsyncExitStack() as opened:
        found = await opened.enter_async_context(working_backends(image))
        model = BenchServer(pid=0, port=model_port, ready_s=0)
        worker = Worker(opened, image, model, found.working)
        _print(json.dumps([backend.kind for backend in found.working]))
        while line := await asyncio.to_thread(sys.stdin.readline):
            operation, kind, count = json.loads(line)
            _print(json.dumps(await worker.operations[operation](kind, count)))


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
