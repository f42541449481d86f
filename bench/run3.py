"""A run of three turns through the whole proxy, from a client's request to its answer.

The script uses bash, writes an answer file with the editor and submits. The model answers without
delay; the sandbox is warm or cold. The reference runs the same script with the same model and
image; the time of its imports, needed in every process, is excluded.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import product

import httpx

from bench.backends import Kind, working_backends
from bench.instant_model import ANSWER, THREE_TURN_MODEL
from bench.plan import Measurement, Plan, interleave, repeat_measurements
from bench.reference import ReferenceProcess, reference_process
from bench.servers import BenchServer, run_instant_model, run_proxy
from bench.table import Row, TablePart
from bench.venvs import PeerMissingError

ROUNDS = 4
REPEATS_PER_ROUND = 3
"""Measurements of each backend in a round. The reference takes 50 times as long and varies little:
it is measured once.
"""
TARGETS_S: Mapping[Kind, float] = {"docker": 1.2, "bubblewrap": 0.4}
IDLE_COUNTS = {"cold": 0, "warm": 2}
REFERENCE_ANSWER, REFERENCE_RETURN = "reference, to its answer", "reference, until it returns"
QUESTION = {"model": THREE_TURN_MODEL, "messages": [{"role": "user", "content": "What is 6 * 7?"}]}
SETTLE_S = 0.5
"""Pause after a run, in seconds, so that the removal and replacement of its sandbox do not slow the
next run.
"""


async def measure(plan: Plan) -> list[TablePart]:
    """Measure every backend and the reference."""
    async with AsyncExitStack() as opened:
        async with working_backends(plan.image) as found:
            kinds = found.kinds
        missing = list(found.missing_rows)
        model = await opened.enter_async_context(run_instant_model())
        measurements: dict[str, Measurement] = {}
        for kind, (state, idle) in product(kinds, IDLE_COUNTS.items()):
            ours = run_proxy(model, sandbox=kind, image=plan.image, idle=idle)
            server = await opened.enter_async_context(ours)
            name = f"{kind}, {state}"
            measurements[name] = await opened.enter_async_context(_proxy_measurement(name, server))
        measurements = repeat_measurements(REPEATS_PER_ROUND, measurements)
        try:
            if "docker" in kinds and plan.allows_peers:
                peer = await opened.enter_async_context(
                    reference_process(model, THREE_TURN_MODEL, plan.image)
                )
                await peer.run()  # whether it works here at all
                measurements[REFERENCE_ANSWER] = partial(_measure_reference, peer)
        except (PeerMissingError, RuntimeError) as error:
            missing.append(Row(REFERENCE_ANSWER, note=str(error).splitlines()[-1]))
        measured = await interleave(plan.rounds or ROUNDS, measurements)
    rows = [
        Row(
            f"{kind}, {state}",
            measured[f"{kind}, {state}"],
            "s",
            target,
            (REFERENCE_ANSWER, REFERENCE_RETURN),
        )
        for kind, target in TARGETS_S.items()
        for state in IDLE_COUNTS
        if kind in kinds
    ]
    peers = [
        Row(name, measured[name], "s")
        for name in (REFERENCE_ANSWER, REFERENCE_RETURN)
        if name in measured
    ]
    return [TablePart("run3: three turns through the whole proxy", [*rows, *peers, *missing])]


@asynccontextmanager
async def _proxy_measurement(name: str, server: BenchServer) -> AsyncIterator[Measurement]:
    async with httpx.AsyncClient(base_url=server.base_url, timeout=60) as client:
        yield partial(_measure_run, name, client)


async def _measure_run(name: str, client: httpx.AsyncClient) -> Mapping[str, float]:
    started = time.perf_counter()
    response = await client.post("/chat/completions", json=QUESTION)
    took_s = time.perf_counter() - started
    if response.status_code != 200:
        raise RuntimeError(f"{name}: {response.status_code} {response.text[:500]}")
    answer = response.json()["choices"][0]["message"]["content"]
    if answer != ANSWER:
        raise RuntimeError(f"{name} answered {answer!r}")
    await asyncio.sleep(SETTLE_S)
    return {name: took_s}


async def _measure_reference(peer: ReferenceProcess) -> Mapping[str, float]:
    to_answer_s, returned_s = await peer.run()
    return {REFERENCE_ANSWER: to_answer_s, REFERENCE_RETURN: returned_s}
