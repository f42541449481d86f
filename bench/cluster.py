"""Throughput of several proxies that share a PostgreSQL database. Delays simulate the sandboxes of
a cluster and the model. The clients and their sockets, the servers, their pools and the database
are real.

One machine runs all of it. The delays are long enough for the processors to be idle at least half
of the time, so that the proxies do not compete for them.
"""

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.instant_model import FIVE_TURN_MODEL, SCRIPTS
from bench.load import post_request, send_burst
from bench.plan import Plan
from bench.processes import busy_s, raise_open_file_limit
from bench.servers import BenchServer, free_port, run_module, run_server
from bench.simulated_sandboxes import ROUND_TRIP_S
from bench.table import Row, TablePart
from tests.postgresql import find_programs, running_server

NODE_COUNTS = (1, 2, 3)
RUNS_PER_SANDBOX = 2
COMMAND_S = 2.0
"""Duration of each command in a sandbox, in seconds."""
QUEUE_TIMEOUT_S = 600
"""Maximum time that a request waits for a sandbox, in seconds. Thousands of requests come at once,
and a proxy starts 64 Pods at a time."""
REQUEST = {
    "model": FIVE_TURN_MODEL,
    "messages": [{"role": "user", "content": "What is 6 * 7? Compute it."}],
}
MIN_SHARE_OF_LINEAR = 0.8
MAX_CPU_SHARE = 0.5
PART = "cluster: simulated, five turns"


@dataclass(frozen=True, slots=True)
class Throughput:
    """The measured values for one number of proxies."""

    runs_per_min: float
    cpu_share: float
    """The share of the time, from 0 to 1, in which the processors were busy with any process."""
    mib_per_run: float
    """Growth of the memory of all proxies divided by the number of concurrent runs, in MiB."""


async def measure(plan: Plan) -> list[TablePart]:
    """Measure one, two and three proxies, each with the same number of sandboxes."""
    programs = find_programs()
    if programs is None:
        return [TablePart(PART, [Row("proxies", note="Debian's package postgresql is missing")])]
    raise_open_file_limit()
    per_node = plan.simulated_sandboxes // max(NODE_COUNTS)
    rows = []
    with running_server(programs) as database:
        alone = 0.0
        for nodes in NODE_COUNTS:
            found = await _measure(nodes, per_node, plan.simulated_model_s, database.url)
            alone = alone or found.runs_per_min
            name = f"{nodes} of {per_node} sandboxes"
            linear = found.runs_per_min / (nodes * alone)
            share_of_ideal = found.runs_per_min / (nodes * per_node * 60 / _ideal_run_s(plan))
            rows += [
                Row(name, [found.runs_per_min], "runs/min"),
                Row(f"{name}: share of linear, at least {MIN_SHARE_OF_LINEAR}", [linear], ""),
                Row(f"{name}: share of what the delays permit", [share_of_ideal], ""),
                Row(f"{name}: share of all processors", [found.cpu_share], "", MAX_CPU_SHARE),
                Row(f"{name}: proxy's memory for each run", [found.mib_per_run], "MiB"),
            ]
    return [TablePart(PART, rows)]


def _ideal_run_s(plan: Plan) -> float:
    """Return the seconds that a run would take if the proxies took no time."""
    calls = SCRIPTS[FIVE_TURN_MODEL]
    commands = sum(name == "execute_bash" for name, _ in calls)
    files = len(calls) - commands
    return len(calls) * plan.simulated_model_s + commands * COMMAND_S + files * ROUND_TRIP_S


async def _measure(nodes: int, per_node: int, model_s: float, database_url: str) -> Throughput:
    async with AsyncExitStack() as opened:
        model = await opened.enter_async_context(
            run_module("bench.instant_model", str(model_s), path="/v1/models")
        )
        servers = [
            await opened.enter_async_context(_node(model, per_node, database_url))
            for _ in range(nodes)
        ]
        idle_mib = sum(server.rss_mib() for server in servers)
        busy_before_s, began = busy_s(), time.perf_counter()
        await asyncio.gather(*(_keep_busy(server, per_node) for server in servers))
        took_s = time.perf_counter() - began
        busy = (busy_s() - busy_before_s) / (took_s * (os.cpu_count() or 1))
        grown_mib = sum(server.rss_mib() for server in servers) - idle_mib
    sandboxes = nodes * per_node
    return Throughput(sandboxes * RUNS_PER_SANDBOX * 60 / took_s, busy, grown_mib / sandboxes)


async def _keep_busy(server: BenchServer, sandboxes: int) -> None:
    """Send the requests of as many clients as the server has sandboxes."""
    await send_burst(
        server.port,
        post_request("/v1/chat/completions", REQUEST, "any"),
        count=sandboxes * RUNS_PER_SANDBOX,
        concurrency=sandboxes,
        expected_bytes=b"42",
    )


@asynccontextmanager
async def _node(
    model: BenchServer, sandboxes: int, database_url: str
) -> AsyncIterator[BenchServer]:
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        config: dict[str, Any] = {
            "server": {"port": port, "data_dir": directory, "max_connections": sandboxes + 100},
            "backend": {"base_url": model.base_url, "tool_support": "always"},
            "sandbox": {
                "self_test": False,
                "pool": {
                    "min_ready": sandboxes // 10,
                    "max_sandboxes": sandboxes * 2,
                    "queue_size": sandboxes,
                    "queue_timeout_s": QUEUE_TIMEOUT_S,
                },
            },
            "store": {"database_url": database_url},
        }
        file = Path(directory, "config.yaml")
        await asyncio.to_thread(file.write_text, json.dumps(config))
        command = [sys.executable, "-m", "bench.simulated_node", str(file), str(COMMAND_S)]
        async with run_server(command, port, path="/health") as server:
            yield server
