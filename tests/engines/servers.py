"""llama.cpp's server with a small model, and the proxy in front of it, as processes."""

import json
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import httpx

from bench.servers import Server, free_port, running
from tests.engines.installing import found

MODEL = "smollm2"
WITH_TOOLS = Path(__file__).parent / "templates" / "tools.jinja"
"""A chat template that tells the model of its tools; the model's own does not."""
SLOTS = 4
REQUEST_TIMEOUT_S = 300
BUSY = ("requests_processing", "requests_deferred")


@dataclass(frozen=True, slots=True)
class Counted:
    """Tokens a model server has worked on since its start, by its own count."""

    prompt: int
    completion: int

    def __sub__(self, earlier: "Counted") -> "Counted":
        return Counted(self.prompt - earlier.prompt, self.completion - earlier.completion)


@dataclass(frozen=True, slots=True)
class ModelServer:
    """A running llama-server."""

    process: Server

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.process.port}"

    async def metrics(self) -> dict[str, float]:
        async with httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S) as client:
            text = (await client.get(f"{self.url}/metrics")).raise_for_status().text
        return {
            name: float(value)
            for name, value in re.findall(r"^llamacpp:(\w+) (\S+)$", text, re.MULTILINE)
        }

    async def working(self) -> None:
        """Return once it works on a request."""
        metrics = await self.metrics()
        while not metrics["requests_processing"]:
            await anyio.sleep(0.02)
            metrics = await self.metrics()

    async def counted(self) -> Counted:
        """What it has worked on, once it works on nothing any more."""
        metrics = await self.metrics()
        while any(metrics[name] for name in BUSY):
            # The server looks for clients that have left after a second without any result, and
            # metrics are one.
            await anyio.sleep(1.5)
            metrics = await self.metrics()
        return Counted(int(metrics["prompt_tokens_total"]), int(metrics["tokens_predicted_total"]))


@asynccontextmanager
async def model_server(
    *,
    template: Path | None = None,
    window: int = 2048,
    slots: int = SLOTS,
    port: int | None = None,
) -> AsyncIterator[ModelServer]:
    """A llama-server with so many tokens for each of its slots; None is the model's own template.

    Raises NotInstalledError.
    """
    there = found()
    port = port or free_port()
    options: dict[str, object] = {
        "-m": there.model,
        "--host": "127.0.0.1",
        "--port": port,
        "-c": window * slots,
        "-np": slots,
        "-a": MODEL,
        # Threads that wait for one another by spinning stand still where the cores have other work.
        "-t": 1,
        **({"--chat-template-file": template} if template else {}),
    }
    words = [str(word) for option in options.items() for word in option]
    command = [str(there.server), *words, "--jinja", "--metrics"]
    async with running(command, port, path="/health") as server:
        yield ModelServer(server)


@asynccontextmanager
async def proxy(url: str, **more: Mapping[str, Any]) -> AsyncIterator[Server]:
    """`serve` in front of the backend at `url`, with sandboxes of bubblewrap; `more` goes into its
    config.yaml."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="engine-") as directory:
        config = {
            "server": {"port": port, "state_dir": directory},
            "sandbox": {"backend": "bubblewrap", "self_test": False},
            **more,
            "backend": {"base_url": f"{url}/v1", **more.get("backend", {})},
        }
        file = Path(directory, "config.yaml")
        file.write_text(json.dumps(config), encoding="utf-8")
        command = [sys.executable, "-m", "proxy", "serve", "--config", str(file)]
        async with running(command, port, path="/health") as server:
            yield server


def tools_always() -> dict[str, Any]:
    """The `backend` entry that offers the tools without asking whether the model sees them."""
    return {"backend": {"tool_support": "always"}}
