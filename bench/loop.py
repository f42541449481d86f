"""Overhead of the agent loop in a run of five turns: duration and processor time.

The run uses bash and the editor, writes an answer file and submits, with a model that answers
without delay and warm sandboxes. The time for the same four commands in a sandbox without loop and
proxy is the lower bound. A minimal loop on the same libraries and sandboxes shows the share of the
libraries in the processor time.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from functools import partial
from statistics import median

from bench.backends import BenchBackend, Kind, working_backends
from bench.instant_model import ANSWER, FILE, FIVE, PRINT, PROGRAM, RUN, SCRIPTS
from bench.load import burst, post
from bench.plan import Measurement, Plan, interleave, milliseconds
from bench.sandboxes import filled
from bench.servers import BenchServer, model_backend, module, proxy
from bench.table import Row, TablePart
from policies.isolation import Isolation
from policies.pool import PoolSettings
from policies.workspace import ANSWER_FILES
from sandbox_runtime.guest_sandbox import start_sandbox
from sandbox_runtime.pool.pool import Pool
from sandbox_runtime.sandbox import Sandbox

ROUNDS = 6
RUNS = 8
"""Runs in one round."""
BUSY_RUNS = 20
"""Runs in one measurement of processor time, which the kernel counts in steps of 10 ms."""
SETTLE_S = 0.5
"""Pause after a run, in seconds, so that the removal and replacement of its sandbox do not slow the
next run.
"""
TURNS = len(SCRIPTS[FIVE])
COMMAND_S = 10
WARM_S, CPU_MS, ADDED_MS = 0.1, 10, 5
QUESTION = {"model": FIVE, "messages": [{"role": "user", "content": "What is 6 * 7?"}]}
ASKED = post("/v1/chat/completions", QUESTION, "none")
ANSWERED = f'"content": "{ANSWER}"'.encode()
MODEL = "model"


async def measure(plan: Plan) -> list[TablePart]:
    """Measure every backend, and a bare sandbox of the same kind."""
    async with AsyncExitStack() as opened:
        found = await opened.enter_async_context(working_backends(plan.image))
        model = await opened.enter_async_context(model_backend())
        measurements: dict[str, Measurement] = {MODEL: partial(_model, model)}
        for backend in found.working:
            ours = proxy(model, sandbox=backend.kind, image=plan.image)
            server = await opened.enter_async_context(ours)
            pool = Pool(backend.backend, PoolSettings(min_ready=1), [Isolation()])
            opened.push_async_callback(pool.aclose)
            measurements[backend.kind] = partial(_runs, backend.kind, server)
            measurements[f"{backend.kind}, busy"] = partial(_busy, _cpu(backend.kind), server)
            least = module("bench.peers.loop", model.base_url, backend.kind, plan.image)
            server = await opened.enter_async_context(least)
            measurements[f"{backend.kind}, least"] = partial(
                _busy, _least_cpu(backend.kind), server
            )
            measurements[f"{backend.kind}, commands"] = partial(_commands, backend, pool)
            measurements[f"{backend.kind}, nothing"] = partial(_nothing, backend)
        measured = await interleave(plan.rounds or ROUNDS, measurements)
    rows = [row for kind in found.kinds for row in _rows(kind, measured)]
    return [TablePart(f"loop: {TURNS} turns, one run at a time", [*rows, *found.missing])]


def _rows(kind: Kind, measured: Mapping[str, list[float]]) -> list[Row]:
    run_s, commands_ms = measured[_run(kind)], measured[_alone(kind)]
    each = zip(run_s, commands_ms, measured[MODEL], strict=True)
    added = [(run * 1000 - commands - TURNS * reply) / TURNS for run, commands, reply in each]
    cpu, ends_cpu = measured[_cpu(kind)], measured[_ends_cpu(kind)]
    own_cpu = [whole - ends for whole, ends in zip(cpu, ends_cpu, strict=True)]
    return [
        Row(_run(kind), run_s, "s", WARM_S),
        Row(_alone(kind), commands_ms),
        Row(f"{kind}: added to each turn by proxy and loop", added, "ms", ADDED_MS),
        Row(_cpu(kind), cpu, "CPU ms", peers=(_least_cpu(kind),)),
        Row(_ends_cpu(kind), ends_cpu, "CPU ms"),
        Row(f"{kind}: the rest, the loop's own", own_cpu, "CPU ms", CPU_MS),
        Row(_least_cpu(kind), measured[_least_cpu(kind)], "CPU ms"),
    ]


def _run(kind: Kind) -> str:
    return f"{kind}: a run on a warm sandbox"


def _alone(kind: Kind) -> str:
    return f"{kind}: its commands alone"


def _cpu(kind: Kind) -> str:
    return f"{kind}: the proxy's CPU for a run"


def _least_cpu(kind: Kind) -> str:
    return f"{kind}: the least loop's CPU for a run"


def _ends_cpu(kind: Kind) -> str:
    return f"{kind}: of that, for the making and the end of its sandbox"


async def _model(model: BenchServer) -> Mapping[str, float]:
    sent = await burst(model.port, ASKED, count=RUNS, at_once=1)
    return {MODEL: median(sent.latencies_ms)}


async def _runs(kind: Kind, server: BenchServer) -> Mapping[str, float]:
    took_ms = []
    for _ in range(RUNS):
        sent = await burst(server.port, ASKED, count=1, at_once=1, holding=ANSWERED)
        took_ms += sent.latencies_ms
        await asyncio.sleep(SETTLE_S)
    return {_run(kind): median(took_ms) / 1000}


async def _busy(figure: str, server: BenchServer) -> Mapping[str, float]:
    before_s = server.cpu_s()
    await burst(server.port, ASKED, count=BUSY_RUNS, at_once=1, holding=ANSWERED)
    await asyncio.sleep(SETTLE_S)
    return {figure: (server.cpu_s() - before_s) * 1000 / BUSY_RUNS}


async def _commands(backend: BenchBackend, pool: Pool) -> Mapping[str, float]:
    took_ms = []
    for _ in range(RUNS):
        await filled(pool, 1)
        async with pool.lease(Isolation()) as lease:
            took_ms.append(await milliseconds(_work(await lease.sandbox())))
    return {_alone(backend.kind): median(took_ms)}


async def _nothing(backend: BenchBackend) -> Mapping[str, float]:
    before_s = time.process_time()
    for _ in range(RUNS):
        await (await start_sandbox(backend.backend, Isolation())).close()
    return {_ends_cpu(backend.kind): (time.process_time() - before_s) * 1000 / RUNS}


async def _work(sandbox: Sandbox) -> None:
    """Run the four commands as the tools do, in a terminal."""
    await sandbox.exec(PRINT, timeout_s=COMMAND_S, stdin=None)
    await sandbox.put(FILE, _whole(PROGRAM))
    await sandbox.exec(RUN, timeout_s=COMMAND_S, stdin=None)
    await sandbox.put(ANSWER_FILES[0], _whole(ANSWER))


async def _whole(text: str) -> AsyncIterator[bytes]:
    yield text.encode()
