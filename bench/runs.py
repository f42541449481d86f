"""Throughput of runs of five turns with many concurrent clients.

A round ends when the last sandbox is removed and the pool is full again, so the time includes the
creation and removal of a sandbox for each run. The reference has one process for each concurrent
run, with its imports done before. A further row measures the engine alone: creating and removing
containers without work.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from statistics import median

from bench.backends import Kind, working_backends
from bench.instant_model import FIVE_TURN_MODEL
from bench.load import get_body, send_burst
from bench.loop import EXPECTED_BYTES, REQUEST
from bench.plain_docker import PlainDocker
from bench.plan import Measurement, Plan, interleave
from bench.reference import ReferenceProcess, reference_process
from bench.servers import DEFAULT_POOL, BenchServer, run_instant_model, run_proxy
from bench.table import Row, TablePart
from bench.venvs import PeerMissingError

ROUNDS = 2
CONCURRENCIES = (8, 64)
RUN_COUNTS: Mapping[tuple[Kind, int], int] = {
    ("docker", 8): 24,
    ("docker", 64): 64,
    ("bubblewrap", 8): 80,
    ("bubblewrap", 64): 128,
}
"""Number of runs in one round, by kind of sandbox and number of concurrent clients."""
CONTAINER_COUNT, CONTAINERS_AT_ONCE = 24, 6
REFERENCE_COUNT = 8
"""Number of concurrent reference processes; 64 would need 20 GB and be no faster."""
REFERENCE, ENGINE = f"reference, {REFERENCE_COUNT} at once", "engine alone: make and remove"
MIN_TIMES_REFERENCE: Mapping[Kind, float] = {"docker": 5, "bubblewrap": 30}
MIN_SHARE_OF_ENGINE = 0.85
MAX_MIB_PER_RUN = 2
POLL_S = 0.1
POOL_STATE = r'^llm_sandbox_pool_sandboxes\{state="(\w+)"\} ([0-9.]+)$'


async def measure(plan: Plan) -> list[TablePart]:
    """Measure every backend, with few and with many clients."""
    async with AsyncExitStack() as opened:
        async with working_backends(plan.image) as found:
            kinds = found.kinds
        missing_rows = list(found.missing_rows)
        model = await opened.enter_async_context(run_instant_model())
        measurements: dict[str, Measurement] = {}
        for kind in kinds:
            ours = run_proxy(model, sandbox=kind, image=plan.image)
            server = await opened.enter_async_context(ours)
            idle_mib = server.rss_mib()
            for concurrency in CONCURRENCIES:
                measurement = partial(_measure_burst, kind, server, concurrency, idle_mib)
                measurements[_runs_row_name(kind, concurrency)] = measurement
        if "docker" in kinds:
            plain_docker = PlainDocker(plan.image)
            opened.callback(plain_docker.close)
            measurements[ENGINE] = partial(_measure_engine, plain_docker)
        try:
            if "docker" in kinds and plan.allows_peers:
                peers = await opened.enter_async_context(_reference_processes(model, plan.image))
                measurements[REFERENCE] = partial(_measure_references, peers)
        except (PeerMissingError, RuntimeError) as error:
            missing_rows.append(Row(REFERENCE, note=str(error).splitlines()[-1]))
        measured = await interleave(plan.rounds or ROUNDS, measurements)
    return [_part(concurrency, kinds, measured, missing_rows) for concurrency in CONCURRENCIES]


def _part(
    concurrency: int,
    kinds: list[Kind],
    measured: Mapping[str, list[float]],
    missing_rows: list[Row],
) -> TablePart:
    rows = []
    for kind in kinds:
        name = _runs_row_name(kind, concurrency)
        target = _target(kind, measured)
        rows.append(Row(name, measured[name], "runs/min", target, (ENGINE, REFERENCE)))
        rows.append(Row(_cpu_row_name(name), measured[_cpu_row_name(name)], "CPU ms"))
        if concurrency == max(CONCURRENCIES):
            worst = [max(measured[_memory_row_name(name)])]
            rows.append(
                Row(_memory_row_name(name), worst, "MiB", MAX_MIB_PER_RUN, note="the worst round")
            )
    peers = [
        Row(name, measured[name], "runs/min") for name in (ENGINE, REFERENCE) if name in measured
    ]
    return TablePart(f"runs: five turns, {concurrency} at once", [*rows, *peers, *missing_rows])


def _target(kind: Kind, measured: Mapping[str, list[float]]) -> float | None:
    bounds = []
    if REFERENCE in measured:
        bounds.append(MIN_TIMES_REFERENCE[kind] * median(measured[REFERENCE]))
    if kind == "docker":
        bounds.append(MIN_SHARE_OF_ENGINE * median(measured[ENGINE]))
    return max(bounds, default=None)


def _runs_row_name(kind: Kind, concurrency: int) -> str:
    return f"{kind}, {concurrency} at once"


def _cpu_row_name(name: str) -> str:
    return f"{name}: the proxy's CPU"


def _memory_row_name(name: str) -> str:
    return f"{name}: memory beyond idle, for each"


async def _measure_burst(
    kind: Kind, server: BenchServer, concurrency: int, idle_mib: float
) -> Mapping[str, float]:
    count, name = RUN_COUNTS[kind, concurrency], _runs_row_name(kind, concurrency)
    await wait_until_settled(server)
    before_s, began, peak_mib = server.cpu_s(), time.perf_counter(), [0.0]
    watching = asyncio.create_task(_poll_memory(server, peak_mib))
    await send_burst(
        server.port, REQUEST, count=count, concurrency=concurrency, expected_bytes=EXPECTED_BYTES
    )
    watching.cancel()
    await wait_until_settled(server)
    return {
        name: count * 60 / (time.perf_counter() - began),
        _cpu_row_name(name): (server.cpu_s() - before_s) * 1000 / count,
        _memory_row_name(name): (max(peak_mib) - idle_mib) / concurrency,
    }


async def _poll_memory(server: BenchServer, mib: list[float]) -> None:
    while True:
        mib.append(server.rss_mib())
        await asyncio.sleep(POLL_S)


async def wait_until_settled(server: BenchServer) -> None:
    """Wait until the pool has its idle sandboxes and no other sandbox exists."""
    wanted = {"starting": 0, "idle": DEFAULT_POOL.min_ready, "in_use": 0, "ending": 0}
    while True:
        metrics = (await get_body(server.port, "/metrics")).decode()
        states = re.findall(POOL_STATE, metrics, re.MULTILINE)
        if {state: float(number) for state, number in states} == wanted:
            return
        await asyncio.sleep(POLL_S)


async def _measure_engine(plain_docker: PlainDocker) -> Mapping[str, float]:
    left = iter(range(CONTAINER_COUNT))

    async def work() -> None:
        for _ in left:
            await plain_docker.remove(await plain_docker.run())

    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(CONTAINERS_AT_ONCE)))
    return {ENGINE: CONTAINER_COUNT * 60 / (time.perf_counter() - began)}


@asynccontextmanager
async def _reference_processes(
    model: BenchServer, image: str
) -> AsyncIterator[list[ReferenceProcess]]:
    async with AsyncExitStack() as opened:
        peers = [
            await opened.enter_async_context(reference_process(model, FIVE_TURN_MODEL, image))
            for _ in range(REFERENCE_COUNT)
        ]
        # Not counted: it shows whether the reference works here, and imports its modules.
        await _measure_references(peers)
        yield peers


async def _measure_references(peers: list[ReferenceProcess]) -> Mapping[str, float]:
    began = time.perf_counter()
    await asyncio.gather(*(peer.run() for peer in peers))
    return {REFERENCE: len(peers) * 60 / (time.perf_counter() - began)}
