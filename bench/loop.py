"""Overhead of the agent loop in a run of five turns: duration and processor time.

The run uses bash and the editor, writes an answer file and submits. Its sandbox is warm, and the
model answers without delay. The time for the same four commands in a sandbox without loop and proxy
is the lower bound. A minimal loop on the same libraries and sandboxes shows the share of the
libraries in the processor time.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from functools import partial
from statistics import median

from bench.backends import BenchBackend, Kind, working_backends
from bench.instant_model import (
    ANSWER,
    FIVE_TURN_MODEL,
    PRINT_COMMAND,
    PROGRAM,
    PROGRAM_FILE,
    RUN_COMMAND,
    SCRIPTS,
)
from bench.load import post_request, send_burst
from bench.plan import Measurement, Plan, interleave, measure_ms
from bench.sandboxes import fill_pool
from bench.servers import BenchServer, run_instant_model, run_module, run_proxy
from bench.table import Row, TablePart
from policies.isolation import Isolation
from policies.pool import PoolSettings
from policies.workspace import ANSWER_FILES
from sandbox_runtime.guest_sandbox import start_sandbox
from sandbox_runtime.pool.pool import Pool
from sandbox_runtime.sandbox import Sandbox

ROUNDS = 6
RUNS = 8
"""Number of runs in one round."""
CPU_RUNS = 20
"""Number of runs in one measurement of processor time."""
SETTLE_S = 0.5
"""Pause after a run, in seconds, so that the removal and replacement of its sandbox do not slow the
next run.
"""
TURNS = len(SCRIPTS[FIVE_TURN_MODEL])
COMMAND_TIMEOUT_S = 10
MAX_WARM_S, MAX_CPU_MS, MAX_ADDED_MS = 0.1, 10, 5
QUESTION = {"model": FIVE_TURN_MODEL, "messages": [{"role": "user", "content": "What is 6 * 7?"}]}
REQUEST = post_request("/v1/chat/completions", QUESTION, "none")
EXPECTED_BYTES = f'"content": "{ANSWER}"'.encode()
MODEL = "model"


async def measure(plan: Plan) -> list[TablePart]:
    """Measure the proxy, the minimal loop and bare sandboxes with every backend."""
    async with AsyncExitStack() as opened:
        found = await opened.enter_async_context(working_backends(plan.image))
        model = await opened.enter_async_context(run_instant_model())
        measurements: dict[str, Measurement] = {MODEL: partial(_measure_model, model)}
        for backend in found.working:
            ours = run_proxy(model, sandbox=backend.kind, image=plan.image)
            server = await opened.enter_async_context(ours)
            pool = Pool(backend.backend, PoolSettings(min_ready=1), [Isolation()])
            opened.push_async_callback(pool.aclose)
            measurements[backend.kind] = partial(_measure_runs, backend.kind, server)
            measurements[f"{backend.kind}, busy"] = partial(
                _measure_cpu, _cpu_row_name(backend.kind), server
            )
            least = run_module("bench.peers.loop", model.base_url, backend.kind, plan.image)
            server = await opened.enter_async_context(least)
            measurements[f"{backend.kind}, least"] = partial(
                _measure_cpu, _least_cpu_row_name(backend.kind), server
            )
            measurements[f"{backend.kind}, commands"] = partial(_measure_commands, backend, pool)
            measurements[f"{backend.kind}, nothing"] = partial(_measure_lifecycle_cpu, backend)
        measured = await interleave(plan.rounds or ROUNDS, measurements)
    rows = [row for kind in found.kinds for row in _rows(kind, measured)]
    return [TablePart(f"loop: {TURNS} turns, one run at a time", [*rows, *found.missing_rows])]


def _rows(kind: Kind, measured: Mapping[str, list[float]]) -> list[Row]:
    run_s, commands_ms = measured[_run_row_name(kind)], measured[_commands_row_name(kind)]
    each = zip(run_s, commands_ms, measured[MODEL], strict=True)
    added = [(run * 1000 - commands - TURNS * reply) / TURNS for run, commands, reply in each]
    cpu, ends_cpu = measured[_cpu_row_name(kind)], measured[_lifecycle_cpu_row_name(kind)]
    own_cpu = [whole - ends for whole, ends in zip(cpu, ends_cpu, strict=True)]
    return [
        Row(_run_row_name(kind), run_s, "s", MAX_WARM_S),
        Row(_commands_row_name(kind), commands_ms),
        Row(f"{kind}: added to each turn by proxy and loop", added, "ms", MAX_ADDED_MS),
        Row(_cpu_row_name(kind), cpu, "CPU ms", peers=(_least_cpu_row_name(kind),)),
        Row(_lifecycle_cpu_row_name(kind), ends_cpu, "CPU ms"),
        Row(f"{kind}: the rest, the loop's own", own_cpu, "CPU ms", MAX_CPU_MS),
        Row(_least_cpu_row_name(kind), measured[_least_cpu_row_name(kind)], "CPU ms"),
    ]


def _run_row_name(kind: Kind) -> str:
    return f"{kind}: a run on a warm sandbox"


def _commands_row_name(kind: Kind) -> str:
    return f"{kind}: its commands alone"


def _cpu_row_name(kind: Kind) -> str:
    return f"{kind}: the proxy's CPU for a run"


def _least_cpu_row_name(kind: Kind) -> str:
    return f"{kind}: the least loop's CPU for a run"


def _lifecycle_cpu_row_name(kind: Kind) -> str:
    return f"{kind}: of that, for the making and the end of its sandbox"


async def _measure_model(model: BenchServer) -> Mapping[str, float]:
    sent = await send_burst(model.port, REQUEST, count=RUNS, concurrency=1)
    return {MODEL: median(sent.latencies_ms)}


async def _measure_runs(kind: Kind, server: BenchServer) -> Mapping[str, float]:
    took_ms = []
    for _ in range(RUNS):
        sent = await send_burst(
            server.port, REQUEST, count=1, concurrency=1, expected_bytes=EXPECTED_BYTES
        )
        took_ms += sent.latencies_ms
        await asyncio.sleep(SETTLE_S)
    return {_run_row_name(kind): median(took_ms) / 1000}


async def _measure_cpu(row_name: str, server: BenchServer) -> Mapping[str, float]:
    before_s = server.cpu_s()
    await send_burst(
        server.port, REQUEST, count=CPU_RUNS, concurrency=1, expected_bytes=EXPECTED_BYTES
    )
    await asyncio.sleep(SETTLE_S)
    return {row_name: (server.cpu_s() - before_s) * 1000 / CPU_RUNS}


async def _measure_commands(backend: BenchBackend, pool: Pool) -> Mapping[str, float]:
    took_ms = []
    for _ in range(RUNS):
        await fill_pool(pool, 1)
        async with pool.lease(Isolation()) as lease:
            took_ms.append(await measure_ms(_run_commands(await lease.sandbox())))
    return {_commands_row_name(backend.kind): median(took_ms)}


async def _measure_lifecycle_cpu(backend: BenchBackend) -> Mapping[str, float]:
    before_s = time.process_time()
    for _ in range(RUNS):
        await (await start_sandbox(backend.backend, Isolation())).close()
    return {_lifecycle_cpu_row_name(backend.kind): (time.process_time() - before_s) * 1000 / RUNS}


async def _run_commands(sandbox: Sandbox) -> None:
    """Run the four commands as the tools do, in a terminal."""
    await sandbox.exec(PRINT_COMMAND, timeout_s=COMMAND_TIMEOUT_S, stdin=None)
    await sandbox.put(PROGRAM_FILE, _text_chunks(PROGRAM))
    await sandbox.exec(RUN_COMMAND, timeout_s=COMMAND_TIMEOUT_S, stdin=None)
    await sandbox.put(ANSWER_FILES[0], _text_chunks(ANSWER))


async def _text_chunks(text: str) -> AsyncIterator[bytes]:
    yield text.encode()
