"""A model server with a small model, and a proxy in front of it, as processes."""

import contextlib
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import httpx

from bench.servers import BenchServer, free_port, run_server
from tests.engines.engine import REQUEST_TIMEOUT_S, Engine, Launch, Tools
from tests.engines.llama_cpp import LLAMA_CPP
from tests.engines.vllm import VLLM

ENGINES = {engine.name: engine for engine in (LLAMA_CPP, VLLM)}
ENGINE: Engine = ENGINES[os.environ.get("ENGINE", LLAMA_CPP.name)]
"""The engine under test, selected by the ENGINE variable."""
SLOTS = 4


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """The tokens that a model server has processed since its start, by its own count."""

    prompt: int
    completion: int

    def __sub__(self, earlier: "TokenCounts") -> "TokenCounts":
        return TokenCounts(self.prompt - earlier.prompt, self.completion - earlier.completion)


@dataclass(frozen=True, slots=True)
class ModelServer:
    """A running model server."""

    process: BenchServer
    tools: Tools

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.process.port}"

    async def metrics(self) -> dict[str, float]:
        async with httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S) as client:
            text = (await client.get(f"{self.url}/metrics")).raise_for_status().text
        line = rf"^{ENGINE.gauges.prefix}:(\w+)(?:\{{.*\}})? (\S+)$"
        return {name: float(value) for name, value in re.findall(line, text, re.MULTILINE)}

    async def working(self) -> None:
        """Wait until the server works on a request. Raise TimeoutError."""
        with anyio.fail_after(REQUEST_TIMEOUT_S):
            metrics = await self.metrics()
            while not metrics[ENGINE.gauges.running]:
                await anyio.sleep(0.02)
                metrics = await self.metrics()

    async def token_counts(self) -> TokenCounts:
        """Wait until the server is idle and return its token counts. Raise TimeoutError."""
        gauges = ENGINE.gauges
        with anyio.fail_after(REQUEST_TIMEOUT_S):
            metrics = await self.metrics()
            while metrics[gauges.running] or metrics[gauges.waiting]:
                # llama.cpp checks for disconnected clients after a second without results, and a
                # metrics request counts as a result.
                await anyio.sleep(1.5)
                metrics = await self.metrics()
        return TokenCounts(
            int(metrics[gauges.prompt_tokens]), int(metrics[gauges.completion_tokens])
        )

    async def prompt_tokens(self, body: dict[str, Any]) -> int:
        """Return the number of prompt tokens of a request."""
        async with httpx.AsyncClient(base_url=self.url, timeout=REQUEST_TIMEOUT_S) as client:
            return await ENGINE.count_prompt(client, body)


@asynccontextmanager
async def model_server(
    *,
    tools: Tools = ENGINE.without_tools,
    window: int = 2048,
    slots: int = SLOTS,
    port: int | None = None,
) -> AsyncIterator[ModelServer]:
    """Run a server with a window of `window` tokens per request. Raise NotInstalledError."""
    port = port or free_port()
    command = ENGINE.command(Launch(port, tools, window, slots))
    groups: list[int] = []
    try:
        async with run_server(
            ["setsid", *command],
            port,
            path="/health",
            env=ENGINE.environment,
            timeout_s=ENGINE.start_timeout_s,
        ) as server:
            groups.append(server.pid)
            yield ModelServer(server, tools)
    finally:
        # vLLM's child processes outlive the main process if it is killed.
        for group in groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)


@asynccontextmanager
async def proxy(url: str, **more: Any) -> AsyncIterator[BenchServer]:
    """Run `serve` with bubblewrap; `more` is merged into its config.yaml."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="engine-") as directory:
        config = {
            "server": {"port": port, "data_dir": directory},
            "sandbox": {"backend": "bubblewrap", "self_test": False},
            **more,
            "backend": {"base_url": f"{url}/v1", **more.get("backend", {})},
        }
        file = Path(directory, "config.yaml")
        file.write_text(json.dumps(config), encoding="utf-8")
        command = [sys.executable, "-m", "proxy", "serve", "--config", str(file)]
        async with run_server(command, port, path="/health") as server:
            yield server


def tools_always() -> dict[str, Any]:
    """Return the `backend` setting that offers tools without a probe."""
    return {"backend": {"tool_support": "always"}}
