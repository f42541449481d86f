"""Time to lease a warm sandbox, to start a cold sandbox, and to remove a sandbox."""

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from bench.backends import BenchBackend, Kind, working_backends
from bench.plain_docker import PlainDocker
from bench.plan import Measurement, Plan, interleave, measure_ms, repeat_measurements
from bench.runtimes import (
    LLM_BUBBLEWRAP,
    LLM_DOCKER,
    LLM_POOL,
    REFERENCE,
    SWE_REX,
    PeerRuntime,
    left_out_peer_rows,
    peer_measurements,
    runtimes,
)
from bench.sandboxes import fill_pool
from bench.table import TablePart, comparison_part, sample_key
from policies.isolation import Isolation
from policies.pool import PoolSettings
from sandbox_runtime.guest_sandbox import start_sandbox
from sandbox_runtime.pool.pool import Pool

ROUNDS = 2
REPEATS_PER_ROUND = 15
"""Number of measurements of each backend in a round. A peer takes up to 100 times as long and is
measured once in a round."""
WARM = "acquire: a warm sandbox"
FIRST_COMMAND = "acquire: a warm sandbox, to the end of its first `true`"
COLD = "acquire: nothing there yet, to the end of the first `true`"
REMOVAL = "acquire: removal, off the request's path"
TARGETS_MS: Mapping[str, Mapping[Kind, float | None]] = {
    WARM: {"docker": 5, "bubblewrap": 5},
    FIRST_COMMAND: {"docker": None, "bubblewrap": None},
    COLD: {"docker": 600, "bubblewrap": 100},
    REMOVAL: {"docker": 200, "bubblewrap": 10},
}
PLAIN = "docker run sleep + docker exec"
PEERS: Mapping[Kind, tuple[str, ...]] = {
    "docker": (PLAIN, REFERENCE, SWE_REX, LLM_DOCKER, LLM_POOL),
    "bubblewrap": (PLAIN, REFERENCE, SWE_REX, LLM_POOL, LLM_BUBBLEWRAP),
}


async def measure(plan: Plan) -> list[TablePart]:
    """Measure every backend, plain Docker and the peers."""
    async with AsyncExitStack() as opened:
        found = await opened.enter_async_context(working_backends(plan.image))
        ours: dict[str, Measurement] = {}
        for backend in found.working:
            ours |= await opened.enter_async_context(_backend_measurements(backend))
        peers = await opened.enter_async_context(runtimes(plan))
        measurements = repeat_measurements(REPEATS_PER_ROUND, ours) | peer_measurements(
            peers, _measure_peer
        )
        if "docker" in found.kinds:
            plain_docker = PlainDocker(plan.image)
            opened.callback(plain_docker.close)
            measurements[PLAIN] = partial(_measure_plain, plain_docker)
        measured = await interleave(plan.rounds or ROUNDS, measurements)
    return [
        comparison_part(
            quantity,
            measured,
            {backend.name: targets[backend.kind] for backend in found.working},
            {backend.name: PEERS[backend.kind] for backend in found.working},
            missing_rows=[*found.missing_rows, *left_out_peer_rows(peers)]
            if quantity == COLD
            else (),
        )
        for quantity, targets in TARGETS_MS.items()
    ]


@asynccontextmanager
async def _backend_measurements(backend: BenchBackend) -> AsyncIterator[Mapping[str, Measurement]]:
    pool = Pool(backend.backend, PoolSettings(min_ready=1), [Isolation()])
    try:
        yield {
            f"{backend.name} warm": partial(_measure_lease, backend, pool),
            f"{backend.name} cold": partial(_measure_start, backend),
        }
    finally:
        await pool.aclose()


async def _measure_lease(backend: BenchBackend, pool: Pool) -> Mapping[str, float]:
    await fill_pool(pool, 1)
    started = time.perf_counter()
    async with pool.lease(Isolation()) as lease:
        sandbox = await lease.sandbox()
        leased_at = time.perf_counter()
        await sandbox.exec("true", timeout_s=10)
        used_at = time.perf_counter()
    return {
        sample_key(backend.name, WARM): (leased_at - started) * 1000,
        sample_key(backend.name, FIRST_COMMAND): (used_at - started) * 1000,
    }


async def _measure_start(backend: BenchBackend) -> Mapping[str, float]:
    started = time.perf_counter()
    sandbox = await start_sandbox(backend.backend, Isolation())
    await sandbox.exec("true", timeout_s=10)
    ready_ms = (time.perf_counter() - started) * 1000
    removal_ms = await measure_ms(sandbox.close())
    return {sample_key(backend.name, COLD): ready_ms, sample_key(backend.name, REMOVAL): removal_ms}


async def _measure_plain(plain_docker: PlainDocker) -> Mapping[str, float]:
    started = time.perf_counter()
    container = await plain_docker.run()
    try:
        await plain_docker.exec_by_sdk(container)
        ready_ms = (time.perf_counter() - started) * 1000
    finally:
        removal_ms = await measure_ms(plain_docker.remove(container))
    return {sample_key(PLAIN, COLD): ready_ms, sample_key(PLAIN, REMOVAL): removal_ms}


async def _measure_peer(runtime: PeerRuntime) -> Mapping[str, float]:
    start_ms = await runtime.order("start")
    first_ms = start_ms + await runtime.order("exec", command="true")
    stop_ms = await runtime.order("stop")
    if runtime.name == LLM_POOL:
        return {sample_key(LLM_POOL, WARM): start_ms, sample_key(LLM_POOL, FIRST_COMMAND): first_ms}
    return {sample_key(runtime.name, COLD): first_ms, sample_key(runtime.name, REMOVAL): stop_ms}
