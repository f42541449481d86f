"""Measures the throughput, CPU time and latency of requests that the proxy relays without a sandbox
(model suffix `:plain`). The peers are a minimal relay on the same libraries, LiteLLM's proxy, and
direct requests to the backend."""

import asyncio
import json
import secrets
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from statistics import median
from typing import Any

from bench.load import post_request, send_burst
from bench.plan import Measurement, Plan, interleave
from bench.servers import (
    BenchServer,
    free_port,
    run_instant_model,
    run_module,
    run_proxy,
    run_server,
)
from bench.table import Row, TablePart
from bench.venvs import PeerMissingError, peer_python

ROUNDS = 9
PROXY, MINIMAL_RELAY = "proxy", "starlette + aiohttp"
BACKEND, LITELLM = "backend itself", "LiteLLM proxy"
PATH = "/v1/chat/completions"
REQUEST_COUNTS = {("whole", 1): 300, ("stream", 1): 100, ("whole", 64): 1000, ("stream", 64): 400}
"""Number of requests in one round, by kind of answer and number of concurrent requests."""
LITELLM_DIVISOR = 10
"""Divisor of the number of requests for LiteLLM, which is slow."""
KEY = f"sk-{secrets.token_hex(16)}"
"""The key of LiteLLM, which does not start without a key."""
MIN_RELAY_SHARE, MIN_TIMES_LITELLM = 0.7, 20
MAX_ADDED_MS = 1.0


async def measure(plan: Plan) -> list[TablePart]:
    """Measure every kind of answer, with one and with many concurrent requests."""
    async with AsyncExitStack() as opened:
        model = await opened.enter_async_context(run_instant_model())
        ours = run_proxy(model, sandbox="bubblewrap", image=plan.image)
        servers = {
            PROXY: await opened.enter_async_context(ours),
            MINIMAL_RELAY: await opened.enter_async_context(
                run_module("bench.peers.relay", model.base_url)
            ),
            BACKEND: model,
        }
        missing_rows = []
        if plan.allows_peers:
            try:
                servers[LITELLM] = await opened.enter_async_context(_run_litellm(model))
            except (PeerMissingError, RuntimeError) as error:
                missing_rows.append(Row(LITELLM, note=str(error).splitlines()[-1]))
        parts = []
        for shape in REQUEST_COUNTS:
            measurements: dict[str, Measurement] = {
                name: partial(_measure_burst, name, server, shape)
                for name, server in servers.items()
            }
            measured = await interleave(plan.rounds or ROUNDS, measurements)
            parts.append(_part(shape, measured, list(servers), missing_rows))
    return parts


async def _measure_burst(
    name: str, server: BenchServer, shape: tuple[str, int]
) -> Mapping[str, float]:
    kind, concurrency = shape
    body: dict[str, Any] = {
        "model": "bench:plain" if name == PROXY else "bench",
        "messages": [{"role": "user", "content": "Tell me something."}],
        "stream": kind == "stream",
    }
    count = max(REQUEST_COUNTS[shape] // (LITELLM_DIVISOR if name == LITELLM else 1), concurrency)
    before_s = server.cpu_s()
    sent = await send_burst(
        server.port, post_request(PATH, body, KEY), count=count, concurrency=concurrency
    )
    cpu_ms = (server.cpu_s() - before_s) * 1000 / count
    return {
        name: sent.requests_per_s,
        _cpu_row_name(name): cpu_ms,
        _p50_row_name(name): median(sent.latencies_ms),
    }


def _cpu_row_name(name: str) -> str:
    return f"{name}, CPU"


def _p50_row_name(name: str) -> str:
    return f"{name}, p50"


def _part(
    shape: tuple[str, int],
    measured: Mapping[str, list[float]],
    names: list[str],
    missing_rows: list[Row],
) -> TablePart:
    kind, concurrency = shape
    others = tuple(name for name in names if name != PROXY)
    bounds = [MIN_RELAY_SHARE * median(measured[MINIMAL_RELAY])]
    if concurrency > 1 and LITELLM in measured:
        bounds.append(MIN_TIMES_LITELLM * median(measured[LITELLM]))
    rows = [
        Row(PROXY, measured[PROXY], "req/s", max(bounds), others),
        Row(
            _cpu_row_name(PROXY),
            measured[_cpu_row_name(PROXY)],
            "CPU ms",
            peers=(_cpu_row_name(MINIMAL_RELAY), _cpu_row_name(LITELLM)),
        ),
    ]
    if concurrency == 1:
        pairs = zip(measured[_p50_row_name(PROXY)], measured[_p50_row_name(BACKEND)], strict=True)
        added = [ours - theirs for ours, theirs in pairs]
        target = MAX_ADDED_MS if kind == "whole" else None
        rows.append(Row("proxy, p50 above the backend's", added, "ms", target))
    for name in others:
        rows.append(Row(name, measured[name], "req/s"))
        if name != BACKEND:  # too little for the kernel's clock
            rows.append(Row(_cpu_row_name(name), measured[_cpu_row_name(name)], "CPU ms"))
    return TablePart(f"relay: `:plain`, {kind}, {concurrency} at once", [*rows, *missing_rows])


@asynccontextmanager
async def _run_litellm(model: BenchServer) -> AsyncIterator[BenchServer]:
    python = await asyncio.to_thread(peer_python, "litellm", "litellm[proxy]==1.106.2")
    port = free_port()
    behind = {"model": "openai/bench", "api_base": model.base_url, "api_key": "none"}
    config = {
        "model_list": [{"model_name": "bench", "litellm_params": behind}],
        "general_settings": {"master_key": KEY},
    }
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(json.dumps(config))
        file.flush()
        command = [str(python.with_name("litellm")), "--config", file.name]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        async with run_server(command, port, path="/health/liveliness") as server:
            yield server
