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
from bench.instant_model import FIVE
from bench.load import burst, got
from bench.loop import ANSWERED, ASKED
from bench.plain_docker import PlainDocker
from bench.plan import Measurement, Plan, interleave
from bench.reference import ReferenceServer, reference
from bench.servers import POOL, BenchServer, model_backend, proxy
from bench.table import Row, TablePart
from bench.venvs import PeerMissingError

ROUNDS = 2
AT_ONCE = (8, 64)
COUNTS: Mapping[tuple[Kind, int], int] = {
    ("docker", 8): 24,
    ("docker", 64): 64,
    ("bubblewrap", 8): 80,
    ("bubblewrap", 64): 128,
}
"""Number of runs in one round."""
CONTAINERS, CONTAINERS_AT_ONCE = 24, 6
REFERENCES = 8
"""Number of concurrent reference processes; 64 would need 20 GB and be no faster."""
REFERENCE, ENGINE = f"reference, {REFERENCES} at once", "engine alone: make and remove"
TIMES_REFERENCE: Mapping[Kind, float] = {"docker": 5, "bubblewrap": 30}
SHARE_OF_ENGINE = 0.85
EACH_MIB = 2
LOOK_S = 0.1
POOL_STATE = r'^llm_sandbox_pool_sandboxes\{state="(\w+)"\} ([0-9.]+)$'


async def measure(plan: Plan) -> list[TablePart]:
    """Measure every backend, with few and with many clients."""
    async with AsyncExitStack() as opened:
        async with working_backends(plan.image) as found:
            kinds = found.kinds
        missing = list(found.missing)
        model = await opened.enter_async_context(model_backend())
        measurements: dict[str, Measurement] = {}
        for kind in kinds:
            ours = proxy(model, sandbox=kind, image=plan.image)
            server = await opened.enter_async_context(ours)
            idle_mib = server.rss_mib()
            for at_once in AT_ONCE:
                measurement = partial(_burst, kind, server, at_once, idle_mib)
                measurements[_runs(kind, at_once)] = measurement
        if "docker" in kinds:
            plain = PlainDocker(plan.image)
            opened.callback(plain.close)
            measurements[ENGINE] = partial(_engine, plain)
        try:
            if "docker" in kinds and plan.peers:
                peers = await opened.enter_async_context(_references(model, plan.image))
                measurements[REFERENCE] = partial(_reference, peers)
        except (PeerMissingError, RuntimeError) as error:
            missing.append(Row(REFERENCE, note=str(error).splitlines()[-1]))
        measured = await interleave(plan.rounds or ROUNDS, measurements)
    return [_part(at_once, kinds, measured, missing) for at_once in AT_ONCE]


def _part(
    at_once: int, kinds: list[Kind], measured: Mapping[str, list[float]], missing: list[Row]
) -> TablePart:
    rows = []
    for kind in kinds:
        name = _runs(kind, at_once)
        target = _target(kind, measured)
        rows.append(Row(name, measured[name], "runs/min", target, (ENGINE, REFERENCE)))
        rows.append(Row(_cpu(name), measured[_cpu(name)], "CPU ms"))
        if at_once == max(AT_ONCE):
            worst = [max(measured[_mib(name)])]
            rows.append(Row(_mib(name), worst, "MiB", EACH_MIB, note="the worst round"))
    peers = [
        Row(name, measured[name], "runs/min") for name in (ENGINE, REFERENCE) if name in measured
    ]
    return TablePart(f"runs: five turns, {at_once} at once", [*rows, *peers, *missing])


def _target(kind: Kind, measured: Mapping[str, list[float]]) -> float | None:
    bounds = []
    if REFERENCE in measured:
        bounds.append(TIMES_REFERENCE[kind] * median(measured[REFERENCE]))
    if kind == "docker":
        bounds.append(SHARE_OF_ENGINE * median(measured[ENGINE]))
    return max(bounds, default=None)


def _runs(kind: Kind, at_once: int) -> str:
    return f"{kind}, {at_once} at once"


def _cpu(name: str) -> str:
    return f"{name}: the proxy's CPU"


def _mib(name: str) -> str:
    return f"{name}: memory beyond idle, for each"


async def _burst(
    kind: Kind, server: BenchServer, at_once: int, idle_mib: float
) -> Mapping[str, float]:
    count, name = COUNTS[kind, at_once], _runs(kind, at_once)
    await settled(server)
    before_s, began, peak_mib = server.cpu_s(), time.perf_counter(), [0.0]
    watching = asyncio.create_task(_watch(server, peak_mib))
    await burst(server.port, ASKED, count=count, at_once=at_once, holding=ANSWERED)
    watching.cancel()
    await settled(server)
    return {
        name: count * 60 / (time.perf_counter() - began),
        _cpu(name): (server.cpu_s() - before_s) * 1000 / count,
        _mib(name): (max(peak_mib) - idle_mib) / at_once,
    }


async def _watch(server: BenchServer, mib: list[float]) -> None:
    while True:
        mib.append(server.rss_mib())
        await asyncio.sleep(LOOK_S)


async def settled(server: BenchServer) -> None:
    """Wait until the pool has its idle sandboxes and no other sandbox exists."""
    wanted = {"starting": 0, "idle": POOL.min_ready, "in_use": 0, "ending": 0}
    while True:
        metrics = (await got(server.port, "/metrics")).decode()
        states = re.findall(POOL_STATE, metrics, re.MULTILINE)
        if {state: float(number) for state, number in states} == wanted:
            return
        await asyncio.sleep(LOOK_S)


async def _engine(plain: PlainDocker) -> Mapping[str, float]:
    left = iter(range(CONTAINERS))

    async def work() -> None:
        for _ in left:
            await plain.remove(await plain.run())

    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(CONTAINERS_AT_ONCE)))
    return {ENGINE: CONTAINERS * 60 / (time.perf_counter() - began)}


@asynccontextmanager
async def _references(model: BenchServer, image: str) -> AsyncIterator[list[ReferenceServer]]:
    async with AsyncExitStack() as opened:
        peers = [
            await opened.enter_async_context(reference(model, FIVE, image))
            for _ in range(REFERENCES)
        ]
        await _reference(peers)  # whether it works here at all; by then their imports are over
        yield peers


async def _reference(peers: list[ReferenceServer]) -> Mapping[str, float]:
    began = time.perf_counter()
    await asyncio.gather(*(peer.run() for peer in peers))
    return {REFERENCE: len(peers) * 60 / (time.perf_counter() - began)}
