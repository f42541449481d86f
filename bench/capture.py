"""The cost of capturing trajectories, with `sandbox.capture`. Measures runs of five turns without
capture, with `messages` and with `tokens`, alternately: one at a time on warm sandboxes, and 64 at
once as in training. The model answers without delay.

Runs without capture are measured twice; the difference between the two shows the noise. The
processor time includes what the proxy does after the answer, such as writing the trajectory. The
duration of runs that are made at once ends when the pool is full again, as in bench/runs.py.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from statistics import median
from typing import Any

from bench.backends import Kind, working_backends
from bench.instant_model import FIVE_TURN_MODEL, SCRIPTS
from bench.load import post_request, send_burst
from bench.loop import EXPECTED_BYTES, QUESTION, SETTLE_S
from bench.plan import Plan, interleave
from bench.runs import RUN_COUNTS, wait_until_settled
from bench.servers import BenchServer, run_instant_model, run_proxy
from bench.table import Row, TablePart

ROUNDS = 20
RUNS = 10
"""Number of runs of each kind in one round, one at a time."""
CONCURRENCY, CONCURRENT_ROUNDS = 64, 5
"""Number of concurrent runs, and number of rounds in which they are measured."""
CAPTURES: Mapping[str, str] = {
    "none": "none",
    "none, the control": "none",
    "messages": "messages",
    "tokens": "tokens",
}
"""The values of `sandbox.capture` by the name of the measurement."""
MAX_ADDED_PERCENT = 5


async def measure(plan: Plan) -> list[TablePart]:
    """Measure every backend."""
    async with AsyncExitStack() as opened:
        found = await opened.enter_async_context(working_backends(plan.image))
        model = await opened.enter_async_context(run_instant_model())
        parts = []
        for kind in found.kinds:
            async with run_proxy(
                model, sandbox=kind, image=plan.image, captures_tokens=True
            ) as server:
                single = await interleave(
                    plan.rounds or ROUNDS,
                    {name: partial(_measure_single_runs, server, name) for name in CAPTURES},
                )
                concurrent = await interleave(
                    plan.rounds or CONCURRENT_ROUNDS,
                    {
                        name: partial(_measure_concurrent_runs, kind, server, name)
                        for name in CAPTURES
                    },
                )
            parts.append(TablePart(_title(kind, "one run at a time"), _rows(single)))
            title = _title(kind, f"{CONCURRENCY} runs at once")
            parts.append(TablePart(title, _rows(concurrent)))
    return [*parts, TablePart("capture: missing", found.missing_rows)]


def _title(kind: Kind, runs: str) -> str:
    return f"capture: {len(SCRIPTS[FIVE_TURN_MODEL])} turns on {kind}, {runs}"


def _rows(measured: Mapping[str, Sequence[float]]) -> list[Row]:
    first, *others = CAPTURES
    rows = []
    for name in CAPTURES:
        rows.append(Row(f"{name}: a run", measured[_run_key(name)]))
        rows.append(Row(f"{name}: the proxy's CPU for a run", measured[_cpu_key(name)], "CPU ms"))
    for name in others:
        for what, of in (("longer", _run_key), ("more CPU, of a run's duration", _cpu_key)):
            added = [
                100 * (one - other) / run
                for one, other, run in zip(
                    measured[of(name)],
                    measured[of(first)],
                    measured[_run_key(first)],
                    strict=True,
                )
            ]
            rows.append(Row(f"{name}: {what}, %", added, "", MAX_ADDED_PERCENT))
    return rows


def _run_key(name: str) -> str:
    return f"{name}: run"


def _cpu_key(name: str) -> str:
    return f"{name}: CPU"


async def _measure_single_runs(server: BenchServer, name: str) -> Mapping[str, float]:
    before_s = server.cpu_s()
    sent = await send_burst(
        server.port, _request(name), count=RUNS, concurrency=1, expected_bytes=EXPECTED_BYTES
    )
    await asyncio.sleep(SETTLE_S)
    return {
        _run_key(name): median(sent.latencies_ms),
        _cpu_key(name): (server.cpu_s() - before_s) * 1000 / RUNS,
    }


async def _measure_concurrent_runs(
    kind: Kind, server: BenchServer, name: str
) -> Mapping[str, float]:
    """Return the duration of all runs divided by their number, and the processor time of one
    run."""
    count = RUN_COUNTS[kind, CONCURRENCY]
    await wait_until_settled(server)
    before_s, began = server.cpu_s(), time.perf_counter()
    await send_burst(
        server.port,
        _request(name),
        count=count,
        concurrency=CONCURRENCY,
        expected_bytes=EXPECTED_BYTES,
    )
    await wait_until_settled(server)
    return {
        _run_key(name): (time.perf_counter() - began) * 1000 / count,
        _cpu_key(name): (server.cpu_s() - before_s) * 1000 / count,
    }


def _request(name: str) -> bytes:
    body: dict[str, Any] = {**QUESTION, "sandbox": {"capture": CAPTURES[name]}}
    return post_request("/v1/chat/completions", body, "none")
